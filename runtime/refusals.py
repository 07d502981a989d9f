"""Commands that were refused since their sender may not: kept in the audit of the thread that they were about.

Nothing of such a command holds, so what it says of itself is written down as said, never as known.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import structlog

from keepstep.errors import Forbidden, KeepstepError, Unauthenticated, Unavailable
from keepstep.runtime.environment import Runtime
from keepstep.store import refusals, threads, waits
from keepstep.store.engine import Transaction
from keepstep.store.errortext import error_text

log = structlog.get_logger("keepstep.worker")

UNKNOWN = "unknown"
"""Who sent a command that nobody vouches for."""
_REASON_CHARACTERS_MAX = 1000


@dataclass(frozen=True, slots=True)
class Said:
    """What a refused command says, as far as it can be read; each up to 200 printable characters, or None."""

    id: str | None
    tenant: str | None
    verb: str | None
    approval: str | None = None
    thread: str | None = None
    graph: str | None = None
    verdict: str | None = None
    by: str | None = None


def record(runtime: Runtime, said: Said, sender: str | None, error: KeepstepError) -> None:
    """Write down that a command was refused, when it is about a thread that is there; else the log alone has it.

    `sender`: who it is by a signature that holds, or by what an unsigned command that may be taken says; None: nobody
    knows. The same command twice is written once. What cannot be written is logged: the refusal stands all the same.
    """
    if not isinstance(error, Forbidden | Unauthenticated) or said.id is None or said.tenant is None:
        return
    detail = {name: value for name, value in asdict(said).items() if value is not None and name not in ("id", "tenant")}
    detail |= {"code": error.code, "message": error.message[:_REASON_CHARACTERS_MAX], "command": said.id}
    try:
        with runtime.store.transaction() as transaction:
            thread_id = _thread(transaction, said, said.tenant)
            if thread_id is not None:
                refusals.record(
                    transaction,
                    tenant=said.tenant,
                    thread_id=thread_id,
                    actor=sender or UNKNOWN,
                    command_id=said.id,
                    detail=error_text(detail),
                )
    except Unavailable as unavailable:
        log.warning("refusal_not_audited", command_id=said.id, reason=unavailable.message)


def _thread(transaction: Transaction, said: Said, tenant: str) -> str | None:
    """Return the thread that a command is about, of its tenant; None when there is none, or several."""
    if said.approval is not None:
        return waits.thread_of_approval(transaction, said.approval, tenant)
    if said.thread is None:
        return None
    named = threads.named(transaction, tenant, said.thread)
    found = [thread_id for thread_id, _, agent in named if said.graph in (None, agent)]
    return found[0] if len(found) == 1 else None
