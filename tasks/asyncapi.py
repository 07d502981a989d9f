"""The contract of messages as an AsyncAPI 3.0 document, for generators and catalogues. docs/asyncapi.json is made here.

Its schemas are those of the models in tasks/messages.py, which stay the authority. What a model checks across fields is
added as conditions, so that a producer's own validator refuses what a worker would refuse.
"""

from __future__ import annotations

import json
from typing import Any

from pydantic.json_schema import GenerateJsonSchema, models_json_schema

from keepstep import broker, eventkinds, topics
from keepstep.settings import Settings
from keepstep.signing import ALGORITHMS
from keepstep.tasks import contractpage, messages, refusalcodes

_PREFIX = "{prefix}"
_CONTENT_TYPE = "application/json"
_JWT_PATTERN = r"^[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+$"
_INTRODUCTION = """\
What a Keepstep deployment takes from producers in any language, and what it answers; docs/messages.md says the same \
for people.

The document is written from the workers' side: they receive commands and send replies, producers do the opposite. A \
command is accepted when its row is committed, which its reply says; one that got no reply is sent again with the same \
id, and is one command."""

# --- schemas ----------------------------------------------------------------------------------------------------------


class _Untitled(GenerateJsonSchema):
    """Pydantic's schemas without a title for every field, which only repeats its name."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        """Give no field a title."""
        del schema
        return False


def _only_with(field: str, other: str, *values: str) -> dict[str, Any]:
    """Return the condition that a field which is not null needs `other` to have one of these values."""
    said = {"properties": {field: {"not": {"type": "null"}}}, "required": [field]}
    return {"if": said, "then": {"properties": {other: {"enum": list(values)}}}}


def _given(field: str) -> dict[str, Any]:
    """Return the condition that a field is there and not null."""
    return {"required": [field], "properties": {field: {"not": {"type": "null"}}}}


def _when(field: str, value: str, then: dict[str, Any]) -> dict[str, Any]:
    """Return the condition that a field's value asks for something else."""
    return {"if": {"properties": {field: {"const": value}}, "required": [field]}, "then": then}


_CONDITIONS: dict[str, list[dict[str, Any]]] = {
    "decide": [
        {"oneOf": [_given("approval"), _given("thread")]},
        _only_with("arguments", "verdict", "approve"),
        # An answer may be null.
        {"if": {"required": ["answer"]}, "then": {"properties": {"verdict": {"enum": ["answer", "approve"]}}}},
        _when("verdict", "answer", {"required": ["answer"]}),
        _only_with("to", "verdict", "delegate"),
        _when("verdict", "delegate", _given("to")),
        _when(
            "verdict",
            "request_changes",
            {"required": ["comment"], "properties": {"comment": {"type": "string", "minLength": 1}}},
        ),
    ],
    "control": [_only_with("step_limit", "action", "retry")],
    "resolve": [_only_with("result", "outcome", "happened")],
}
"""What the models' validators ask for across fields, by verb."""


def _model_schemas() -> dict[str, Any]:
    """Return the schemas of every model by its name."""
    models = [*messages.MODELS.values(), messages.Reply, messages.EventMessage]
    _, found = models_json_schema(
        [(model, "validation") for model in models],
        ref_template="#/components/schemas/{model}",
        schema_generator=_Untitled,
    )
    schemas: dict[str, Any] = found["$defs"]
    for verb, conditions in _CONDITIONS.items():
        schemas[messages.MODELS[verb].__name__]["allOf"] = conditions
    schemas["ErrorPart"]["properties"]["code"]["x-codes"] = refusalcodes.listed()
    return schemas


def _signature_schemas() -> dict[str, Any]:
    """Return the schemas of a signed command: the message, and the two parts of its token that are JSON."""
    commands = [{"$ref": f"#/components/schemas/{model.__name__}"} for model in messages.MODELS.values()]
    name = {"type": "string", "minLength": 1}
    seconds = {"type": "number", "description": "Seconds since 1970."}
    return {
        "Signed": {
            "type": "object",
            "description": "A command with who vouches for it. `jwt` is a JSON Web Token (RFC 7519, compact): see "
            "SignedHeader and SignedClaims.",
            "properties": {
                "v": {"type": "integer", "const": messages.VERSION},
                "jwt": {"type": "string", "pattern": _JWT_PATTERN},
            },
            "required": ["v", "jwt"],
            "additionalProperties": False,
        },
        "SignedHeader": {
            "type": "object",
            "description": "The token's header. The algorithm is that of the key in `trusted_keys`.",
            "properties": {"kid": name, "alg": {"enum": list(ALGORITHMS)}, "typ": {"const": "JWT"}},
            "required": ["kid", "alg"],
        },
        "SignedClaims": {
            "type": "object",
            "description": "The token's claims.",
            "properties": {
                "command": {"oneOf": commands, "description": "The whole command, as it would be sent unsigned."},
                "sub": {**name, "description": "Who wants it. A `by` in the command is the same or missing."},
                "aud": {**name, "description": "The deployment's setting `audience`.", "default": "keepstep"},
                "jti": {**name, "description": "The command's id: a token counts once."},
                "iat": {**seconds, "description": "When it was signed, in seconds since 1970."},
                "exp": {**seconds, "description": "Its end, in seconds since 1970."},
                "roles": {"type": "array", "items": name, "maxItems": 100, "description": "The roles of `sub`."},
            },
            "required": ["command", "sub", "aud", "jti", "iat", "exp"],
        },
    }


def _envelope_schemas() -> dict[str, Any]:
    """Return the schemas of what stands around a body: its headers, and Kombu's message for brokers without any."""
    correlation = {
        "type": "string",
        "description": "The command's id, of an event its own. AMQP: the property correlation-id.",
    }
    return {
        "CommandHeaders": {
            "type": "object",
            "properties": {
                "correlation_id": correlation,
                "reply_to": {
                    "type": "string",
                    "pattern": r"\.replies\..",
                    "description": f"The queue for the reply, `{broker.replies_prefix(_PREFIX)}` and a name that is "
                    "the sender's own; missing for none. AMQP: the property reply-to.",
                },
                broker.SENT_AT: {
                    "type": "number",
                    "description": "When it was sent (seconds since 1970); may be missing. AMQP: in the headers.",
                },
            },
            "required": ["correlation_id"],
        },
        "ReplyHeaders": {
            "type": "object",
            "properties": {"correlation_id": correlation},
            "required": ["correlation_id"],
        },
        "KombuMessage": {
            "type": "object",
            "description": "A message as it stands in Redis and in the file broker: JSON text.",
            "properties": {
                "body": {"type": "string", "contentEncoding": "base64", "description": "The payload."},
                "content-type": {"const": _CONTENT_TYPE},
                "content-encoding": {"const": "utf-8"},
                "headers": {"type": "object", "properties": {broker.SENT_AT: {"type": "number"}}},
                "properties": {
                    "type": "object",
                    "properties": {
                        "correlation_id": correlation,
                        "reply_to": {"type": "string"},
                        "delivery_mode": {"enum": [1, 2], "description": "2 for commands."},
                        "delivery_info": {
                            "type": "object",
                            "properties": {"exchange": {"const": ""}, "routing_key": {"type": "string"}},
                            "required": ["exchange", "routing_key"],
                            "description": "The routing key is the queue's name.",
                        },
                        "priority": {"const": 0},
                        "body_encoding": {"const": "base64"},
                        "delivery_tag": {
                            "type": "string",
                            "minLength": 1,
                            "description": "Another one each time that anything is sent, a UUID for instance.",
                        },
                    },
                    "required": [
                        "correlation_id",
                        "delivery_mode",
                        "delivery_info",
                        "priority",
                        "body_encoding",
                        "delivery_tag",
                    ],
                },
            },
            "required": ["body", "content-type", "content-encoding", "headers", "properties"],
        },
    }


# --- the document -----------------------------------------------------------------------------------------------------


def document() -> dict[str, Any]:
    """Return the AsyncAPI document, as plain JSON values."""
    return {
        "asyncapi": "3.0.0",
        "info": {
            "title": "Keepstep messages",
            "version": str(messages.VERSION),
            "description": _INTRODUCTION,
            "license": {"name": "Apache-2.0", "url": "https://www.apache.org/licenses/LICENSE-2.0"},
        },
        "defaultContentType": _CONTENT_TYPE,
        "servers": _servers(),
        "channels": _channels(),
        "operations": _operations(),
        "components": {
            "messages": _messages(),
            "schemas": {**_model_schemas(), **_signature_schemas(), **_envelope_schemas()},
        },
    }


def _servers() -> dict[str, Any]:
    return {
        name: {
            "host": "{address}",
            "protocol": protocol,
            **version,
            "description": text,
            "variables": {"address": {"default": address, "description": "Host and port."}},
        }
        for name, protocol, version, address, text in (
            ("rabbitmq", "amqp", {"protocolVersion": "0-9-1"}, "localhost:5672", "RabbitMQ; `amqps` with TLS."),
            ("redis", "redis", {}, "localhost:6379", "Redis; `rediss` with TLS. Every value is a KombuMessage."),
        )
    }


def _channels() -> dict[str, Any]:
    names = [*messages.MODELS, "signed"]
    word = "The name; what is no letter, digit, - or _ in it is _."
    value = {"$ref": "#/components/schemas/KombuMessage"}
    expires_seconds = broker.replies_queue("replies").queue_arguments["x-expires"] // 1000
    return {
        "commands": {
            "address": broker.commands_name(_PREFIX),
            "title": "Commands",
            "description": f"A queue of messages of at most `message_bytes_max` bytes "
            f"({Settings.model_fields['message_bytes_max'].default} by default). RabbitMQ: a quorum queue that the "
            "workers declare; publish to the default exchange. Redis: a list, under the queue's name.",
            "parameters": {"prefix": {"default": "keepstep", "description": "The deployment's setting `queue`."}},
            "messages": {name: {"$ref": f"#/components/messages/{name}"} for name in names},
            "bindings": {"amqp": _amqp_queue()},
            "x-redis": {"send": "LPUSH", "receive": "BRPOP", "value": value},
        },
        "replies": {
            "address": None,
            "title": "Replies",
            "description": "The queue that a command's `reply_to` names. RabbitMQ: its sender declares it, durable, "
            f"with `x-expires` {expires_seconds * 1000}. Redis: a list, which nobody needs to make.",
            "messages": {"reply": {"$ref": "#/components/messages/reply"}},
            "bindings": {"amqp": _amqp_queue()},
            "x-redis": {"send": "LPUSH", "receive": "BRPOP", "value": value, "expiresSeconds": expires_seconds},
        },
        "events": {
            "address": "{event}.{tenant}.{graph}",
            "title": "Events",
            "description": f"The routing key on the durable topic exchange `{topics.exchange_name(_PREFIX)}`; a "
            "consumer binds a queue of its own. Redis: a binding is an element of a set, and the queue is a list.",
            "parameters": {
                "event": {"enum": list(eventkinds.KINDS), "description": "What kind of thing happened."},
                "tenant": {"description": word},
                "graph": {"description": word},
            },
            "messages": {"event": {"$ref": "#/components/messages/event"}},
            "bindings": {
                "amqp": {
                    "is": "routingKey",
                    "exchange": {
                        "name": topics.exchange_name("keepstep"),
                        "type": "topic",
                        "durable": True,
                        "autoDelete": False,
                    },
                    "bindingVersion": "0.3.0",
                }
            },
            "x-redis": {
                "bindings": f"_kombu.binding.{topics.exchange_name(_PREFIX)}",
                "binding": "{pattern}\u0006\u0016{regular expression}\u0006\u0016{queue}",
                "bind": "SADD",
                "receive": "BRPOP",
                "value": value,
            },
        },
    }


def _amqp_queue() -> dict[str, Any]:
    return {
        "is": "queue",
        "queue": {"durable": True, "exclusive": False, "autoDelete": False},
        "bindingVersion": "0.3.0",
    }


def _operations() -> dict[str, Any]:
    names = [*messages.MODELS, "signed"]
    return {
        "takeCommand": {
            "action": "receive",
            "channel": {"$ref": "#/channels/commands"},
            "title": "Take a command",
            "description": "Workers receive, producers send. It is acknowledged after its row is committed. Where a "
            "deployment has `trusted_keys`, `signed` is the only message that it takes.",
            "messages": [{"$ref": f"#/channels/commands/messages/{name}"} for name in names],
            "reply": {
                "address": {
                    "location": "$message.header#/reply_to",
                    "description": "No reply is sent to a queue whose name does not begin as one of replies does.",
                },
                "channel": {"$ref": "#/channels/replies"},
                "messages": [{"$ref": "#/channels/replies/messages/reply"}],
            },
            "bindings": {"amqp": {"deliveryMode": 2, "ack": True, "bindingVersion": "0.3.0"}},
        },
        "tellEvent": {
            "action": "send",
            "channel": {"$ref": "#/channels/events"},
            "title": "Tell what happened",
            "description": "Workers send, whoever binds a queue receives: each event at least once, in order.",
            "messages": [{"$ref": "#/channels/events/messages/event"}],
            "bindings": {"amqp": {"deliveryMode": 2, "bindingVersion": "0.3.0"}},
        },
    }


def _messages() -> dict[str, Any]:
    found = {
        verb: _message(verb, model.__name__, str(model.__doc__), [contractpage.example(verb)])
        for verb, model in messages.MODELS.items()
    }
    found["signed"] = _message("signed", "Signed", "Any of the commands, signed.", [])
    answers = [contractpage.example_reply(), contractpage.example_reply(refused=True)]
    found["reply"] = _message("reply", "Reply", str(messages.Reply.__doc__), answers, headers="ReplyHeaders")
    about = str(messages.EventMessage.__doc__)
    found["event"] = _message("event", "EventMessage", about, [contractpage.example_event()], headers="ReplyHeaders")
    return found


def _message(
    name: str, schema: str, summary: str, examples: list[dict[str, Any]], *, headers: str = "CommandHeaders"
) -> dict[str, Any]:
    message: dict[str, Any] = {
        "name": name,
        "summary": summary,
        "contentType": _CONTENT_TYPE,
        "headers": {"$ref": f"#/components/schemas/{headers}"},
        "correlationId": {"location": "$message.header#/correlation_id"},
        "payload": {"$ref": f"#/components/schemas/{schema}"},
        "bindings": {"amqp": {"contentEncoding": "utf-8", "bindingVersion": "0.3.0"}},
    }
    if examples:
        message["examples"] = [
            {"name": each.get("status", name), "headers": {"correlation_id": str(each["id"])}, "payload": each}
            for each in examples
        ]
    return message


def text() -> str:
    """Return docs/asyncapi.json."""
    return json.dumps(document(), indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    import sys

    sys.stdout.write(text())
