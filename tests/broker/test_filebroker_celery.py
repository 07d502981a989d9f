"""Celery itself on the file broker: both pools work, and what a killed worker held is run by the next."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
from celery import Celery

from keepstep import broker

_APP = """
import os, time
from celery import Celery
from keepstep import broker

app = Celery("hops")
app.conf.update(broker.celery_settings(os.environ["BROKER"]))
app.conf.update(task_ignore_result=True, worker_enable_remote_control=False, task_acks_late=True,
                worker_prefetch_multiplier=1)

def write(line):
    out = os.open(os.environ["RESULTS"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(out, f"{line}\\n".encode())
    os.close(out)

@app.task(name="hop")
def hop(chain, left):
    write(f"{chain} {left}")
    if left:
        hop.delay(chain, left - 1)

@app.task(name="hold")
def hold(seconds):
    write("held")
    time.sleep(seconds)
"""


@pytest.fixture
def celery_worker(tmp_path):
    """Start a worker with the given pool; it is killed with all its children at the end."""
    (tmp_path / "hops.py").write_text(_APP)
    started = []

    def start(*options: str) -> subprocess.Popen:
        command = [sys.executable, "-m", "celery", "-A", "hops", "worker", "-l", "WARNING", *options]
        command += ["--without-gossip", "--without-mingle", "--without-heartbeat"]
        environment = os.environ | {
            "BROKER": f"file://{tmp_path / 'Broker'}", "RESULTS": str(tmp_path / "results"), "C_FORCE_ROOT": "1",
        }  # fmt: skip
        with (tmp_path / "log").open("ab") as log:
            process = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=log, stderr=log, process_group=0)
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)


@pytest.fixture
def app(tmp_path):
    celery = Celery(set_as_current=False)
    celery.conf.update(broker.celery_settings(f"file://{tmp_path / 'Broker'}"))
    yield celery
    celery.close()


def wait_for_lines(tmp_path, count: int) -> list[str]:
    results, deadline = tmp_path / "results", time.monotonic() + 60
    while time.monotonic() < deadline:
        lines = results.read_text().splitlines() if results.exists() else []
        if len(lines) >= count:
            return lines
        time.sleep(0.02)
    raise AssertionError((tmp_path / "log").read_text()[-5000:])


@pytest.mark.parametrize("pool", [("-P", "solo"), ("-P", "prefork", "-c", "2")], ids=["solo", "prefork"])
def test_chains_of_tasks_run_to_their_end(tmp_path, celery_worker, app, pool):
    worker = celery_worker(*pool)
    for chain in range(4):
        app.send_task("hop", (chain, 24))
    lines = wait_for_lines(tmp_path, 100)
    assert sorted(lines) == sorted(f"{chain} {left}" for chain in range(4) for left in range(25))
    worker.terminate()
    assert worker.wait(30) == 0
    assert list((tmp_path / "Broker").rglob("*.msg")) == []


def test_what_a_killed_worker_held_is_run_by_another(tmp_path, celery_worker, app):
    first = celery_worker("-P", "prefork", "-c", "1")
    app.send_task("hold", (0.5,))
    wait_for_lines(tmp_path, 1)
    os.kill(first.pid, signal.SIGKILL)  # its child sees that and ends by itself
    first.wait(10)
    celery_worker("-P", "solo")
    assert wait_for_lines(tmp_path, 2) == ["held", "held"]
