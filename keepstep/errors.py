"""Every error Keepstep raises, as one tree.

A class's docstring is the message used when it is raised without one. `code` is stable, machine-readable and what a
refused command's reply, a thread's `error` column and the CLI's `--json` carry. `retryable` says whether sending or
running the same thing again can help.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar


class KeepstepError(Exception):
    """Something went wrong in Keepstep."""

    code: ClassVar[str] = "error"
    retryable: ClassVar[bool] = False

    def __init__(self, message: str | None = None) -> None:
        super().__init__(message or (type(self).__doc__ or "").strip().splitlines()[0])

    @property
    def message(self) -> str:
        """The error's text, without its type."""
        return str(self.args[0])


# --- what the caller said was wrong: nothing was written ---


class InvalidInput(KeepstepError):
    """The input was refused; nothing was changed."""

    code = "invalid_input"


class GraphError(InvalidInput):
    """The graph's definition does not hold together."""

    code = "graph"


class UnknownGraph(InvalidInput):
    """No worker carries a graph of that name."""

    code = "unknown_graph"


class NotCarried(UnknownGraph):
    """No worker carries the thread's graph in its version."""

    code = "not_carried"

    elsewhere = False
    """Whether another live worker carries it."""


class StateError(InvalidInput):
    """A state or an update does not fit the graph's state schema."""

    code = "state"


class ToolArguments(StateError):
    """The arguments of a call do not fit the tool; nothing was called."""

    code = "tool_arguments"


class ConflictingWrites(StateError):
    """Two node runs of one super-step wrote one key that has no reducer."""

    code = "conflicting_writes"


class NotStorable(InvalidInput):
    """A value cannot be stored exactly; the message names its path."""

    code = "not_storable"


class TooLarge(InvalidInput):
    """A value or a message is over its limit."""

    code = "too_large"


class InvalidMessage(InvalidInput):
    """A message does not follow the contract."""

    code = "invalid_message"


class UnsupportedVersion(InvalidMessage):
    """A message follows a version of the contract that this worker does not know."""

    code = "unsupported_version"


class InvalidSettings(InvalidInput):
    """A setting is unknown or has a value that cannot be used."""

    code = "invalid_settings"


class InvalidSchedule(InvalidInput):
    """A schedule's times cannot be used."""

    code = "invalid_schedule"


class PolicyError(InvalidInput):
    """A policy cannot be used; the message names its file and line."""

    code = "policy"


class NotFound(InvalidInput):
    """There is nothing of that name or id."""

    code = "not_found"


class UnknownTool(NotFound):
    """The graph has no tool of that name."""

    code = "unknown_tool"


class NothingAsked(NotFound):
    """The thread asks nothing now; it may ask later."""

    code = "nothing_asked"
    retryable = True


class Ambiguous(InvalidInput):
    """More than one thing answers to that name."""

    code = "ambiguous"


class Conflict(InvalidInput):
    """The request contradicts what is already recorded."""

    code = "conflict"


class Unauthenticated(InvalidInput):
    """It is not known who sent this."""

    code = "unauthenticated"


class Forbidden(InvalidInput):
    """Whoever sent this may not."""

    code = "forbidden"


class KeyNotTrusted(Forbidden):
    """The key that signed this is not trusted with it."""

    code = "key_not_trusted"


class NotAsked(Forbidden):
    """Whoever decides is not among those asked."""

    code = "not_asked"


class SelfApproval(Forbidden):
    """Whoever started the run may not decide on what it asks."""

    code = "self_approval"


class RunInProgress(Conflict):
    """The thread has a run that has not ended."""

    code = "run_in_progress"


class AlreadyCounted(Conflict):
    """The person, or somebody in whose place they are asked, has decided before: that counts once."""

    code = "already_counted"


class ApprovalClosed(Conflict):
    """The approval is no longer open."""

    code = "approval_closed"


class ApprovalExpired(ApprovalClosed):
    """The approval's time has run out."""

    code = "approval_expired"


class WrongStatus(Conflict):
    """The thread's status does not allow that."""

    code = "wrong_status"


class RunUndone(WrongStatus):
    """What the run did was undone: the thread can be given another run, but this one cannot go on."""

    code = "run_undone"


class StepRunning(Conflict):
    """The thread's step is running."""

    code = "step_running"
    retryable = True


class StaleEdit(Conflict):
    """The thread has moved on since its state was looked at."""

    code = "stale_edit"


# --- what happened to a step: recorded on the thread ---


class StepError(KeepstepError):
    """A super-step could not go on."""

    code = "step"


class NodeFailed(StepError):
    """A node failed and has no attempts left."""

    code = "node_failed"


class NodeTimeout(StepError):
    """A node ran longer than its timeout."""

    code = "node_timeout"
    retryable = True


class StepLimit(StepError):
    """The run reached its step limit."""

    code = "step_limit"


class ChildFailed(StepError):
    """A child that was joined did not end well.

    `thread` is the child's, `status` how its run ended (`failed` or `cancelled`), `error` why: {code, message, …}.
    """

    code = "child_failed"

    def __init__(
        self,
        message: str | None = None,
        *,
        thread: str = "",
        status: str = "failed",
        error: Mapping[str, object] | None = None,
    ) -> None:
        super().__init__(message)
        self.thread = thread
        self.status = status
        self.error = dict(error or {})


class EffectConflict(StepError):
    """One effect key was used for different calls."""

    code = "effect_conflict"


class AnswerLost(StepError):
    """A call to the outside was sent and its answer was lost: it may have happened.

    For functions to raise that know it better than their exception tells.
    """

    code = "answer_lost"
    # Of an effect that may be repeated, and of a lookup; one at risk never comes to a retry without being asked about.
    retryable = True


class CallTimeout(AnswerLost):
    """A tool call ran longer than its timeout: it may have happened."""

    code = "call_timeout"
    retryable = True


class CallRefused(StepError):
    """A tool call was not let through; the tool was not called."""

    code = "call_refused"


class CallDenied(CallRefused):
    """A policy forbids the tool call. `policies` are the ids of those that decided, `reason` is for people."""

    code = "call_denied"

    def __init__(self, message: str | None = None, *, policies: Sequence[str] = (), reason: str = "") -> None:
        super().__init__(message)
        self.policies = tuple(policies)
        self.reason = reason


class CallRejected(CallRefused):
    """People did not approve the tool call. `verdict` is `reject` or `expired`, `by` and `comment` say who and why."""

    code = "call_rejected"

    def __init__(
        self, message: str | None = None, *, verdict: str = "reject", by: str | None = None, comment: str | None = None
    ) -> None:
        super().__init__(message)
        self.verdict = verdict
        self.by = by
        self.comment = comment


class CallCancelled(StepError):
    """A prepared tool call failed for good and what was prepared is cancelled; `reason` is the failure's text."""

    code = "call_cancelled"

    def __init__(self, message: str | None = None, *, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason


class EffectGivenUp(StepError):
    """An effect whose outcome was unknown was given up by a person; the node decides what that means."""

    code = "effect_given_up"


class PutOff(StepError):
    """The node run cannot go on now, which is nobody's failure; it runs again in `seconds` and holds no worker."""

    code = "put_off"

    def __init__(self, message: str = "", *, seconds: float = 0.0) -> None:
        super().__init__(message)
        self.seconds = seconds


class TransactionRefused(StepError):
    """A transaction was asked for something that its block cannot do."""

    code = "transaction_refused"


class UnknownDatabase(StepError):
    """A transaction names a database that the graph does not register."""

    code = "unknown_database"


class JournalMissing(StepError):
    """A database has no journal table; `keepstep db install-journal` makes it."""

    code = "journal_missing"


class EffectPending(PutOff):
    """An effect may still be under way outside; the node run is put off until it must have settled."""

    code = "effect_pending"


class RateLimited(StepError):
    """The tool refused the call, which did not happen: there were too many.

    A tool raises it itself; `retry_after` says in how many seconds there may be another call, None: it was not said.
    """

    code = "rate_limited"
    retryable = True

    def __init__(self, message: str | None = None, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class SecretNotFound(StepError):
    """A secret's reference leads to nothing."""

    code = "secret_not_found"


class ThreadBlocked(StepError):
    """The thread is blocked and needs an operator."""

    code = "blocked"


class EffectUnknown(ThreadBlocked):
    """An effect was begun and nobody knows whether it happened."""

    code = "effect_unknown"
    asking_failed: Exception | None = None
    """Why the outside could not be asked: asking again may help."""


class Diverged(ThreadBlocked):
    """A retry went another way than the attempt before it."""

    code = "diverged"


class UndoUnavailable(ThreadBlocked):
    """The function that undoes an effect is not known to the worker."""

    code = "undo_unavailable"


class UndoFailed(ThreadBlocked):
    """An effect of a failed run could not be undone, and has no attempts left."""

    code = "undo_failed"


class WorkerLost(ThreadBlocked):
    """The node killed its worker too often."""

    code = "worker_lost"


class HistoryCorrupt(ThreadBlocked):
    """A stored checkpoint does not match its digest."""

    code = "history_corrupt"


class ArtifactCorrupt(ThreadBlocked):
    """A large value is not where it was put, or is not what was put there."""

    code = "artifact_corrupt"


class UnknownType(ThreadBlocked):
    """Stored data names a type that the graph's schema does not declare."""

    code = "unknown_type"


class Undecided(KeepstepError):
    """The run waits for something that nobody gave."""

    code = "undecided"


# --- the world around it ---


class StaleLease(KeepstepError):
    """The lease was lost; this attempt writes nothing more."""

    code = "stale_lease"


class Unavailable(KeepstepError):
    """Something Keepstep needs cannot be reached."""

    code = "unavailable"
    retryable = True


class BrokerUnavailable(Unavailable):
    """The broker cannot be reached."""

    code = "broker_unavailable"


class DatabaseUnavailable(Unavailable):
    """The database cannot be reached."""

    code = "database_unavailable"


class ArtifactsUnavailable(DatabaseUnavailable):
    """The storage of large values, a part of the database kept elsewhere, cannot be reached."""

    code = "artifacts_unavailable"


class NotConfirmed(Unavailable):
    """No worker has confirmed the message in time; it may still be accepted later."""

    code = "not_confirmed"


class SecretUnavailable(Unavailable):
    """Where secrets are kept cannot be reached."""

    code = "secret_unavailable"


class DuplicateRow(KeepstepError):
    """Another transaction wrote the same row first; the transaction can be run again and will find it."""

    code = "duplicate_row"
    retryable = True


class SchemaMismatch(KeepstepError):
    """The database's schema is not the one this release knows."""

    code = "schema_mismatch"


def by_code(code: str) -> type[KeepstepError]:
    """Return the error class of `code`, or `KeepstepError` when this release does not know it."""
    todo: list[type[KeepstepError]] = [KeepstepError]
    while todo:
        candidate = todo.pop()
        if candidate.code == code:
            return candidate
        todo.extend(candidate.__subclasses__())
    return KeepstepError
