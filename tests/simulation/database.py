"""The database of a simulation: the real store on SQLite in memory, watched at every transaction.

Before a transaction begins and after it has ended, the code that runs it may be stopped, killed, or told that the
connection died, before or after the commit landed. What each committed transaction has changed is held against the
rules that no schedule may break.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from sqlalchemy import make_url

from keepstep.errors import DatabaseUnavailable, StaleLease
from keepstep.store import (
    admission,
    children,
    claims,
    effects,
    limits,
    migrate,
    outcomes,
    signals,
    stateedits,
    threads,
    workers,
)
from keepstep.store.engine import Store, Transaction
from keepstep.store.statements import Row, Statement
from keepstep.store.status import TRANSITIONS
from tests.simulation.agents import LIMITS

if TYPE_CHECKING:
    from tests.simulation.world import World

T = TypeVar("T")

_CLAIMS = (claims._CLAIM_THREAD, claims._CLAIM_NODE)
_UNFENCED = (
    *_CLAIMS,
    *claims._HELD_BACK,
    limits._FORGET_FREED,
    limits._TAKE,
    *admission._KINDS.values(),
    *admission._DUE_NOW.values(),
    effects._END,
)
"""What an attempt may write without holding a lease: it acquires one, it says what came of an effect, or it has ended
and lets in who comes next."""
_ERRANDS = (
    *(children._START, children._REFUSE, children._PUT_OFF, children._TELL, children._NOBODY_ASKS, children._FORGET),
    *(children._GOES_ON, children._SETTLE),
    *(threads._CANCEL, threads._NEXT_BEGINS, threads._QUEUE_AGAIN, threads._RETRY),
)
"""What tells the transactions between a parent and a child: whoever comes along runs them, under no lease."""
_UNAVAILABLE_SECONDS = 0.2
_REASONS = {
    "failed": {"node_failed", "node_timeout", "step_limit"},
    "blocked": {"effect_unknown", "worker_lost", "undo_failed"},
}
"""Why a thread of these graphs may stop: their nodes are deterministic, so nothing else can be right."""
_THREADS = """
SELECT agent, id, name, status, seq, version, branch, fanned, pending, control, lease_nonce, lease_deadline
FROM keepstep_thread
"""
_RUNNING = """
SELECT t.name, '', t.lease_nonce, t.lease_deadline FROM keepstep_thread t
WHERE t.agent = ?1 AND t.lease_nonce IS NOT NULL
UNION ALL
SELECT t.name, n.run, n.lease_nonce, n.lease_deadline FROM keepstep_node_run n JOIN keepstep_thread t
ON t.id = n.thread_id WHERE t.agent = ?1 AND n.lease_nonce IS NOT NULL
"""
_MISSED = """
SELECT w.run, s.name, s.key FROM keepstep_wait w JOIN keepstep_signal s ON s.thread_id = w.thread_id
WHERE w.status = 'open' AND s.consumed_by IS NULL AND s.name = w.signal_name AND s.expires_at > ?
AND (w.signal_key IS NULL OR w.signal_key = s.key)
"""
_NODE_RUNS = """
SELECT n.run, n.status, t.control, n.lease_nonce, n.lease_deadline
FROM keepstep_node_run n JOIN keepstep_thread t ON t.id = n.thread_id
WHERE n.thread_id = ? AND n.branch = ? AND n.seq = ?
"""


@functools.cache
def template() -> bytes:
    """Return an empty, migrated database, as a file's bytes."""
    store = Store.open("sqlite://")
    migrate.upgrade(store)
    data: bytes = _connection_of(store).serialize()
    store.dispose()
    return data


def _connection_of(store: Store) -> Any:
    return store.engine.raw_connection().driver_connection


class WatchedTransaction(Transaction):
    """A transaction that remembers what it wrote, and whether its lease was there when it began to."""

    def __init__(self, store: SimulatedStore, cursor: Any) -> None:
        super().__init__(store, cursor)
        self._world = store.world
        self.wrote: list[Statement] = []
        self.held: bool | None = None

    def rows(self, statement: Statement, params: Mapping[str, Any]) -> list[Row]:
        """Run a statement and return its rows."""
        self._watch(statement)
        return super().rows(statement, params)

    def run(self, statement: Statement, params: Mapping[str, Any]) -> int:
        """Run a statement without a result; return the number of rows it touched."""
        self._watch(statement)
        return super().run(statement, params)

    @property
    def is_errand(self) -> bool:
        """Whether it is one of those that lie between two threads."""
        return any(statement in _ERRANDS for statement in self.wrote)

    def _watch(self, statement: Statement) -> None:
        if statement.prepared(self._dialect)[0].startswith("SELECT"):
            return
        if self.held is None and self._world.attempt is not None:
            self.held = self._holds(self._world.attempt.nonces)
        self.wrote.append(statement)

    def _holds(self, nonces: list[str]) -> bool:
        connection = self.cursor.connection
        for table in ("keepstep_thread", "keepstep_node_run"):
            for nonce in nonces:
                if connection.execute(f"SELECT 1 FROM {table} WHERE lease_nonce = ?", (nonce,)).fetchone():
                    return True
        return False


class SimulatedStore(Store):
    """The store of all workers of a world."""

    def __init__(self, world: World) -> None:
        super().__init__(make_url("sqlite://"), pool_size=1, clock=world.database_time)
        self.world = world
        self.raw = _connection_of(self)
        self.raw.deserialize(template())
        self.inside = False
        self.threads: dict[str, tuple[Any, ...]] = {}
        """Each thread as the last commit left it: name, status, seq, version."""
        self.overstayed: set[str] = set()
        self.leases: dict[tuple[str, str], tuple[str | None, float | None]] = {}
        """Nonce of each thread's and node run's lease, and its first deadline by the machines' clock."""
        self.results: dict[str, int] = {}
        """Serial number of the commit that recorded an effect's result, by idempotency key."""
        self.serial = 0
        self.edits = False
        """Whether the last commit was an edit of a state."""

    @contextlib.contextmanager
    def transaction(self) -> Iterator[Transaction]:
        """Run several statements as one transaction, between two moments at which anything may happen."""
        self.world.boundary("transaction begins")
        if self.world.database_fails("before"):
            raise DatabaseUnavailable
        before = self.raw.total_changes
        with super().transaction() as plain:
            self.inside = True
            watched = WatchedTransaction(self, plain.cursor)
            try:
                yield watched
                if self.world.database_fails("instead of the commit"):
                    raise DatabaseUnavailable
            except StaleLease:
                self.world.counts["fenced off"] += 1
                raise
            finally:
                self.inside = False
        if self.raw.total_changes != before:
            self.serial += 1
            self._check(watched)
        elif watched.held is False and not watched.is_errand and any(each not in _UNFENCED for each in watched.wrote):
            self.world.counts["fenced off"] += 1
        if self.world.database_fails("after the commit"):
            raise DatabaseUnavailable
        self.world.boundary("transaction ended")

    def patiently(self, action: Callable[[], T], *, seconds: float = 60.0) -> T:
        """Run `action` again while the database is unavailable, in the world's time."""
        deadline = self.world.monotonic() + seconds
        while True:
            try:
                return action()
            except DatabaseUnavailable:
                if self.world.monotonic() >= deadline:
                    raise
                self.world.sleep(_UNAVAILABLE_SECONDS)

    def query(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        """Look at the database from outside the world."""
        found: list[tuple[Any, ...]] = self.raw.execute(statement, values).fetchall()
        return found

    # --- after each commit ------------------------------------------------------------------------------------------

    def _check(self, transaction: WatchedTransaction) -> None:
        world = self.world
        claiming = any(statement in _CLAIMS for statement in transaction.wrote)
        if claiming:
            self._check_limits()
        self.edits = stateedits._MOVE_HEAD in transaction.wrote
        if world.attempt is not None and transaction.held is False and not transaction.is_errand:
            foreign = [each for each in transaction.wrote if each not in _UNFENCED]
            world.require(not foreign, "a stale owner wrote", lambda: foreign[0].prepared(self.engine.dialect)[0][:200])
        if effects._BEGIN in transaction.wrote or effects._END in transaction.wrote:
            done = "SELECT step || '/' || run || '/' || call, state FROM keepstep_effect"
            for key, state in self.query(done):
                if state == effects.DONE:
                    self.results.setdefault(key, self.serial)
                else:
                    world.require(key not in self.results, "a recorded result was lost", key)
        if outcomes._INSERT_WAIT in transaction.wrote or signals._KEEP in transaction.wrote:
            missed = self.query(_MISSED, self.world.database_time())
            world.require(not missed, "a signal and the wait for it have missed each other", str(missed))
        if workers._FORGET_GONE in transaction.wrote:
            known = {row[0] for row in self.query("SELECT id FROM keepstep_worker")}
            healthy = [worker.id for worker in world.workers if worker.is_healthy]
            world.require(known.issuperset(healthy), "a healthy worker was given up", f"{known} of {healthy}")
        for agent, *row in self.query(_THREADS):
            self._check_lease((row[0], ""), f"{row[1]} {agent}", *row[-3:], claims=claiming)
            self._check_thread(*row[:-3])
            if row[6]:
                self._check_fan(agent, *row[:-3], claims=claiming)

    def _check_limits(self) -> None:
        for scope, most in LIMITS.items():
            leased = self.query(_RUNNING, scope.removeprefix("graph "))
            # Who has overstayed a deadline once has lost its place, whatever becomes of it.
            self.overstayed |= {nonce for *_, nonce, deadline in leased if deadline <= self.world.database_time()}
            running = [lease[:3] for lease in leased if lease[2] not in self.overstayed]
            self.world.require(len(running) <= most, "more run at once than may", f"{scope}: {running}")

    def _check_lease(
        self, key: tuple[str, str], name: str, control: str, nonce: str | None, deadline: float | None, *, claims: bool
    ) -> None:
        before, until = self.leases.get(key, (None, None))
        if nonce == before:
            return
        now = self.world.monotonic()
        self.leases[key] = nonce, None if deadline is None else now + deadline - self.world.database_time()
        if self.edits:
            live = until is not None and until > now
            self.world.require(not live, "an edit took a live lease", f"{name} {key[1]}: {before}")
        if nonce is not None:
            detail = f"{name} {key[1]}: {nonce} after {before}"
            self.world.require(claims, "a lease was made up", detail)
            self.world.require(control != "pause", "a paused thread was taken", detail)
            live = before is not None and until is not None and until > now
            self.world.require(not live, "a live lease was taken", detail)
            process = self.world.process
            carries = process is None or (name.split()[1], "1") in process.worker.graphs
            self.world.require(carries, "taken by a worker that cannot run it", detail)

    def _check_thread(
        self, thread_id: str, name: str, status: str, seq: int, version: int, branch: int, fanned: int, pending: int
    ) -> None:
        require = self.world.require
        before = self.threads.get(thread_id)
        after = (name, status, seq, version)
        if before == after:
            return
        self.threads[thread_id] = after
        if before is not None:
            allowed = status == before[1] or status in TRANSITIONS[before[1]]
            require(allowed, "a transition of no table", f"{name}: {before[1]} -> {status}")
            require(seq in {before[2], before[2] + 1}, "the head jumped", f"{name}: {before[2]} -> {seq}")
            require(version >= before[3], "the version went back", f"{name}: {before[3]} -> {version}")
        if status == "waiting" and not fanned:
            self._require_wait(thread_id, seq + 1, None, f"{name} {branch} {pending}")
        if status in _REASONS:
            ((error,),) = self.query("SELECT error FROM keepstep_thread WHERE id = ?", thread_id)
            good = json.loads(error)["code"] in _REASONS[status] or (status == "failed" and "nonsense" in error)
            require(good, f"{status} for no good reason", f"{name}: {error}")

    def _check_fan(
        self,
        agent: str,
        thread_id: str,
        name: str,
        status: str,
        seq: int,
        _version: int,
        branch: int,
        fanned: int,
        pending: int,
        *,
        claims: bool,
    ) -> None:
        runs = self.query(_NODE_RUNS, thread_id, branch, seq + 1)
        for run, _, *lease in runs:
            self._check_lease((thread_id, run), f"{name} {agent}", *lease, claims=claims)
        if status == "cancelled":
            return
        under_way = [run for run, state, *_ in runs if state in {"ready", "waiting"}]
        detail = f"{name}: pending {pending}, {runs}"
        self.world.require(len(runs) == fanned, "a node run has no row", detail)
        self.world.require(pending == len(under_way), "the count of pending node runs is wrong", detail)
        self.world.require((status == "waiting") == (pending > 0), "the join is too early or too late", detail)
        for run, state, *_ in runs:
            if state == "waiting":
                self._require_wait(thread_id, seq + 1, run, name)

    def _require_wait(self, thread_id: str, seq: int, run: str | None, name: str) -> None:
        found = self.query(
            "SELECT 1 FROM keepstep_wait "
            "WHERE thread_id = ? AND seq = ? AND run = coalesce(?, run) AND status = 'open'",
            thread_id,
            seq,
            run,
        )
        self.world.require(bool(found), "parked on nothing", f"{name} {run or ''}")
