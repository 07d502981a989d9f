"""Taking waiting nudges straight from the queue: the same messages in the same order, and nothing else.

On Redis alone: of RabbitMQ nothing is taken past its consumer (test_rabbitmq.py).
"""

from __future__ import annotations

import json
import os
import time

import kombu
import pytest
import redis

from keepstep import broker
from keepstep.settings import load
from keepstep.store.leases import Nudge
from keepstep.tasks import nudges, process
from keepstep.tasks.publish import Hint, Publisher

QUEUE = "deployment.nudges.agent@1"
STEPS = [Nudge("step", "1" * 26, 1, "agent@1", 0), Nudge("step", "2" * 26, 2, "agent@1", 0)]
NODE = Nudge("node", "3" * 26, 8, "agent@1", 0, 3, "part#2")


def said(*nudges):
    """What the messages of nudges say."""
    return [Hint(each.kind, each.thread_id, each.version, each.seq, each.run) for each in nudges]


@pytest.fixture
def settings(redis_url):
    return load(broker=redis_url, queue="deployment")


@pytest.fixture
def publisher(settings):
    made = Publisher(settings)
    yield made
    made.close()


@pytest.fixture
def queue(settings):
    client = redis.Redis.from_url(settings.broker)
    yield lambda: client.lrange(QUEUE, 0, -1)
    client.close()


def test_nudges_are_taken_in_the_order_in_which_they_were_published(publisher):
    publisher([*STEPS, NODE])

    assert [publisher.take([QUEUE]) for _ in range(4)] == [*said(*STEPS, NODE), None]


def test_the_urgent_ones_are_taken_first_and_no_queue_is_looked_at_twice(publisher, settings):
    slow, fast = STEPS[0]._replace(priority=2), STEPS[1]._replace(queue="other@1")
    publisher([slow, NODE, fast])
    other = "deployment.nudges.other@1"

    assert [publisher.take([QUEUE, other]) for _ in range(4)] == [*said(NODE, fast, slow), None]
    client = redis.Redis.from_url(settings.broker)
    assert client.keys("deployment*") == []
    client.script_flush()
    client.close()
    publisher([fast])
    # A server that was restarted does not know the script any more.
    assert publisher.take([QUEUE, other]) == said(fast)[0]


def test_what_kombu_wrote_is_left_to_the_consumer(publisher, settings, queue):
    publisher([STEPS[0]])
    with broker.connection(settings.broker, commands=False, queue=settings.queue) as connection:
        kombu.Producer(connection.channel(), auto_declare=False).publish(
            json.dumps([["4" * 26, 5], {}, {}]),
            routing_key=QUEUE,
            headers={"task": "keepstep.step", "id": "x"},
            content_type="application/json",
            content_encoding="utf-8",
        )

    assert publisher.take([QUEUE]) == said(STEPS[0])[0]
    # Its body is in base 64, and the consumer reads every form.
    assert publisher.take([QUEUE]) is None
    assert len(queue()) == 1


@pytest.mark.parametrize(
    "message",
    [
        b"no JSON",
        b'{"body": "[[1], {}, {}]", "headers": {"task": "keepstep.step"}}',
        b'{"body": "[[\\"t\\", 1, 2], {}, {}]", "headers": {"task": "keepstep.step"}}',
        b'{"body": "[]", "headers": {"task": "keepstep.node"}}',
        b'{"body": "[[\\"t\\", 1], {}, {}]", "headers": {"task": "somebody.else"}}',
    ],
)
def test_what_is_no_nudge_stays_where_it_was(publisher, queue, settings, message):
    publisher([STEPS[0]])
    assert publisher.take([QUEUE]) == said(STEPS[0])[0]
    publisher([STEPS[1]])
    client = redis.Redis.from_url(settings.broker)
    client.rpush(QUEUE, message)
    client.close()

    assert publisher.take([QUEUE]) is None
    assert queue()[-1] == message
    assert len(queue()) == 2


def test_nothing_is_taken_before_something_was_published_or_in_a_process_that_was_forked(publisher, queue):
    assert publisher.take([QUEUE]) is None
    publisher(STEPS)

    pid = os.fork()
    if pid == 0:
        os._exit(0 if publisher.take([QUEUE]) is None else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert len(queue()) == 2


def test_a_broker_without_lists_gives_nothing(tmp_path):
    publisher = Publisher(load(broker=f"file://{tmp_path}/broker"))
    publisher(STEPS)
    assert publisher.take([QUEUE]) is None
    publisher.close()


def test_a_broken_connection_gives_nothing_and_is_replaced(redis_proxy):
    publisher = Publisher(load(broker=f"redis://127.0.0.1:{redis_proxy.port}/0", queue="deployment"))
    publisher(STEPS)
    redis_proxy.cut()

    assert publisher.take([QUEUE]) is None
    publisher([NODE])
    assert [publisher.take([QUEUE]) for _ in range(3)] == said(*STEPS, NODE)
    publisher.close()


def test_a_child_goes_on_for_a_moment_only(monkeypatch):
    ran = []
    monkeypatch.setattr(nudges, "_run", ran.append)
    monkeypatch.setattr(process, "take", iter([*said(*STEPS), None, *said(NODE)]).__next__)

    nudges.step(NODE.thread_id, 1)
    assert ran == [Hint("step", NODE.thread_id, 1), *said(*STEPS)]

    monkeypatch.setattr(nudges, "_run", lambda nudge: (ran.append(nudge), time.sleep(nudges._GO_ON_SECONDS)))
    ran.clear()
    nudges.node(NODE.thread_id, 3, "part#2", 8)
    # What took longer than that moment has nobody behind it.
    assert ran == said(NODE)


def test_children_run_what_waits_without_the_main_process(served_by_redis):
    """Each thread's chain is three steps; all of them are run, each once, though few are Celery tasks."""
    served_by_redis.worker(concurrency=1)
    threads = [f"t{number}" for number in range(20)]
    served_by_redis.start("chain", *threads)
    served_by_redis.ended(*threads)

    assert set(served_by_redis.counts("starts").values()) == {1}
    assert len(served_by_redis.counts("starts")) == 60
