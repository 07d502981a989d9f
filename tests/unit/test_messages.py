"""The contract of messages: what is accepted, what is refused and how, and that its document is current."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest

from keepstep import errors
from keepstep.runtime.reader import Event
from keepstep.tasks import contractpage, messages

NOON = datetime(2026, 11, 30, 12, tzinfo=UTC)
START = {"v": 1, "verb": "start", "id": "c1", "tenant": "t", "graph": "g", "thread": "th", "input": {}}
DECIDE = {"v": 1, "verb": "decide", "id": "c1", "tenant": "t", "approval": "a", "verdict": "approve", "by": "b"}
SIGNAL = {"v": 1, "verb": "signal", "id": "c1", "tenant": "t", "thread": "th", "name": "n"}
CONTROL = {"v": 1, "verb": "control", "id": "c1", "tenant": "t", "thread": "th", "action": "pause"}
RESOLVE = {
    "v": 1,
    "verb": "resolve",
    "id": "c1",
    "tenant": "t",
    "effect": "x/0/1/n/pay:1",
    "outcome": "give_up",
    "by": "b",
}
EDIT = {"v": 1, "verb": "edit", "id": "c1", "tenant": "t", "thread": "th", "values": {"k": 1}, "by": "b"}
SCHEDULE = {
    "v": 1, "verb": "schedule", "id": "c1", "tenant": "t", "name": "n", "graph": "g", "input": {}, "cron": "@daily",
}  # fmt: skip
UNSCHEDULE = {"v": 1, "verb": "unschedule", "id": "c1", "tenant": "t", "name": "n"}
SCHEDULE_CONTROL = {"v": 1, "verb": "schedule_control", "id": "c1", "tenant": "t", "name": "n", "action": "pause"}
NEEDED = (
    "$.verb: one of start, decide, signal, control, edit, resolve, schedule, unschedule, schedule_control is needed"
)
SECRET = "sk-canary-9d1"


def parse(message, size_max=1_000_000):
    body = message if isinstance(message, bytes) else json.dumps(message).encode()
    return messages.parse(body, size_max=size_max)


def test_commands_are_read_with_their_defaults():
    start = parse(START)
    assert isinstance(start, messages.Start)
    assert start.model_dump() == START | {
        "application": "default", "request_id": None, "if_running": "queue", "step_limit": None,
        "priority": None, "by": None,
    }  # fmt: skip
    assert isinstance(parse(DECIDE), messages.Decide)
    assert isinstance(parse(SIGNAL), messages.SignalMessage)
    assert isinstance(parse(CONTROL), messages.Control)
    resolve = parse(RESOLVE)
    assert isinstance(resolve, messages.Resolve)
    assert resolve.model_dump() == RESOLVE | {"result": None, "reason": None}
    schedule = parse(SCHEDULE)
    assert isinstance(schedule, messages.ScheduleMessage)
    assert schedule.model_dump() == SCHEDULE | {
        "application": "default", "version": None, "thread": None, "timezone": "UTC", "missed": "last",
        "overlap": "allow", "priority": None, "step_limit": None, "by": None,
    }  # fmt: skip
    assert parse(UNSCHEDULE).model_dump() == UNSCHEDULE | {"application": "default", "reason": None, "by": None}
    control = parse(SCHEDULE_CONTROL)
    assert isinstance(control, messages.ScheduleControl)
    assert control.model_dump() == SCHEDULE_CONTROL | {"application": "default", "reason": None, "by": None}
    edit = parse(EDIT)
    assert isinstance(edit, messages.Edit)
    assert edit.model_dump() == EDIT | {"application": "default", "graph": None, "reason": None, "expect": None}
    assert [parse(EDIT | {"expect": each}).expect for each in (0, "01jdz8k3v5w0c9q2m7r4t6y8xa")] == [
        0, "01jdz8k3v5w0c9q2m7r4t6y8xa",
    ]  # fmt: skip


def test_numbers_arrive_as_they_were_sent():
    got = parse(START | {"input": {"big": 2**200, "small": 1e-300, "one": 1.0, "yes": True}})
    assert got.input == {"big": 2**200, "small": 1e-300, "one": 1.0, "yes": True}
    assert [type(value) for value in got.input.values()] == [int, float, float, bool]


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (b"", "$: JSON is needed; it ends to be so at character 0"),
        (b'{"v": 1,', "$: JSON is needed; it ends to be so at character 8"),
        (b"\xff{}", "$: UTF-8 is needed"),
        (b"[]", "$: an object is needed"),
        (b"null", "$: an object is needed"),
        (b'"v"', "$: an object is needed"),
        (b"[" * 100_000 + b"]" * 100_000, "$: too many objects and arrays inside each other"),
        (b'{"a":' * 50_000 + b"1" + b"}" * 50_000, "$: too many objects and arrays inside each other"),
        (b'{"v": 1, "v": 1}', "$: an object has the key v twice"),
        (b'{"v": 1, "input": {"a": {"k": 1, "k": 2}}}', "$: an object has the key k twice"),
        (b'{"v": NaN}', "$: NaN is not JSON"),
        (b'{"v": -Infinity}', "$: -Infinity is not JSON"),
        (b'{"v": 1e999}', "$: a number is too large for 64-bit floating point; send it as a string"),
        (b'{"v": 1' + b"0" * 5000 + b"}", "$: an integer has too many digits; send it as a string"),
        (b'{"v": 1, "x": {"y": ["\\ud800"]}}',
         "$.x.y.0: a string with half a surrogate pair, which is not Unicode text"),
        (b"{}", "$.v: the version is needed, a whole number"),
        (b'{"v": true}', "$.v: the version is needed, a whole number"),
        (b'{"v": "1"}', "$.v: the version is needed, a whole number"),
        (b'{"v": 1}', NEEDED),
        (b'{"v": 1, "verb": ["start"]}', NEEDED),
    ],
)  # fmt: skip
def test_a_body_that_is_no_message_is_refused(body, problem):
    with pytest.raises(errors.InvalidMessage) as caught:
        parse(body)
    assert caught.value.message == problem


def test_objects_inside_each_other_are_bounded():
    value: object = 1
    for _ in range(98):
        value = [value]
    parse(START | {"input": {"a": value}})
    with pytest.raises(errors.InvalidMessage, match="more than 100 objects"):
        parse(START | {"input": {"a": [value]}})


def test_another_version_is_refused_as_such():
    for version in (0, 2, 10**30):
        with pytest.raises(errors.UnsupportedVersion, match=r"^\$\.v: this worker knows version 1"):
            parse(START | {"v": version})


def test_a_message_over_the_limit_is_refused_unread():
    with pytest.raises(errors.TooLarge, match="the message has 101 bytes; message_bytes_max allows 100"):
        parse(b"x" * 101, size_max=100)


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        (START | {"extra": SECRET}, "$.extra: Extra inputs are not permitted"),
        ({k: v for k, v in START.items() if k != "graph"}, "$.graph: Field required"),
        (START | {"graph": ""}, "$.graph: String should have at least 1 character"),
        (START | {"graph": "x" * 201}, "$.graph: String should have at most 200 characters"),
        (START | {"thread": f"{SECRET}\n"}, "$.thread: String should have printable characters only"),
        (START | {"id": 7}, "$.id: Input should be a valid string"),
        (START | {"input": [SECRET]}, "$.input: Input should be a valid dictionary"),
        (START | {"input": None}, "$.input: Input should be a valid dictionary"),
        (START | {"if_running": SECRET}, "$.if_running: Input should be 'queue' or 'reject'"),
        (START | {"step_limit": 0}, "$.step_limit: Input should be greater than or equal to 1"),
        (START | {"step_limit": True}, "$.step_limit: Input should be a valid integer"),
        (START | {"step_limit": "7"}, "$.step_limit: Input should be a valid integer"),
        (DECIDE | {"verdict": SECRET},
         "$.verdict: Input should be 'approve', 'reject', 'answer', 'delegate' or 'request_changes'"),
        (DECIDE | {"verdict": "reject", "arguments": {"k": SECRET}}, "$: Arguments belong to the verdict approve"),
        (DECIDE | {"verdict": "answer"}, "$: An answer belongs to the verdict answer, which needs one"),
        (DECIDE | {"verdict": "reject", "answer": SECRET},
         "$: An answer belongs to the verdict answer, which needs one"),
        (DECIDE | {"thread": "t"}, "$: Either approval or thread says what is decided"),
        (DECIDE | {"approval": None}, "$: Either approval or thread says what is decided"),
        (DECIDE | {"verdict": "delegate"},
         "$: People to ask instead belong to the verdict delegate, which needs some"),
        (DECIDE | {"to": ["bob"]}, "$: People to ask instead belong to the verdict delegate, which needs some"),
        (DECIDE | {"verdict": "delegate", "to": []}, "$.to: List should have at least 1 item after validation, not 0"),
        (DECIDE | {"verdict": "request_changes"},
         "$: The verdict request_changes needs a comment: what to change"),
        (DECIDE | {"comment": SECRET * 1000}, "$.comment: String should have at most 10000 characters"),
        (CONTROL | {"action": SECRET}, "$.action: Input should be 'pause', 'resume', 'cancel' or 'retry'"),
        (CONTROL | {"step_limit": 7}, "$: A step limit belongs to the action retry"),
        (SCHEDULE | {"missed": SECRET}, "$.missed: Input should be 'skip', 'last' or 'all'"),
        (SCHEDULE | {"overlap": SECRET}, "$.overlap: Input should be 'allow' or 'skip'"),
        (SCHEDULE | {"cron": f"{SECRET}\n"}, "$.cron: String should have printable characters only"),
        (SCHEDULE | {"input": None}, "$.input: Input should be a valid dictionary"),
        (SCHEDULE_CONTROL | {"action": SECRET}, "$.action: Input should be 'pause' or 'resume'"),
        (EDIT | {"values": {}}, "$.values: Dictionary should have at least 1 item after validation, not 0"),
        ({k: v for k, v in EDIT.items() if k != "by"}, "$.by: Field required"),
        (EDIT | {"by": None}, "$.by: Input should be a valid string"),
        *(
            (EDIT | {"expect": wrong}, "$.expect: Input should be a checkpoint's seq (a whole number) or its id")
            for wrong in (-1, 1.5, True, "", f"{SECRET}\n", [SECRET])
        ),
        (SIGNAL | {"id": SECRET + "\0", "key": 1},
         "$.id: String should have printable characters only; $.key: Input should be a valid string"),
    ],
)  # fmt: skip
def test_a_message_that_does_not_fit_is_refused_by_its_path_and_never_shown(message, problem):
    with pytest.raises(errors.InvalidMessage) as caught:
        parse(message)
    assert caught.value.message == problem
    assert SECRET not in str(caught.value)
    assert SECRET not in repr(caught.value.__cause__)


def test_an_answer_may_be_null_and_arguments_belong_to_an_approval():
    assert parse(DECIDE | {"verdict": "answer", "answer": None}).answer is None
    assert parse(DECIDE | {"arguments": {"a": 1}}).arguments == {"a": 1}
    assert parse(CONTROL | {"action": "retry", "step_limit": 7}).step_limit == 7


def test_a_reply_says_what_was_accepted_or_why_not():
    assert json.loads(messages.reply("c1", thread_id="T", run_id="R", duplicate=True)) == {
        "v": 1, "id": "c1", "status": "accepted", "thread_id": "T", "run_id": "R", "duplicate": True,
    }  # fmt: skip
    assert json.loads(messages.reply("c1", error=errors.RunInProgress("it runs"))) == {
        "v": 1, "id": "c1", "status": "refused", "duplicate": False,
        "error": {"code": "run_in_progress", "message": "it runs"},
    }  # fmt: skip


def test_the_document_is_current():
    document = Path(__file__).parents[2] / "docs" / "messages.md"
    assert document.read_text() == contractpage.markdown(), "make it again: python -m keepstep.tasks.contractpage"


def test_the_documents_examples_are_accepted():
    blocks = contractpage.markdown().split("```json\n")[1:]
    values = [json.loads(block.split("```")[0]) for block in blocks]
    commands = [value for value in values if "verb" in value]
    assert [type(parse(command)).__name__ for command in commands] == [
        "Start", "Decide", "SignalMessage", "Control", "Edit", "Resolve",
        "ScheduleMessage", "Unschedule", "ScheduleControl",
    ]  # fmt: skip
    *answers, event = values[len(commands) :]
    for answer in answers:
        messages.Reply.model_validate(answer)
    assert [answer["status"] for answer in answers] == ["accepted", "refused"]
    assert messages.EventMessage.model_validate(event).event == "approval.opened"


def test_an_event_that_would_be_too_large_says_that_its_payload_is_left_out():
    found = Event(
        7, 9, "node.emitted", "acme", "default", "g", "t", "id", None, "body", 3, None, {"text": "x" * 1000}, NOON
    )
    whole = json.loads(messages.event(found, size_max=2000))
    assert whole["payload"] == {"text": "x" * 1000}
    assert "left_out" not in whole
    cut = json.loads(messages.event(found, size_max=1000))
    assert cut == {
        "v": 1, "event": "node.emitted", "id": 9, "position": 7, "at": NOON.timestamp(), "tenant": "acme",
        "application": "default", "graph": "g", "thread": "t", "thread_id": "id", "node": "body", "left_out": True,
    }  # fmt: skip
