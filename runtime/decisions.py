"""One person's word on a question: who may give it, what it may say, and when the question is closed by it."""

from __future__ import annotations

import json
from typing import Any, NamedTuple, Protocol

from keepstep.errors import (
    AlreadyCounted,
    Ambiguous,
    ApprovalClosed,
    ApprovalExpired,
    Conflict,
    InvalidInput,
    NotAsked,
    NotFound,
    NothingAsked,
    SelfApproval,
    StateError,
)
from keepstep.runtime import edits, quorums
from keepstep.runtime.codec import view
from keepstep.runtime.environment import Runtime
from keepstep.runtime.meant import one_thread
from keepstep.runtime.principals import Principal
from keepstep.runtime.quorums import Word
from keepstep.store import waits
from keepstep.store.engine import Transaction
from keepstep.store.leases import Nudge
from keepstep.store.schema import ENDED
from keepstep.store.waits import ApprovalState, DecisionState

APPROVE, REJECT, ANSWER = "approve", "reject", "answer"
DELEGATE, REQUEST_CHANGES = quorums.DELEGATE, "request_changes"
VERDICTS = (APPROVE, REJECT, ANSWER, DELEGATE, REQUEST_CHANGES)
_ASSIGNED_MAX = 100


class DecideMessage(Protocol):
    """One person's word on an approval."""

    id: str
    tenant: str
    approval: str | None
    application: str
    graph: str | None
    thread: str | None
    verdict: str
    arguments: Any
    answer: Any
    to: list[str] | None
    by: str
    comment: str | None


class Decided(NamedTuple):
    """What a decision came to."""

    thread_id: str
    nudges: list[Nudge]
    detail: dict[str, Any]
    """For the audit: what was asked, and what was approved in its place, too."""
    duplicate: bool = False
    """The same person had said the same before; nothing was changed."""


def decide(runtime: Runtime, transaction: Transaction, message: DecideMessage, principal: Principal | None) -> Decided:
    """Write down one person's word, and go on from it when it closes the question.

    Raises `NotFound`, `NothingAsked`, `Ambiguous`, `ApprovalClosed`, `ApprovalExpired`, `NotAsked`, `SelfApproval`,
    `AlreadyCounted`, `Conflict`, `InvalidInput` and `StateError`; then nothing was written. `principal`: whose word it
    is, when it is signed.
    """
    found = _meant(transaction, message)
    question = view(found.question)
    edited = edits.untagged(question["arguments"], message.arguments)
    stored = {
        "verdict": message.verdict,
        "arguments": edited,
        "answer": message.answer,
        "by": message.by,
        "comment": message.comment,
    }
    if message.to is not None:
        stored["to"] = message.to
    earlier = waits.decisions(transaction, found.id)
    words = [Word.of(view(each.payload)) for each in earlier]
    place = quorums.place_of(message.by, principal, found.put_to(question["to"]), words)
    if place != message.by:
        stored["place"] = place
    decision = DecisionState(message.id, message.by, message.verdict, runtime.plain_codec.encode(stored))
    said = _said(decision.payload)
    if any(each.by == message.by and _said(each.payload) == said for each in earlier):
        return Decided(found.thread_id, [], {}, duplicate=True)
    _check_decidable(transaction, found, earlier)
    asked = found.asked(question["to"])
    _check_asked(found, asked, principal)
    _check_own(runtime, transaction, found, question, message)
    _check_counted(found, words, message, place)
    _check_verdict(found, question, message, edited)
    _check_agreement(found, earlier, message, edited)
    waits.record_decision(transaction, found.id, found.tenant, decision)
    if message.verdict == DELEGATE:
        waits.assign(transaction, found, _delegated(asked, message), by=message.by)
    status = _closes(found, words, message, place)
    nudge = None
    if status is not None:
        nudge = waits.close_approval(transaction, found.id, status, decision.payload, by=message.by)
    detail: dict[str, Any] = {"approval": found.id, "verdict": message.verdict, "closed": status is not None}
    if edited is not None:
        detail |= {"asked": question["arguments"], "approved": edited}
    if message.to is not None:
        detail["to"] = message.to
    if place != message.by:
        detail["in_the_place_of"] = place
    return Decided(found.thread_id, [nudge] if nudge else [], detail)


def _said(payload: bytes) -> dict[str, Any]:
    """Return what somebody said, in whosever place."""
    return {name: value for name, value in view(payload).items() if name != "place"}


# --- which question ---


def _meant(transaction: Transaction, message: DecideMessage) -> ApprovalState:
    """Return the approval that is decided, locked after its thread: the one that is named, or a thread's only one."""
    approval = message.approval if message.approval is not None else _only_one(transaction, message)
    thread_id = waits.thread_of_approval(transaction, approval, message.tenant)
    if thread_id is None:
        text = f"there is no approval {approval!r}"
        raise NotFound(text)
    waits.lock_thread(transaction, thread_id)
    return waits.lock_approval(transaction, approval)


def _only_one(transaction: Transaction, message: DecideMessage) -> str:
    found = one_thread(transaction, message)
    asked = waits.open_approvals(transaction, found.id)
    if not asked and found.status in ENDED and not found.queued:
        text = f"thread {found.name!r} asks nothing, and has ended ({found.status})"
        raise NotFound(text)
    if not asked:
        text = f"thread {found.name!r} asks nothing yet ({found.status}): send it again when it does"
        raise NothingAsked(text)
    if len(asked) > 1:
        text = f"thread {found.name!r} asks {len(asked)} things: say which approval ({', '.join(asked)})"
        raise Ambiguous(text)
    return asked[0]


# --- may it be decided, and by whom ---


def _check_decidable(transaction: Transaction, found: ApprovalState, earlier: list[DecisionState]) -> None:
    if found.status == "open" and not found.expired:
        return
    others = ", ".join(waits.open_approvals(transaction, found.thread_id)) or "none"
    if found.status == "expired" or (found.status == "open" and found.expired):
        text = f"the time to decide approval {found.id!r} has run out (open approvals of its thread: {others})"
        raise ApprovalExpired(text)
    by = f" by {earlier[-1].by}" if earlier else ""
    status = found.status.replace("_", " ")
    text = f"approval {found.id!r} is {status}{by} (open approvals of its thread: {others})"
    raise ApprovalClosed(text)


def _check_asked(found: ApprovalState, asked: list[str], principal: Principal | None) -> None:
    """Refuse the word of somebody who is not asked; whose an unsigned one is, nobody knows."""
    if principal is None or not asked or principal.is_among(asked):
        return
    text = (
        f"approval {found.id!r} asks {', '.join(asked)}: {principal.name} is none of them and has none of these roles; "
        "roles are what the signed command says: Client(…, roles=[…]), or --role"
    )
    raise NotAsked(text)


def _check_own(
    runtime: Runtime, transaction: Transaction, found: ApprovalState, question: Any, message: DecideMessage
) -> None:
    """Refuse who has asked for the run, where nobody may decide on what he asked for himself, nor choose who does."""
    asked_so = question.get("self_approval", True) is False
    if (runtime.settings.self_approval and not asked_so) or message.verdict in (REJECT, REQUEST_CHANGES):
        return
    if message.by != waits.started_by(transaction, found.thread_id):
        return
    whose = f"policies {', '.join(question['context']['policies'])}" if asked_so else "the deployment's setting"
    others = quorums.rule(found.quorum, self_approval=False, to=found.put_to(question["to"]))
    text = (
        f"{message.by} has started the run that asks and may reject it or request changes, but neither approve, answer "
        f"nor delegate it (self_approval = false, {whose}). It needs: {others}"
    )
    raise SelfApproval(text)


def _check_counted(found: ApprovalState, earlier: list[Word], message: DecideMessage, place: str) -> None:
    """Refuse a second word of one person, and a second one in one place: a quorum is of different people."""
    decided = [each for each in earlier if each.verdict != DELEGATE]
    if any(each.by == message.by for each in decided):
        text = f"{message.by} has decided approval {found.id!r} otherwise before: one person counts once"
        raise AlreadyCounted(text)
    other = next((each.by for each in decided if each.place == place), None)
    if other is not None and message.verdict in (APPROVE, DELEGATE):
        rule = quorums.rule(found.quorum, self_approval=True)
        text = f"{other} has approved approval {found.id!r} in the place of {place}, which counts once: it needs {rule}"
        raise AlreadyCounted(text)


def _delegated(asked: list[str], message: DecideMessage) -> list[str]:
    """Return who is asked from now on: those who are named, in the place of the one who names them."""
    assigned = [name for name in asked if name != message.by]
    assigned += [name for name in message.to or () if name not in assigned]
    if len(assigned) > _ASSIGNED_MAX:
        text = f"$.to: at most {_ASSIGNED_MAX} people and roles can be asked"
        raise InvalidInput(text)
    return assigned


# --- may it say that ---


def _check_verdict(found: ApprovalState, question: Any, message: DecideMessage, edited: Any) -> None:
    verdict, choices, schema = message.verdict, question.get("choices"), question.get("schema")
    takes_answer = found.kind == "ask" or choices is not None
    if (verdict == ANSWER and found.kind != "ask") or (verdict == APPROVE and found.kind == "ask"):
        first = f"answer {found.id} VALUE" if found.kind == "ask" else f"approve {found.id}"
        wants = "an answer, not for an approval" if found.kind == "ask" else "approval, not for an answer"
        text = f"this asks for {wants}: keepstep {first}, or keepstep reject {found.id}"
        raise InvalidInput(text)
    if verdict == APPROVE and message.answer is not None and not takes_answer:
        text = "$.answer: the question has no choices; approve it, or edit its arguments"
        raise InvalidInput(text)
    if verdict in (ANSWER, APPROVE) and choices is not None:
        # As JSON: to Python, true is 1.
        offered = [json.dumps(each, sort_keys=True) for each in choices]
        if json.dumps(message.answer, sort_keys=True) not in offered:
            text = f"$.answer: choose one of {', '.join(offered)}"
            raise StateError(text)
    if verdict == ANSWER and schema is not None:
        edits.check_schema(json.loads(schema), message.answer, "$.answer")
    if edited is not None and verdict != APPROVE:
        text = "$.arguments: only an approval can edit the arguments"
        raise InvalidInput(text)
    if edited is not None:
        edits.check(question["arguments"], edited)
        if schema is not None:
            edits.check_schema(json.loads(schema), edited, "$.arguments")


def _check_agreement(found: ApprovalState, earlier: list[DecisionState], message: DecideMessage, edited: Any) -> None:
    """Refuse an approval of other arguments than those before it: a quorum is of people who approve the same thing."""
    if message.verdict != APPROVE:
        return
    wanted = json.dumps([edited, message.answer], sort_keys=True)
    for each in earlier:
        said = view(each.payload)
        if each.verdict == APPROVE and json.dumps([said["arguments"], said["answer"]], sort_keys=True) != wanted:
            text = f"{each.by} has approved other arguments of approval {found.id!r}: approve the same or reject"
            raise Conflict(text)


def _closes(found: ApprovalState, earlier: list[Word], message: DecideMessage, place: str) -> str | None:
    """Return the status that this decision closes the approval with, None when it stays open."""
    match message.verdict:
        case "reject":
            return "rejected"
        case "answer":
            return "answered"
        case "request_changes":
            return "changes_requested"
        case "delegate":
            return None
    approved = {each.place for each in earlier if each.verdict == APPROVE} | {place}
    return "approved" if len(approved) >= found.quorum else None
