"""The ways out of a thread that has stopped, one for each error code; docs/operating.md says the same at length."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from keepstep.cli.session import Session

_OF_CODES = {
    "step_limit": "{retry} --step-limit N",
    "child_failed": "what the child came to stands ({show}): once that is mended, give the thread another run",
    "worker_lost": "mend what takes its worker down, then {retry}",
    "effect_unknown": "find out whether it happened, and say so: {effects} lists it with the commands; "
    "a result that did not fit is given again: {resolve} KEY ({journal} shows the key)",
    "undo_failed": "mend what the undo meets, then {retry}; or undo it by hand, and say so: "
    "{resolve} KEY/undo --happened null ({journal} shows the key)",
    "undo_unavailable": "deploy code that declares the undo, then {retry}",
    "diverged": "see what the earlier attempt did ({show}). If an edit of the state led elsewhere: edit it back, "
    "{retry}. Else: {cancel}",
    "history_corrupt": "restore the stored checkpoint: nothing runs on it",
    "artifact_corrupt": "restore the value that the error names, then {retry}",
    "unknown_type": "deploy code that declares the type, then {retry}",
    "graph": "deploy code that has the node, then {retry}",
    "internal": "a defect in Keepstep: report it with the thread's error",
}
_OF_STATUSES = {
    "failed": "once its cause is mended: {retry}",
    "blocked": "look at it ({show}), then {retry} or {cancel}",
}


def way_out(session: Session, thread: str, status: str, error: Any) -> str | None:
    """Return what lets a failed or blocked thread go on; None for others."""
    if status not in _OF_STATUSES:
        return None
    code = error.get("code") if isinstance(error, dict) else None
    # A node that fails with a code of its own is mended in its own way.
    known = status == "blocked" or code in {"step_limit", "child_failed"}
    text = _OF_CODES.get(str(code)) if known else None
    if status == "failed" and isinstance(error, dict) and "undone" in error:
        text = "what its run did was undone ({journal}): once its cause is mended, give the thread another run"
    return (text or _OF_STATUSES[status]).format(
        effects=session.hint("effects"),
        journal=session.hint(f"effects {thread}"),
        resolve=session.hint("resolve"),
        **{verb: session.hint(f"{verb} {thread}") for verb in ("retry", "cancel", "show")},
    )
