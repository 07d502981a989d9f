"""The kinds of events: what happens to threads and their approvals, and what nodes tell the world."""

from __future__ import annotations

from keepstep.errors import InvalidInput

EMITTED = "node.emitted"
STARTED, THREAD_WAITING, THREAD_BLOCKED = "thread.started", "thread.waiting", "thread.blocked"
THREAD_DONE, THREAD_FAILED, THREAD_CANCELLED = "thread.done", "thread.failed", "thread.cancelled"
PAUSED, RESUMED, RETRIED = "thread.paused", "thread.resumed", "thread.retried"
OPENED, REMINDED = "approval.opened", "approval.reminder"
REASSIGNED, CLOSED = "approval.reassigned", "approval.closed"
KINDS = {
    STARTED: "A run has begun.",
    THREAD_WAITING: "A node run waits: for people, a signal, a time or a child. It holds no worker.",
    THREAD_BLOCKED: "The thread cannot go on before somebody has dealt with the error.",
    THREAD_DONE: "A run has ended well.",
    THREAD_FAILED: "A run has failed, and what it did was undone where it can be.",
    THREAD_CANCELLED: "A run was cancelled.",
    PAUSED: "Somebody has paused the thread: it takes no other step.",
    RESUMED: "Somebody has taken the pause away.",
    RETRIED: "A run that had failed, was blocked or cancelled goes on.",
    OPENED: "People are asked: a new question, or one that was withdrawn and is asked again.",
    REMINDED: "Nobody has answered yet, and the node wanted people to be reminded.",
    REASSIGNED: "Others are asked: somebody has handed the question on, or nobody had answered in time.",
    CLOSED: "A question is open no more: decided, expired or withdrawn.",
    EMITTED: "A node has told the world something (`ctx.emit`).",
}
"""What each kind of event says."""


def checked(kind: str) -> str:
    """Return a kind, `*`, or the beginning of some (`approval.*`); raise `InvalidInput` when it is none."""
    beginning = kind.removesuffix("*")
    is_pattern = kind.endswith("*") and (not beginning or beginning.endswith("."))
    if kind not in KINDS and not (is_pattern and any(each.startswith(beginning) for each in KINDS)):
        message = f"kind: there is no event {kind!r}: use one of {', '.join(KINDS)}, or approval.* and the like"
        raise InvalidInput(message)
    return kind
