"""What became of a thread, read from the database: nothing here believes a worker's word."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import sqlalchemy

from keepstep.runtime.history import verify
from keepstep.runtime.reader import Reader
from keepstep.store import checkpoints
from keepstep.store.engine import Store
from tests.worker.deployment import Deployment


@contextlib.contextmanager
def opened(deployment: Deployment) -> Iterator[Store]:
    """A store on what the deployment looks at."""
    store = Store.open(deployment._engine.url.render_as_string(hide_password=False))
    try:
        yield store
    finally:
        store.dispose()


def history(deployment: Deployment, thread: str) -> list[tuple[str, dict[str, int]]]:
    """Return (kind, {node run: starts}) of a thread's checkpoints, after proving that they are one unbroken line."""
    [(thread_id, seq, head)] = deployment.query(
        "SELECT id, seq, checkpoint_id FROM keepstep_thread WHERE name = :name", name=thread
    )
    [(count,)] = deployment.query("SELECT count(*) FROM keepstep_checkpoint WHERE thread_id = :id", id=thread_id)
    with opened(deployment) as store, contextlib.closing(Reader(store=store)) as reader:
        rows = [row for row, _ in checkpoints.history(store, thread_id, 0)]
        shown = reader.history(thread)
    verify(rows)
    assert [row.seq for row in rows] == list(range(seq + 1)), "the history has a gap or a fork"
    assert count == len(rows), "there are checkpoints beside the history"
    assert [row.parent_id for row in rows] == [None, *(row.id for row in rows[:-1])]
    assert not rows or (rows[0].parent_digest, rows[-1].id) == (b"", head)
    return [(each.kind, {node["run"]: node["starts"] for node in each.nodes}) for each in shown]


def state(deployment: Deployment, thread: str) -> dict[str, Any]:
    """Return a thread's state as people see it."""
    with opened(deployment) as store, contextlib.closing(Reader(store=store)) as reader:
        return reader.state(thread)


def journal(deployment: Deployment, thread: str) -> dict[str, tuple[str, int]]:
    """Return {call: (state, calls)} of a thread's effects."""
    rows = deployment.query(
        "SELECT e.call, e.state, e.calls FROM keepstep_effect e JOIN keepstep_thread t ON t.id = e.thread_id "
        "WHERE t.name = :name",
        name=thread,
    )
    return {call: (state, calls) for call, state, calls in rows}


def commands(deployment: Deployment, thread: str) -> Counter[str]:
    """Return how often each kind of command was applied to a thread."""
    rows = deployment.query(
        "SELECT a.action FROM keepstep_audit a JOIN keepstep_thread t ON t.id = a.thread_id WHERE t.name = :name",
        name=thread,
    )
    return Counter(action for (action,) in rows)


def count(deployment: Deployment, table: str, thread: str, condition: str = "true") -> int:
    """Return the number of a thread's rows in a table."""
    [(found,)] = deployment.query(
        f"SELECT count(*) FROM keepstep_{table} x JOIN keepstep_thread t ON t.id = x.thread_id "
        f"WHERE t.name = :name AND {condition}",
        name=thread,
    )
    return int(found)


def events(deployment: Deployment, thread: str) -> Counter[str]:
    """Return how often each kind of event of a thread stands in the log."""
    rows = deployment.query(
        "SELECT e.kind FROM keepstep_event e JOIN keepstep_thread t ON t.id = e.thread_id WHERE t.name = :name",
        name=thread,
    )
    return Counter(kind for (kind,) in rows)


def error_code(deployment: Deployment, thread: str) -> str:
    """Return the code of a thread's error."""
    [(error,)] = deployment.query("SELECT error FROM keepstep_thread WHERE name = :name", name=thread)
    return str(json.loads(error)["code"])


def hasten(deployment: Deployment) -> None:
    """Let the seconds pass in which a nudge is believed to be on its way."""
    with deployment._engine.begin() as connection:
        connection.execute(sqlalchemy.text("UPDATE keepstep_child SET due_at = 0 WHERE due_at IS NOT NULL"))
        for table in ("thread", "node_run"):
            connection.execute(
                sqlalchemy.text(
                    f"UPDATE keepstep_{table} SET next_nudge_at = 0 WHERE status = 'ready' AND lease_nonce IS NULL"
                )
            )
