"""Threads as the store knows them: rows and bytes, no graph."""

from __future__ import annotations

from typing import Any

from keepstep.ids import new_id
from keepstep.store import claims, threads, workers
from keepstep.store.checkpoints import NewCheckpoint
from keepstep.store.claims import Claim
from keepstep.store.engine import Store
from keepstep.store.leases import Fence, Owner
from keepstep.store.threads import NewRun
from keepstep.store.workers import carried_text
from tests.steps.driver import dump

CARRIED = carried_text([("agent", "1")])
OWNER = Owner("nobody", 1)

__all__ = ["CARRIED", "OWNER", "checkpoint", "claimed", "created", "dump", "registered", "row"]


def new_run(number: int = 1) -> NewRun:
    """A run to be accepted."""
    return NewRun(new_id(), f"request-{new_id()}", b"digest", b"input", None)


def created(store: Store, name: str = "t", *, tenant: str = "default", agent: str = "agent", priority: int = 1) -> str:
    """A thread with one run queued; return its id."""
    thread_id = new_id()
    with store.transaction() as transaction:
        threads.create(
            transaction,
            thread_id=thread_id,
            tenant=tenant,
            application="default",
            agent=agent,
            name=name,
            graph_version="1",
            priority=priority,
            lease_seconds=60.0,
            first=new_run(),
        )
    return thread_id


def registered(store: Store, *, window_seconds: float = 1e6, worker_id: str | None = None) -> str:
    """A worker that carries the graph; return its id."""
    return workers.register(
        store,
        host="test",
        pid=1,
        concurrency=1,
        graphs=[("agent", "1")],
        release="test",
        window_seconds=window_seconds,
        worker_id=worker_id,
    )


def claimed(store: Store, thread_id: str, version: int = 1, *, owner: Owner = OWNER) -> Claim:
    """The thread's lease, which must be free."""
    claim = claims.claim_thread(store, thread_id, version, owner=owner, carried=CARRIED)
    assert claim is not None
    return claim


def checkpoint(fence: Fence, **changes: Any) -> NewCheckpoint:
    """A checkpoint to be committed under a fence."""
    values: dict[str, Any] = {
        "seq": fence.seq,
        "id": new_id(),
        "parent_id": None,
        "tenant": "default",
        "run_id": "run",
        "kind": "step",
        "change": b"change",
        "snapshot": b"snapshot" if fence.seq == 0 else None,
        "cursor": b"cursor",
        "meta": b"meta",
        "digest": b"digest",
        "parent_digest": b"",
        "status": "ready",
        "run_steps": 1,
        "lease_seconds": 60.0,
        "nudge_seconds": 5.0,
    }
    return NewCheckpoint(**{**values, **changes})


def row(store: Store, thread_id: str) -> dict[str, Any]:
    """The thread's row."""
    with store.engine.connect() as connection:
        found = connection.exec_driver_sql(f"SELECT * FROM keepstep_thread WHERE id = '{thread_id}'").mappings().one()
    return dict(found)
