"""The AsyncAPI document: current, whole by AsyncAPI's rules, of one mind with the models about what is a message."""

from __future__ import annotations

import json
import re

import jsonschema
import pytest

from keepstep import errors, eventkinds, topics
from keepstep.tasks import asyncapi, messages
from tests.contract import DOCUMENT, Contract
from tests.unit.test_messages import (
    CONTROL,
    DECIDE,
    EDIT,
    RESOLVE,
    SCHEDULE,
    SCHEDULE_CONTROL,
    SIGNAL,
    START,
    UNSCHEDULE,
)

CONTRACT = Contract()
SCHEMAS = {verb: model.__name__ for verb, model in messages.MODELS.items()}


def accepted(message):
    """Whether a worker takes it."""
    try:
        messages.parse(json.dumps(message).encode(), size_max=1_000_000)
    except errors.InvalidMessage:
        return False
    return True


def test_the_document_is_current():
    assert DOCUMENT.read_text(encoding="utf-8") == asyncapi.text(), "make it again: python -m keepstep.tasks.asyncapi"


# --- AsyncAPI's rules -------------------------------------------------------------------------------------------------


def references(value):
    """Return every reference in a part of the document."""
    if isinstance(value, dict):
        own = [value["$ref"]] if isinstance(value.get("$ref"), str) else []
        return own + [found for each in value.values() for found in references(each)]
    return [found for each in value for found in references(each)] if isinstance(value, list) else []


def resolved(reference):
    """Return what a reference leads to; fail when that is nothing."""
    found = CONTRACT.document
    assert reference.startswith("#/")
    for part in reference.removeprefix("#/").split("/"):
        found = found[part]
    return found


def test_the_document_has_the_parts_of_asyncapi_3():
    document = CONTRACT.document
    assert document["asyncapi"] == "3.0.0"
    assert {"title", "version"} <= set(document["info"])
    assert set(document) == {
        "asyncapi", "info", "defaultContentType", "servers", "channels", "operations", "components",
    }  # fmt: skip
    for server in document["servers"].values():
        assert {"host", "protocol"} <= set(server)
        assert set(re.findall(r"{(\w+)}", server["host"])) == set(server["variables"])
    for channel in document["channels"].values():
        named = re.findall(r"{(\w+)}", channel["address"] or "")
        assert set(named) == set(channel.get("parameters", {}))
        assert channel["messages"]


def test_every_reference_leads_somewhere():
    found = references(CONTRACT.document)
    assert len(found) > 40
    for reference in found:
        assert isinstance(resolved(reference), dict), reference


def test_the_operation_takes_every_message_of_its_channel_and_answers_where_it_is_told():
    operation = CONTRACT.document["operations"]["takeCommand"]
    assert operation["action"] == "receive"
    names = list(resolved(operation["channel"]["$ref"])["messages"])
    assert names == [*messages.VERBS, "signed"]
    assert [each["$ref"] for each in operation["messages"]] == [f"#/channels/commands/messages/{n}" for n in names]
    assert operation["reply"]["address"]["location"] == "$message.header#/reply_to"
    assert resolved(operation["reply"]["channel"]["$ref"])["address"] is None
    for name in names:
        headers = resolved(CONTRACT.document["components"]["messages"][name]["headers"]["$ref"])
        assert set(headers["properties"]) == {"correlation_id", "reply_to", "sent_at"}


def test_events_go_by_the_routing_key_that_workers_publish_under():
    operation = CONTRACT.document["operations"]["tellEvent"]
    assert operation["action"] == "send"
    channel = resolved(operation["channel"]["$ref"])
    assert channel["parameters"]["event"]["enum"] == list(eventkinds.KINDS)
    key = channel["address"].format(event="thread.done", tenant=topics.word("acme.org"), graph=topics.word("re funds"))
    assert key == topics.routing_key("thread.done", "acme.org", "re funds") == "thread.done.acme_org.re_funds"
    assert channel["bindings"]["amqp"]["exchange"]["name"] == topics.exchange_name("keepstep") == "keepstep.events"


def test_schemas_are_schemas():
    for schema in CONTRACT.document["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)
        jsonschema.Draft7Validator.check_schema(schema)  # AsyncAPI's own dialect is a superset of it


# --- of one mind with the models --------------------------------------------------------------------------------------


def test_every_example_is_as_its_schema_says():
    shown = 0
    for message in CONTRACT.document["components"]["messages"].values():
        for example in message.get("examples", ()):
            schema = message["payload"]["$ref"].rpartition("/")[2]
            assert CONTRACT.problems(schema, example["payload"]) == []
            assert example["headers"]["correlation_id"] == str(example["payload"]["id"])
            shown += 1
    assert shown == len(messages.VERBS) + 3


@pytest.mark.parametrize(
    "message",
    [
        START, DECIDE, SIGNAL, CONTROL, RESOLVE, EDIT, SCHEDULE, UNSCHEDULE, SCHEDULE_CONTROL,
        SCHEDULE | {"missed": "all", "overlap": "skip", "thread": "daily", "version": "2", "step_limit": 3},
        SCHEDULE | {"missed": "some"},
        SCHEDULE | {"overlap": None},
        SCHEDULE | {"cron": ""},
        SCHEDULE | {"cron": "* " * 101},
        {name: value for name, value in SCHEDULE.items() if name != "cron"},
        SCHEDULE_CONTROL | {"action": "cancel"},
        START | {"if_running": "reject", "priority": "low", "step_limit": 1, "request_id": None},
        START | {"if_running": "later"},
        START | {"input": []},
        START | {"step_limit": 0},
        START | {"colour": "red"},
        START | {"v": "1"},
        START | {"tenant": ""},
        START | {"graph": "g" * 201},
        {name: value for name, value in START.items() if name != "graph"},
        DECIDE | {"approval": None, "thread": "t"},
        DECIDE | {"approval": None},
        DECIDE | {"thread": "t"},
        DECIDE | {"arguments": {"a": 1}},
        DECIDE | {"arguments": None, "verdict": "reject"},
        DECIDE | {"arguments": {"a": 1}, "verdict": "reject"},
        DECIDE | {"answer": "left"},
        DECIDE | {"verdict": "answer", "answer": None},
        DECIDE | {"verdict": "answer"},
        DECIDE | {"verdict": "reject", "answer": 1},
        DECIDE | {"verdict": "delegate", "to": ["ben"]},
        DECIDE | {"verdict": "delegate", "to": []},
        DECIDE | {"verdict": "delegate"},
        DECIDE | {"to": ["ben"]},
        DECIDE | {"verdict": "request_changes", "comment": "smaller"},
        DECIDE | {"verdict": "request_changes", "comment": ""},
        DECIDE | {"verdict": "request_changes"},
        SIGNAL | {"payload": [1, None, {"ä": "ö"}]},
        SIGNAL | {"name": 7},
        CONTROL | {"action": "retry", "step_limit": 7},
        CONTROL | {"step_limit": 7},
        CONTROL | {"action": "stop"},
        CONTROL | {"reason": "r" * 10_001},
        RESOLVE | {"outcome": "happened", "result": {"receipt": "R"}},
        RESOLVE | {"result": 1},
        RESOLVE | {"result": None},
        EDIT | {"expect": 3},
        EDIT | {"expect": "01jdz8k3v5w0c9q2m7r4t6y8xa"},
        EDIT | {"expect": 1.5},
        EDIT | {"expect": -1},
        EDIT | {"expect": ""},
        EDIT | {"values": {}},
    ],
    ids=json.dumps,
)  # fmt: skip
def test_a_producer_that_validates_sends_what_a_worker_takes(message):
    assert (CONTRACT.problems(SCHEMAS[message["verb"]], message) == []) is accepted(message)


def test_a_signed_message_has_a_token_and_nothing_else():
    assert CONTRACT.problems("Signed", {"v": 1, "jwt": "aa.bb.c-_"}) == []
    assert CONTRACT.problems("Signed", {"v": 1, "jwt": "aa.bb"}) != []
    assert CONTRACT.problems("Signed", {"v": 1, "jwt": "aa.bb.cc", "tenant": "t"}) != []
    claims = {"command": START, "sub": "anna", "aud": "keepstep", "jti": "c1", "iat": 1, "exp": 2}
    assert CONTRACT.problems("SignedClaims", claims) == []
    for name in claims:
        assert CONTRACT.problems("SignedClaims", {key: claims[key] for key in claims if key != name}) != []
    assert CONTRACT.problems("SignedClaims", claims | {"command": START | {"colour": "red"}}) != []
