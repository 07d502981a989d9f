"""A deployment that switches Celery's late acknowledgements on, with a short time-out: copies come, and do nothing.

On Redis alone: RabbitMQ makes no copies while a consumer is connected; its time-out closes channels (test_rabbitmq.py).
"""

from __future__ import annotations

import contextlib
import json
import textwrap
import threading
from collections import Counter, defaultdict

import pytest

from tests.worker.deployment import eventually

VISIBILITY_SECONDS = 1.0
BUSY_MACHINE_SECONDS = 1.0

# What is delivered is told by the main process, how long it was worked on by the child.
CELERYCONFIG = """
    import os, time
    from celery import signals

    task_acks_late = True
    worker_prefetch_multiplier = int(os.environ.get("TEST_PREFETCH", "1"))
    worker_disable_prefetch = worker_prefetch_multiplier == 1
    broker_transport_options = {
        "ack_emulation": True,
        "visibility_timeout": 1,
        "unacked_restore_interval": 1,
        "unacked_restore_throttle": 1,
    }

    def note(kind, *words):
        with open(os.path.join(os.environ["KEEPSTEP_TEST_FOLDER"], kind), "a") as file:
            file.write(" ".join(map(str, (*words, os.getpid(), time.time()))) + "\\n")

    @signals.task_received.connect(weak=False)
    def received(request, **_):
        note("delivered", request.id, request.args[0])

    @signals.task_prerun.connect(weak=False)
    def begun(task_id, **_):
        note("begun", task_id)

    @signals.task_postrun.connect(weak=False)
    def ended(task_id, **_):
        note("ended", task_id)
"""


@pytest.fixture
def acknowledging(served_by_redis):
    """A deployment on PostgreSQL and Redis whose own `celeryconfig` wins over what Keepstep would choose."""
    (served_by_redis.folder / "celeryconfig.py").write_text(textwrap.dedent(CELERYCONFIG))
    return served_by_redis


@pytest.fixture
def redis(redis_server):
    with contextlib.closing(redis_server.client()) as client:
        yield client


def deliveries(deployment):
    """Return when each message was delivered, by its task id, and the thread it is for."""
    found = defaultdict(list)
    for task, thread, _, at in deployment.notes("delivered"):
        found[task, thread].append(float(at))
    return found


def queues(redis):
    """Return the key of every queue that holds a nudge."""
    return list(redis.scan_iter("keepstep.nudges.*", count=1000))


def is_empty(redis):
    return not queues(redis) and not redis.hlen("unacked") and not redis.zcard("unacked_index")


def test_copies_of_what_is_running_end_at_once_and_start_nothing(acknowledging, redis):
    deployment = acknowledging
    workers = [deployment.worker(concurrency=1) for _ in range(3)]
    deployment.start("held", "h")
    [(thread_id,)] = deployment.query("SELECT id FROM keepstep_thread")
    holder = deployment.holding("h")[0][-2]
    [stored] = eventually(lambda: redis.hvals("unacked"), what="the message that is worked on")
    message, *_ = json.loads(stored)
    task = message["headers"]["id"]

    def times():
        return deliveries(deployment)[task, thread_id]

    # The broker's own copy, when the time-out has passed; it is acknowledged, so there is no third by itself.
    eventually(lambda: len(times()) == 2, what="the second delivery")
    gap = times()[1] - times()[0]
    assert gap > VISIBILITY_SECONDS * 0.9
    eventually(lambda: is_empty(redis), what="the end of the copy")
    for number in range(3, 7):
        redis.lpush("keepstep.nudges.held@1", json.dumps(message))
        eventually(lambda number=number: len(times()) == number, what=f"delivery {number}")
    # None of them holds a slot: the two workers that are free do everything else meanwhile.
    others = [f"q{number}" for number in range(20)]
    deployment.start("quick", *others)
    deployment.ended(*others)
    assert holder not in {words[-2] for words in deployment.notes("starts") if words[0] in others}
    deployment.touch("release")
    deployment.ended("h")
    eventually(lambda: is_empty(redis), what="an empty queue and nothing unacknowledged")

    assert len(times()) == 6
    begun, ended = ({words[0]: [] for words in deployment.notes(kind)} for kind in ("begun", "ended"))
    for kind, found in (("begun", begun), ("ended", ended)):
        for task, pid, at in deployment.notes(kind):
            found[task].append((pid, float(at)))
    for task, starts in begun.items():
        for pid, at in starts:
            took = min(end for other, end in ended[task] if other == pid and end >= at) - at
            assert took < 1.0 + BUSY_MACHINE_SECONDS or pid == holder
    assert deployment.counts("starts") == Counter(
        {**{f"{thread} once": 1 for thread in others}, "h before": 1, "h hold": 1, "h after": 1}
    )
    assert deployment.counts("paid") == Counter({"h before": 1, "h hold": 1, "h after": 1})
    assert deployment.query("SELECT count(*) FROM keepstep_checkpoint WHERE thread_id = :id", id=thread_id) == [(4,)]
    assert deployment.query("SELECT starts, deaths FROM keepstep_thread WHERE name = 'h'") == [(0, 0)]
    assert [worker.process.poll() for worker in workers] == [None] * 3


def test_what_a_worker_that_hangs_has_fetched_is_run_by_others(acknowledging, redis):
    deployment = acknowledging
    greedy = deployment.worker(concurrency=1, TEST_PREFETCH="8")
    deployment.start("held", "h")
    deployment.holding("h")
    fetched = [f"q{number}" for number in range(4)]
    deployment.start("quick", *fetched)
    [*_] = eventually(lambda: len(deliveries(deployment)) >= 5 and [1], what="messages that lie in the worker")
    assert deployment.statuses() == {"h": "ready", **dict.fromkeys(fetched, "ready")}

    deployment.worker(concurrency=1)
    deployment.ended(*fetched)
    assert set(greedy.children()).isdisjoint(int(words[-2]) for words in deployment.notes("starts") if words[0] != "h")
    deployment.touch("release")
    deployment.ended("h")
    eventually(lambda: is_empty(redis), what="an empty queue and nothing unacknowledged")

    # The worker has since looked at its own copies, and found nothing to do.
    assert deployment.counts("starts") == Counter(
        {**{f"{thread} once": 1 for thread in fetched}, "h before": 1, "h hold": 1, "h after": 1}
    )


class Messages:
    """Every message that was seen in the broker: queued, or delivered and not yet acknowledged."""

    def __init__(self, redis):
        self._redis = redis
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self.seen = set()

    def _look(self):
        while not self._stop.wait(0.02):
            for key in queues(self._redis):
                self.seen.update(self._redis.lrange(key, 0, -1))
            self.seen.update(json.dumps(json.loads(each)[0]).encode() for each in self._redis.hvals("unacked"))

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        self._thread.join()

    @property
    def delayed(self):
        return [each for each in self.seen if json.loads(each)["headers"].get("eta")]


def test_a_retry_that_is_put_off_longer_than_the_time_out_is_no_message_and_delays_nobody(acknowledging, redis):
    deployment, delay = acknowledging, 6.0
    for _ in range(3):
        deployment.launch(concurrency=1)
    for worker in deployment.workers:
        worker.ready()
    late = [f"r{number}" for number in range(9)]  # thrice as many as there are slots
    # As many as a busy machine runs long before the others' time has come.
    urgent = [f"q{number}" for number in range(30)]
    with Messages(redis) as messages:
        deployment.start("later", *late)
        first = {thread: float(deployment.started(f"{thread} fail_once")[0][-1]) for thread in late}
        deployment.start("quick", *urgent)
        deployment.ended(*urgent)
        deployment.ended(*late)

    begun = {words[0]: float(words[-1]) for words in deployment.notes("starts")}
    # The urgent ones did not wait for them.
    assert max(begun[thread] for thread in urgent) < min(first.values()) + delay
    for thread in late:
        _, second = deployment.started(f"{thread} fail_once", 2)
        assert delay <= float(second[-1]) - first[thread] <= delay + 2 * deployment.settings.sweep_seconds + 2.0
    assert deployment.counts("starts") == Counter(
        {**{f"{thread} once": 1 for thread in urgent}, **{f"{thread} fail_once": 2 for thread in late}}
    )
    assert len(messages.seen) > 0
    assert messages.delayed == []
    eventually(lambda: is_empty(redis), what="an empty queue and nothing unacknowledged")
