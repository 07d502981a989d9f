"""What the worker's threads have in common: they survive errors, stop promptly, and stay out of forks."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
import time

import pytest
import structlog

from keepstep.tasks import logs
from keepstep.tasks.forkgate import Gate
from keepstep.tasks.service import Service, stop


class Counting(Service):
    name = "counting"
    failed_seconds = 0.01

    def __init__(self, rounds):
        super().__init__()
        self.rounds = iter(rounds)
        self.done = threading.Event()
        self.finished_in = None

    def work(self):
        outcome = next(self.rounds, None)
        if outcome is None:
            self.done.set()
            return 3600.0
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def finish(self):
        self.finished_in = threading.current_thread().name


def test_a_service_survives_errors_and_stops_in_the_middle_of_a_long_wait():
    with structlog.testing.capture_logs() as lines:
        service = Counting([0.0, ValueError("once"), OSError("twice"), 0.0])
        service.start()
        assert service.done.wait(10)
        begun = time.monotonic()
        stop([service])

    assert time.monotonic() - begun < 2
    assert service.finished_in == "keepstep-counting"
    assert [(line["event"], line["service"], line["error"], line["reason"]) for line in lines] == [
        ("service_failed", "counting", "ValueError", "once"),
        ("service_failed", "counting", "OSError", "twice"),
    ]


def test_a_fork_waits_for_the_threads_that_work():
    gate, entered, leave = Gate(), threading.Event(), threading.Event()
    order = []

    def work():
        with gate.hold():
            entered.set()
            leave.wait(10)
            order.append("worked")

    thread = threading.Thread(target=work)
    thread.start()
    assert entered.wait(10)
    threading.Timer(0.2, leave.set).start()

    pid = os.fork()
    if pid == 0:
        # The child finds the gate open, and can close it.
        with gate.hold():
            os._exit(0)
    order.append("forked")
    thread.join()

    assert os.waitpid(pid, 0)[1] == 0
    assert order == ["worked", "forked"]
    with gate.hold():
        pass


def test_a_thread_that_is_stuck_does_not_stop_forks_for_ever():
    gate, entered, leave = Gate(), threading.Event(), threading.Event()

    def work():
        with gate.hold():
            entered.set()
            leave.wait(30)

    thread = threading.Thread(target=work)
    thread.start()
    assert entered.wait(10)

    pid = os.fork()
    if pid == 0:
        os._exit(0)

    assert os.waitpid(pid, 0)[1] == 0
    leave.set()
    thread.join()


def test_what_a_log_line_says_of_an_error():
    def fail():
        message = "duplicate key violates a constraint\nDETAIL: Key (name)=(anna) exists"
        raise ValueError(message)

    with pytest.raises(ValueError, match="duplicate key") as raised:
        fail()

    line = fail.__code__.co_firstlineno + 2
    assert logs.told(raised.value) == {
        "error": "ValueError",
        "reason": "duplicate key violates a constraint",
        "where": f"test_services.py:{line}",
    }
    assert logs.told(KeyError()) == {"error": "KeyError", "reason": "", "where": ""}


PROGRAM = """
import logging, structlog
from keepstep.tasks import logs
logs.configure(logging.INFO, as_json={as_json})
structlog.get_logger("keepstep.worker").info("began", broker="redis://user:pa55@host/0", files=["caf\\udce9"])
logging.getLogger("celery.worker").info("not shown")
logging.getLogger("celery.worker").warning("lost amqp://u:pa55@host//: %s", "gone")
logging.getLogger("keepstep").debug("not shown")
"""


@pytest.mark.parametrize("as_json", [True, False])
def test_logs_are_lines_without_passwords(as_json):
    shown = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(as_json=as_json)], capture_output=True, check=True
    ).stderr.decode()

    assert "pa55" not in shown
    assert "not shown" not in shown
    lines = shown.splitlines()
    assert len(lines) == 2
    if as_json:
        first, second = (json.loads(line) for line in lines)
        assert (first["event"], first["broker"], first["level"]) == ("began", "redis://***@host/0", "info")
        assert first["files"] == ["caf\udce9"]
        assert (second["event"], second["logger"]) == ("lost amqp://***@host//: gone", "celery.worker")
    assert logging.getLogger().handlers is not None
