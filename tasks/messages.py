"""The messages: what a deployment takes from outside, and what it answers. docs/messages.md is made of them.

Every command is one JSON object that any language can put on the queue of commands. Models are strict: an unknown
field, a number for a string or a later version is refused, since a command that is half understood is worse.
"""

from __future__ import annotations

import json
import math
from datetime import UTC, datetime
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
from keepstep.store import events
from keepstep.tasks import refusalcodes
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
    """Something that happened, as workers publish it. It may come twice: its `position` tells."""

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
    )
    body = _body(message)
    if len(body) > size_max:
        body = _body(message.model_copy(update={"payload": None, "left_out": True}))
    return body


def _body(message: EventMessage) -> bytes:
    fields = message.model_dump(exclude_defaults=True)
    return json.dumps(fields, ensure_ascii=True, allow_nan=False, separators=(",", ":")).encode()


# --- describing -------------------------------------------------------------------------------------------------------

_INTRODUCTION = """# Messages

<!-- Made by `python -m keepstep.tasks.messages` from tasks/messages.py, which is the authority. Do not edit. -->

Every verb of `keepstep.Client` is one JSON message that any language can send through the broker. A worker reads it,
commits its row in the database, and then answers. A message that was sent is not yet accepted: it is when the reply
says so. Every command has an id and is idempotent, so a sender that got no reply sends the same message again.
[asyncapi.json](asyncapi.json) is this contract as an AsyncAPI 3.0 document with JSON schemas, for tools;
[producers.md](producers.md#from-another-language) has a producer in another language.

## Envelope

| what | value |
|---|---|
| queue | `<prefix>.commands`, durable; the prefix is the setting `queue`, `keepstep` by default |
| exchange and routing key | the default exchange (`""`), the queue's name |
| body | one JSON object in UTF-8, at most `message_bytes_max` bytes (1 MiB by default) |
| `content_type` | `application/json` |
| `delivery_mode` | 2 (persistent) |
| `correlation_id` | the command's id |
| `reply_to` | the queue for the reply, or missing for none; its name starts with `<prefix>.replies.` |
| `headers` | `sent_at`, or missing: when it was sent (seconds since 1970), by which `keepstep doctor` tells its age |

The sender makes its reply queue: durable, with `x-expires` 600000 (ten minutes). On RabbitMQ the queue of commands is a
quorum queue whose arguments are the deployment's, so others publish to it without declaring it. On Redis and the file
broker a message is in Kombu's format: a JSON object with `body` (base64), `content-type`, `content-encoding`, `headers`
and `properties` (the schema `KombuMessage`). On Redis a queue is the list of that name: `LPUSH` sends, `BRPOP` takes,
and the worker that answers gives the list of replies its ten minutes.

## Signatures

Where a deployment has `trusted_keys` it takes signed commands only. A signed command is `{"v": 1, "jwt": "…"}` and
nothing else: a JSON Web Token (RFC 7519, compact) whose claims are

| claim | what |
|---|---|
| `command` | the whole command, as it would be sent unsigned |
| `sub` | who wants it: the identity that counts. A `by` in the command must be the same or missing |
| `aud` | the deployment's `audience`, `keepstep` by default |
| `jti` | the command's `id`: a token counts once, however often and late it comes |
| `iat` | when it was signed (seconds since 1970) |
| `exp` | its end; it is taken up to `signature_backlog_seconds` (7 days) later, since a queue may have been away |
| `roles` | a list of names, or missing: the roles of `sub`, for questions that are put to roles |

and whose header names the key (`kid`). `trusted_keys` is a JSON Web Key Set of public keys, each with `kid` and `alg`
(EdDSA, ES256, ES384, RS256, PS256 or HS256), and where its trust is to be bounded `tenants`, `verbs`, `principals` (who
it may speak for) and `roles` (which it may give), each a list. The algorithm is the key's, whatever a token says; RSA
keys have 2048 bits, shared secrets 32 bytes at least. `keepstep new-key` makes a pair. What is not signed, or not as
the keys say, is refused as `unauthenticated` or `forbidden`; nothing is changed.

## JSON

JSON is taken strictly: no key twice in one object, no NaN or infinity, no number that 64-bit floating point cannot hold
(whole numbers may have up to 4,200 digits), at most 100 objects and arrays inside each other, no unknown field. A name
is 1 to 200 printable characters, a text at most 10,000 characters. A field that is not required may be missing or null.
"""

_REFUSALS = """## Refusals

What is refused has changed nothing, and its id is free: the same message can be sent again. Where that is worth while
is said here; elsewhere something else has to change first. Codes may be added; one that a sender does not know is a
refusal all the same. Who wanted what they may not (the codes from `unauthenticated` to `forbidden`, `not_asked` and
`self_approval`) stands in the audit of the thread that it was about, as `refused` (`keepstep show`), up to 100 times.
"""

_ABOUT_EVENTS = """What happens to threads and their approvals is published on the topic exchange `<prefix>.events`
(durable; the setting `publish_events` turns it off), under the routing key `<event>.<tenant>.<graph>`, in which every
character of a name that is no letter, digit, `-` or `_` is `_`. A consumer makes a durable queue of its own and binds
it: `approval.opened.default.refunds`, `thread.*.default.*`, `#`. Each event comes at least once, in the log's order;
its `position` tells one that came twice. What was published before the queue was bound stands in the log, as everything
does: `keepstep events`, `Reader.events`. A consumer reads past kinds and fields that it does not know.

On RabbitMQ that is all. Redis has no exchanges: a binding is an element of the set `_kombu.binding.<prefix>.events`
(`SADD`), made of the pattern, the same as a regular expression, and the queue's name, with the two characters U+0006
U+0016 between them; of the pattern `*` is `[^.]+` there and `#` is `.*?`. Workers put a copy into the list of each
queue that is bound, up to 100,000; for a queue that nobody empties the rest stays in the log.
"""
_PAYLOADS = {
    events.STARTED: "none",
    events.THREAD_WAITING: "`waits`: list of {`kind`: `approval`, `signal`, `timer` or `child`, `approval`, `signal`, "
    "`key`, `due_at`}",
    events.THREAD_BLOCKED: "`error`: {`code`, `message`, …}",
    events.THREAD_DONE: "none",
    events.THREAD_FAILED: "`error`: {`code`, `message`, …}",
    events.THREAD_CANCELLED: "`error`: {`code`, `message`, `by`}",
    events.PAUSED: "none",
    events.RESUMED: "none",
    events.RETRIED: "none",
    events.OPENED: "`kind` (`approve` or `ask`), `question`, `arguments`, `context`, `to`, `schema`, `choices`, "
    "`quorum`, `on_expiry`, `expires_at` (seconds since 1970)",
    events.REMINDED: "as of `approval.opened`, and `reminders`: how many there were",
    events.REASSIGNED: "`to`, and `by` when somebody did it",
    events.CLOSED: "`status`: `approved`, `rejected`, `answered`, `changes_requested`, `expired` or `withdrawn`; `by`",
    events.EMITTED: "what was emitted",
}
_EXAMPLES: dict[str, dict[str, Any]] = {
    "start": {"graph": "refunds", "thread": "order-81", "input": {"order_id": "81", "amount": "12.50"}},
    "decide": {"approval": "01jdz8k3v5w0c9q2m7r4t6y8xa", "verdict": "approve", "by": "anna@example.com"},
    "signal": {"graph": "refunds", "thread": "order-81", "name": "goods_returned", "payload": {"parcel": "P-7"}},
    "control": {"graph": "refunds", "thread": "order-81", "action": "pause", "reason": "Under review"},
    "edit": {
        "graph": "refunds",
        "thread": "order-81",
        "values": {"amount": "10.00"},
        "by": "anna@example.com",
        "expect": 3,
    },
    "resolve": {
        "effect": "01jdz8k0b2c4d6e8f0g2h4j6km/0/2/pay/send_payment:81",
        "outcome": "happened",
        "result": {"receipt": "R-81"},
        "by": "anna@example.com",
    },
    "schedule": {
        "name": "nightly-report",
        "graph": "report",
        "input": {"region": "eu"},
        "cron": "30 2 * * mon-fri",
        "timezone": "Europe/Berlin",
        "by": "anna@example.com",
    },
    "unschedule": {"name": "nightly-report", "by": "anna@example.com"},
    "schedule_control": {"name": "nightly-report", "action": "pause", "reason": "Year's end"},
}
_EXAMPLE_ID = "01jdz8jzmt3n5e7p9a1s4d6f8g"


def example(verb: str) -> dict[str, Any]:
    """Return a command of this verb."""
    return {"v": VERSION, "verb": verb, "id": _EXAMPLE_ID, "tenant": "default", **_EXAMPLES[verb]}


def example_event() -> dict[str, Any]:
    """Return what is published when a thread asks something."""
    found = Event(
        cursor=1207,
        id=1209,
        kind=events.OPENED,
        tenant="default",
        application="default",
        graph="refunds",
        thread="order-81",
        thread_id="01jdz8k0b2c4d6e8f0g2h4j6km",
        run="01jdz8k0b3n5p7q9r1s3t5v7wx",
        node="pay",
        seq=1,
        approval="01jdz8k3v5w0c9q2m7r4t6y8xa",
        payload={
            "kind": "approve",
            "question": "Pay the refund?",
            "arguments": {"order_id": "81", "amount": "12.50"},
            "to": ["finance"],
            "quorum": 1,
            "on_expiry": "reject",
            "expires_at": 1793523600.0,
        },
        at=datetime(2026, 10, 31, 9, tzinfo=UTC),
    )
    shown: dict[str, Any] = json.loads(event(found, size_max=10_000))
    return shown


def example_reply(*, refused: bool = False) -> dict[str, Any]:
    """Return what a worker answers to an example."""
    if refused:
        body = reply(_EXAMPLE_ID, error=InvalidMessage("$.graph: Field required"))
    else:
        body = reply(_EXAMPLE_ID, thread_id="01jdz8k0b2c4d6e8f0g2h4j6km", run_id="01jdz8k0b3n5p7q9r1s3t5v7wx")
    answer: dict[str, Any] = json.loads(body)
    return answer


def markdown() -> str:
    """Return docs/messages.md."""
    parts = [_INTRODUCTION]
    for verb, model in MODELS.items():
        parts.append(f"## Command `{verb}`\n\n{model.__doc__}\n\n{_table(model)}\n{_fenced(example(verb))}")
    parts.append(
        f"## Reply\n\n{Reply.__doc__}\n\n{_table(Reply)}\n`error` has these fields:\n\n{_table(ErrorPart)}\n"
        f"{_fenced(example_reply())}\n{_fenced(example_reply(refused=True))}"
    )
    parts.append(f"{_REFUSALS}\n{refusalcodes.markdown()}")
    kinds = "\n".join(f"| `{kind}` | {text} | {_PAYLOADS[kind]} |" for kind, text in events.KINDS.items())
    parts.append(
        f"## Events\n\n{_ABOUT_EVENTS}\n{_table(EventMessage)}\n| event | what happened | payload |\n|---|---|---|\n"
        f"{kinds}\n\n{_fenced(example_event())}"
    )
    return "\n".join(parts)


def _table(model: type[BaseModel]) -> str:
    required = {True: "yes", False: "no"}
    schema = model.model_json_schema()
    rows = ["| field | type | required | meaning |", "|---|---|---|---|"]
    for name, part in schema["properties"].items():
        default = part.get("default")
        meaning = part["description"] + (f" Default: `{json.dumps(default)}`." if default is not None else "")
        rows.append(f"| `{name}` | {_type(part)} | {required[name in schema.get('required', ())]} | {meaning} |")
    return "\n".join(rows) + "\n"


def _type(part: dict[str, Any]) -> str:
    """Return a JSON schema's type in words."""
    if "anyOf" in part:
        return " or ".join(_type(one) for one in part["anyOf"] if one.get("type") != "null")
    if "const" in part:
        return f"`{json.dumps(part['const'])}`"
    if "enum" in part:
        return " or ".join(f"`{json.dumps(one)}`" for one in part["enum"])
    if "$ref" in part:
        return "object"
    if part.get("type") == "array":
        return f"list of {_type(part['items'])}s"
    words = {"string": "string", "integer": "integer", "number": "number", "boolean": "boolean", "object": "object"}
    word = words.get(part.get("type", ""), "any JSON value")
    if part.get("maxLength") == 200:  # noqa: PLR2004
        return "name"
    if "maxLength" in part:
        return "text"
    return f"{word} ≥ {part['minimum']}" if "minimum" in part else word


def _fenced(value: dict[str, Any]) -> str:
    return f"```json\n{json.dumps(value, indent=2)}\n```\n"


if __name__ == "__main__":
    import sys

    sys.stdout.write(markdown())
