"""Named points at the boundaries of the protocol, at which tests kill the process.

In production they do nothing: two looks at a variable. `KEEPSTEP_CRASH_AT=NAME` arms one of them, and
`KEEPSTEP_CRASH_MARK=FILE` names the file that the first process to reach it creates just before it kills itself with
SIGKILL; later processes find the file and live, so that what was killed can be seen to go on, and a test can see that
the point was reached. `NAME@TEXT` arms the point only where its detail contains the text (a node run's name, say). With
the second variable alone, the point is read from `FILE.next` each time, so that a running worker can be armed.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Final

from keepstep.errors import InvalidSettings

POINTS: Final = {
    "before_claim": "a nudge was received, nothing is claimed yet",
    "after_claim": "the lease is held, the head is loaded",
    "after_begin": "a run's input is committed as a checkpoint, the lease is kept",
    "before_fan_out": "the node runs are planned, none has a row yet",
    "after_fan_out": "every node run has a row, no nudge is published",
    "before_intent": "an effect is about to be begun, its intent is not recorded",
    "after_intent": "the intent is committed, nothing was called",
    "after_response": "a model has answered, its response is not spooled",
    "after_call": "the effect happened, its result is not recorded",
    "after_result": "the effect's result is committed",
    "before_undo": "a run has failed, an effect of it is about to be undone, nothing of that is recorded",
    "after_undo": "an effect is undone and that is recorded, the thread does not know it yet",
    "inside_transaction": "the rows of a transaction are written, it is not committed",
    "after_transaction": "a transaction is committed in another database, its result is not recorded here",
    "before_spawn": "a child is asked for, nothing of it is recorded",
    "after_spawn": "the wish for a child is committed, its thread is not there",
    "after_child_start": "the child's thread is committed, its first step is not nudged",
    "before_deliver": "a child has ended, its parent is not told",
    "after_deliver": "the parent's wait is answered, the parent is not nudged",
    "before_child_cancel": "a parent was cancelled, its child was not",
    "after_child_cancel": "the child of a cancelled parent is cancelled, its own children are not",
    "before_pending_write": "a fanned-out node run ended, its pending write is not recorded",
    "after_pending_write": "the pending write is committed, a nudge may follow",
    "before_park": "the node waits, its waits are not recorded",
    "after_park": "the waits are committed, the lease is released",
    "before_commit": "the step is done, its checkpoint is not committed",
    "inside_commit": "the checkpoint is written, the transaction is not committed",
    "after_commit": "the checkpoint is committed, the next step is not nudged",
    "after_nudge": "the next step is nudged",
    "inside_command": "a command is applied, the transaction is not committed",
    "after_command": "a command is committed, neither acknowledged nor answered nor nudged",
    "before_ack": "a command is committed and answered, not acknowledged",
    "inside_tick": "a schedule's tick has its run and the next is written down, the transaction is not committed",
    "after_tick": "the run of a schedule's tick is committed, its first step is not nudged",
    "after_sweep": "the time or a death made rows due, nothing is published",
    "after_admission": "rows that are due are marked as nudged, nothing is published",
    "after_place": "events have their places in the log, none is published",
    "after_announce": "events are published, nothing says so yet",
    "after_register": "the worker's row is committed, it takes no work yet",
}
"""Every point, and what has happened there."""

hook: Callable[[str, str], None] | None = None
"""Called with every point that is reached and its detail, by a simulation that decides there who stops and who dies."""

_at = os.environ.get("KEEPSTEP_CRASH_AT", "")
_mark = os.environ.get("KEEPSTEP_CRASH_MARK", "")

if _at and (_at.partition("@")[0] not in POINTS or not _mark):
    _message = f"KEEPSTEP_CRASH_AT must be one of {', '.join(POINTS)}, and KEEPSTEP_CRASH_MARK the file it creates"
    raise InvalidSettings(_message)


def _armed() -> tuple[str, str]:
    at = _at
    if not at:
        with contextlib.suppress(FileNotFoundError):
            at = Path(f"{_mark}.next").read_text(encoding="utf-8")
    name, _, detail = at.partition("@")
    return name, detail


class Died(BaseException):
    """What a test raises where a process would have died: nothing may handle it."""


def armed(name: str) -> bool:
    """Tell whether the process is to die at a point."""
    return bool(_mark) and _armed()[0] == name


def reach(name: str, detail: str = "") -> None:
    """Die here if this point is armed and nobody has died at it before."""
    if hook is not None:
        hook(name, detail)
    if not _mark:
        return
    armed_name, text = _armed()
    if armed_name != name or text not in detail:
        return
    try:
        descriptor = os.open(_mark, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    except FileExistsError:
        return
    os.write(descriptor, f"{name} {detail} {os.getpid()}\n".encode())
    os.close(descriptor)
    os.kill(os.getpid(), signal.SIGKILL)
