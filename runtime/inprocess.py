"""`Graph.run`: a run from input to result in this process, for tests and notebooks.

The same steps over the same store, in memory. Nothing is simulated but two things: the queue is a loop, and the clock,
which jumps over waits, so that `ctx.sleep(days)` takes no time.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from keepstep import errors, settings
from keepstep.errors import GraphError, NodeFailed, Undecided
from keepstep.ids import new_id
from keepstep.runtime import commands, superstep
from keepstep.runtime.commands import Accepted
from keepstep.runtime.compiled import CompiledGraph
from keepstep.runtime.environment import Runtime
from keepstep.runtime.history import restore
from keepstep.runtime.reader import Approval, Kin, Reader, Thread
from keepstep.store import migrate, sweep
from keepstep.store.engine import Store
from keepstep.store.leases import Nudge, Owner

Decide = Callable[[Approval], Any]
Decisions = Mapping[str, Any] | Iterable[Any] | Decide | None
Signals = Mapping[str, Any] | Iterable[tuple[str, Any]] | None

_THREAD = "run"
_THREADS_MAX = 10_000


@dataclass
class _Clock:
    """The store's time: the machine's, and what was skipped."""

    skipped_seconds: float = 0.0

    def __call__(self) -> float:
        return time.time() + self.skipped_seconds


def run_in_process(
    graph: CompiledGraph,
    given: object = None,
    *,
    decisions: Decisions = None,
    signals: Signals = None,
    step_limit: int | None = None,
) -> Any:
    """Run a graph to its end and return its final state, in the state type's shape.

    `given` is plain data or an instance of the state type. `decisions` answers `ctx.approve` and `ctx.ask`: a mapping
    from question to verdict, a list of verdicts in the order in which they are asked for, or a function from `Approval`
    to verdict. A verdict is True or "approve", False or "reject", a dict {verdict, arguments, answer, by, comment}, or
    for a question the answer itself. `signals`: a mapping from name to payload, or (name, payload) pairs; they are
    there from the start. Raises `NodeFailed` (from the node's error text), `StepLimit`, the kinds of `ThreadBlocked`,
    `StateError`, and `Undecided` when the run waits for something that was not given.
    """

    def run() -> Any:
        clock = _Clock()
        store = Store.open("sqlite://", clock=clock)
        try:
            migrate.set_up_in_memory(store)
            return _Run(graph, store, clock, decisions).to_end(given, signals, step_limit)
        finally:
            store.dispose()

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return run()
    # In a notebook a loop runs in this thread already, and an async node needs one of its own.
    with ThreadPoolExecutor(1, thread_name_prefix="keepstep-run") as pool:
        return pool.submit(run).result()


class _Run:
    def __init__(self, graph: CompiledGraph, store: Store, clock: _Clock, decisions: Decisions) -> None:
        self._compiled = graph
        self._clock = clock
        self._store = store
        self._queue: list[Nudge] = []
        self._graphs = {(graph.name, graph.version): graph}
        self._runtime = Runtime(
            store=store,
            graphs=self._graphs,
            settings=settings.load(),
            owner=Owner("in-process", os.getpid()),
            publish=self._queue.extend,
            on_failure=self._failed,
            on_spawn=self._met,
        )
        self._reader = Reader(store=store)
        self._decide = _decider(decisions)
        self._cause: BaseException | None = None

    def to_end(self, given: object, signals: Signals, step_limit: int | None) -> Any:
        started = self._send("start", graph=self._compiled.name, thread=_THREAD, input=given, step_limit=step_limit)
        thread_id = started.thread_id or _THREAD
        pairs = signals.items() if isinstance(signals, Mapping) else signals or ()
        for name, payload in pairs:
            self._send("signal", graph=None, thread=thread_id, name=name, key=None, payload=payload)
        while True:
            self._work()
            thread = self._reader.get(thread_id)
            match thread.status:
                case "done":
                    return self._state(thread)
                case "failed" | "blocked" | "cancelled":
                    raise _error_of(thread) from self._cause
                case _:
                    self._go_on()

    def _met(self, graph: CompiledGraph) -> None:
        """Carry a graph that a node spawns a child of."""
        known = self._graphs.setdefault((graph.name, graph.version), graph)
        if known is not graph:
            message = (
                f"two graphs are named {graph.name!r}, version {graph.version!r}: a thread could not tell them apart"
            )
            raise GraphError(message)
        self._runtime.carries_more()

    def _failed(self, error: BaseException) -> None:
        # A node that waits is left by a signal that is nobody's error.
        self._cause = error if isinstance(error, Exception) else self._cause

    def _work(self) -> None:
        while self._queue:
            nudge = self._queue.pop(0)
            if nudge.kind == "step":
                superstep.run_step(self._runtime, nudge.thread_id, nudge.version)
            else:
                superstep.run_node(self._runtime, nudge.thread_id, nudge.seq, nudge.run, nudge.version)

    def _go_on(self) -> None:
        """Answer what is asked, else let the time pass until something is due."""
        for approval in self._reader.approvals():
            verdict = self._decide(approval)
            if verdict is not None:
                self._send("decide", approval=approval.id, **_decision(approval, verdict))
                return
        due_at = min(filter(None, map(self._reader.next_due, self._threads())), default=None)
        if due_at is None:
            for blocked in self._reader.threads(status="blocked"):  # a child: its parent waits for it
                raise _error_of(blocked) from self._cause
            asked = ", ".join(repr(approval.question) for approval in self._reader.approvals())
            waits_for = f"a decision on {asked}" if asked else "a signal"
            unknown = [each.graph for each in self._children() if each.state == "wanted"]
            if unknown:
                message = (
                    f"the run waits for a child of graph {unknown[0]!r}, which is not here: spawn the Graph itself"
                )
                raise Undecided(message)
            message = f"the run waits for {waits_for}; give graph.run decisions=… or signals=…"
            raise Undecided(message)
        self._clock.skipped_seconds += max(0.0, due_at - self._clock())
        self._queue += sweep.sweep(self._store, takeover=False, limit=1000)
        self._queue += self._runtime.admission.look(lambda _queue: 1000, self._runtime.running_max()).nudges

    def _threads(self) -> list[str]:
        return [thread.id for thread in self._reader.threads(limit=_THREADS_MAX)]

    def _children(self) -> list[Kin]:
        return [child for thread_id in self._threads() for child in self._reader.children(thread_id)]

    def _send(self, verb: str, **fields: Any) -> Accepted:
        defaults: dict[str, Any] = {"verb": verb, "id": new_id(), "tenant": "default", "application": "default"}
        defaults["by"] = None
        if verb == "decide":
            defaults |= {"graph": None, "thread": None}
        if verb == "start":
            defaults |= {"request_id": None, "if_running": "reject", "priority": None}
        accepted = commands.accept(self._runtime, SimpleNamespace(**{**defaults, **fields}))
        self._queue += accepted.nudges
        return accepted

    def _state(self, thread: Thread) -> Any:
        rows = self._reader.head_rows(thread.id)
        head = restore(self._runtime.codec(self._compiled), rows)
        return self._compiled.schema.present(head.channels)


def _error_of(thread: Thread) -> errors.KeepstepError:
    error = thread.error or {}
    kind = errors.by_code(str(error.get("code", "")))
    message = str(error.get("message", ""))
    if kind is NodeFailed:
        message = f"node {error.get('run')!r} failed: {error.get('type')}: {message}"
    return kind(message)


def _decider(decisions: Decisions) -> Decide:
    if decisions is None:
        return lambda _approval: None
    if callable(decisions):
        return decisions
    if isinstance(decisions, Mapping):
        by_question: Mapping[str, Any] = decisions
        return lambda approval: by_question.get(approval.question)
    in_order = iter(decisions)
    return lambda _approval: next(in_order, None)


def _decision(approval: Approval, verdict: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {"arguments": None, "answer": None, "by": "graph.run", "comment": None, "to": None}
    if isinstance(verdict, Mapping) and "verdict" in verdict:
        return {**fields, **verdict}
    if approval.kind == "ask":
        return {**fields, "verdict": "answer", "answer": verdict}
    if isinstance(verdict, bool):
        return {**fields, "verdict": "approve" if verdict else "reject"}
    return {**fields, "verdict": verdict}
