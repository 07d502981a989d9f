"""Nudges: what is on the wire, what a process does after a fork, and what becomes of a broker that is away."""

from __future__ import annotations

import json
import os
import time

import kombu
import pytest
import structlog
from celery.worker.request import Request

from keepstep import broker
from keepstep.settings import load
from keepstep.store.leases import Nudge
from keepstep.tasks.app import app
from keepstep.tasks.publish import Publisher
from tests.servers import free_port

STEP = Nudge("step", "01k0000000000000000000thread", 7, "agent@1", 1)
NODE = Nudge("node", "01k0000000000000000000thread", 8, "agent@1", 1, 3, "part#2")


@pytest.fixture(params=["file", "redis"])
def settings(request, tmp_path):
    url = f"file://{tmp_path}/broker" if request.param == "file" else request.getfixturevalue("redis_url")
    return load(broker=url, queue="deployment")


def received(settings, count):
    got = []
    with broker.connection(settings.broker, commands=False, queue=settings.queue) as connection:
        queue = broker.nudges_queue(settings.broker, settings.queue, "agent@1")
        with kombu.Consumer(connection.channel(), [queue], on_message=got.append, no_ack=True):
            while len(got) < count:
                connection.drain_events(timeout=10)
    return got


def test_a_nudge_is_a_task_message_that_celery_reads(settings):
    publish = Publisher(settings)
    publish([STEP, NODE])
    publish.close()

    messages = received(settings, 2)

    app.loader.import_default_modules()
    requests = [Request(message, app=app, task=app.tasks[message.headers["task"]]) for message in messages]
    assert [(request.name, request.args, request.kwargs) for request in requests] == [
        ("keepstep.step", [STEP.thread_id, 7], {}),
        ("keepstep.node", [NODE.thread_id, 3, "part#2", 8], {}),
    ]
    assert [request.ignore_result for request in requests] == [True, True]
    assert len({request.id for request in requests}) == 2
    # A reference, never a state: the message stays small whatever the thread holds.
    assert max(len(message.body) + len(json.dumps(message.headers)) for message in messages) < 500


def test_the_urgent_ones_are_received_first_and_counted_with_the_others(settings):
    publish = Publisher(settings)
    low, normal, high = (STEP._replace(version=version, priority=2 - version) for version in range(3))
    publish([low, normal, high, high._replace(version=3)])
    assert publish.waiting(["agent@1", "agent@2"]) == {"agent@1": 4, "agent@2": 0}
    publish.close()

    versions = [json.loads(message.body)[0][1] for message in received(settings, 4)]
    assert versions == [2, 3, 1, 0]


def test_a_large_fan_out_fills_the_queue_and_leaves_the_rest(settings):
    publish = Publisher(settings.model_copy(update={"queue_nudges_max": 80}))
    publish([STEP] * 10)
    publish([NODE] * 100)
    assert publish.waiting(["agent@1"]) == {"agent@1": 80}
    publish([STEP])  # a step that follows is never left behind: it takes the place of one that was taken
    assert publish.waiting(["agent@1"]) == {"agent@1": 81}
    publish.close()


def test_a_child_publishes_on_a_connection_of_its_own(settings):
    publish = Publisher(settings)
    publish([STEP])
    inherited = publish._producer

    pid = os.fork()
    if pid == 0:
        publish([NODE])
        os._exit(0 if publish._producer is not inherited else 1)
    assert os.waitpid(pid, 0)[1] == 0
    publish([STEP])
    publish.close()

    assert sorted(message.headers["task"] for message in received(settings, 3)) == [
        "keepstep.node",
        "keepstep.step",
        "keepstep.step",
    ]


def test_a_connection_that_died_unnoticed_is_replaced(redis_proxy):
    settings = load(broker=f"redis://127.0.0.1:{redis_proxy.port}/0", queue="deployment")
    publish = Publisher(settings)
    publish([STEP])
    assert redis_proxy.cut() >= 1

    publish([NODE])
    publish.close()

    assert [message.headers["task"] for message in received(settings, 2)] == ["keepstep.step", "keepstep.node"]


def test_a_broker_that_is_away_costs_a_line_and_bounded_time():
    publish = Publisher(load(broker=f"redis://:secret@127.0.0.1:{free_port()}/0"))
    begun = time.monotonic()

    with structlog.testing.capture_logs() as lines:
        publish([STEP, NODE])

    assert time.monotonic() - begun < 10
    assert [(line["event"], line["count"], line["log_level"]) for line in lines] == [
        ("nudges_left_to_sweep", 2, "warning")
    ]
    assert "secret" not in str(lines)


def test_a_broker_that_is_frozen_costs_bounded_time(redis_proxy, monkeypatch):
    publish = Publisher(load(broker=f"redis://127.0.0.1:{redis_proxy.port}/0"))
    publish([STEP])
    redis_proxy.freeze()
    begun = time.monotonic()

    with structlog.testing.capture_logs() as lines:
        publish([NODE])

    assert time.monotonic() - begun < 20
    assert [line["event"] for line in lines] == ["nudges_left_to_sweep"]
