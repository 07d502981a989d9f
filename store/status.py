"""The thread's statuses and which may follow which: the one place that says so.

"Running" is not among them: it is `ready` with a live lease, so that a crash leaves nothing to be undone.
"""

from __future__ import annotations

from typing import Final

from keepstep.store.schema import BLOCKED, CANCELLED, DONE, FAILED, READY, WAITING

TRANSITIONS: Final[dict[str, dict[str, str]]] = {
    READY: {
        READY: "a step was committed, a retry was put off, or what a failed run did is being undone",
        WAITING: "the step parked on waits, or was fanned out",
        BLOCKED: "the step needs an operator",
        DONE: "the run finished and no other is queued",
        FAILED: "a node has no attempts left, or the step limit was reached, and what is to be undone was",
        CANCELLED: "somebody cancelled it",
    },
    WAITING: {
        READY: "what it waited for has come, or the last node run ended",
        CANCELLED: "somebody cancelled it",
    },
    BLOCKED: {
        READY: "an operator said retry",
        WAITING: "an operator said retry, and node runs of a fanned-out step go on",
        CANCELLED: "somebody cancelled it",
    },
    DONE: {READY: "a new run was started"},
    FAILED: {
        READY: "somebody said retry, or started a new run",
        WAITING: "somebody said retry, and node runs of a fanned-out step go on",
        CANCELLED: "somebody cancelled it",
    },
    CANCELLED: {
        READY: "somebody said retry, or started a new run",
        WAITING: "somebody said retry, and node runs of a fanned-out step go on",
    },
}
