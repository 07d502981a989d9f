"""The codes by which a worker refuses commands: part of the contract, so each is told in the documents of it."""

from __future__ import annotations

from typing import Any

from keepstep import errors
from keepstep.errors import KeepstepError

REFUSALS: tuple[tuple[type[KeepstepError], str], ...] = (
    (errors.InvalidMessage, "any: a field is missing, unknown or of another kind; the message names its path"),
    (errors.UnsupportedVersion, "any: `v` is a version that this worker does not know"),
    (errors.TooLarge, "any: the message is over `message_bytes_max`; `signal`: too many that nobody has asked for"),
    (errors.Unauthenticated, "any: it is not signed, or its signature, audience, times or id do not hold"),
    (errors.KeyNotTrusted, "any: the key may not speak for this tenant, verb, principal or role"),
    (errors.Forbidden, "any: `by` is not the token's `sub`"),
    (errors.NotFound, "there is no thread, approval, effect or schedule of that name or id, or none of that tenant"),
    (errors.Ambiguous, "several graphs have a thread of that name, or the thread asks several things; all are named"),
    (errors.Conflict, "the id was used for another command, or others have approved other arguments or another choice"),
    (errors.NothingAsked, "`decide` by `thread`: it asks nothing yet"),
    (errors.ApprovalClosed, "`decide`: the question is closed; by whom is said"),
    (errors.ApprovalExpired, "`decide`: the time to decide has run out"),
    (errors.NotAsked, "`decide`, signed: `sub` is none of those asked and has none of the roles asked"),
    (
        errors.SelfApproval,
        "`decide`: `by` has started the run, and the rule is that others approve, answer or delegate",
    ),
    (errors.AlreadyCounted, "`decide`: the same person, or another in the same place, has decided otherwise before"),
    (errors.InvalidInput, "a part does not belong to what is asked, for instance an answer to an approval"),
    (errors.StateError, "input, values, answer or arguments do not fit; the message names the path"),
    (errors.NotStorable, "a value cannot be stored exactly; the message names its path"),
    (errors.UnknownGraph, "`start`, `schedule`: no worker carries a graph of that name"),
    (errors.NotCarried, "`edit`, `resolve`: no worker carries the thread's graph in its version"),
    (errors.RunInProgress, '`start` with `if_running` "reject": the thread has a run that has not ended'),
    (errors.WrongStatus, "the status of the thread or of the effect does not allow it"),
    (errors.RunUndone, "`control`: what the run did was undone, so that it cannot go on"),
    (errors.StepRunning, "`edit`: the step is running"),
    (errors.StaleEdit, "`edit`: the thread has moved on since `expect`"),
    (errors.InvalidSchedule, "`schedule`: its times cannot be used; the message names the field"),
    (KeepstepError, "a defect: its kind is in the worker's log as `command_failed`"),
)
"""Each with when it comes."""


def markdown() -> str:
    """Return the table of docs/messages.md."""
    rows = ["| code | when | worth sending again |", "|---|---|---|"]
    again = {True: "yes, a little later", False: "no"}
    rows += [f"| `{each.code}` | {when} | {again[each.retryable]} |" for each, when in REFUSALS]
    return "\n".join(rows) + "\n"


def listed() -> list[dict[str, Any]]:
    """Return the codes for docs/asyncapi.json."""
    return [{"code": each.code, "when": when, "retryable": each.retryable} for each, when in REFUSALS]
