"""The broker or the database goes away and comes back; nothing accepted is lost and nobody restarts a worker."""

from __future__ import annotations

import contextlib
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import kombu
import pytest

import keepstep
from keepstep import broker
from keepstep.ids import new_id
from tests.worker.deployment import deployed, eventually


@pytest.fixture
def mortal(request, broker_kind):
    """A broker of each kind that a test may kill, and its URL: Redis comes back empty, RabbitMQ with what it held."""
    if broker_kind == "redis":
        server = request.getfixturevalue("spare_redis")
        return server, server.url
    return request.getfixturevalue("rabbitmq_server"), request.getfixturevalue("rabbitmq_url")


def test_a_broker_emptied_with_threads_in_flight_loses_none(served, broker_server):
    worker = served.worker(concurrency=2)
    running, queued = [f"h{n}" for n in range(2)], [f"t{n}" for n in range(10)]
    backing_off, waiting = [f"r{n}" for n in range(3)], [f"w{n}" for n in range(3)]
    served.start("asking", *waiting)
    served.ended(*waiting, status="waiting")
    served.start("flaky", *backing_off)
    for thread in backing_off:
        served.started(f"{thread} fail_once")
    served.start("held", *running)
    for thread in running:
        served.started(f"{thread} hold")
    served.start("chain", *queued)

    broker_server.flush()
    served.touch("release")
    for (approval,) in served.query("SELECT id FROM keepstep_approval WHERE status = 'open'"):
        served.client.approve(approval, by="anna")
    served.ended(*running, *queued, *backing_off, *waiting)

    expected = Counter({f"{thread} {node}": 1 for thread in queued for node in "abc"})
    expected.update({f"{thread} {node}": 1 for thread in running for node in ("before", "hold", "after")})
    assert served.counts("paid") == expected
    expected.update({f"{thread} fail_once": 2 for thread in backing_off})
    expected.update({f"{thread} ask": 2 for thread in waiting})  # once to ask, once with the answer
    assert served.counts("starts") == expected
    assert worker.process.poll() is None


def test_a_full_redis_delays_nudges_and_no_commit(served_by_redis, redis_server):
    """RabbitMQ's word for it is an alarm (test_rabbitmq.py)."""
    served = served_by_redis
    worker = served.worker(concurrency=1)
    served.start("held", "h")
    served.holding("h")

    with contextlib.closing(redis_server.client()) as redis:
        redis.config_set("maxmemory", 1)
        try:
            served.touch("release")
            eventually(lambda: served.query("SELECT seq FROM keepstep_thread") == [(2,)], what="the commit")
            eventually(lambda: worker.events("nudges_left_to_sweep"), what="the failed nudge")
        finally:
            redis.config_set("maxmemory", 0)
    served.ended("h")

    assert served.counts("starts") == Counter({"h before": 1, "h hold": 1, "h after": 1})


@pytest.mark.timeout(240)  # RabbitMQ is started twice
def test_a_broker_that_is_down_at_the_start_and_in_between_is_waited_for(tmp_path, postgresql_url, mortal):
    server, url = mortal
    server.kill()
    with deployed(tmp_path, postgresql_url, url) as deployment:
        worker = deployment.worker(concurrency=1)
        server.start()
        deployment.start("held", "h")
        deployment.started("h hold")

        server.kill()
        deployment.touch("release")
        # The step commits although its nudge cannot be sent.
        eventually(
            lambda: deployment.query("SELECT seq FROM keepstep_thread") == [(2,)], what="the commit without a broker"
        )
        server.start()
        deployment.ended("h")
        deployment.start("chain", "t")
        deployment.ended("t")

        assert deployment.counts("starts") == Counter(
            {"h before": 1, "h hold": 1, "h after": 1, "t a": 1, "t b": 1, "t c": 1}
        )
        assert worker.process.poll() is None
        assert worker.stop() == 0


def test_a_database_that_is_away_delays_commands_and_loses_none(
    tmp_path, postgresql_url, proxied_url, postgresql_proxy, broker_url
):
    with deployed(tmp_path, proxied_url, broker_url, postgresql_url) as deployment:
        worker = deployment.worker(concurrency=1)
        deployment.start("chain", "t1")
        deployment.ended("t1")

        postgresql_proxy.refuse()
        with keepstep.Client(settings=deployment.settings) as client:
            receipt = client.start("chain", "t2", {})
            eventually(lambda: worker.events("command_put_back"), what="the command's return to the queue")
            postgresql_proxy.accept()
            assert receipt.accepted(timeout=20).duplicate is False
        deployment.ended("t2")

        assert deployment.counts("starts") == Counter(
            {f"{thread} {node}": 1 for thread in ("t1", "t2") for node in "abc"}
        )
        assert worker.process.poll() is None


def test_a_bad_message_is_rejected_and_the_next_one_is_taken(deployment):
    worker = deployment.worker(concurrency=1)
    # RabbitMQ may refuse what is sent to a queue that is just being made.
    deployment.start("chain", "first")
    settings = deployment.settings
    replies = broker.replies_queue(broker.replies_prefix(settings.queue) + new_id())
    with broker.connection(settings.broker, commands=True, queue=settings.queue) as connection:
        producer = kombu.Producer(connection.channel())
        bodies = [
            b'{"v": 1, "verb": "start", "id": "bad-1", "tenant": "default"}',
            b"\x80\x04nonsense",
            b'{"v": 9, "verb": "start", "id": "bad-3"}',
            b'["not", "an", "object"]',
        ]
        with kombu.Consumer(connection.channel(), [replies], on_message=lambda m: (got.append(m.payload), m.ack())):
            got: list[dict[str, object]] = []
            for number, body in enumerate(bodies, 1):
                producer.publish(
                    body,
                    routing_key=broker.commands_name(settings.queue),
                    declare=[broker.commands_queue(settings.broker, settings.queue)],
                    content_type="application/x-python-serialize" if number == 2 else "application/json",
                    content_encoding="binary" if number == 2 else "utf-8",
                    correlation_id=f"bad-{number}",
                    reply_to=replies.name,
                )
            eventually(lambda: drained(connection) or len(got) == 4, what="four refusals")

    deployment.start("chain", "t")
    deployment.ended("t")
    assert sorted((reply["id"], reply["status"], reply["error"]["code"]) for reply in got) == [
        ("bad-1", "refused", "invalid_message"),
        ("bad-2", "refused", "invalid_message"),
        ("bad-3", "refused", "unsupported_version"),
        ("bad-4", "refused", "invalid_message"),
    ]
    refused = [event["command_id"] for event in worker.events("command_refused")]
    assert [command_id for command_id in refused if command_id] == ["bad-1", "bad-2", "bad-3", "bad-4"]
    deployment.ended("first")
    assert deployment.statuses() == {"first": "done", "t": "done"}
    # They were answered: nothing is left for an operator to look at.
    with deployment.looking_at(broker.rejected_queue(settings.queue)) as rejected:
        assert rejected() == 0


@pytest.mark.parametrize("lost", ["message", "answer of the broker", "reply of the worker"])
def test_a_start_whose_message_or_answer_is_lost_makes_one_run(
    served, broker_kind, broker_proxy, proxied_broker_url, lost
):
    served.worker(concurrency=1)
    # Redis answers each request, the reply of a worker is the answer to a BRPOP; RabbitMQ delivers one unasked.
    sent, replied = {"redis": (b"LPUSH", b"BRPOP"), "rabbitmq": (b'"verb":"start"', b'"status":"accepted"')}[
        broker_kind
    ]
    with keepstep.Client(broker=proxied_broker_url, confirm=True, timeout=30) as client:
        client.start("quick", "before", {})
        if lost == "message":
            broker_proxy.lose_request(sent)
        elif lost == "answer of the broker":
            broker_proxy.lose_reply(sent)
        elif broker_kind == "redis":
            broker_proxy.lose_reply(replied)
        else:
            broker_proxy.lose_delivery(replied)
        receipt = client.start("quick", "once", {}, request_id="order-7")
        assert broker_proxy.lost.wait(30)
        # Sent again by somebody who heard nothing of it at all: it is the same request.
        again = client.start("quick", "once", {}, request_id="order-7")
    served.ended("before", "once")

    assert again.accepted(timeout=20).run_id == receipt.accepted(timeout=20).run_id
    assert served.query("SELECT count(*) FROM keepstep_run WHERE request_id = 'order-7'") == [(1,)]
    assert served.counts("starts") == Counter({"before once": 1, "once once": 1})
    audit = "SELECT count(*) FROM keepstep_audit a JOIN keepstep_thread t ON t.id = a.thread_id WHERE t.name = 'once'"
    assert served.query(audit) == [(1,)]


def test_a_message_that_the_broker_has_lost_is_sent_again_by_who_waits_for_its_answer(served, broker_server):
    settings = served.settings
    commands = broker.commands_queue(settings.broker, settings.queue)
    # Nobody is there to take it when the broker loses everything.
    with keepstep.Client(settings=served.settings, confirm=True, timeout=60) as client, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.start, "quick", "once", {})
        with served.looking_at(commands) as count:
            eventually(lambda: count() == 1, what="the message")
        broker_server.flush()
        served.worker(concurrency=1)
        receipt = waiting.result(60)
    served.ended("once")
    assert receipt.accepted(timeout=1).duplicate is False
    assert served.counts("starts") == Counter({"once once": 1})


def test_nudges_of_another_format_are_dropped_and_their_threads_found(deployment):
    worker = deployment.worker(concurrency=1)
    settings = deployment.settings
    deployment.start("held", "h")
    deployment.holding("h")
    [(thread_id, version)] = deployment.query("SELECT id, version FROM keepstep_thread")
    arguments = [
        ("keepstep.step", [thread_id, version, {"format": 2}]),
        ("keepstep.step", ["nobody", "no number"]),
        ("keepstep.step_of_the_next_release", [thread_id]),
        ("keepstep.node", []),
    ]
    with broker.connection(settings.broker, commands=False, queue=settings.queue) as connection:
        producer = kombu.Producer(connection.channel())
        for task, args in arguments:
            producer.publish(
                [args, {}, {}],
                routing_key=broker.nudges_name(settings.queue, "held@1"),
                headers={"task": task, "id": new_id(), "lang": "py", "argsrepr": "", "kwargsrepr": ""},
                serializer="json",
            )
    deployment.touch("release")
    deployment.start("quick", "q")
    deployment.ended("h", "q")

    assert deployment.counts("starts") == Counter({"h before": 1, "h hold": 1, "h after": 1, "q once": 1})
    assert worker.process.poll() is None
    assert worker.events("child_lost") == []


def drained(connection):
    with contextlib.suppress(TimeoutError):
        connection.drain_events(timeout=0.2)
    return False
