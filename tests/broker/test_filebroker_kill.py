"""Consumers of a file broker die by SIGKILL in a loop, and no message is lost."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from collections import Counter, deque
from pathlib import Path

import kombu

from keepstep import broker

_MESSAGES = 2000
_KILLS = 15
_CONSUMERS = 2
_HELD = 4
_QUEUE = kombu.Queue("work", kombu.Exchange(""), routing_key="work")

spawn = multiprocessing.get_context("spawn")


def consume(folder: Path, results: str) -> None:
    """Append each message's number to `results`, acknowledge it when three more have come; end when nothing is left."""
    out = os.open(results, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    held: deque[kombu.Message] = deque()
    with broker.connection(f"file://{folder}", commands=False) as connection:

        def received(body, message) -> None:
            os.write(out, b"%d\n" % body)
            time.sleep(0.002)  # work, without which all is done before the first victim has a successor
            held.append(message)
            if len(held) == _HELD:
                held.popleft().ack()

        with connection.Consumer([_QUEUE], callbacks=[received]):
            while True:
                try:
                    connection.drain_events(timeout=2.5)
                except TimeoutError:
                    if not held:
                        return
                    while held:
                        held.popleft().ack()


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def started(folder: Path, results: Path) -> multiprocessing.process.BaseProcess:
    process = spawn.Process(target=consume, args=(folder, str(results)))
    process.start()
    return process


def test_no_message_is_lost_when_consumers_are_killed(tmp_path):
    chance = random.Random(20_240_817)
    folder, results = tmp_path / "broker", tmp_path / "got"
    with broker.connection(f"file://{folder}", commands=False) as connection:
        producer = kombu.Producer(connection.channel())
        for number in range(_MESSAGES):
            producer.publish(number, routing_key="work", declare=[_QUEUE])

    consumers = [started(folder, results) for _ in range(_CONSUMERS)]
    # Spread over the work: each kill hits a consumer that is in the middle of it.
    for progress in sorted(chance.sample(range(_MESSAGES * 3 // 4), _KILLS)):
        while len(lines(results)) < progress:
            if not any(process.is_alive() for process in consumers):
                break
        victim = chance.randrange(_CONSUMERS)
        os.kill(consumers[victim].pid, signal.SIGKILL)
        consumers[victim].join(10)
        consumers[victim] = started(folder, results)
    for process in consumers:
        process.join(60)
        assert process.exitcode == 0

    counts = Counter(int(line) for line in lines(results))
    assert sorted(counts) == list(range(_MESSAGES))
    # What a dying consumer had done and not acknowledged comes twice, and nothing else does.
    assert 0 < sum(counts.values()) - _MESSAGES <= _KILLS * _HELD
    assert list(folder.rglob("*.msg")) == []


def test_what_a_killed_consumer_held_is_given_back_by_a_peer_that_was_there_already(tmp_path):
    with broker.connection(f"file://{tmp_path / 'broker'}", commands=False) as connection:
        producer = kombu.Producer(connection.channel())
        for number in range(3):
            producer.publish(number, routing_key="work", declare=[_QUEUE])
        ready = spawn.Event()
        holder = spawn.Process(target=hold, args=(tmp_path / "broker", ready))
        holder.start()
        assert ready.wait(30)
        queue = connection.SimpleQueue(_QUEUE)
        os.kill(holder.pid, signal.SIGSTOP)
        try:
            # It lives, so what it holds stays its own, however long it says nothing.
            messages = [queue.get(timeout=5)]
            connection.transport.spool._recover()
            assert len(list((tmp_path / "broker/queues/work").iterdir())) == 0
        finally:
            os.kill(holder.pid, signal.SIGKILL)
        holder.join(10)
        messages += [queue.get(timeout=5) for _ in range(2)]
        assert [message.payload for message in messages] == [2, 0, 1]
        assert [bool(message.delivery_info.get("redelivered")) for message in messages] == [False, True, True]


def hold(folder: Path, ready) -> None:
    with broker.connection(f"file://{folder}", commands=False) as connection:
        channel = connection.channel()
        held = [channel.basic_get("work"), channel.basic_get("work")]
        ready.set()
        signal.pause()
        assert held


def test_a_child_that_outlives_its_killed_parent_does_not_keep_what_that_held(tmp_path):
    with broker.connection(f"file://{tmp_path / 'broker'}", commands=False) as connection:
        kombu.Producer(connection.channel()).publish("x", routing_key="work", declare=[_QUEUE])
        reader, writer = os.pipe()
        parent = os.fork()
        if parent == 0:
            hold_and_fork(tmp_path / "broker", writer)
        os.close(writer)
        child = int(os.read(reader, 100))
        try:
            os.kill(parent, signal.SIGKILL)
            os.waitpid(parent, 0)
            message = connection.SimpleQueue(_QUEUE).get(timeout=5)
            assert message.delivery_info["redelivered"] is True
            os.kill(child, 0)  # it was alive all the time
        finally:
            os.kill(child, signal.SIGKILL)


def hold_and_fork(folder: Path, writer: int) -> None:
    """Claim a message, then tell the pid of a child that does nothing. Never returns."""
    try:
        with broker.connection(f"file://{folder}", commands=False) as connection:
            held = connection.channel().basic_get("work")
            child = os.fork()
            if child:
                os.write(writer, b"%d" % child)
            signal.pause()
            assert held
    finally:
        os._exit(1)
