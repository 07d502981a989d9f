"""The supervisor with a stand-in for the worker: a small program whose end the test decides."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from keepstep.tasks.supervise import EXIT_REFUSED, Refusal, Supervisor, refused
from tests.worker.deployment import eventually

# Runs the command in its arguments under a supervisor and ends as that does.
SUPERVISE = """
import os, sys
from keepstep.tasks.supervise import Supervisor
sys.exit(Supervisor([sys.executable, '-c', sys.argv[1]], os.environ).run())
"""
# Notes each start; the number of the start is in `n`.
NOTED = """
import os, signal, sys, time
with open("starts", "a") as file:
    file.write(f"{os.getpid()}\\n")
n = len(open("starts").readlines())
"""


def starts():
    noted = Path("starts")
    return [int(line) for line in noted.read_text().splitlines()] if noted.exists() else []


def supervised(body):
    return subprocess.Popen([sys.executable, "-c", SUPERVISE, NOTED + textwrap.dedent(body)])


@pytest.mark.parametrize("code", [0, EXIT_REFUSED])
def test_a_worker_that_ends_by_itself_is_left_alone(code):
    assert Supervisor([sys.executable, "-c", NOTED + f"sys.exit({code})"], os.environ).run() == code
    assert len(starts()) == 1


def test_a_worker_that_dies_is_started_again():
    code = Supervisor(
        [sys.executable, "-c", NOTED + "os.kill(os.getpid(), 9) if n == 1 else sys.exit(3 if n == 2 else 0)"],
        os.environ,
    ).run()

    assert code == 0
    assert len(starts()) == 3


@pytest.mark.parametrize(("sent", "arrives"), [(signal.SIGTERM, 15), (signal.SIGQUIT, 3), (signal.SIGHUP, 15)])
def test_signals_are_handed_on_and_the_exit_code_handed_back(sent, arrives):
    process = supervised("""
        for number in (2, 3, 15):
            signal.signal(number, lambda number, frame: sys.exit(100 + number))
        open("ready", "w").close()
        time.sleep(60)
    """)
    eventually(Path("ready").exists, what="the program")

    process.send_signal(sent)

    assert process.wait(10) == 100 + arrives
    assert len(starts()) == 1


WARM_THEN_COLD = """
    signal.signal(3, lambda number, frame: sys.exit(7))
    signal.signal(15, lambda number, frame: open("stopping", "w").close())
    open("ready", "w").close()
    while True:
        time.sleep(0.01)
        if os.path.exists("stopping") and not os.path.exists("hold"):
            sys.exit(1 if os.path.exists("fail") else 0)
"""


@pytest.mark.parametrize("fails", [False, True])
def test_ctrl_c_asks_for_an_end_in_order_and_is_no_failure(fails):
    if fails:
        Path("fail").touch()
    process = supervised(WARM_THEN_COLD)
    eventually(Path("ready").exists, what="the program")

    process.send_signal(signal.SIGINT)

    assert process.wait(10) == 130
    assert len(starts()) == 1


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 7)])
def test_a_second_signal_does_not_wait(sent, code):
    Path("hold").touch()
    process = supervised(WARM_THEN_COLD)
    eventually(Path("ready").exists, what="the program")
    process.send_signal(sent)
    eventually(Path("stopping").exists, what="the end in order")

    process.send_signal(sent)

    assert process.wait(10) == code
    assert len(starts()) == 1


def test_a_refusal_says_why_to_the_supervisor():
    body = """
        from keepstep.tasks.supervise import Refusal, refused
        refused(Refusal("graph", "there is none", ("agent.py:1 in <module>: x",)))
        sys.exit(78)
    """
    supervisor = Supervisor(
        [sys.executable, "-c", textwrap.dedent(body).replace("sys.exit", "import sys\nsys.exit")], os.environ
    )

    assert supervisor.run() == EXIT_REFUSED
    assert supervisor.refusal == Refusal("graph", "there is none", ("agent.py:1 in <module>: x",))


def test_a_refusal_without_a_supervisor_is_for_the_log(monkeypatch):
    monkeypatch.delenv("KEEPSTEP_REFUSAL_FD", raising=False)
    assert refused(Refusal("graph", "there is none")) is False


def test_a_worker_killed_while_it_stops_is_not_started_again():
    process = supervised("""
        signal.signal(15, lambda number, frame: os.kill(os.getpid(), 9))
        open("ready", "w").close()
        time.sleep(60)
    """)
    eventually(Path("ready").exists, what="the program")

    process.terminate()

    assert process.wait(10) == 128 + 9
    assert len(starts()) == 1


def test_a_signal_during_the_wait_for_the_next_start_ends_it():
    process = supervised("sys.exit(5)")
    eventually(lambda: len(starts()) >= 3, what="three starts")

    process.terminate()

    assert process.wait(10) in {5, 128 + 15}
