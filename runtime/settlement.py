"""Writing down what came of a node run, when that is anything but the commit of the whole step."""

from __future__ import annotations

from collections.abc import Sequence

from keepstep.crashpoints import reach
from keepstep.runtime.environment import Runtime
from keepstep.runtime.outcome import Blocked, Done, Failed, Outcome, Retry, Waiting
from keepstep.store import leases, outcomes
from keepstep.store.claims import Claim
from keepstep.store.errortext import error_text
from keepstep.store.events import NewEvent
from keepstep.store.leases import Nudge
from keepstep.store.schema import BLOCKED, DONE, FAILED

PATIENCE_SECONDS = 600.0
"""How long a finished attempt holds its result while the database is away."""


def settle(
    runtime: Runtime, claim: Claim, step: str, run: str, outcome: Outcome, emitted: Sequence[NewEvent], *, failures: int
) -> list[Nudge]:
    """Write a node run's outcome under its lease; return the nudges that follow from it.

    Raises `StaleLease` when the lease is gone, also when the write had landed but its answer was lost: then the sweep
    finds what is due.
    """
    kind = "park" if isinstance(outcome, Waiting) else "pending_write"
    reach(f"before_{kind}", run)
    nudges = runtime.store.patiently(
        lambda: _written(runtime, claim, step, run, outcome, emitted, failures=failures), seconds=PATIENCE_SECONDS
    )
    reach(f"after_{kind}", run)
    return nudges


def _written(
    runtime: Runtime, claim: Claim, step: str, run: str, outcome: Outcome, emitted: Sequence[NewEvent], *, failures: int
) -> list[Nudge]:
    store, fence = runtime.store, claim.fence
    match outcome:
        case Waiting(waits):
            return outcomes.park(store, fence, step=step, run=run, asked=waits, failures=failures, emitted=emitted)
        case Retry(delay, counted, error):
            text = error_text(error)
            leases.postpone(store, fence, failures=counted, delay_seconds=delay, error=text)
            return []
        case Done(result) if fence.run is not None:
            graph = runtime.graphs[claim.thread.agent, claim.thread.graph_version]
            write = runtime.codec(graph).encode(result.to_plain())
            return _each(
                outcomes.finish_node(store, fence, status=DONE, write=write, failures=failures, emitted=emitted)
            )
        case Done():
            message = "a step that is not fanned out ends by its commit"
            raise TypeError(message)
        case Failed(counted, error):
            return _ended(runtime, claim, FAILED, error_text(error), counted, emitted)
        case Blocked(error):
            return _ended(runtime, claim, BLOCKED, error_text(error), failures, emitted)


def _ended(
    runtime: Runtime, claim: Claim, status: str, error: str, failures: int, emitted: Sequence[NewEvent]
) -> list[Nudge]:
    store, fence = runtime.store, claim.fence
    if fence.run is not None:
        return _each(outcomes.finish_node(store, fence, status=status, error=error, failures=failures, emitted=emitted))
    return outcomes.stop(
        store,
        fence,
        status=status,
        error=error,
        failures=failures,
        emitted=emitted,
        undo_lease_seconds=runtime.undo_lease_seconds,
    )


def _each(nudge: Nudge | None) -> list[Nudge]:
    return [] if nudge is None else [nudge]
