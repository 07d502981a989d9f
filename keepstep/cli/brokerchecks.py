"""What `keepstep doctor` looks at in the broker: whether it answers, how fast, and what waits in it."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import kombu

from keepstep import broker, places
from keepstep.cli.finding import Finding, ago
from keepstep.errors import KeepstepError
from keepstep.settings import Settings

_BROKER_SECONDS = 4.0
_SLOW_SECONDS = 0.25
_LOOKS = 3


class Queue(NamedTuple):
    """What waits in a queue."""

    length: int
    oldest_seconds: float | None = None
    """How long the one that comes next has waited; None where the broker does not say."""
    is_consumed: bool | None = None
    """Whether anybody consumes it; None where the broker does not say."""


NOTHING = Queue(0)


def unwritable(what: str, problem: str) -> Finding:
    """Return the finding that a place on the disk cannot be used, of a sentence with its way out."""
    text, _, way_out = problem.rpartition(". ")
    return Finding("problem", what, text, way_out[:1].lower() + way_out[1:])


def examine(settings: Settings, graphs: Sequence[str] = ()) -> tuple[list[Finding], Queue]:
    """Return what was found of the broker, and the commands that wait there.

    `graphs`: those whose nudges are counted, as rows name them (`leases.queue_of`).
    """
    url = settings.broker
    shown = broker.redacted(url)
    if url.startswith("file://"):
        problem = places.broker_problem(url)
        if problem is not None:
            return [unwritable("broker", f"{shown}: {problem}")], NOTHING
        if not Path(url.removeprefix("file://")).exists():
            return [Finding("ok", "broker", f"{shown}: no folder yet; the first worker or client makes it")], NOTHING
    begun = time.monotonic()
    try:
        connection = broker.connection(url, commands=True, queue=settings.queue, timeout_seconds=_BROKER_SECONDS)
    except KeepstepError as error:
        return [Finding("problem", "broker", error.message, "correct KEEPSTEP_BROKER")], NOTHING
    try:
        connection.ensure_connection(max_retries=0, timeout=_BROKER_SECONDS, reraise_as_library_errors=False)
        queues = _queues(connection, settings)
        if graphs:
            queues["nudges"] = _nudges(settings, graphs)
        took = time.monotonic() - begun
        round_trip = min(_timed(connection, settings) for _ in range(_LOOKS))
    except Exception as error:  # noqa: BLE001  each transport has its own, and all say that it is not to be reached
        cause = broker.scrubbed(f"{type(error).__name__}: {error}", url)
        way_out = "is it running, and is KEEPSTEP_BROKER right?"
        return [Finding("problem", "broker", f"{shown}: not reached: {cause}", way_out)], NOTHING
    finally:
        with suppress(Exception):
            connection.release()
    return _found(shown, settings, queues, took, round_trip), queues.get("commands") or NOTHING


def _found(
    shown: str, settings: Settings, queues: dict[str, Queue | None], took: float, round_trip: float
) -> list[Finding]:
    waiting = ", ".join(f"{name} {_said(queue)}" for name, queue in queues.items() if queue is not None)
    findings = [
        Finding("ok", "broker", f"{shown}: answers in {took * 1000:.0f} ms; its queues: {waiting or 'none yet'}")
    ]
    if round_trip > _SLOW_SECONDS:
        text = f"{shown}: slow: it takes {round_trip * 1000:.0f} ms to say how long a queue is"
        way_out = "look at its load and at the network to it: every step and decision waits for it"
        findings.append(Finding("warning", "broker", text, way_out))
    rejected = queues.get("rejected") or NOTHING
    if rejected.length:
        text = f"commands that were refused, or that no worker could handle: {rejected.length}"
        way_out = f"look at the queue {broker.commands_name(settings.queue)}.rejected"
        findings.append(Finding("warning", "broker", text, way_out))
    return findings


def _said(queue: Queue) -> str:
    oldest = "" if queue.oldest_seconds is None else f" (the oldest for {ago(queue.oldest_seconds)})"
    return f"{queue.length}{oldest}"


def _queues(connection: kombu.Connection, settings: Settings) -> dict[str, Queue | None]:
    names = {"commands": broker.commands_name(settings.queue)}
    if broker.kind_of(settings.broker) == "amqp":
        names["rejected"] = f"{names['commands']}.rejected"
    return {what: _queue(connection, name, settings) for what, name in names.items()}


def _nudges(settings: Settings, graphs: Sequence[str]) -> Queue:
    """Return how many nudges wait, over a connection of nudges: on Redis a priority is a key of its own."""
    url, name = settings.broker, settings.queue
    with broker.connection(url, commands=False, queue=name, timeout_seconds=_BROKER_SECONDS) as connection:
        found = [_queue(connection, broker.nudges_name(name, graph), settings, with_age=False) for graph in graphs]
    return Queue(sum(queue.length for queue in found if queue is not None))


def _queue(connection: kombu.Connection, name: str, settings: Settings, *, with_age: bool = True) -> Queue | None:
    """Return what waits in a queue, None when there is no such queue. Nothing is taken out, nor given back."""
    kind = broker.kind_of(settings.broker)
    with _channel(connection) as channel:
        try:
            found = channel.queue_declare(queue=name, passive=True)
        except connection.channel_errors:
            return None
        consumed = found.consumer_count > 0 if kind == "amqp" else None
        age = _age(channel, name, kind) if with_age and found.message_count else None
        return Queue(int(found.message_count), age, consumed)


def _timed(connection: kombu.Connection, settings: Settings) -> float:
    """Return how long the broker takes to say how long a queue is: one round trip."""
    name = broker.commands_name(settings.queue)
    with _channel(connection) as channel:
        begun = time.monotonic()
        with suppress(*connection.channel_errors):
            channel.queue_declare(queue=name, passive=True)
        return time.monotonic() - begun


@contextmanager
def _channel(connection: kombu.Connection) -> Iterator[Any]:
    """Give a channel: RabbitMQ closes it when a queue is not there, so it gets one each time; others keep theirs."""
    if connection.transport.driver_type != "amqp":
        yield connection.default_channel
        return
    channel: Any = connection.channel()
    try:
        yield channel
    finally:
        with suppress(Exception):
            channel.close()


def _age(channel: Any, name: str, kind: str) -> float | None:
    """Return how long the message that comes next has waited, by its sender's clock."""
    sent_at: object = None
    if kind == "file":
        sent_at = channel.connection.spool.oldest(name)
    elif kind == "redis":
        with channel.conn_or_acquire() as client:
            stored = client.lindex(name, -1)
        if stored is not None:
            sent_at = (json.loads(stored).get("headers") or {}).get(broker.SENT_AT)
    return max(0.0, time.time() - sent_at) if isinstance(sent_at, int | float) else None
