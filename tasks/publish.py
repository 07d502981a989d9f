"""Publishing nudges: the least that Celery's protocol needs, over one connection that each process keeps.

A failed publish is one line in the log. The row that the nudge was about stays due, and the sweep finds it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import structlog
from kombu import Connection, Producer

from keepstep import blockage, broker
from keepstep.blockage import Blocked
from keepstep.ids import new_id
from keepstep.redisbroker import Channel as RedisChannel
from keepstep.settings import Settings
from keepstep.store.leases import Nudge
from keepstep.tasks.config import NODE_TASK, STEP_TASK
from keepstep.tasks.hangup import hang_up
from keepstep.tasks.logs import told

log = structlog.get_logger("keepstep.worker")

_OPERATION_SECONDS_MAX = 2.0
"""A frozen broker holds a step no longer than a few of these: what is published is only a hint."""

_FEW = 64
"""So many nudges are published without a look at what the queue holds."""

# A connection made before a fork belongs to the parent: a child must neither use it nor, by collecting it as garbage,
# close it.
_inherited: list[object] = []


class Hint(NamedTuple):
    """What a nudge's message says: ids only."""

    kind: str
    """`step` or `node`."""
    thread_id: str
    version: int
    seq: int = 0
    run: str = ""


class _Headers(msgspec.Struct):
    task: str


class _Message(msgspec.Struct):
    """What is read of a message that is taken."""

    body: str
    headers: _Headers


class Publisher:
    """Publishes nudges to the queues of their graphs. Safe in threads and across forks; never raises."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._connection: Connection | None = None
        self._producer: Producer | None = None

    def __call__(self, nudges: Sequence[Nudge]) -> None:
        """Publish nudges in order; what could not be published is logged and left to the sweep."""
        if not nudges:
            return
        if len(nudges) > _FEW:
            nudges = self._fitting(nudges)
        if self._pid != os.getpid():
            self._forget()
        with self._lock:
            sent = 0
            # A connection that was idle may be dead without anybody having noticed: one more try on a fresh one.
            for last in (False, True):
                try:
                    producer = self._connected()
                    while sent < len(nudges):
                        self._send(producer, nudges[sent])
                        sent += 1
                except Blocked as error:
                    self._leave(len(nudges) - sent, error)
                    return
                except Exception as error:  # noqa: BLE001  drivers raise what they like; the sweep is the answer to all
                    self._drop()
                    if last:
                        self._leave(len(nudges) - sent, error)
                else:
                    return

    @staticmethod
    def _leave(count: int, error: Exception) -> None:
        log.warning("nudges_left_to_sweep", count=count, **told(error))

    def _fitting(self, nudges: Sequence[Nudge]) -> Sequence[Nudge]:
        """Return as many nudges of a large fan-out as there is room for: a queue is not the place for a backlog."""
        waiting = self.waiting(sorted({nudge.queue for nudge in nudges}))
        if waiting is None:
            return nudges
        left = {queue: self._settings.queue_nudges_max - count for queue, count in waiting.items()}
        fitting = []
        for nudge in nudges:
            left[nudge.queue] -= 1
            if left[nudge.queue] >= 0:
                fitting.append(nudge)
        return fitting

    def take(self, queues: Sequence[str]) -> Hint | None:
        """Take the most urgent nudge out of the first of the queues (by name) that has one; None when none has.

        On Redis alone, over the connection that was published on, as long as that works. What is not a nudge stays
        where it is, for Celery to deal with.
        """
        with self._lock:
            channel = None if self._producer is None else self._producer.channel
            if self._pid != os.getpid() or not isinstance(channel, RedisChannel):
                return None
            try:
                found = channel.pull(queues)
                if found is None:
                    return None
                key, message = found
                hint = _hint_in(message)
                if hint is None:
                    channel.put_back(key, message)
            except Exception as error:  # noqa: BLE001  as above
                log.debug("nudge_not_taken", **told(error))
                self._drop()
                return None
            return hint

    def waiting(self, graphs: Sequence[str]) -> dict[str, int] | None:
        """Return how many nudges wait in the queue of each of these graphs (as rows name them); None: not known."""
        if self._pid != os.getpid():
            self._forget()
        with self._lock:
            try:
                channel = self._connected().channel
                blockage.check(channel)
                return {
                    graph: broker.nudges_queue(self._settings.broker, self._settings.queue, graph)(channel)
                    .queue_declare()
                    .message_count
                    for graph in graphs
                }
            except Exception as error:  # noqa: BLE001  as above
                log.debug("queues_not_measured", **told(error))
                if not isinstance(error, Blocked):
                    self._drop()
                return None

    def close(self) -> None:
        """Close the connection; the next publish opens another."""
        with self._lock:
            self._drop()

    def _connected(self) -> Producer:
        if self._producer is None:
            self._connection = broker.connection(
                self._settings.broker,
                commands=False,
                queue=self._settings.queue,
                timeout_seconds=_OPERATION_SECONDS_MAX,
            )
            # As a channel, not a connection: the producer's own reconnecting is not bounded.
            self._producer = Producer(self._connection.channel(), auto_declare=False)
        return self._producer

    def _send(self, producer: Producer, nudge: Nudge) -> None:
        queue = broker.nudges_name(self._settings.queue, nudge.queue)
        if isinstance(producer.channel, RedisChannel):
            producer.channel.push(queue, nudge.priority, _redis_message(nudge, queue))
            return
        blockage.check(producer.channel)
        producer.publish(
            _body(nudge),
            routing_key=queue,
            priority=broker.message_priority(self._settings.broker, nudge.priority),
            headers=_headers(nudge),
            content_type="application/json",
            content_encoding="utf-8",
            # Nothing of it must survive a broker's restart: the rows do.
            delivery_mode=1,
        )

    def _drop(self) -> None:
        connection, self._connection, self._producer = self._connection, None, None
        hang_up(connection, "publisher_close_failed")

    def _forget(self) -> None:
        _inherited.append((self._connection, self._producer, self._lock))
        self._connection = self._producer = None
        self._lock = threading.Lock()
        self._pid = os.getpid()


def _arguments(nudge: Nudge) -> list[Any]:
    if nudge.kind == "node":
        return [nudge.thread_id, nudge.seq, nudge.run, nudge.version]
    return [nudge.thread_id, nudge.version]


def _body(nudge: Nudge) -> str:
    embedded = {"callbacks": None, "errbacks": None, "chain": None, "chord": None}
    return msgspec.json.encode([_arguments(nudge), {}, embedded]).decode()


def _redis_message(nudge: Nudge, queue: str) -> bytes:
    """Return a message as Kombu's Redis transport writes one; its body as text, as JSON needs no base 64."""
    headers = _headers(nudge)
    message = {
        "body": _body(nudge),
        "content-encoding": "utf-8",
        "content-type": "application/json",
        "headers": headers,
        "properties": {
            "delivery_mode": 1,
            "delivery_info": {"exchange": "", "routing_key": queue},
            "delivery_tag": headers["id"],
            "priority": nudge.priority,
        },
    }
    return msgspec.json.encode(message)


def _hint_in(message: bytes) -> Hint | None:
    """Return what a message of `_redis_message` says, None when it is another message."""
    try:
        read = msgspec.json.decode(message, type=_Message)
        arguments = msgspec.json.decode(read.body)[0]
        if read.headers.task == STEP_TASK:
            return Hint("step", *msgspec.convert(arguments, tuple[str, int]))
        if read.headers.task == NODE_TASK:
            thread_id, seq, run, version = msgspec.convert(arguments, tuple[str, int, str, int])
            return Hint("node", thread_id, version, seq, run)
    except (msgspec.MsgspecError, LookupError, TypeError):
        return None
    return None


def _headers(nudge: Nudge) -> dict[str, Any]:
    """Return the headers of Celery's protocol 2 that a worker reads; the rest it takes as absent."""
    task_id = new_id()
    return {
        "lang": "py",
        "task": NODE_TASK if nudge.kind == "node" else STEP_TASK,
        "id": task_id,
        "root_id": task_id,
        "argsrepr": "",
        "kwargsrepr": "",
        "ignore_result": True,
    }
