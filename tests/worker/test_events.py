"""Events on real brokers: whoever listens hears all of it, also what happened while they were away."""

from __future__ import annotations

import contextlib
import threading

import pytest
import redis
from kombu import Producer

import keepstep
from keepstep import broker
from keepstep.errors import InvalidInput
from keepstep.runtime.reader import Reader
from tests.worker.deployment import deployed, eventually

_RESUMED = (
    "INSERT INTO keepstep_event (tenant, thread_id, seq, run, kind, at) "
    "SELECT tenant, id, seq, '', 'thread.resumed', 0 FROM keepstep_thread"
)
CHAIN = ["thread.started", "thread.done"]


def heard(subscription, count):
    """Return (thread, kind) of the next events."""
    found = []
    while len(found) < count:
        event = next(subscription, None)
        assert event is not None, f"only {found} were heard"
        found.append((event["thread"], event["event"]))
    return found


def ended(deployment, *threads, status="done"):
    """Wait until threads have a status and all that happened is published."""
    deployment.ended(*threads, status=status)
    left = (
        "SELECT (SELECT count(*) FROM keepstep_event) - (SELECT position FROM keepstep_mark WHERE name = 'published')"
    )
    eventually(lambda: deployment.query(left) == [(0,)], what="everything published")


def log_of(deployment):
    with Reader(settings=deployment.settings) as reader:
        return [(each.thread, each.kind) for each in reader.events()]


def test_a_question_is_heard_and_answered_by_a_service_that_knows_the_broker_alone(deployment):
    deployment.worker()
    client = deployment.client
    with client.events("questions", kind="approval.opened", timeout=30) as questions:
        deployment.start("asking", "t")
        question = next(questions)
        assert (question["graph"], question["thread"], question["payload"]["question"]) == ("asking", "t", "Go on?")
        assert question["payload"]["arguments"] == {"thread": "t"}
        client.approve(question["approval"], by="anna")
    deployment.ended("t")
    with client.events("questions", kind="approval.opened", timeout=0) as questions:
        assert list(questions) == []  # the one that was handled is acknowledged


def test_each_subscriber_gets_what_it_asked_for_and_misses_nothing_while_it_is_away(deployment):
    deployment.worker()
    client, names = deployment.client, [f"t{number}" for number in range(5)]
    everything = client.events("everything", timeout=30)
    ends = client.events("ends", kind="thread.done", graph="chain", timeout=30)
    questions = client.events("questions", kind="approval.*", timeout=0.5)
    with keepstep.Client(settings=deployment.settings, tenant="another") as other:
        foreign = other.events("foreign", timeout=0.5)
    deployment.start("chain", *names)
    deployment.ended(*names)
    everything.close()
    deployment.start("chain", "later")
    deployment.ended("later")

    names.append("later")
    assert sorted(heard(ends, 6)) == sorted((name, "thread.done") for name in names)
    everything = client.events("everything", timeout=30)
    told = heard(everything, 12)
    assert sorted(told) == sorted((name, kind) for name in names for kind in CHAIN)
    assert told == log_of(deployment)
    assert list(questions) == []
    assert list(foreign) == []
    for each in (everything, ends, questions, foreign):
        each.close()


def test_an_event_whose_handling_failed_comes_again_to_its_subscriber_alone(deployment):
    deployment.worker()
    client = deployment.client
    other = client.events("other", kind="thread.done", timeout=30)
    failing = client.events("failing", kind="thread.done", timeout=30)
    deployment.start("chain", "t")
    with contextlib.suppress(ZeroDivisionError), failing:
        [1 / 0 for event in failing if event["thread"] == "t"]
    with client.events("failing", kind="thread.done", timeout=40) as again:
        assert heard(again, 1) == [("t", "thread.done")]
    assert heard(other, 1) == [("t", "thread.done")]
    other.close()
    with client.events("other", kind="thread.done", timeout=0.5) as other:
        assert list(other) == []


def test_a_loop_that_is_begun_again_begins_with_the_event_whose_handling_failed(embedded):
    embedded.worker()
    with embedded.client.events("some", kind="thread.done", timeout=3) as subscription:
        embedded.start("chain", "t0", "t1")
        ended(embedded, "t0", "t1")
        tried = []
        for _ in range(2):
            for event in subscription:
                tried.append(event["thread"])
                break
        tried += [event["thread"] for event in subscription]
    assert sorted(set(tried)) == ["t0", "t1"]
    assert tried == [tried[0], tried[0], tried[0], tried[-1]]


def test_a_queue_that_was_bound_for_another_kind_is_not_heard_of_that(embedded):
    embedded.worker()
    embedded.client.events("some", kind="thread.started", timeout=3).close()
    with embedded.client.events("some", kind="thread.done", timeout=3) as subscription:
        embedded.start("chain", "t")
        ended(embedded, "t")
        assert [event["event"] for event in subscription] == ["thread.done"]


def test_what_somebody_wrote_into_the_table_of_bindings_stops_nobody(served_by_redis, redis_url):
    deployment = served_by_redis
    table = f"_kombu.binding.{deployment.settings.queue}.events"
    with contextlib.closing(redis.Redis.from_url(redis_url)) as link:
        for binding in (
            "nothing",
            "thread.done.(\x06\x16(\x06\x16bad",
            "#\x06\x16^.*$\x06\x16text",
            "#\x06\x16\x06\x16",
        ):
            link.sadd(table, binding)
        link.set("text", "of somebody else")
        worker = deployment.worker()
        with deployment.client.events("good", kind="thread.done", timeout=30) as good:
            deployment.start("chain", "t")
            assert heard(good, 1) == [("t", "thread.done")]
        assert worker.events("events_left_in_log") == []
        assert link.get("text") == b"of somebody else"


def test_what_is_no_event_is_passed_over(embedded):
    embedded.worker()
    with embedded.client.events("some", kind="thread.done", timeout=10) as subscription:
        with broker.connection(embedded.settings.broker, commands=True) as connection:
            producer = Producer(connection.channel(), auto_declare=False)
            for body in (b"[" * 200_000, b"no JSON", b"[]", b'{"event": 7}'):
                kind = {"content_type": "application/json", "content_encoding": "utf-8"}
                producer.publish(body, exchange="", routing_key="some", **kind)
        embedded.start("chain", "t")
        assert heard(subscription, 1) == [("t", "thread.done")]


def test_a_subscription_that_is_removed_gathers_nothing(deployment):
    deployment.worker()
    client = deployment.client
    client.events("gone", timeout=1).remove()
    kept = client.events("kept", kind="thread.done", timeout=30)
    deployment.start("chain", "t")
    assert heard(kept, 1) == [("t", "thread.done")]
    kept.close()
    with client.events("gone", timeout=0.5) as gone:
        assert list(gone) == []


def test_events_wait_for_a_broker_that_is_away(tmp_path, postgresql_url, spare_redis):
    with deployed(tmp_path, postgresql_url, spare_redis.url) as deployment:
        worker = deployment.worker()
        deployment.start("asking", "t")
        ended(deployment, "t", status="waiting")
        with deployment.client.events("all", timeout=60) as every:
            spare_redis.freeze()
            deployment.execute(_RESUMED)
            eventually(lambda: worker.events("events_left_in_log"), what="a failure to publish")
            eventually(lambda: log_of(deployment)[-1] == ("t", "thread.resumed"), what="its place in the log")
            spare_redis.thaw()
            told = heard(every, 1)
            while told[-1] != ("t", "thread.resumed"):
                told += heard(every, 1)
        assert worker.events("service_failed") == []


def test_many_workers_publish_each_event_once(served):
    for _ in range(3):
        served.launch(concurrency=1)
    for worker in served.workers:
        worker.ready()
    names = [f"t{number}" for number in range(40)]
    with served.client.events("all", timeout=30) as every:
        served.start("chain", *names)
        told = [next(every)["position"] for _ in range(80)]
    assert told == list(range(1, 81))
    with served.client.events("all", timeout=0.5) as every:
        assert list(every) == []


def test_two_who_share_a_queue_share_the_events(deployment):
    deployment.worker()
    names = [f"t{number}" for number in range(30)]
    found, lock = [], threading.Lock()

    def listen(subscription):
        while len(found) < len(names):
            event = next(subscription, None)
            if event is not None:
                with lock:
                    found.append(event["thread"])

    both = [deployment.client.events("shared", kind="thread.done", timeout=0.5) for _ in range(2)]
    crowd = [threading.Thread(target=listen, args=(each,)) for each in both]
    deployment.start("chain", *names)
    for each in crowd:
        each.start()
    for each in crowd:
        each.join(60)
    for each in both:
        each.close()
    assert sorted(found) == sorted(names)


def test_a_deployment_may_keep_its_events_to_the_log(embedded):
    embedded.worker(KEEPSTEP_PUBLISH_EVENTS="false")
    with embedded.client.events("all", timeout=1) as every:
        embedded.start("chain", "t")
        embedded.ended("t")
        eventually(lambda: log_of(embedded) == [("t", kind) for kind in CHAIN], what="the log")
        assert list(every) == []
    assert embedded.query("SELECT position FROM keepstep_mark WHERE name = 'published'") == [(0,)]


def test_names_that_are_one_word_in_a_routing_key_are_told_apart(embedded):
    embedded.worker()
    clients = {tenant: keepstep.Client(settings=embedded.settings, tenant=tenant) for tenant in ("a.b", "a_b", "a*b")}
    heard_by = {tenant: client.events(f"of {tenant}", timeout=3) for tenant, client in clients.items()}
    for tenant, client in clients.items():
        client.start("chain", f"thread of {tenant}", {}).accepted(30)
    ended(embedded, *(f"thread of {tenant}" for tenant in clients))
    for tenant, subscription in heard_by.items():
        assert heard(subscription, 2) == [(f"thread of {tenant}", kind) for kind in CHAIN]
        assert next(subscription, None) is None
        subscription.close()
        clients[tenant].close()


@pytest.mark.parametrize("queue", ["keepstep.commands", "keepstep.nudges.chain", "keepstep.replies.x", "", "\n"])
def test_a_queue_of_the_deployments_own_is_refused(queue, tmp_path):
    with keepstep.Client(f"file://{tmp_path}/broker") as client, pytest.raises(InvalidInput, match="queue"):
        client.events(queue)


@pytest.mark.parametrize("kind", ["approval", "thread.exploded", "appr*", "", "\n"])
def test_a_kind_that_is_none_is_refused(kind, tmp_path):
    with keepstep.Client(f"file://{tmp_path}/broker") as client, pytest.raises(InvalidInput, match="kind"):
        client.events("q", kind=kind)
