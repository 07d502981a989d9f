"""The messages: what a deployment takes from outside, what it answers and what it tells; docs/messages.md shows them.

Every command is one JSON object that any language can put on the queue of commands. Models are strict: an unknown
field, a number for a string or a later version is refused, since a command that is half understood is worse.
"""

from __future__ import annotations

import json
import math
from typing import Annotated, Any, Literal, NamedTuple, NoReturn, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PlainValidator,
    StringConstraints,
    ValidationError,
    model_validator,
)
from pydantic_core import PydanticCustomError

from keepstep.errors import InvalidMessage, KeepstepError, NotStorable, TooLarge, Unauthenticated, UnsupportedVersion
from keepstep.jsonvalue import checked_json, shown_key
from keepstep.priority import Priority
from keepstep.runtime.principals import Principal
from keepstep.runtime.reader import Event
from keepstep.tasks.tokens import TrustedKeys

VERSION: Literal[1] = 1


def _printable(value: str) -> str:
    if not value.isprintable():
        kind, text = "not_printable", "String should have printable characters only"
        raise PydanticCustomError(kind, text)
    return value


Name = Annotated[str, StringConstraints(min_length=1, max_length=200), AfterValidator(_printable)]
"""1 to 200 printable characters."""
Text = Annotated[str, StringConstraints(max_length=10_000)]
"""Up to 10,000 characters for people to read."""


def _seq_or_id(value: object) -> int | str:
    if type(value) is int and value >= 0:
        return value
    if isinstance(value, str) and 0 < len(value) <= 200 and value.isprintable():  # noqa: PLR2004  as in Name
        return value
    kind, text = "seq_or_id", "Input should be a checkpoint's seq (a whole number) or its id"
    raise PydanticCustomError(kind, text)


_SeqOrIdShown = Annotated[int, Field(ge=0)] | Annotated[str, StringConstraints(min_length=1, max_length=200)]
SeqOrId = Annotated[int | str, PlainValidator(_seq_or_id, json_schema_input_type=_SeqOrIdShown)]
"""A checkpoint by its seq or by its id."""


class Message(BaseModel):
    """What every command has."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, hide_input_in_errors=True)

    v: Literal[1] = Field(description="The version of this contract.")
    verb: str
    id: Name = Field(
        description="The command's id, chosen by the sender: sent again with the same id, it is one command."
    )
    tenant: Name = Field(description="The tenant that owns the thread.")


class Start(Message):
    """Give a thread an input, which makes a run. The thread is made when it is not there."""

    verb: Literal["start"] = Field(description="Always `start`.")
    application: Name = Field("default", description="The application that the thread belongs to.")
    graph: Name = Field(description="The graph's name.")
    thread: Name = Field(description="The thread's name, unique for tenant, application and graph.")
    input: dict[str, Any] = Field(description="The run's input: checked against the graph's state schema.")
    request_id: Name | None = Field(
        None, description="Two starts with one request id are one run; the command's id when it is missing."
    )
    if_running: Literal["queue", "reject"] = Field(
        "queue", description="When the thread has a run that has not ended: run after it, or refuse."
    )
    step_limit: Annotated[int, Field(ge=1, le=1_000_000_000)] | None = Field(
        None, description="Super-steps that the run may take; the graph's limit when it is missing."
    )
    priority: Priority | None = Field(
        None,
        description="The thread's from now on, against other threads of its graph; when it is missing it keeps what it "
        "has, `normal` at first.",
    )
    by: Name | None = Field(None, description="Who wants it.")


class Decide(Message):
    """Decide an approval, answer a question, hand it on, or ask for changes."""

    verb: Literal["decide"] = Field(description="Always `decide`.")
    approval: Name | None = Field(None, description="The approval's id; or `thread` instead, when that asks one thing.")
    application: Name = Field("default", description="With `thread`: the application that it belongs to.")
    graph: Name | None = Field(
        None, description="With `thread`: the graph's name; needed when threads of several graphs share the name."
    )
    thread: Name | None = Field(None, description="The thread whose only open question is decided.")
    verdict: Literal["approve", "reject", "answer", "delegate", "request_changes"] = Field(description="The decision.")
    arguments: dict[str, Any] | None = Field(
        None, description="With `approve`: what is approved when it is not what was asked."
    )
    answer: Any = Field(
        None, description="With `answer`, and needed then: the answer. With `approve`: what was chosen, of choices."
    )
    to: Annotated[list[Name], Field(min_length=1, max_length=100)] | None = Field(
        None, description="With `delegate`, and needed then: the people and roles that are asked instead."
    )
    by: Name = Field(description="Who decided; one principal counts once.")
    comment: Text | None = Field(
        None, description="A remark for people and for the graph; needed with `request_changes`."
    )

    @model_validator(mode="after")
    def _fits_verdict(self) -> Self:
        if (self.approval is None) == (self.thread is None):
            kind, text = "approval_or_thread", "Either approval or thread says what is decided"
            raise PydanticCustomError(kind, text)
        if self.arguments is not None and self.verdict != "approve":
            kind, text = "unwanted_arguments", "Arguments belong to the verdict approve"
            raise PydanticCustomError(kind, text)
        answers = "answer" in self.model_fields_set
        if answers != (self.verdict == "answer") and not (answers and self.verdict == "approve"):
            kind, text = "answer_and_verdict", "An answer belongs to the verdict answer, which needs one"
            raise PydanticCustomError(kind, text)
        if (self.to is not None) != (self.verdict == "delegate"):
            kind, text = "to_and_verdict", "People to ask instead belong to the verdict delegate, which needs some"
            raise PydanticCustomError(kind, text)
        if self.verdict == "request_changes" and not self.comment:
            kind, text = "comment_needed", "The verdict request_changes needs a comment: what to change"
            raise PydanticCustomError(kind, text)
        return self


class SignalMessage(Message):
    """Send a thread a signal; one that comes before anybody waits for it is kept."""

    verb: Literal["signal"] = Field(description="Always `signal`.")
    application: Name = Field("default", description="The application that the thread belongs to.")
    graph: Name | None = Field(
        None, description="The graph's name; needed when threads of several graphs share the name."
    )
    thread: Name = Field(description="The thread's name.")
    name: Name = Field(description="The signal's name.")
    payload: Any = Field(None, description="What the signal says: any JSON value.")
    key: Name | None = Field(None, description="Tells waits of one name apart.")
    by: Name | None = Field(None, description="Who sends it.")


class Control(Message):
    """Pause, resume, cancel or retry a thread."""

    verb: Literal["control"] = Field(description="Always `control`.")
    application: Name = Field("default", description="The application that the thread belongs to.")
    graph: Name | None = Field(
        None, description="The graph's name; needed when threads of several graphs share the name."
    )
    thread: Name = Field(description="The thread's name.")
    action: Literal["pause", "resume", "cancel", "retry"] = Field(description="What to do.")
    reason: Text | None = Field(None, description="Why, for people.")
    by: Name | None = Field(None, description="Who wants it.")
    step_limit: Annotated[int, Field(ge=1, le=1_000_000_000)] | None = Field(
        None, description="With `retry`: the super-steps that the run may take from now on in all."
    )

    @model_validator(mode="after")
    def _fits_action(self) -> Self:
        if self.step_limit is not None and self.action != "retry":
            kind, text = "unwanted_step_limit", "A step limit belongs to the action retry"
            raise PydanticCustomError(kind, text)
        return self


class Edit(Message):
    """Replace values in a thread's state, between two steps. Each is the key's whole new value, past any reducer."""

    verb: Literal["edit"] = Field(description="Always `edit`.")
    application: Name = Field("default", description="The application that the thread belongs to.")
    graph: Name | None = Field(
        None, description="The graph's name; needed when threads of several graphs share the name."
    )
    thread: Name = Field(description="The thread's name.")
    values: dict[str, Any] = Field(
        min_length=1, description="State keys and their new values: checked against the graph's state schema."
    )
    by: Name = Field(description="Who edits; it stands in the history and in the audit.")
    reason: Text | None = Field(None, description="Why, for people.")
    expect: SeqOrId | None = Field(
        None,
        description="The seq or the id of the checkpoint that was looked at: the edit is refused when the thread has "
        "another one by now.",
    )


class Resolve(Message):
    """Say what became of an effect whose outcome is unknown; the thread that it blocks goes on."""

    verb: Literal["resolve"] = Field(description="Always `resolve`.")
    effect: Annotated[str, StringConstraints(min_length=1, max_length=1000), AfterValidator(_printable)] = Field(
        description="The effect's idempotency key, as `keepstep effects` shows it."
    )
    outcome: Literal["happened", "not_happened", "give_up"] = Field(
        description="`happened`: the node gets the result. `not_happened`: it calls again, under the same key. "
        "`give_up`: it gets an error that it may handle."
    )
    result: Any = Field(None, description="With `happened`: what the call returned.")
    by: Name = Field(description="Who says so; it stands in the journal and in the audit.")
    reason: Text | None = Field(None, description="Why, for people.")

    @model_validator(mode="after")
    def _fits_outcome(self) -> Self:
        if self.result is not None and self.outcome != "happened":
            kind, text = "unwanted_result", "A result belongs to the outcome happened"
            raise PydanticCustomError(kind, text)
        return self


class ScheduleMessage(Message):
    """Make a schedule, which gives a thread a run at each of its ticks; or change the one of that name to this."""

    verb: Literal["schedule"] = Field(description="Always `schedule`.")
    application: Name = Field("default", description="The application that the schedule and its threads belong to.")
    name: Name = Field(description="The schedule's name, unique for tenant and application.")
    graph: Name = Field(description="The graph's name.")
    version: Name | None = Field(
        None, description="The graph's version; when it is missing, the one that a worker carries at the tick."
    )
    thread: Name | None = Field(
        None,
        description="The name of the thread that each tick gives a run. With `{tick}` in it, which stands for the "
        "tick's time in UTC, each tick has a thread of its own; the schedule's name and `-{tick}` when it is missing.",
    )
    input: dict[str, Any] = Field(description="The input of each run: checked against the graph's state schema.")
    cron: Name = Field(
        description="When: minute, hour, day of the month, month and day of the week, as cron has them; or `@hourly`, "
        "`@daily`, `@weekly`, `@monthly`, `@yearly`."
    )
    timezone: Name = Field("UTC", description="Whose clocks it means: a name of IANA's, as `Europe/Berlin`.")
    missed: Literal["skip", "last", "all"] = Field(
        "last",
        description="Which of the ticks that came while no worker ran start a run when one runs again; `all` of the "
        "last 100.",
    )
    overlap: Literal["allow", "skip"] = Field(
        "allow",
        description="`skip`: a tick starts no run while the run of an earlier tick has not ended. `allow`: it does; of "
        "one thread they run one after the other.",
    )
    priority: Priority | None = Field(None, description="The threads', as with `start`.")
    step_limit: Annotated[int, Field(ge=1, le=1_000_000_000)] | None = Field(
        None, description="Super-steps that each run may take; the graph's limit when it is missing."
    )
    by: Name | None = Field(None, description="Who wants it; its runs are started by them.")


class Unschedule(Message):
    """Remove a schedule. Runs that it has started go on."""

    verb: Literal["unschedule"] = Field(description="Always `unschedule`.")
    application: Name = Field("default", description="The application that the schedule belongs to.")
    name: Name = Field(description="The schedule's name.")
    reason: Text | None = Field(None, description="Why, for people.")
    by: Name | None = Field(None, description="Who wants it.")


class ScheduleControl(Message):
    """Pause or resume a schedule. Ticks that come in a pause start no run, also not later."""

    verb: Literal["schedule_control"] = Field(description="Always `schedule_control`.")
    application: Name = Field("default", description="The application that the schedule belongs to.")
    name: Name = Field(description="The schedule's name.")
    action: Literal["pause", "resume"] = Field(description="What to do.")
    reason: Text | None = Field(None, description="Why, for people.")
    by: Name | None = Field(None, description="Who wants it.")


class ErrorPart(BaseModel):
    """Why a command was refused."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, hide_input_in_errors=True)

    code: str = Field(description="Stable and machine-readable; see Refusals.")
    message: str = Field(description="For people.")


class Reply(BaseModel):
    """What a worker answers, to the queue that the command names, after the command's row is committed."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, hide_input_in_errors=True)

    v: Literal[1] = Field(description="The version of this contract.")
    id: str = Field(description="The command's id.")
    status: Literal["accepted", "refused"] = Field(description="`refused`: nothing was changed.")
    thread_id: str | None = Field(None, description="The internal id of the thread that the command is about.")
    run_id: str | None = Field(None, description="With `start`: the run's id.")
    duplicate: bool = Field(
        default=False, description="The command had been accepted before; this time nothing was changed."
    )
    error: ErrorPart | None = Field(None, description="With `refused`: why.")


class EventMessage(BaseModel):
    """Something that happened, as workers publish it. It may come twice: its `id` tells."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, hide_input_in_errors=True)

    v: Literal[1] = Field(description="The version of this contract.")
    event: str = Field(description="What kind of thing happened: see below.")
    id: int = Field(description="The event's own, wherever it is read.")
    position: int = Field(description="Its place in the log, larger than that of every event published before it.")
    at: float = Field(description="When it happened, in seconds since 1970 by the database's clock.")
    tenant: str = Field(description="The tenant that owns the thread.")
    application: str = Field(description="The application that the thread belongs to.")
    graph: str = Field(description="The graph's name.")
    thread: str = Field(description="The thread's name.")
    thread_id: str = Field(description="The internal id of the thread.")
    run_id: str | None = Field(None, description="The run that it is about.")
    node: str | None = Field(None, description="The node run that it is about.")
    approval: str | None = Field(None, description="The approval that it is about.")
    payload: Any = Field(None, description="What else there is to say: see the table below.")
    left_out: bool = Field(
        default=False, description="The payload would make the message larger than `message_bytes_max`: read the log."
    )


Command = Start | Decide | SignalMessage | Control | Edit | Resolve | ScheduleMessage | Unschedule | ScheduleControl
MODELS: dict[str, type[Command]] = {
    "start": Start,
    "decide": Decide,
    "signal": SignalMessage,
    "control": Control,
    "edit": Edit,
    "resolve": Resolve,
    "schedule": ScheduleMessage,
    "unschedule": Unschedule,
    "schedule_control": ScheduleControl,
}
"""The model of each verb."""


VERBS = tuple(MODELS)
"""Every verb."""


# --- reading ----------------------------------------------------------------------------------------------------------


class Received(NamedTuple):
    """A command, and who vouches for it."""

    command: Command
    principal: Principal | None = None
    """Whose word it is; None: it is not signed."""


def parse(body: bytes, *, size_max: int) -> Command:
    """Return the command that `body` (JSON in UTF-8, at most `size_max` bytes) is, whoever sent it; see `receive`."""
    return receive(body, size_max=size_max).command


def receive(body: bytes, *, size_max: int, keys: TrustedKeys | None = None, accept_unsigned: bool = True) -> Received:
    """Return the command that `body` (JSON in UTF-8, at most `size_max` bytes) is, and whose it is.

    Raises `TooLarge`, `InvalidMessage` or `UnsupportedVersion`. Their messages name the place (`$.input.order`) and
    what is wanted there, never the value: it may be a secret. Raises `Unauthenticated` and `Forbidden` for a signature
    that does not hold, and for a command without one where that is needed.
    """
    if len(body) > size_max:
        message = f"the message has {len(body)} bytes; message_bytes_max allows {size_max}"
        raise TooLarge(message)
    value = _json(body)
    if not isinstance(value, dict):
        _refuse("$", "an object is needed")
    version = value.get("v")
    if type(version) is not int:
        _refuse("$.v", "the version is needed, a whole number")
    if version != VERSION:
        message = f"$.v: this worker knows version {VERSION} of the messages only; workers are upgraded before clients"
        raise UnsupportedVersion(message)
    if "jwt" in value:
        return _signed(value, keys)
    if not accept_unsigned:
        text = (
            "it is not signed, and this deployment takes signed commands only: name a private key by "
            "KEEPSTEP_SIGNING_KEY (keepstep new-key makes one)"
        )
        raise Unauthenticated(text)
    return Received(_command(value))


def _signed(value: dict[str, Any], keys: TrustedKeys | None) -> Received:
    """Return the command that a token carries."""
    if keys is None:
        text = "$.jwt: this deployment trusts no keys: set trusted_keys, or send the command unsigned"
        raise Unauthenticated(text)
    if set(value) != {"v", "jwt"}:
        _refuse("$", "a signed command has v and jwt, nothing else")
    carried, principal = keys.verified(value["jwt"])
    if type(carried.get("v")) is not int or carried["v"] != VERSION:
        _refuse("$.v", f"version {VERSION} is needed in the signed command")
    return Received(_command(_checked(carried)), principal)


def _command(value: dict[str, Any]) -> Command:
    verb = value.get("verb")
    model = MODELS.get(verb) if isinstance(verb, str) else None
    if model is None:
        _refuse("$.verb", f"one of {', '.join(MODELS)} is needed")
    try:
        return model.model_validate(value)
    except ValidationError as error:
        problems = error.errors(include_input=False, include_url=False, include_context=False)
        text = "; ".join(f"{_path(p['loc'])}: {p['msg']}" for p in problems[:5])
        raise InvalidMessage(text) from None


def _json(body: bytes) -> Any:
    try:
        value = json.loads(body.decode(), object_pairs_hook=_object, parse_constant=_constant, parse_float=_float)
    except UnicodeDecodeError:
        _refuse("$", "UTF-8 is needed")
    except RecursionError:
        _refuse("$", "too many objects and arrays inside each other")
    except json.JSONDecodeError as error:
        _refuse("$", f"JSON is needed; it ends to be so at character {error.pos}")
    except ValueError:  # more digits than Python reads
        _refuse("$", "an integer has too many digits; send it as a string")
    return _checked(value)


def _checked(value: Any) -> Any:
    try:
        checked_json(value)
    except NotStorable as error:
        raise InvalidMessage(error.message) from None
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):  # readers differ in which one they take, so nobody can know what was meant
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        _refuse("$", f"an object has the key {shown_key(twice)} twice")
    return value


def _constant(name: str) -> NoReturn:
    _refuse("$", f"{name} is not JSON")


def _float(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        _refuse("$", "a number is too large for 64-bit floating point; send it as a string")
    return number


def _path(location: tuple[int | str, ...]) -> str:
    return ".".join(["$", *(shown_key(str(part)) for part in location)])


def _refuse(path: str, what: str) -> NoReturn:
    message = f"{path}: {what}"
    raise InvalidMessage(message)


# --- answering --------------------------------------------------------------------------------------------------------


def reply(
    command_id: str,
    *,
    thread_id: str | None = None,
    run_id: str | None = None,
    duplicate: bool = False,
    error: KeepstepError | None = None,
) -> bytes:
    """Return the body of the reply to a command: refused when there is an `error`, accepted otherwise."""
    part = None if error is None else ErrorPart(code=error.code, message=error.message)
    answer = Reply(
        v=VERSION,
        id=command_id,
        status="accepted" if part is None else "refused",
        thread_id=thread_id,
        run_id=run_id,
        duplicate=duplicate,
        error=part,
    )
    return answer.model_dump_json(exclude_none=True).encode()


def event(found: Event, *, size_max: int) -> bytes:
    """Return the body that publishes an event of the log, without its payload where that makes it too large."""
    message = EventMessage(
        v=VERSION,
        event=found.kind,
        id=found.id,
        position=found.cursor,
        at=found.at.timestamp(),
        tenant=found.tenant,
        application=found.application,
        graph=found.graph,
        thread=found.thread,
        thread_id=found.thread_id,
        run_id=found.run,
        node=found.node or None,
        approval=found.approval,
        payload=found.payload,
        left_out=found.left_out,
    )
    body = _body(message)
    if len(body) > size_max:
        body = _body(message.model_copy(update={"payload": None, "left_out": True}))
    return body


def _body(message: EventMessage) -> bytes:
    fields = message.model_dump(exclude_defaults=True)
    return json.dumps(fields, ensure_ascii=True, allow_nan=False, separators=(",", ":")).encode()
