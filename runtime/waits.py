"""Waiting: questions to people, signals, time and children, found again when the node runs again.

A node that waits is left by an exception and its rows are written; when everything it waits for has come it runs again
from the top. The n-th wait of a node run is the n-th wait of its next attempt: it is found by step key, node run and
occurrence, and must ask the same thing, else the thread is blocked as diverged, since an answer must never be given to
another question.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn

from pydantic import TypeAdapter, ValidationError

from keepstep.errors import Diverged, InvalidInput, StateError
from keepstep.ids import checked_name, new_id
from keepstep.runtime import policy
from keepstep.runtime.blocks import refuse_inside
from keepstep.runtime.codec import Codec
from keepstep.runtime.outcome import Parked
from keepstep.runtime.watchdog import undisturbed
from keepstep.store.outcomes import NewApproval, NewWait
from keepstep.store.waits import WaitState

_SECONDS_MAX = 100 * 366 * 86400.0
_QUORUM_MAX = 1000
_BOUND_FROM = 1_000_000
"""The occurrences of questions that are found again by what they are bound to begin here."""
ON_EXPIRY = ("reject", "approve", "escalate", "fail")
_CHOICES_MAX = 100


@dataclass(frozen=True, slots=True)
class Decision:
    """What people said to a question."""

    approved: bool
    """Whether they approved, or answered what was asked; with `on_expiry="approve"`, nobody objecting in time too."""
    verdict: str
    """`approve`, `reject`, `request_changes`, `answer` or `expired`."""
    arguments: Any = None
    """What was approved: the arguments asked about, with the approver's edits."""
    answer: Any = None
    by: str | None = None
    comment: str | None = None
    approval: str | None = None
    """The approval's id."""


@dataclass(frozen=True, slots=True)
class Signal:
    """A named message from outside."""

    name: str
    payload: Any
    key: str | None = None


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked, of whom, and until when."""

    kind: str
    text: str
    arguments: Any = None
    context: Any = None
    to: Sequence[str] = ()
    quorum: int = 1
    expires: float | timedelta | None = None
    on_expiry: str = "reject"
    schema: Any = None
    escalate_to: Sequence[str] | str = ()
    choices: Sequence[Any] | None = None
    remind: float | timedelta | None = None
    self_approval: bool = True
    """Whether who started the run may approve; the deployment's setting may forbid it all the same."""
    bound: Any = None
    """What an answer is bound to, for a question that is found again by that and not by its place in the node."""

    def checked(self) -> Question:
        """Return the question; raise `InvalidInput` naming what in it cannot be."""
        if not isinstance(self.text, str) or not self.text.strip():
            message = f"ctx.{self.kind}: the question must be a text, not {self.text!r}"
            raise InvalidInput(message)
        if isinstance(self.quorum, bool) or not isinstance(self.quorum, int) or not 1 <= self.quorum <= _QUORUM_MAX:
            message = f"ctx.{self.kind}: quorum must be a number of people, 1 to {_QUORUM_MAX}, not {self.quorum!r}"
            raise InvalidInput(message)
        if self.on_expiry not in ON_EXPIRY:
            message = f"ctx.{self.kind}: on_expiry must be one of {', '.join(ON_EXPIRY)}, not {self.on_expiry!r}"
            raise InvalidInput(message)
        if (self.on_expiry == "escalate") != bool(self.escalate_to):
            message = f'ctx.{self.kind}: on_expiry="escalate" and escalate_to= belong together: whom else to ask'
            raise InvalidInput(message)
        if self.on_expiry in ("approve", "escalate") and self.expires is None:
            message = f"ctx.{self.kind}: on_expiry={self.on_expiry!r} needs expires="
            raise InvalidInput(message)
        if self.on_expiry == "approve" and (self.kind == "ask" or self.choices is not None):
            message = f'ctx.{self.kind}: on_expiry="approve" is for questions that silence can answer'
            raise InvalidInput(message)
        if self.choices is not None and not 0 < len(self.choices) <= _CHOICES_MAX:
            message = f"ctx.{self.kind}: choices must be 1 to {_CHOICES_MAX} values"
            raise InvalidInput(message)
        return self

    def plain(self) -> dict[str, Any]:
        """Return the question as it is stored."""
        choices = {} if self.choices is None else {"choices": list(self.choices)}
        rule = {} if self.self_approval else {"self_approval": False}
        return {
            "question": self.text,
            "arguments": self.arguments,
            "context": self.context,
            "to": _names(self.to),
            "schema": json_schema(self.schema),
            **choices,
            **rule,
        }


def _names(given: Sequence[str] | str) -> list[str]:
    return [given] if isinstance(given, str) else list(given or ())


def json_schema(schema: Any) -> str | None:
    """Return the JSON schema that answers are checked against at the door; a type is turned into its own."""
    if schema is None:
        return None
    import jsonschema  # noqa: PLC0415  a tenth of a worker's start, and few questions have a schema

    found = schema if isinstance(schema, Mapping) else TypeAdapter(schema).json_schema()
    try:
        plain = json.loads(json.dumps(found))
        checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
        jsonschema.Draft202012Validator.check_schema(plain, format_checker=checker)
        # What refers to something that is not there shows when it is used.
        jsonschema.Draft202012Validator(plain, format_checker=checker).is_valid({})
    except jsonschema.SchemaError as error:
        message = f"ctx.ask: schema is no JSON schema: {error.json_path}: {error.message}"
        raise InvalidInput(message) from None
    except Exception as error:
        message = f"ctx.ask: schema cannot be used: {type(error).__name__}"
        raise InvalidInput(message) from error
    return json.dumps(plain)


class WaitBook:
    """The waits of one attempt of a node run: those its earlier attempts left, and those it asks for anew."""

    def __init__(self, codec: Codec, load: Callable[[], list[WaitState]] | None) -> None:
        """`load` looks up what earlier attempts have asked; None: there were none."""
        self._codec = codec
        self._load = load
        self._found: dict[int, WaitState] | None = {} if load is None else None
        self._occurrence = 0
        self._bound_asked: dict[bytes, int] = {}
        """By digest, the occurrences given to questions that this attempt was the first to ask."""
        self._unserved: list[Parked] = []
        self._lock = threading.Lock()

    def decide(self, question: Question) -> Decision:
        """Return the decision on a question; raise `Parked` while there is none."""
        plain = question.checked().plain()
        stored = self._codec.encode(plain, path="$.question")
        # Neither people nor time limits are part of what was answered.
        bound = question.arguments if question.bound is None else question.bound
        asked = self._codec.encode([question.kind, question.text, bound], path="$.question")
        find = self._state if question.bound is None else self._bound
        state = find(
            asked,
            lambda occurrence, digest: NewWait(
                occurrence,
                "approval",
                digest,
                approval=NewApproval(
                    new_id(),
                    question.kind,
                    stored,
                    question.quorum,
                    question.on_expiry,
                    json.dumps(_names(question.escalate_to)) if question.escalate_to else None,
                    _seconds("remind", question.remind),
                ),
                seconds=_seconds("expires", question.expires),
            ),
        )
        if state.answer is None:
            if question.on_expiry == "fail":
                message = f"nobody answered {question.text!r} in time"
                raise TimeoutError(message)
            approved = question.on_expiry == "approve"
            return Decision(
                approved=approved, verdict="expired", arguments=question.arguments, approval=state.approval_id
            )
        answer = self._codec.decode(state.answer)
        edited = answer.get("arguments")
        if edited is not None and question.bound is None:
            edited = fitted(question.arguments, edited)
        return Decision(
            approved=answer["verdict"] in {"approve", "answer"},
            verdict=answer["verdict"],
            arguments=question.arguments if edited is None else edited,
            # A question that was refused has no answer to be fitted.
            answer=_said(question, answer),
            by=answer.get("by"),
            comment=answer.get("comment"),
            approval=state.approval_id,
        )

    def signal(self, name: str, key: str | None, timeout: float | timedelta | None) -> Signal | None:
        """Return a signal of that name, or None when none came in time; raise `Parked` while there is none."""
        checked_name("a signal's name", name)
        if key is not None:
            checked_name("a signal's key", key)
        state = self._state(
            self._codec.encode(["signal", name, key]),
            lambda occurrence, digest: NewWait(
                occurrence,
                "signal",
                digest,
                signal_name=name,
                signal_key=key,
                seconds=_seconds("timeout", timeout, zero=True),
            ),
        )
        if state.answer is None:
            return None
        answer = self._codec.decode(state.answer)
        return Signal(name, answer.get("payload"), answer.get("key"))

    def sleep(self, duration: float | timedelta) -> None:
        """Return when the duration has passed; raise `Parked` until then."""
        seconds = _seconds("duration", duration, zero=True)
        self._state(
            self._codec.encode(["timer"]),
            lambda occurrence, digest: NewWait(occurrence, "timer", digest, seconds=seconds),
        )

    def child(self, run_id: str) -> None:
        """Return when the run of a child has ended; raise `Parked` until then."""
        self._state(
            self._codec.encode(["child", run_id]),
            lambda occurrence, digest: NewWait(occurrence, "child", digest, child_run=run_id),
        )

    def _state(self, asked: bytes, make: Callable[[int, bytes], NewWait]) -> WaitState:
        refuse_inside("a wait")
        digest = hashlib.blake2b(asked, digest_size=16).digest()
        with self._lock:
            occurrence = self._occurrence
            self._occurrence += 1
            state = self._loaded().get(occurrence)
        if state is None:
            raise self._parked((make(occurrence, digest),))
        if bytes(state.digest) != digest:
            message = (
                f"wait {occurrence + 1} of this node asked something else in an earlier attempt; an answer is never "
                "given to another question: make what the node asks depend on its state and on effects only"
            )
            raise Diverged(message)
        if state.status == "open":
            raise self._parked(())
        _check_answered(state)
        return state

    def _bound(self, asked: bytes, make: Callable[[int, bytes], NewWait]) -> WaitState:
        """As `_state`, of a question that is known by what it is bound to, wherever in the node it is asked."""
        digest = hashlib.blake2b(asked, digest_size=16).digest()
        with self._lock:
            found = self._loaded()
            state = next(
                (each for each in found.values() if each.occurrence >= _BOUND_FROM and bytes(each.digest) == digest),
                None,
            )
            first = max([*self._bound_asked.values(), *found, _BOUND_FROM - 1]) + 1
            occurrence = first if state is not None else self._bound_asked.setdefault(digest, first)
        if state is None:
            raise self._parked((make(occurrence, digest),))
        if state.status == "open":
            raise self._parked(())
        _check_answered(state)
        return state

    def with_those_beside(self, waits: tuple[NewWait, ...]) -> tuple[NewWait, ...]:
        """Return new waits with the questions about calls that were asked beside them: people see all of them at once.

        Other waits are numbered in the order in which they are asked for, which is not told by who parked first.
        """
        with self._lock:
            parked = [wait for each in self._unserved for wait in each.waits if wait.occurrence >= _BOUND_FROM]
        return tuple({wait.occurrence: wait for wait in (*parked, *waits)}.values())

    def _loaded(self) -> dict[int, WaitState]:
        if self._found is None:
            with undisturbed():
                self._found = {state.occurrence: state for state in (self._load() if self._load else ())}
        return self._found

    def _parked(self, waits: tuple[NewWait, ...]) -> Parked:
        signal = Parked(waits)
        with self._lock:
            self._unserved.append(signal)
        return signal

    def check_course(self) -> None:
        """Check, when the node has returned, that it did not pass over what it had asked for.

        Raises `Parked` when the node caught the signal of a wait that is not answered: it waits all the same. Raises
        `Diverged` when an earlier attempt asked something that this one did not: an answer must not be passed over.
        """
        if self._unserved:
            gathered(self._unserved)
        with self._lock:
            # Of what is bound, an answer that nobody asks for any more lets nothing happen.
            found = [state for number, state in self._loaded().items() if number < _BOUND_FROM]
        for state in found:
            _check_answered(state)  # the node may have caught what it was told
        with self._lock:
            passed_over = [state for state in found if state.occurrence >= self._occurrence]
        if passed_over:
            message = (
                f"an earlier attempt of this node asked {len(found)} times for something from outside, this one "
                f"{self._occurrence} times: an answer must not be passed over"
            )
            raise Diverged(message)


def _check_answered(state: WaitState) -> None:
    """Raise `Diverged` for a wait that a cancel has closed: nobody answered it, and its time has not run out either.

    Answered ones are closed as well, by the commit of their step, and that is not run again.
    """
    if state.status == "closed":
        message = (
            f"wait {state.occurrence + 1} of this node was closed without an answer, by a cancel, and was not opened "
            "again: that is not the same as that its time ran out"
        )
        raise Diverged(message)


def _seconds(what: str, value: float | timedelta | None, *, zero: bool = False) -> float | None:
    if value is None:
        return None
    seconds = policy.seconds(what, value, zero=zero)
    if seconds > _SECONDS_MAX:
        message = f"{what}: {seconds:g} s is longer than a hundred years; leave it out to wait for ever"
        raise InvalidInput(message)
    return seconds


def _said(question: Question, answer: Mapping[str, Any]) -> Any:
    """Return what was answered, or chosen; None when the question was refused."""
    if answer["verdict"] == "answer":
        return _typed(question.schema, answer["answer"])
    return answer["answer"] if answer["verdict"] == "approve" and question.choices is not None else None


def _typed(schema: Any, answer: Any) -> Any:
    if schema is None or isinstance(schema, Mapping):
        return answer
    try:
        return TypeAdapter(schema).validate_python(answer)
    except ValidationError as error:
        message = f"the answer does not fit {schema!r}: {error.error_count()} problems"
        raise StateError(message) from None


def fitted(original: Any, edited: Any) -> Any:
    """Return edited arguments, which came as JSON, with the types of the original ones: 12.50 for a Decimal again."""
    if isinstance(original, Mapping) and isinstance(edited, Mapping):
        return {name: fitted(original.get(name), value) for name, value in edited.items()}
    if isinstance(original, list) and isinstance(edited, list) and len({type(each) for each in original}) == 1:
        return [fitted(original[0], each) for each in edited]
    if original is None or isinstance(edited, type(original)):
        return edited
    try:
        return TypeAdapter(type(original)).validate_python(edited)
    except ValidationError as error:
        message = f"the edited arguments do not fit those that were asked about: {error.error_count()} problems"
        raise StateError(message) from None


def gathered(parked: Sequence[Parked]) -> NoReturn:
    """Park on everything that several calls wait for."""
    raise Parked(tuple(wait for each in parked for wait in each.waits))
