"""One super-step, from the lease to the nudge of the next. Read it from the top.

A step is reached by a nudge, which is only a hint: claiming the lease decides whether there is anything to do. From
then on every write carries the lease's nonce. Killed at any line, the step is where its last committed write left it:
the lease is released by whoever notices, and another worker begins again at the claim.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import structlog

from keepstep.crashpoints import reach
from keepstep.errors import (
    DatabaseUnavailable,
    GraphError,
    KeepstepError,
    NodeTimeout,
    StaleLease,
    StepError,
    StepLimit,
    ThreadBlocked,
    WorkerLost,
)
from keepstep.runtime import children, planner, undoing
from keepstep.runtime.compiled import CompiledGraph
from keepstep.runtime.environment import Runtime
from keepstep.runtime.execution import NodeRun, execute, of_state
from keepstep.runtime.history import Channels, Head, describe, payload, restore
from keepstep.runtime.outcome import Blocked, Done, Failed, NodeOverdue, Outcome, described
from keepstep.runtime.planner import MISSING, Cursor, DueRun, NodeResult
from keepstep.runtime.settlement import PATIENCE_SECONDS, settle
from keepstep.runtime.watchdog import alarm
from keepstep.store import checkpoints, claims, leases, outcomes
from keepstep.store.checkpoints import Committed, NewCheckpoint
from keepstep.store.claims import Claim
from keepstep.store.errortext import error_text
from keepstep.store.events import NewEvent
from keepstep.store.leases import NUDGE_SECONDS, Fence, Nudge
from keepstep.store.outcomes import NewNodeRun
from keepstep.store.schema import BLOCKED, DONE, FAILED, READY

__all__ = ["Runtime", "run_node", "run_step"]

T = TypeVar("T")
log = structlog.get_logger("keepstep.step")

_NAMED_MAX = 4


def run_step(runtime: Runtime, thread_id: str, version: int) -> bool:
    """Run a thread's due super-step; return whether there was one for this worker.

    Nothing is raised for a thread that is busy, further on, paused or ended: the nudge was one too many. Raises
    `DatabaseUnavailable` when the database stayed away; the sweep then finds the thread.
    """
    reach("before_claim", thread_id)
    claim = claims.claim_thread(
        runtime.store,
        thread_id,
        version,
        owner=runtime.owner,
        carried=runtime.carried,
        running_max=runtime.running_max(),
    )
    if claim is None:
        return False
    at = f"{claim.thread.name}/{claim.fence.seq}"
    reach("after_claim", at)
    try:
        nudges = _step(runtime, claim)
    except StaleLease:
        log.info("lease_lost", thread=claim.thread.name, step=_key(claim.fence))
        return True
    except DatabaseUnavailable:
        leases.give_back(runtime.store, claim.fence.thread_id, claim.fence.nonce)
        raise
    except Exception as error:  # noqa: BLE001  nothing may leave a thread leased and in nobody's hands
        nudges = _stopped(runtime, claim, error)
    except (KeyboardInterrupt, SystemExit):  # the process was told to end
        leases.give_back(runtime.store, claim.fence.thread_id, claim.fence.nonce)
        raise
    reach("after_commit", at)
    runtime.publish(_in_turn(runtime, claim, children.attended(runtime, nudges)))
    reach("after_nudge", at)
    if all(nudge.kind == "child" for nudge in nudges):
        runtime.publish(runtime.next_within(claim.scopes))
    return True


def _in_turn(runtime: Runtime, claim: Claim, nudges: Sequence[Nudge]) -> list[Nudge]:
    """Under a limit no thread keeps its place from step to step while others wait for one."""
    found: list[Nudge] = []
    for nudge in nudges:
        is_own = nudge.kind == "step" and nudge.thread_id == claim.thread.id
        found += runtime.in_turn(claim.scopes, nudge) if is_own else [nudge]
    return found


def _step(runtime: Runtime, claim: Claim) -> list[Nudge]:
    graph = runtime.graphs[claim.thread.agent, claim.thread.graph_version]
    if claim.thread.undoing:
        return undoing.undo_next(runtime, claim, graph)
    head = restore(runtime.codec(graph), claim.checkpoints) if claim.checkpoints else None
    if head is None or not claim.thread.run_active:
        begun = _begin_run(runtime, claim, graph, head)
        if isinstance(begun, list):
            return begun
        claim, head = begun
    limit = _step_limit(runtime, claim, graph)
    if claim.thread.run_steps >= limit:
        raise _limit_reached(limit)

    step = head.cursor.key or _key(claim.fence)
    runs = planner.due(graph, head.cursor, head.channels)
    if claim.thread.fanned:
        return _join(runtime, claim, graph, head, step, runs)
    _check_deaths(runtime, claim, [run.id for run in runs])
    if len(runs) > 1:
        return _fan_out(runtime, claim, graph, step, runs)
    return _run_alone(runtime, claim, graph, head, step, runs[0])


def _key(fence: Fence) -> str:
    return f"{fence.thread_id}/{fence.branch}/{fence.seq}"


# --- a run begins ---


def _begin_run(
    runtime: Runtime, claim: Claim, graph: CompiledGraph, head: Head | None
) -> tuple[Claim, Head] | list[Nudge]:
    """Commit the next queued run's input as a checkpoint and keep the lease for its first step.

    Returns the nudges that follow instead when the run ends here: it has nothing to do, or its input does not fit.
    """
    queued = checkpoints.next_run(runtime.store, claim.thread.id)
    if queued is None:
        message = "the thread is due and has no run"
        raise ThreadBlocked(message)
    try:
        given = runtime.codec(graph).decode(queued.input)
        channels = graph.schema.initial(given) if head is None else graph.schema.merge(head.channels, given)
        cursor = _in_time(
            runtime,
            claim,
            graph,
            runtime.settings.node_timeout_seconds,
            "the routes from START",
            lambda: planner.begin(graph, channels, key=""),
            lambda text: outcomes.refuse_run(runtime.store, claim.fence, queued.id, text),
        )
    except KeepstepError as error:
        text = error_text(described(error))
        return outcomes.refuse_run(runtime.store, claim.fence, queued.id, text)
    claim = claim._replace(
        thread=claim.thread._replace(run_id=queued.id, run_steps=0, step_limit=queued.step_limit, run_active=1)
    )
    committed, after = _commit(
        runtime, claim, graph, head, channels, cursor, kind="input", keep_lease=not cursor.finished
    )
    reach("after_begin", claim.thread.name)
    if cursor.finished:
        return [_next(claim, committed.version), *committed.told]
    fence = claim.fence
    claim = Claim(
        Fence(fence.thread_id, fence.nonce, fence.branch, fence.seq + 1),
        claim.thread._replace(seq=after.seq, version=committed.version, fanned=0),
        claims.Attempt(1, 0, 0, None),
        None,
        claim.checkpoints,
    )
    return claim, after


def _step_limit(runtime: Runtime, claim: Claim, graph: CompiledGraph) -> int:
    return claim.thread.step_limit or graph.step_limit or runtime.settings.step_limit


def _limit_reached(limit: int) -> StepLimit:
    return StepLimit(f"the run reached its limit of {limit} steps; its state is kept: retry with a higher step limit")


def _check_deaths(runtime: Runtime, claim: Claim, runs: Sequence[str]) -> None:
    """Refuse to enter a body that has taken its process down too often."""
    deaths, last = claim.attempt.deaths, claim.attempt.last_death
    if deaths >= runtime.settings.deaths_max:
        message = (
            f"node {', '.join(map(repr, runs))} took its process down {deaths} times (last: {last}); "
            "retry gives it another chance"
        )
        raise WorkerLost(message)


# --- one node run ---


def _run_alone(runtime: Runtime, claim: Claim, graph: CompiledGraph, head: Head, step: str, run: DueRun) -> list[Nudge]:
    started = time.perf_counter()
    present = of_state(graph, head.cursor, run, head.channels)
    emitted: list[NewEvent] = []
    node_run = NodeRun(graph, run, claim, step, present, claim.attempt.starts, claim.attempt.failures, emitted)
    outcome = execute(runtime, node_run)
    if not isinstance(outcome, Done):
        _report(claim, run.id, outcome)
        return settle(runtime, claim, step, run.id, outcome, emitted, failures=node_run.failures)
    ran = _ran(run.id, node_run.starts, node_run.failures) | {"seconds": round(time.perf_counter() - started, 6)}
    seconds = max(node_run.deadline - time.monotonic(), runtime.settings.timeout_grace_seconds)
    results = {run.id: outcome.result}
    return _advance(runtime, claim, graph, head, results, ran=[ran], emitted=emitted, step=step, seconds=seconds)


def _ran(run: str, starts: int, failures: int) -> dict[str, Any]:
    return {"run": run, "starts": starts, "failures": failures} if failures else {"run": run, "starts": starts}


def _report(claim: Claim, run: str, outcome: Outcome) -> None:
    if isinstance(outcome, Failed | Blocked):
        error = outcome.error
        kind = "node_failed" if isinstance(outcome, Failed) else "node_blocked"
        where = {"where": error["where"]} if "where" in error else {}
        log.warning(
            kind, thread=claim.thread.name, run=run, error=error["type"], message=error["message"][:500], **where
        )


# --- several node runs ---


def _fan_out(runtime: Runtime, claim: Claim, graph: CompiledGraph, step: str, runs: Sequence[DueRun]) -> list[Nudge]:
    """Give each node run a row and a lease of its own; run a few of them here, leave many to everybody."""
    codec = runtime.codec(graph)
    new = [
        NewNodeRun(
            run.id,
            step,
            run.node,
            None if run.input is MISSING else codec.encode(run.input, path=f"${run.id}"),
            runtime.lease_seconds(runtime.timeout(graph.node_at(run.node))),
        )
        for run in runs
    ]
    reach("before_fan_out", claim.thread.name)
    nudges = runtime.store.patiently(
        lambda: outcomes.fan_out(runtime.store, claim.fence, new), seconds=PATIENCE_SECONDS
    )
    reach("after_fan_out", claim.thread.name)
    if len(runs) > _inline_max(runtime, graph):
        return nudges
    with ThreadPoolExecutor(len(runs), thread_name_prefix="keepstep-node") as pool:
        found = list(
            pool.map(lambda each: _claim_and_run(runtime, each.thread_id, each.seq, each.run, each.version), nudges)
        )
    followed = [nudge for several in found for nudge in several or ()]
    joins = [nudge for nudge in followed if nudge.kind == "step"]
    for nudge in joins:
        run_step(runtime, nudge.thread_id, nudge.version)
    return [nudge for nudge in followed if nudge.kind != "step"]


def _inline_max(runtime: Runtime, graph: CompiledGraph) -> int:
    if graph.fan_out is True:
        return 0
    if graph.fan_out is False:
        return 1_000_000
    return runtime.settings.parallel_inline_max if graph.fan_out is None else graph.fan_out


def run_node(runtime: Runtime, thread_id: str, seq: int, run: str, version: int) -> bool:
    """Run one fanned-out node run that is due; return whether there was one for this worker (see `run_step`)."""
    nudges = _claim_and_run(runtime, thread_id, seq, run, version)
    if nudges is None:
        return False
    runtime.publish(nudges)
    return True


def _claim_and_run(runtime: Runtime, thread_id: str, seq: int, run: str, version: int) -> list[Nudge] | None:
    """Run a node run if it is due and free; return the nudges that follow, None when there was nothing to do."""
    claim = claims.claim_node(
        runtime.store,
        thread_id,
        seq,
        run,
        version,
        owner=runtime.owner,
        carried=runtime.carried,
        running_max=runtime.running_max(),
    )
    if claim is None or claim.node is None:
        return None
    nudges = _ended_node_run(runtime, claim, claim.node.step, run)
    return nudges or runtime.next_within(claim.scopes)


def _ended_node_run(runtime: Runtime, claim: Claim, step: str, run: str) -> list[Nudge]:
    try:
        return _node_run(runtime, claim, step)
    except StaleLease:
        log.info("lease_lost", thread=claim.thread.name, step=step, run=run)
        return []
    except DatabaseUnavailable:
        leases.give_back(runtime.store, claim.fence.thread_id, claim.fence.nonce)
        raise
    except Exception as error:  # noqa: BLE001  as in run_step
        text = described(error, run=run)
        failed = isinstance(error, KeepstepError) and not isinstance(error, ThreadBlocked | GraphError)
        outcome: Outcome = Failed(claim.attempt.failures, text) if failed else Blocked(text)
        _report(claim, run, outcome)
        return settle(runtime, claim, step, run, outcome, (), failures=claim.attempt.failures)


def _node_run(runtime: Runtime, claim: Claim, step: str) -> list[Nudge]:
    graph = runtime.graphs[claim.thread.agent, claim.thread.graph_version]
    _check_deaths(runtime, claim, [claim.fence.run or ""])
    run, present = _as_due(runtime, claim, graph)
    emitted: list[NewEvent] = []
    node_run = NodeRun(graph, run, claim, step, present, claim.attempt.starts, claim.attempt.failures, emitted)
    if run.input is not MISSING:
        node_run.failures_before = lambda: _failures_before(runtime, claim, graph)
    outcome = execute(runtime, node_run)
    _report(claim, run.id, outcome)
    return settle(runtime, claim, step, run.id, outcome, emitted, failures=node_run.failures)


def _as_due(runtime: Runtime, claim: Claim, graph: CompiledGraph) -> tuple[DueRun, Any]:
    """Return a node run as the planner knows it, and how it sees its state."""
    node, name = claim.node, claim.fence.run
    if node is None or name is None:
        message = "not a fanned-out node run"
        raise TypeError(message)
    codec = runtime.codec(graph)
    if node.input is not None:
        # A Send carries its own input: neither the state nor the cursor is loaded for it.
        given = codec.decode(node.input)
        run = DueRun(name, node.node, given, "")
        return run, lambda: (codec.decode(node.input or b""), given)
    head = restore(codec, claim.checkpoints)
    for run in planner.due(graph, head.cursor, head.channels):
        if run.id == name:
            return run, of_state(graph, head.cursor, run, head.channels)
    message = f"node run {name!r} is not due in the thread's cursor"
    raise GraphError(message)


def _failures_before(runtime: Runtime, claim: Claim, graph: CompiledGraph) -> Sequence[Mapping[str, Any]]:
    """Return what a Send's node run is told of the super-step before; few ask, so it is loaded for these."""
    stored = checkpoints.cursor_of(runtime.store, claim.thread.id, claim.fence.branch, claim.fence.seq - 1)
    cursor = Cursor.from_plain(runtime.codec(graph).decode(stored))
    return next((run.failures for run in planner.due(graph, cursor, {}) if run.id == claim.fence.run), ())


def _join(
    runtime: Runtime, claim: Claim, graph: CompiledGraph, head: Head, step: str, runs: Sequence[DueRun]
) -> list[Nudge]:
    """Every node run has ended: put their pending writes together, or say which of them cannot go on."""
    rows = outcomes.node_runs(runtime.store, claim.thread.id, claim.fence.branch, claim.fence.seq)
    for status in (BLOCKED, FAILED):
        ended = [row for row in rows if row.status == status]
        if ended:
            first = ended[0]
            others = f" (and {len(ended) - 1} others)" if len(ended) > 1 else ""
            return _stop(runtime, claim, status, first.error or "{}", others)
    codec = runtime.codec(graph)
    results = {row.run: NodeResult.from_plain(codec.decode(row.write or b"")) for row in rows}
    missing = [run.id for run in runs if run.id not in results]
    if missing:
        message = f"node run {missing[0]!r} is due and was not fanned out"
        raise StepError(message)
    ran = [_ran(row.run, row.starts, 0) for row in rows]
    seconds = max(runtime.timeout(graph.node_at(run.node)) for run in runs)
    return _advance(runtime, claim, graph, head, results, ran=ran, emitted=(), step=step, seconds=seconds)


# --- the commit ---


def _in_time(
    runtime: Runtime,
    claim: Claim,
    graph: CompiledGraph,
    seconds: float,
    what: str,
    plan: Callable[[], T],
    fail: Callable[[str], list[Nudge]],
) -> T:
    """Plan what follows. Routes and own reducers are ended like nodes: when told, or else with the process."""
    if not graph.decides:
        return plan()
    deadline = time.monotonic() + seconds
    message = f"{what} ran longer than their timeout"

    def write_off() -> None:
        if runtime.end_process is None:
            return
        log.error("routes_hung", thread=claim.thread.name, step=_key(claim.fence))
        error = NodeTimeout(f"{message} and did not end when told; their process was ended")
        with contextlib.suppress(Exception):  # as of a node
            runtime.publish(fail(error_text(described(error, step=_key(claim.fence)))))

    ours = runtime.end_process is not None
    with runtime.watchdog.watch(seconds + runtime.settings.timeout_grace_seconds, write_off, runtime.end):
        try:
            with alarm(seconds, process_is_ours=ours):
                planned = plan()
        except NodeOverdue:
            raise NodeTimeout(message) from None
        if time.monotonic() > deadline:
            raise NodeTimeout(message)
    return planned


def _advance(
    runtime: Runtime,
    claim: Claim,
    graph: CompiledGraph,
    head: Head,
    results: Mapping[str, NodeResult],
    *,
    ran: Sequence[Mapping[str, Any]],
    emitted: Sequence[NewEvent],
    step: str,
    seconds: float,
) -> list[Nudge]:
    """Apply what the node runs wrote, plan what follows, commit, and return the nudge of the next step."""
    named = ", ".join(map(repr, results)) if len(results) < _NAMED_MAX else f"{len(results)} node runs"
    cursor, channels = _in_time(
        runtime,
        claim,
        graph,
        seconds,
        f"the routes and reducers after {named}",
        lambda: planner.advance(graph, head.cursor, head.channels, results, key=""),
        lambda text: _stop(runtime, claim, FAILED, text),
    )
    committed, _ = _commit(
        runtime,
        claim,
        graph,
        head,
        channels,
        cursor,
        kind="step",
        ran=ran,
        emitted=emitted,
        # Only a node run that was entered before can have waits to be settled.
        waits_of=step if claim.attempt.starts > 1 else None,
    )
    if committed.status != READY or committed.control == leases.PAUSE:
        return [*committed.told]
    return [_next(claim, committed.version), *committed.told]


def _next(claim: Claim, version: int) -> Nudge:
    return Nudge("step", claim.thread.id, version, claim.thread.queue, claim.thread.priority)


def _commit(
    runtime: Runtime,
    claim: Claim,
    graph: CompiledGraph,
    head: Head | None,
    channels: Channels,
    cursor: Cursor,
    *,
    kind: str,
    ran: Sequence[Mapping[str, Any]] = (),
    emitted: Sequence[NewEvent] = (),
    waits_of: str | None = None,
    keep_lease: bool = False,
) -> tuple[Committed, Head]:
    thread, settings = claim.thread, runtime.settings
    steps = thread.run_steps + (kind == "step")
    status, error = (DONE, None) if cursor.finished else (READY, None)
    limit = _step_limit(runtime, claim, graph)
    if status == READY and kind == "step" and steps >= limit:
        status, error = FAILED, error_text(described(_limit_reached(limit)))
    meta = describe(graph_version=thread.graph_version, nodes=ran, worker=runtime.owner.worker)
    new = payload(runtime.codec(graph), head, channels, cursor, meta, chain_max=settings.snapshot_steps_max)
    reach("before_commit", f"{thread.name}/{claim.fence.seq}")
    committed = checkpoints.commit(
        runtime.store,
        claim.fence,
        NewCheckpoint(
            seq=claim.fence.seq,
            id=new.id,
            parent_id=None if head is None else head.checkpoint_id,
            tenant=thread.tenant,
            run_id=thread.run_id or "",
            kind=kind,
            change=new.change,
            snapshot=new.snapshot,
            cursor=new.cursor,
            meta=new.meta,
            digest=new.digest,
            parent_digest=b"" if head is None else head.digest,
            status=status,
            error=error,
            run_steps=steps,
            lease_seconds=_next_lease_seconds(runtime, graph, cursor, channels),
            nudge_seconds=NUDGE_SECONDS,
            step_limit=thread.step_limit,
            keep_lease=keep_lease,
            emitted=emitted,
            begins_run=kind == "input",
            signals_of=waits_of,
            undo_lease_seconds=runtime.undo_lease_seconds,
        ),
        patience_seconds=PATIENCE_SECONDS,
    )
    after = Head(claim.fence.seq, new.id, channels, cursor, new.digest, 0, 0, 0)
    if new.snapshot is not None:
        after = Head(claim.fence.seq, new.id, channels, cursor, new.digest, 0, 0, len(new.snapshot))
    elif head is not None:
        size = head.chain_bytes + len(new.change or b"")
        after = Head(
            claim.fence.seq, new.id, channels, cursor, new.digest, head.chain_count + 1, size, head.snapshot_bytes
        )
    return committed, after


def _next_lease_seconds(runtime: Runtime, graph: CompiledGraph, cursor: Cursor, channels: Channels) -> float:
    """Return how long the next claim's lease lasts: as long as the longest node that it may run inline."""
    due = planner.due(graph, cursor, channels)
    # Nothing is due: the next claim begins a run, by the routes from START.
    longest = max(
        (runtime.timeout(graph.node_at(run.node)) for run in due), default=runtime.settings.node_timeout_seconds
    )
    return runtime.lease_seconds(longest)


# --- stopping ---


def _stopped(runtime: Runtime, claim: Claim, error: Exception) -> list[Nudge]:
    """Record that a step cannot go on: failed when what the nodes gave is at fault, blocked when an operator can help.

    An error that is not Keepstep's own is a defect here; the thread is blocked and shows it.
    """
    failed = isinstance(error, KeepstepError) and not isinstance(error, ThreadBlocked | GraphError)
    failed = failed and not claim.thread.undoing
    status = FAILED if failed else BLOCKED
    text = described(error, step=_key(claim.fence))
    if not isinstance(error, KeepstepError):
        text["code"] = "internal"
    log.warning(
        "thread_failed" if failed else "thread_blocked",
        thread=claim.thread.name,
        error=text["type"],
        message=text["message"][:500],
    )
    try:
        return _stop(runtime, claim, status, error_text(text))
    except StaleLease:
        log.info("lease_lost", thread=claim.thread.name, step=_key(claim.fence))
    return []


def _stop(runtime: Runtime, claim: Claim, status: str, error: str, others: str = "") -> list[Nudge]:
    if others:
        import json  # noqa: PLC0415  only on this rare path

        parts = json.loads(error)
        parts["message"] = f"{parts.get('message', '')}{others}"
        error = error_text(parts)
    return runtime.store.patiently(
        lambda: outcomes.stop(
            runtime.store,
            claim.fence,
            status=status,
            error=error,
            failures=claim.attempt.failures,
            undo_lease_seconds=runtime.undo_lease_seconds,
        ),
        seconds=PATIENCE_SECONDS,
    )
