"""The supervisor with a stand-in for the worker: a small program whose end the test decides."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from keepstep.tasks.supervise import EXIT_REFUSED, Supervisor
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


@pytest.mark.parametrize(
    ("sent", "arrives"), [(signal.SIGTERM, 15), (signal.SIGINT, 2), (signal.SIGQUIT, 3), (signal.SIGHUP, 15)]
)
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
