"""Children: threads of other graphs that a node spawns, and joins when it needs what they came to.

A spawn is a row under the parent's lease, found again by step key, node run and the spawn's own id, as effects are: on
a retry it is the same child. The child's thread is made after that, in a transaction of its own. A join is a wait for
each child. What a child came to is not copied: its last checkpoint, which nothing ever changes, is read.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import structlog

from keepstep.crashpoints import reach
from keepstep.errors import (
    ChildFailed,
    Conflict,
    Diverged,
    InvalidInput,
    StepError,
    ThreadBlocked,
)
from keepstep.ids import checked_name, new_id
from keepstep.runtime import planner
from keepstep.runtime.callids import CallIds
from keepstep.runtime.compiled import CompiledGraph
from keepstep.runtime.environment import Runtime
from keepstep.runtime.graph import Graph
from keepstep.runtime.history import restore
from keepstep.runtime.journal import Journal
from keepstep.runtime.outcome import Parked
from keepstep.runtime.place import Place
from keepstep.runtime.reader import plain_state
from keepstep.runtime.waits import WaitBook, gathered
from keepstep.runtime.watchdog import undisturbed
from keepstep.store import children, errands, views
from keepstep.store.children import ChildState
from keepstep.store.errands import NewChild
from keepstep.store.leases import Fence, Nudge
from keepstep.store.schema import DONE

log = structlog.get_logger("keepstep.step")

ON_FAILURE = ("raise", "return")
_NAME_LENGTH_MAX = 200
_AT_ONCE_MAX = 20
"""Errands that the process which they follow from runs itself; more are left to the sweep: nobody is held up."""


@dataclass(frozen=True, slots=True)
class Child:
    """A thread that a node spawned. It may be kept in a state whose type declares it, and joined by a later node."""

    graph: str
    thread: str
    """The thread's name."""
    run: str
    """The run's id."""


@dataclass(frozen=True, slots=True)
class ChildResult:
    """What a child came to."""

    child: Child
    status: str
    """`done`, `failed` or `cancelled`."""
    state: Any = None
    """The final state of a run that is done."""
    error: Mapping[str, Any] | None = None
    """{code, message, …} of one that is not."""


@dataclass(frozen=True, slots=True)
class _Wish:
    """A child as it was asked for."""

    graph: str
    compiled: CompiledGraph | None
    input: bytes
    digest: bytes


class ChildBook:
    """The children of one attempt of a node run: those its earlier attempts spawned, and those it asks for."""

    def __init__(
        self,
        runtime: Runtime,
        fence: Fence,
        place: Place,
        journal: Journal,
        waits: WaitBook,
        *,
        priority: int,
        load: bool,
    ) -> None:
        """`priority`: the thread's, which its children get; `load`: whether earlier attempts may have spawned some."""
        self._runtime = runtime
        self._fence = fence
        self._place = place
        self._journal = journal
        self._waits = waits
        self._priority = priority
        self._found: dict[str, ChildState] | None = None if load else {}
        self._by_run: dict[str, ChildState] | None = None
        self._ids: CallIds[None] = CallIds("a spawn key", Conflict)
        self._new: set[str] = set()
        self._compiled: dict[str, CompiledGraph] = {}
        self._blocked: ThreadBlocked | None = None
        self._lock = threading.RLock()
        journal.beside = self.check_course

    # --- spawning -----------------------------------------------------------------------------------------------------

    def spawn(self, graph: Graph | str, given: object, thread: str | None, key: str | None) -> Child:
        """Return a child, started now or by an earlier attempt of the node run."""
        wish = self._wish(graph, given, thread)
        self._journal.masker.refuse(key, "$.key")
        call = self._ids.reserve(f"a child of graph {wish.graph!r}", wish.graph, wish.digest, key, None)
        try:
            with undisturbed():
                found = self._spawned(call, wish, thread, key)
        finally:
            self._ids.end(call)
        if wish.compiled is not None:
            self._compiled[found.run_id] = wish.compiled
        return Child(found.agent, found.name, found.run_id)

    def _wish(self, graph: Graph | str, given: object, thread: str | None) -> _Wish:
        if thread is not None:
            checked_name("a thread's name", thread)
        if isinstance(graph, Graph):
            compiled = graph.compile()
            if self._runtime.on_spawn is not None:
                self._runtime.on_spawn(compiled)
            codec, name = self._runtime.codec(compiled), compiled.name
            if thread is None:
                planner.begin(compiled, compiled.schema.initial(given), key="")
            else:  # a thread that is there already has values of its own for what is not given
                compiled.schema.fitted(given)
        else:
            compiled, codec, name = None, self._runtime.plain_codec, checked_name("a graph's name", graph)
        stored = codec.encode(given, path="$.input")
        self._journal.masker.refuse(given, "$.input", stored)
        self._journal.masker.refuse(thread, "$.thread")
        parts = (name.encode(), b"" if thread is None else thread.encode(), stored)
        return _Wish(name, compiled, stored, hashlib.blake2b(b"\x1f".join(parts), digest_size=16).digest())

    def _spawned(self, call: str, wish: _Wish, thread: str | None, key: str | None) -> ChildState:
        found = self._known().get(call)
        if found is None:
            return self._started(self._recorded(call, wish, thread))
        if bytes(found.digest) == wish.digest:
            return self._started(found)
        if call in self._new:
            message = f"spawn key {key!r} of graph {wish.graph!r} was used for another child of this node"
            raise Conflict(message)
        message = (
            f"an earlier attempt of this node spawned child {found.name!r} under key {key!r} with other input: make "
            "what the node spawns depend on its state and on effects only"
        )
        self._blocked = Diverged(message)
        raise self._blocked

    def _recorded(self, call: str, wish: _Wish, thread: str | None) -> ChildState:
        self._journal.check_course(before=f"a child of graph {wish.graph!r}")
        place, settings = self._place, self._runtime.settings
        name = self._derived_name(wish.graph, call) if thread is None else thread
        new = NewChild(
            step=place.step,
            run=place.node_run,
            call=call,
            tenant=place.tenant,
            application=place.application,
            agent=wish.graph,
            graph_version=None if wish.compiled is None else wish.compiled.version,
            name=name,
            run_id=new_id(),
            input=wish.input,
            digest=wish.digest,
            priority=self._priority,
            lease_seconds=self._runtime.lease_seconds(settings.node_timeout_seconds),
        )
        store = self._runtime.store
        reach("before_spawn", name)
        store.patiently(lambda: errands.spawn(store, self._fence, new))
        reach("after_spawn", name)
        state = ChildState(
            thread_id=self._fence.thread_id,
            child_id=None,
            state=children.WANTED,
            cancel=0,
            status=None,
            error=None,
            branch=None,
            seq=None,
            due_at=None,
            **{field: value for field, value in new._asdict().items() if field != "input"},
        )
        with self._lock:
            self._new.add(call)
            self._known()[call] = state
        return state

    def _derived_name(self, graph: str, call: str) -> str:
        """Return the name of a child's thread: its parent's, its graph's, and what tells it from its siblings."""
        place = self._place
        which = hashlib.blake2b(f"{place.step}\x1f{place.node_run}\x1f{call}".encode(), digest_size=5).hexdigest()
        end = f"/{graph[: _NAME_LENGTH_MAX // 2]}-{which}"
        return place.thread[: _NAME_LENGTH_MAX - len(end)] + end

    def _started(self, found: ChildState) -> ChildState:
        if found.state == children.WANTED:
            self._runtime.publish(attended(self._runtime, [children.nudge(found.run_id, None)]))
            with self._lock:
                self._known()[found.call] = found._replace(state=children.STARTED)
        return found

    # --- joining ------------------------------------------------------------------------------------------------------

    def join(self, joined: Sequence[Child], on_failure: str) -> list[Any]:
        """Return what children came to, in order; raise `Parked` while one of them has not ended."""
        if on_failure not in ON_FAILURE:
            message = f"ctx.join: on_failure must be one of {', '.join(ON_FAILURE)}, not {on_failure!r}"
            raise InvalidInput(message)
        for child in joined:
            self._check_own(child)
        parked: list[Parked] = []
        for child in joined:
            try:
                self._waits.child(child.run)
            except Parked as signal:
                parked.append(signal)
        if parked:
            gathered(parked)
        with undisturbed():
            results = [self._result(child) for child in joined]
        if on_failure == "return":
            return results
        failed = [result for result in results if result.status != DONE]
        if failed:
            raise _failure(failed)
        return [result.state for result in results]

    def _check_own(self, child: object) -> None:
        if not isinstance(child, Child):
            message = f"ctx.join takes the children that ctx.spawn returned, not {type(child).__name__}"
            raise InvalidInput(message)
        found = self._row(child.run)
        if found is None or found.thread_id != self._fence.thread_id:
            message = f"thread {self._place.thread!r} has no child {child.thread!r} of graph {child.graph!r}"
            raise InvalidInput(message)

    def _row(self, run_id: str) -> ChildState | None:
        with self._lock:
            if self._by_run is None:
                self._by_run = {state.run_id: state for state in self._known().values()}
            found = self._by_run.get(run_id)
            # Only what was delivered is final.
            if found is None or found.state != children.DELIVERED:
                found = children.by_run(self._runtime.store, run_id)
                if found is not None:
                    self._by_run[run_id] = found
            return found

    def _result(self, child: Child) -> ChildResult:
        found = self._row(child.run)
        if found is None or found.status is None:
            message = f"child {child.thread!r} has ended and left nothing"
            raise StepError(message)
        if found.status != DONE:
            return ChildResult(child, found.status, None, json.loads(found.error or "{}"))
        return ChildResult(child, DONE, self._final_state(found))

    def _final_state(self, found: ChildState) -> Any:
        store, thread_id, branch, seq = self._runtime.store, found.child_id or "", found.branch or 0, found.seq or 0
        first = views.snapshot_before(store, thread_id, branch, seq)
        rows = [row for row, _ in views.history(store, thread_id, branch, seq if first is None else first, seq)]
        graphs = self._runtime.graphs
        compiled = graphs.get((found.agent, found.graph_version or "")) or self._compiled.get(found.run_id)
        if compiled is None:
            return plain_state(rows)
        return compiled.schema.present(restore(self._runtime.codec(compiled), rows).channels)

    # --- the course ---------------------------------------------------------------------------------------------------

    def check_course(self, before: str) -> None:
        """Raise `Diverged` when an earlier attempt spawned a child that this one has not asked for again."""
        with self._lock:
            if self._blocked is not None:
                raise self._blocked  # the node caught it; it is not the node's to decide
            left = [state for call, state in self._known().items() if call not in self._ids.asked]
        if left:
            message = (
                f"before {before}: an earlier attempt of this node spawned child {left[0].name!r}, which this one has "
                "not asked for again: the retry goes another way than the attempt before it"
            )
            self._blocked = Diverged(message)
            raise self._blocked

    def close(self) -> None:
        """Spawn nothing more: the node has ended."""
        self._ids.close()

    def _known(self) -> dict[str, ChildState]:
        with self._lock:
            if self._found is None:
                place = self._place
                states = children.of_run(self._runtime.store, self._fence.thread_id, place.step, place.node_run)
                self._found = {state.call: state for state in states}
            return self._found


def _failure(failed: Sequence[ChildResult]) -> ChildFailed:
    first = failed[0]
    error = first.error or {}
    others = f" (and {len(failed) - 1} others)" if len(failed) > 1 else ""
    said = f": {error.get('message')}" if error.get("message") else ""
    message = f"child {first.child.thread!r} of graph {first.child.graph!r} {_ENDED[first.status]}{said}{others}"
    return ChildFailed(message, thread=first.child.thread, status=first.status, error=error)


_ENDED = {"failed": "has failed", "cancelled": "was cancelled"}


def attended(runtime: Runtime, nudges: Sequence[Nudge]) -> list[Nudge]:
    """Run the errands among some nudges; return the others, and what follows from the errands.

    Bounded, and never raises: what is not done here is done by the sweep.
    """
    followed = [nudge for nudge in nudges if nudge.kind != "child"]
    todo = [nudge for nudge in nudges if nudge.kind == "child"]
    for _ in range(_AT_ONCE_MAX):
        if not todo:
            break
        nudge = todo.pop(0)
        try:
            more = errands.run(runtime.store, nudge)
        except Exception as error:  # noqa: BLE001  what it follows from is committed, and must not seem to have failed
            log.warning("errand_left_to_sweep", run=nudge.run, error=type(error).__name__, reason=str(error)[:500])
            continue
        followed += [each for each in more if each.kind != "child"]
        todo += [each for each in more if each.kind == "child"]
    return followed
