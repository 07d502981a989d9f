"""Celery with everything taken out that costs time, and one durable PostgreSQL transaction per task.

The strongest baseline we know how to write: no results, no events, no acknowledgements, one cached Redis client per
channel, messages written by hand instead of by Celery's signature machinery, and the whole transaction as one statement
on a connection that each process keeps. What it gives up is what Keepstep adds: nothing here notices a lost message, a
killed worker or a task that runs twice.
"""

from __future__ import annotations

import json
import os
from typing import Any
from uuid import uuid4

import psycopg2
from celery import Celery
from kombu import Connection, Exchange, Producer, Queue
from kombu.transport import TRANSPORT_ALIASES, redis

QUEUE = "lean"
SCHEMA = """
CREATE TABLE chain (id integer PRIMARY KEY, n integer NOT NULL);
CREATE TABLE hop (chain integer, n integer, payload bytea NOT NULL, at timestamptz NOT NULL, PRIMARY KEY (chain, n));
"""
_HOP = """
WITH moved AS (UPDATE chain SET n = n + 1 WHERE id = %s RETURNING id, n)
INSERT INTO hop SELECT id, n, %s, clock_timestamp() FROM moved RETURNING n
"""
_OPTIONS = {"ack_emulation": False, "priority_steps": [0], "socket_keepalive": True}


class Channel(redis.Channel):
    """Kombu's channel with one Redis client instead of one for each operation."""

    _operations: Any = None

    def _create_client(self, asynchronous: bool = False) -> Any:  # noqa: FBT001, FBT002  kombu's signature
        if asynchronous:
            return super()._create_client(asynchronous=True)
        if self._operations is None or self._operations.connection_pool is not self.pool:
            self._operations = super()._create_client()
        return self._operations


class Transport(redis.Transport):
    """Redis with the channel above."""

    Channel = Channel


TRANSPORT_ALIASES["lean-redis"] = "benchmarks.lean:Transport"

app = Celery("lean", broker=os.environ.get("BENCH_BROKER"))
app.conf.update(
    broker_transport="lean-redis",
    broker_transport_options=_OPTIONS,
    task_queues=[Queue(QUEUE, exchange=Exchange(""), routing_key=QUEUE)],
    task_default_queue=QUEUE,
    task_ignore_result=True,
    task_serializer="json",
    accept_content=["json"],
    worker_prefetch_multiplier=1,
    worker_enable_remote_control=False,
    worker_send_task_events=False,
)

_database: Any = None
_producer: Any = None


@app.task(name="lean.hop")  # type: ignore[untyped-decorator]
def hop(chain: int) -> None:
    """Commit one transaction, then enqueue the next."""
    global _database  # noqa: PLW0603  one connection per pool process, made after the fork
    if _database is None:
        _database = psycopg2.connect(os.environ["BENCH_DATABASE"])
        _database.autocommit = True
    with _database.cursor() as cursor:
        cursor.execute(_HOP, (chain, b"x" * 100))
        cursor.fetchall()
    publish(chain)


def publish(chain: int, url: str | None = None) -> None:
    """Enqueue a chain's next task: the least that Celery's protocol 2 needs."""
    global _producer  # noqa: PLW0603  as above
    if _producer is None:
        connection = Connection(url or os.environ["BENCH_BROKER"], transport="lean-redis", transport_options=_OPTIONS)
        _producer = Producer(connection.channel(), auto_declare=False)
    task_id = str(uuid4())
    _producer.publish(
        json.dumps([[chain], {}, {"callbacks": None, "errbacks": None, "chain": None, "chord": None}]),
        routing_key=QUEUE,
        headers={
            "lang": "py",
            "task": "lean.hop",
            "id": task_id,
            "root_id": task_id,
            "argsrepr": "",
            "kwargsrepr": "",
            "ignore_result": True,
        },
        content_type="application/json",
        content_encoding="utf-8",
        delivery_mode=1,
    )
