"""What only RabbitMQ does: it confirms, it blocks, it closes channels and cancels consumers, and it hands out ahead."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter

import pytest

import keepstep
from tests.worker.deployment import deployed, eventually

CHAIN = ("a", "b", "c")


@pytest.fixture
def impatient(rabbitmq_server):
    """A RabbitMQ that closes a channel on which something was not acknowledged for a second and a half."""
    before = {name: rabbitmq_server.setting(name) for name in ("consumer_timeout", "channel_tick_interval")}
    rabbitmq_server.set(consumer_timeout="1500", channel_tick_interval="200")
    yield rabbitmq_server
    rabbitmq_server.set(**before)


@pytest.mark.timeout(240)  # RabbitMQ is started twice
def test_a_broker_that_is_down_at_the_start_and_killed_under_load_loses_nothing(served_by_rabbitmq, rabbitmq_server):
    deployment = served_by_rabbitmq
    rabbitmq_server.kill()
    workers = [deployment.worker(concurrency=1) for _ in range(2)]
    rabbitmq_server.start()
    threads = [f"t{number}" for number in range(60)]

    def produce() -> None:
        with keepstep.Client(settings=deployment.settings, confirm=True, timeout=60) as client:
            for thread in threads:
                client.start("chain", thread, {})

    producer = threading.Thread(target=produce)
    producer.start()
    deployment.noted("paid", f"{threads[5]} a")
    rabbitmq_server.restart()
    producer.join(90)
    deployment.ended(*threads)

    assert deployment.counts("paid") == Counter({f"{thread} {node}": 1 for thread in threads for node in CHAIN})
    assert deployment.counts("starts") == deployment.counts("paid")
    assert deployment.query("SELECT count(*) FROM keepstep_run") == [(len(threads),)]
    assert [worker.process.poll() for worker in workers] == [None, None]


def test_workers_that_are_cut_off_again_and_again_run_each_step_once(
    tmp_path, postgresql_url, rabbitmq_url, rabbitmq_proxy, proxied_rabbitmq_url
):
    with deployed(tmp_path, postgresql_url, rabbitmq_url) as deployment:
        worker = deployment.worker(concurrency=2, KEEPSTEP_BROKER=proxied_rabbitmq_url)
        threads = [f"t{number}" for number in range(30)]
        with keepstep.Client(settings=deployment.settings) as client:
            receipts = [client.start("chain", thread, {}) for thread in threads]
            for receipt in receipts[::10]:
                receipt.accepted(timeout=20)
                rabbitmq_proxy.cut()
        deployment.ended(*threads)

        assert deployment.counts("starts") == Counter({f"{thread} {node}": 1 for thread in threads for node in CHAIN})
        assert deployment.query("SELECT count(*) FROM keepstep_run") == [(len(threads),)]
        assert worker.process.poll() is None


def test_queues_that_somebody_removed_are_made_again(served_by_rabbitmq, rabbitmq_server, rabbitmq_vhost):
    worker = served_by_rabbitmq.worker(concurrency=1)
    served_by_rabbitmq.start("chain", "before")
    served_by_rabbitmq.ended("before")

    rabbitmq_server.remove_queues(rabbitmq_vhost)
    served_by_rabbitmq.start("chain", "after")
    served_by_rabbitmq.ended("after")

    assert served_by_rabbitmq.counts("starts") == Counter(
        {f"{thread} {node}": 1 for thread in ("before", "after") for node in CHAIN}
    )
    assert worker.process.poll() is None


def test_what_waits_behind_a_long_node_is_put_back_before_rabbitmq_closes_the_channel(served_by_rabbitmq, impatient):
    deployment = served_by_rabbitmq
    worker = deployment.worker(concurrency=1)
    deployment.start("held", "h")
    deployment.started("h hold")
    deployment.start("chain", "t1", "t2", "t3")

    # Longer than RabbitMQ's patience.
    begun = time.monotonic()
    eventually(lambda: time.monotonic() - begun > 2.5, what="the passing of time")
    assert impatient.unacknowledged() == 0
    deployment.touch("release")
    deployment.ended("h", "t1", "t2", "t3")

    assert worker.process.poll() is None
    assert warnings(worker) == []
    assert deployment.counts("starts") == Counter(
        [f"{thread} {node}" for thread in ("t1", "t2", "t3") for node in CHAIN] + ["h before", "h hold", "h after"]
    )


def test_a_channel_that_rabbitmq_closes_ends_no_worker(served_by_rabbitmq, impatient):
    worker = served_by_rabbitmq.worker(concurrency=1)
    [child] = worker.children()
    # What a child has been handed and has not begun is not acknowledged.
    os.kill(child, signal.SIGSTOP)
    served_by_rabbitmq.start("chain", "t")
    eventually(lambda: [w for w in warnings(worker) if "PRECONDITION_FAILED" in w], what="the closed channel")
    os.kill(child, signal.SIGCONT)
    served_by_rabbitmq.ended("t")

    assert served_by_rabbitmq.counts("starts") == Counter({f"t {node}": 1 for node in CHAIN})
    assert worker.process.poll() is None


def warnings(worker):
    return [event["event"] for event in worker.events() if event["level"] not in {"info", "debug"}]


def test_a_rabbitmq_without_memory_delays_nudges_and_no_commit(served_by_rabbitmq, rabbitmq_server):
    deployment = served_by_rabbitmq
    worker = deployment.worker(concurrency=1)
    deployment.start("held", "h")
    deployment.holding("h")
    deployment.start("asking", "w")

    rabbitmq_server.alarm()
    deployment.touch("release")
    eventually(
        lambda: deployment.query("SELECT seq FROM keepstep_thread WHERE name = 'h'") == [(2,)],
        seconds=2,
        what="the commit",
    )
    eventually(lambda: worker.events("nudges_left_to_sweep"), seconds=2, what="the nudge that is given up")
    # Of the worker: Celery's, the commands', the replies', those that its main process and its child publish on; two of
    # the client.
    assert rabbitmq_server.connections() <= 7
    rabbitmq_server.end_alarm()
    deployment.ended("h")
    deployment.ended("w", status="waiting")

    assert deployment.counts("starts") == Counter({"h before": 1, "h hold": 1, "h after": 1, "w ask": 1})
    assert worker.process.poll() is None
