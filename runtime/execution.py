"""One node run: its attempts in this process, each with its time, its journal and its waits."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import structlog
from tenacity import RetryCallState, Retrying, retry_if_result

from keepstep.crashpoints import Died
from keepstep.errors import (
    DatabaseUnavailable,
    EffectUnknown,
    NodeTimeout,
    PutOff,
    StaleLease,
    StepError,
    ThreadBlocked,
)
from keepstep.runtime import planner, settlement
from keepstep.runtime.children import ChildBook
from keepstep.runtime.compiled import CompiledGraph, Node
from keepstep.runtime.context import AsyncContext, Attempt, Context
from keepstep.runtime.environment import Runtime
from keepstep.runtime.gateway import Gateway
from keepstep.runtime.history import Channels
from keepstep.runtime.journal import Journal
from keepstep.runtime.leaselook import LeaseLook
from keepstep.runtime.outcome import (
    Blocked,
    Done,
    Failed,
    NodeOverdue,
    Outcome,
    Parked,
    Retry,
    Waiting,
    described,
    ungrouped,
)
from keepstep.runtime.place import Place
from keepstep.runtime.planner import Cursor, DueRun, NodeResult
from keepstep.runtime.secretbook import GuardedCodec, SecretBook
from keepstep.runtime.transactions import TransactionBook
from keepstep.runtime.waits import WaitBook
from keepstep.runtime.watchdog import alarm
from keepstep.store import events, leases
from keepstep.store import waits as stored_waits
from keepstep.store.claims import Claim
from keepstep.store.events import NewEvent

log = structlog.get_logger("keepstep.step")
_UNAVAILABLE_SECONDS = 5.0
_loops = threading.local()


@dataclass
class NodeRun:
    """A node run to be executed under a lease."""

    graph: CompiledGraph
    run: DueRun
    claim: Claim
    step: str
    present: Callable[[], tuple[Any, Any]]
    """Returns, afresh for each attempt, what the node is handed and what it is judged against (see `result_of`)."""
    starts: int
    failures: int
    emitted: list[NewEvent]
    """Filled by the attempt that counts."""
    failures_before: Callable[[], Sequence[Mapping[str, Any]]] | None = None
    """Looks up what failed in the super-step before, where the node run does not bring it along."""
    deadline: float = 0.0
    """When the time of the attempt under way ends, by this process's clock."""

    @property
    def node(self) -> Node:
        """The node."""
        return self.graph.node_at(self.run.node)


def of_state(graph: CompiledGraph, cursor: Cursor, run: DueRun, channels: Channels) -> Callable[[], tuple[Any, Any]]:
    """Return how a node run due in a cursor sees its state."""
    seen = planner.state_for(graph, cursor, run, channels)
    return lambda: (planner.presented(graph, cursor, run, channels), seen)


def execute(runtime: Runtime, node_run: NodeRun) -> Outcome:
    """Run a node until its outcome is known: short retries here, everything longer is left to the database.

    Raises `StaleLease` when the lease was lost, `Unavailable` when the database stayed away.
    """
    outcome = _attempt(runtime, node_run)
    longest = runtime.settings.retry_in_place_seconds_max
    if not _is_short(outcome, longest):
        return outcome
    first = [outcome]

    def again() -> Outcome:
        if first:
            return first.pop()
        # Counted before the body runs, so that a crash in it is not forgotten.
        node_run.starts = leases.begin_attempt(runtime.store, node_run.claim.fence, failures=node_run.failures)
        return _attempt(runtime, node_run)

    retrying = Retrying(
        retry=retry_if_result(lambda result: _is_short(result, longest)),
        wait=_planned_wait,
        sleep=time.sleep,
    )
    settled: Outcome = retrying(again)
    return settled


def _is_short(outcome: Outcome, longest: float) -> bool:
    return isinstance(outcome, Retry) and outcome.delay_seconds <= longest


def _planned_wait(state: RetryCallState) -> float:
    result: Any = state.outcome.result() if state.outcome else None
    return float(result.delay_seconds) if isinstance(result, Retry) else 0.0


def _attempt(runtime: Runtime, node_run: NodeRun) -> Outcome:
    """Enter the node's body once."""
    timeout = runtime.timeout(node_run.node)
    deadline = node_run.deadline = time.monotonic() + timeout
    attempt = _prepared(runtime, node_run, deadline)
    try:
        result = _result(runtime, node_run, attempt, timeout, deadline)
    except StaleLease:
        raise
    except BaseException as error:
        # User code may raise anything; these alone are about the process, not about the node.
        if isinstance(error, KeyboardInterrupt | Died):
            raise
        if runtime.on_failure is not None:
            runtime.on_failure(error)
        return _outcome_of(error, node_run, attempt, timeout)
    node_run.emitted[:] = attempt.events
    return Done(result)


def _result(runtime: Runtime, node_run: NodeRun, attempt: Attempt, timeout: float, deadline: float) -> NodeResult:
    """Return what the node returned, checked; raises whatever ends the attempt otherwise."""
    ours = runtime.end_process is not None
    # The state's own types run code of the user's, too.
    with runtime.watchdog.watch(
        timeout + runtime.settings.timeout_grace_seconds, lambda: _write_off(runtime, node_run), runtime.end
    ):
        given, seen = node_run.present()
        returned = _called(node_run.node, given, attempt, timeout, process_is_ours=ours)
        if time.monotonic() > deadline:
            raise NodeOverdue  # a node that could not be interrupted ends as one that was
        result = planner.result_of(node_run.graph, node_run.run, returned, seen, given)
    # Refused now, while the node can be named, and not when the whole step is committed.
    attempt.codec.encode(result.to_plain().get("update", {}))
    if attempt.secrets.masker:
        attempt.codec.encode(result.to_plain(), path="$result")  # where it goes to, and with what input
    attempt.journal.check_course(before="its end")
    attempt.journal.check_settled()
    attempt.transactions.check_settled()
    attempt.waits.check_course()
    return result


def _outcome_of(error: BaseException, node_run: NodeRun, attempt: Attempt, timeout: float) -> Outcome:
    """Return what an attempt that did not return came to."""
    run = node_run.run
    match error:
        case Parked():
            try:
                attempt.journal.check_course(before="it parked")
                attempt.journal.check_settled()
                attempt.transactions.check_settled()
            except (ThreadBlocked, PutOff) as blocked:
                return _held_up(node_run, blocked, attempt)
            except StepError as left_open:
                return _failed(node_run, left_open, attempt)
            node_run.emitted[:] = attempt.events
            return Waiting(attempt.waits.with_those_beside(error.waits))
        case ThreadBlocked() | PutOff():
            return _held_up(node_run, error, attempt)
        case DatabaseUnavailable():
            # The store's failure, not the node's: it costs no attempt, and no worker waits for the store.
            text = described(error, masker=attempt.secrets.masker, node=run.node, run=run.id)
            return Retry(_UNAVAILABLE_SECONDS, node_run.failures, text)
        case NodeOverdue():
            message = f"node {run.id!r} ran longer than its timeout of {timeout:g} s"
            return _failed(node_run, NodeTimeout(message), attempt)
        case SystemExit() if type(error) is not SystemExit:  # a kind of its own is how a worker is told to stop
            raise error
        case _:
            left = StepError("the node called sys.exit()") if isinstance(error, SystemExit) else error
            return _failed(node_run, left, attempt)


def _held_up(node_run: NodeRun, error: ThreadBlocked | PutOff, attempt: Attempt) -> Outcome:
    """Return what becomes of an attempt that must not go on, whatever the node made of it."""
    text = described(error, masker=attempt.secrets.masker, node=node_run.run.node, run=node_run.run.id)
    if isinstance(error, PutOff):
        # Nobody's failure: what may still be under way outside, or was too much for it, is given its time.
        return Retry(error.seconds, node_run.failures, text)
    retry = node_run.node.retry
    failed = error.asking_failed if isinstance(error, EffectUnknown) else None
    if failed is None or not retry.allows(failed, node_run.failures + 1):
        return Blocked(text)
    # Only the asking failed: it is asked again as the node's retries say; nothing was called and nothing is.
    node_run.failures += 1
    return Retry(retry.wait(node_run.failures, random.random), node_run.failures, text)


def _prepared(runtime: Runtime, node_run: NodeRun, deadline: float) -> Attempt:
    thread, fence, run = node_run.claim.thread, node_run.claim.fence, node_run.run
    secrets = SecretBook(runtime.secrets, thread.tenant)
    codec = GuardedCodec(runtime.codec(node_run.graph), secrets.masker)
    # A node run that is entered for the first time has no past that would have to be looked up.
    load = node_run.starts > 1
    stored = node_run.claim.checkpoints
    place = Place(
        tenant=thread.tenant,
        application=thread.application,
        agent=thread.agent,
        thread=thread.name,
        thread_id=thread.id,
        run=thread.run_id or "",
        checkpoint=stored[-1].id if stored else "",
        step=node_run.step,
        node=run.node,
        node_run=run.id,
        attempt=node_run.starts,
    )
    journal = Journal(
        runtime.store,
        fence,
        tenant=thread.tenant,
        step=node_run.step,
        run=run.id,
        codec=codec,
        masker=secrets.masker,
        load=load,
        remaining=lambda: deadline - time.monotonic(),
        run_id=thread.run_id,
        artifacts=runtime.large_values,
    )
    earlier = functools.partial(stored_waits.of_run, runtime.store, thread.id, node_run.step, run.id)
    book = WaitBook(codec, earlier if load else None)
    children = ChildBook(runtime, fence, place, journal, book, priority=thread.priority, load=load)
    failures = functools.cache(node_run.failures_before or (lambda: run.failures))
    transactions = TransactionBook(
        runtime.store,
        fence,
        journal,
        node_run.graph.databases,
        tenant=thread.tenant,
        codec=codec,
        remaining=lambda: deadline - time.monotonic(),
    )
    gateway = Gateway(
        place,
        journal,
        book,
        secrets,
        runtime.rates,
        lambda: runtime.policies,
        node_run.graph.tools_at(run.node),
        runtime.settings.retry_in_place_seconds_max,
    )
    attempt = Attempt(
        place,
        journal,
        book,
        children,
        transactions,
        codec,
        secrets,
        gateway,
        failures,
        LeaseLook(runtime.store, fence),
        runtime.responses,
    )
    if load:
        attempt.published = functools.cache(
            lambda: events.emitted_by(runtime.store, thread.id, node_run.step, fence.seq, run.id)
        )
    return attempt


def _called(node: Node, given: object, attempt: Attempt, timeout: float, *, process_is_ours: bool) -> object:
    function = node.function
    if function is None:  # a subgraph has no body: the planner never makes it due
        message = f"node {node.name!r} has no function"
        raise TypeError(message)
    if not node.is_async:
        try:
            with alarm(timeout, process_is_ours=process_is_ours):
                return function(given, Context(attempt))
        finally:
            attempt.close()
    return event_loop().run(_in_time(function(given, AsyncContext(attempt)), timeout, attempt))


async def _in_time(body: Any, seconds: float, attempt: Attempt) -> object:
    limit = asyncio.timeout(seconds)
    try:
        async with limit:
            return await body
    except TimeoutError:
        if limit.expired():
            raise NodeOverdue from None
        raise
    except Parked:
        await _acted(attempt)
        raise
    except BaseExceptionGroup as group:
        error = ungrouped(group)
        if isinstance(error, Parked):
            await _acted(attempt)
        raise error from group
    finally:
        attempt.close()
        # What was begun beside the node's last line ends with it: two attempts never act at once.
        await _acted(attempt)


async def _acted(attempt: Attempt) -> None:
    """Wait for what the node has asked for and does not wait for any more.

    Before a node parks, too: what it asked for beside the wait is asked for, as far as it was in an earlier attempt.
    """
    while attempt.acting:
        await asyncio.wait(attempt.acting)


def event_loop() -> asyncio.Runner:
    """Return this thread's event loop: made once, so that clients which nodes keep open stay usable."""
    runner: asyncio.Runner | None = getattr(_loops, "runner", None)
    if runner is None:
        runner = asyncio.Runner()
        _loops.runner = runner
    return runner


def _failed(node_run: NodeRun, error: BaseException, attempt: Attempt) -> Outcome:
    node, run = node_run.node, node_run.run
    node_run.failures += 1
    masker = attempt.secrets.masker
    text = described(error, masker=masker, node=run.node, run=run.id)
    retriable = error if isinstance(error, Exception) else RuntimeError(str(error))
    if node.retry.allows(retriable, node_run.failures):
        delay = node.retry.wait(node_run.failures, random.random)
        log.info(
            "node_retry", run=run.id, failures=node_run.failures, delay_seconds=round(delay, 3), error=text["type"]
        )
        return Retry(delay, node_run.failures, text)
    try:
        attempt.journal.check_course(before="its failure")
    except (ThreadBlocked, PutOff) as blocked:
        return _held_up(node_run, blocked, attempt)
    if node.on_error == "continue":
        node_run.emitted[:] = attempt.events
        return Done(NodeResult(error=planner.failure_of(run, error, masker.text)))
    return Failed(node_run.failures, text)


def _write_off(runtime: Runtime, node_run: NodeRun) -> None:
    """Write off an attempt that does not end, before the process that it holds is ended."""
    if runtime.end_process is None:
        return
    run = node_run.run
    message = f"node {run.id!r} ran longer than its timeout and did not end when told; its process was ended"
    log.error("node_hung", thread=node_run.claim.thread.name, run=run.id)
    error = NodeTimeout(message)
    failures = node_run.failures + 1
    with contextlib.suppress(Exception):  # the process is ended in any case; the lease's deadline covers the rest
        text = described(error, node=run.node, run=run.id)
        retry = node_run.node.retry
        again = retry.allows(error, failures)
        outcome: Outcome = (
            Retry(retry.wait(failures, random.random), failures, text) if again else Failed(failures, text)
        )
        settled = settlement.settle(runtime, node_run.claim, node_run.step, run.id, outcome, (), failures=failures)
        runtime.publish(settled)
