"""The contract of messages as a page for people, with an example of each. docs/messages.md is made here."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

from pydantic import BaseModel

from keepstep import eventkinds
from keepstep.errors import InvalidMessage
from keepstep.runtime.reader import Event
from keepstep.tasks import refusalcodes
from keepstep.tasks.messages import MODELS, VERSION, ErrorPart, EventMessage, Reply, event, reply

_INTRODUCTION = """# Messages

<!-- Made by `python -m keepstep.tasks.contractpage` from tasks/messages.py, which is the authority. Do not edit. -->

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
`self_approval`) stands in the audit of the thread that it was about, as `refused` (`keepstep show`), up to 100 for
each sender.
"""

_ABOUT_EVENTS = """What happens to threads and their approvals is published on the topic exchange `<prefix>.events`
(durable; the setting `publish_events` turns it off), under the routing key `<event>.<tenant>.<graph>`, in which every
character of a name that is no letter, digit, `-` or `_` is `_`, and a name ends after 80. A consumer makes a durable
queue of its own and binds it: `approval.opened.default.refunds`, `thread.*.default.*`, `#`. Names may be the same word
there: `tenant` and `graph` in the event are whole. Each event comes at least once, in the log's order, and one that was
not acknowledged comes again later; its `id` tells one that came twice. What was published before the queue was bound
stands in the log, as everything does: `keepstep events`, `Reader.events`. A consumer reads past kinds and fields that
it does not know.

On RabbitMQ that is all. Redis has no exchanges: a binding is an element of the set `_kombu.binding.<prefix>.events`
(`SADD`), made of the pattern, the same as a regular expression, and the queue's name, with the two characters U+0006
U+0016 between them; of the pattern `*` is `[^.]+` there and `#` is `.*?`. Workers put a copy into the list of each
queue that is bound, up to 100,000; for a queue that nobody empties the rest stays in the log.
"""
_PAYLOADS = {
    eventkinds.STARTED: "none",
    eventkinds.THREAD_WAITING: "`waits`: list of {`kind`: `approval`, `signal`, `timer` or `child`, `approval`, "
    "`signal`, `key`, `due_at`}",
    eventkinds.THREAD_BLOCKED: "`error`: {`code`, `message`, …}",
    eventkinds.THREAD_DONE: "none",
    eventkinds.THREAD_FAILED: "`error`: {`code`, `message`, …}",
    eventkinds.THREAD_CANCELLED: "`error`: {`code`, `message`, `by`}",
    eventkinds.PAUSED: "none",
    eventkinds.RESUMED: "none",
    eventkinds.RETRIED: "none",
    eventkinds.OPENED: "`kind` (`approve` or `ask`), `question`, `arguments`, `context`, `to`, `schema`, `choices`, "
    "`quorum`, `on_expiry`, `expires_at` (seconds since 1970)",
    eventkinds.REMINDED: "as of `approval.opened`, and `reminders`: how many there were",
    eventkinds.REASSIGNED: "as of `approval.opened`, and `by` when somebody did it",
    eventkinds.CLOSED: "`status`: `approved`, `rejected`, `answered`, `changes_requested`, `expired` or `withdrawn`; "
    "`by`",
    eventkinds.EMITTED: "what was emitted",
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
        kind=eventkinds.OPENED,
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
    kinds = "\n".join(f"| `{kind}` | {text} | {_PAYLOADS[kind]} |" for kind, text in eventkinds.KINDS.items())
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
