"""Nudges: what is on the wire, what a process does after a fork, and what becomes of a broker that is away."""

from __future__ import annotations

import json
import os
import time

import kombu
import pytest
import structlog
from celery.worker.request import Request

from keepstep import blockage, broker
from keepstep.settings import load
from keepstep.store.leases import Nudge
from keepstep.tasks.app import app
from keepstep.tasks.publish import Publisher
from tests.servers import free_port
from tests.worker.deployment import eventually

STEP = Nudge("step", "01k0000000000000000000thread", 7, "agent@1", 1)
NODE = Nudge("node", "01k0000000000000000000thread", 8, "agent@1", 1, 3, "part#2")


@pytest.fixture(params=["file", "redis", "rabbitmq"])
def settings(request, tmp_path):
    url = f"file://{tmp_path}/broker" if request.param == "file" else request.getfixturevalue(f"{request.param}_url")
    declare(url)
    return load(broker=url, queue="deployment")


@pytest.fixture(params=["redis", "rabbitmq"])
def proxied(request):
    """A proxy, and the settings whose broker is reached through it."""
    proxy = request.getfixturevalue(f"{request.param}_proxy")
    url = f"redis://127.0.0.1:{proxy.port}/0"
    if request.param == "rabbitmq":
        url = request.getfixturevalue("proxied_rabbitmq_url")
        declare(url)
    return proxy, load(broker=url, queue="deployment")


def declare(url):
    """Make the queue where messages to one that is not there are dropped."""
    if url.startswith("amqp://"):
        with broker.connection(url, commands=False) as connection:
            broker.nudges_queue(url, "deployment", "agent@1")(connection.channel()).declare()


def received(settings, count):
    got = []
    queue = broker.nudges_queue(settings.broker, settings.queue, "agent@1")
    with (
        broker.connection(settings.broker, commands=False, queue=settings.queue) as connection,
        kombu.Consumer(connection.channel(), [queue], on_message=got.append, no_ack=True),
    ):
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


def test_a_connection_that_died_unnoticed_is_replaced(proxied):
    proxy, settings = proxied
    publish = Publisher(settings)
    publish([STEP])
    assert proxy.cut() >= 1

    publish([NODE])
    publish.close()

    assert [message.headers["task"] for message in received(settings, 2)] == ["keepstep.step", "keepstep.node"]


@pytest.mark.parametrize("scheme", ["redis", "amqp"])
def test_a_broker_that_is_away_costs_a_line_and_bounded_time(scheme):
    publish = Publisher(load(broker=f"{scheme}://u:secret@127.0.0.1:{free_port()}/0"))
    begun = time.monotonic()

    with structlog.testing.capture_logs() as lines:
        publish([STEP, NODE])

    assert time.monotonic() - begun < 10
    assert [(line["event"], line["count"], line["log_level"]) for line in lines] == [
        ("nudges_left_to_sweep", 2, "warning")
    ]
    assert "secret" not in str(lines)


def test_a_broker_that_is_frozen_costs_bounded_time(proxied):
    proxy, settings = proxied
    publish = Publisher(settings)
    publish([STEP])
    proxy.freeze()
    begun = time.monotonic()

    with structlog.testing.capture_logs() as lines:
        publish([NODE])

    assert time.monotonic() - begun < 20
    assert [line["event"] for line in lines] == ["nudges_left_to_sweep"]


def test_a_rabbitmq_without_memory_is_given_up_at_once_and_on_one_connection(rabbitmq_url, rabbitmq_server):
    declare(rabbitmq_url)
    settings = load(broker=rabbitmq_url, queue="deployment")
    publish = Publisher(settings)
    publish([STEP])
    rabbitmq_server.alarm()
    begun = time.monotonic()

    with structlog.testing.capture_logs() as lines:
        for _ in range(10):
            publish([NODE])

    # Sooner than by a single time-out.
    assert time.monotonic() - begun < 2
    assert [(line["event"], line["error"], line["count"]) for line in lines] == [
        ("nudges_left_to_sweep", "Blocked", 1)
    ] * 10
    assert rabbitmq_server.connections() == 1
    rabbitmq_server.end_alarm()
    eventually(lambda: blocked(publish) is False, what="the end of the blockage")
    publish([STEP])
    publish.close()
    # The one that was being sent when the blockage began has arrived after it.
    assert [message.headers["task"] for message in received(settings, 3)] == [
        "keepstep.step",
        "keepstep.node",
        "keepstep.step",
    ]


def blocked(publish):
    try:
        blockage.check(publish._producer.channel)
    except blockage.Blocked:
        return True
    return False
