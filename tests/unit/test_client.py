"""The client's side of a message: what it builds, what it refuses before anything is sent."""

from __future__ import annotations

import datetime as dt
import decimal
import enum
import json
import math
import subprocess
import sys
import uuid

import kombu
import pytest

from keepstep import Client, broker, errors
from keepstep.settings import load
from keepstep.tasks import messages


@pytest.fixture
def sent(tmp_path):
    """Send with a client, and return what then stands in the queue of commands: the body, and the properties."""

    def send(act, **options):
        url = f"file://{tmp_path / 'broker'}"
        with Client(url, **options) as client:
            receipt = act(client)
        with broker.connection(url, commands=True) as connection:
            message = connection.channel().basic_get("keepstep.commands")
            message.ack()
        assert receipt.id == json.loads(message.body)["id"]
        return json.loads(message.body), message

    return send


VERBS = {
    "start": (
        lambda c: c.start("refunds", "order-1", {"n": 2**70, "x": -0.0, "list": [None, True, "ü"]}),
        {"verb": "start", "graph": "refunds", "thread": "order-1", "application": "default", "if_running": "queue",
         "input": {"n": 2**70, "x": -0.0, "list": [None, True, "ü"]}},
    ),
    "start, all": (
        lambda c: c.start("refunds", "order-1", {}, request_id="r", if_running="reject", step_limit=7),
        {"verb": "start", "graph": "refunds", "thread": "order-1", "application": "default", "input": {},
         "request_id": "r", "if_running": "reject", "step_limit": 7},
    ),
    "decide": (
        lambda c: c.decide("a1", "approve", by="anna", arguments={"amount": "9"}, comment="ok"),
        {"verb": "decide", "approval": "a1", "verdict": "approve", "by": "anna", "arguments": {"amount": "9"},
         "comment": "ok"},
    ),
    "approve": (
        lambda c: c.approve("a1", by="anna"),
        {"verb": "decide", "approval": "a1", "verdict": "approve", "by": "anna"},
    ),
    "reject": (
        lambda c: c.reject("a1", by="anna", comment="no"),
        {"verb": "decide", "approval": "a1", "verdict": "reject", "by": "anna", "comment": "no"},
    ),
    "answer": (
        lambda c: c.answer("a1", None, by="anna"),
        {"verb": "decide", "approval": "a1", "verdict": "answer", "answer": None, "by": "anna"},
    ),
    "signal": (
        lambda c: c.signal("order-1", "paid"),
        {"verb": "signal", "thread": "order-1", "application": "default", "name": "paid", "payload": None},
    ),
    "signal, all": (
        lambda c: c.signal("order-1", "paid", [1], graph="refunds", key="k", id="event-7"),
        {"verb": "signal", "thread": "order-1", "application": "default", "name": "paid", "payload": [1],
         "graph": "refunds", "key": "k", "id": "event-7"},
    ),
    "pause": (
        lambda c: c.pause("order-1", graph="refunds", reason="audit", by="anna"),
        {"verb": "control", "action": "pause", "thread": "order-1", "application": "default", "graph": "refunds",
         "reason": "audit", "by": "anna"},
    ),
    "resume": (
        lambda c: c.resume("order-1"),
        {"verb": "control", "action": "resume", "thread": "order-1", "application": "default"},
    ),
    "cancel": (
        lambda c: c.cancel("order-1"),
        {"verb": "control", "action": "cancel", "thread": "order-1", "application": "default"},
    ),
    "retry": (
        lambda c: c.retry("order-1", step_limit=5000),
        {"verb": "control", "action": "retry", "thread": "order-1", "application": "default", "step_limit": 5000},
    ),
    "edit": (
        lambda c: c.edit("order-1", {"amount": "9", "note": None}, by="anna"),
        {"verb": "edit", "thread": "order-1", "application": "default", "values": {"amount": "9", "note": None},
         "by": "anna"},
    ),
    "resolve": (
        lambda c: c.resolve("x/0/1/n/pay:1", "happened", result=None, by="anna"),
        {"verb": "resolve", "effect": "x/0/1/n/pay:1", "outcome": "happened", "result": None, "by": "anna"},
    ),
    "schedule": (
        lambda c: c.schedule("nightly", "report", "30 2 * * *"),
        {"verb": "schedule", "name": "nightly", "graph": "report", "application": "default", "cron": "30 2 * * *",
         "input": {}, "timezone": "UTC", "missed": "last", "overlap": "allow"},
    ),
    "schedule, all": (
        lambda c: c.schedule(
            "nightly", "report", "@daily", {"n": 1}, timezone="Europe/Berlin", thread="reports", version="2",
            missed="all", overlap="skip", priority="low", step_limit=9, by="anna", id="s1",
        ),
        {"verb": "schedule", "id": "s1", "name": "nightly", "graph": "report", "application": "default",
         "cron": "@daily", "input": {"n": 1}, "timezone": "Europe/Berlin", "thread": "reports", "version": "2",
         "missed": "all", "overlap": "skip", "priority": "low", "step_limit": 9, "by": "anna"},
    ),
    "unschedule": (
        lambda c: c.unschedule("nightly", reason="done", by="anna"),
        {"verb": "unschedule", "name": "nightly", "application": "default", "reason": "done", "by": "anna"},
    ),
    "pause a schedule": (
        lambda c: c.pause_schedule("nightly", by="anna"),
        {"verb": "schedule_control", "action": "pause", "name": "nightly", "application": "default", "by": "anna"},
    ),
    "resume a schedule": (
        lambda c: c.resume_schedule("nightly", reason="January"),
        {"verb": "schedule_control", "action": "resume", "name": "nightly", "application": "default",
         "reason": "January"},
    ),
    "edit what was looked at": (
        lambda c: c.edit("order-1", {"n": 1}, by="anna", graph="refunds", reason="typo", expect=0, id="e1"),
        {"verb": "edit", "id": "e1", "thread": "order-1", "application": "default", "graph": "refunds",
         "values": {"n": 1}, "by": "anna", "reason": "typo", "expect": 0},
    ),
}  # fmt: skip


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_is_one_message_that_the_models_accept(sent, verb):
    act, expected = VERBS[verb]
    body, message = sent(act, tenant="acme")
    assert len(body["id"]) == (26 if "id" not in expected else len(expected["id"]))
    assert body == {"v": 1, "id": body["id"], "tenant": "acme"} | expected
    parsed = messages.parse(message.body, size_max=10_000)
    assert parsed.model_dump(exclude_unset=True) == body
    assert math.copysign(1, body.get("input", {}).get("x", -1)) == -1


def test_the_envelope_says_where_the_reply_goes(sent):
    body, message = sent(lambda c: c.pause("t"))
    assert message.content_type == "application/json"
    assert message.properties["correlation_id"] == body["id"]
    assert message.properties["reply_to"].startswith("keepstep.replies.")
    assert message.properties["delivery_mode"] == 2


class Colour(enum.Enum):
    RED = "red"


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ({"order": {"at": dt.datetime(2026, 1, 1, tzinfo=dt.UTC)}},
         "$.input.order.at: JSON has no datetime; send value.isoformat(): the graph's state schema parses it"),
        ({"n": [1, decimal.Decimal("1.5")]},
         "$.input.n.1: JSON has no Decimal; send str(value): the graph's state schema parses it"),
        ({"id": uuid.UUID(int=7)}, "$.input.id: JSON has no UUID; send str(value): the graph's state schema parses it"),
        ({"c": Colour.RED}, "$.input.c: JSON has no Colour; send its value"),
        ({"wait": dt.timedelta(1)}, "$.input.wait: JSON has no timedelta; send value.total_seconds()"),
        ({"t": (1, 2)}, "$.input.t: JSON has no tuple; send a list: the graph's state schema makes its own type of it"),
        ({"b": b"x"}, "$.input.b: JSON has no bytes; send base64 text, or a reference to where the bytes are"),
        ({"o": object()},
         "$.input.o: JSON has no object; send an object, an array, a string, a number, true, false or null"),
        ({"n": math.nan}, "$.input.n: JSON has no NaN and no infinities; send a string or null"),
        ({"n": -math.inf}, "$.input.n: JSON has no NaN and no infinities; send a string or null"),
        ({"n": 10**4300}, "$.input.n: an integer of more than 4,200 digits; send it as a string"),
        ({1: 2}, "$.input: a key is a int; JSON's keys are strings"),
        ({"s": "\ud800"}, "$.input.s: a string with half a surrogate pair, which is not Unicode text"),
        ([1], "$.input: an object (a mapping) is needed, not a list"),
    ],
)  # fmt: skip
def test_what_json_cannot_carry_is_refused_by_its_path_with_a_way_out(tmp_path, value, problem):
    client = Client(f"file://{tmp_path / 'broker'}")
    with pytest.raises(errors.NotStorable) as caught:
        client.start("g", "t", value)
    assert caught.value.message == problem
    assert not (tmp_path / "broker").exists()


def test_values_inside_themselves_are_refused(tmp_path):
    value: dict[str, object] = {}
    value["again"] = value
    with pytest.raises(errors.NotStorable, match="more than 100 objects and arrays inside each other"):
        Client(f"file://{tmp_path}").start("g", "t", value)


def test_a_message_over_the_limit_is_refused_before_it_is_sent(tmp_path):
    client = Client(f"file://{tmp_path / 'broker'}", settings=load(message_bytes_max=1000))
    with pytest.raises(errors.TooLarge, match=r"the start message has \d+ bytes; message_bytes_max allows 1000"):
        client.start("g", "t", {"text": "x" * 1000})
    assert not (tmp_path / "broker").exists()


@pytest.mark.parametrize(
    ("act", "problem"),
    [
        (lambda c: c.start("", "t", {}), "graph must be"),
        (lambda c: c.start("g", "a\nb", {}), "thread must be"),
        (lambda c: c.start("g", "x" * 201, {}), "thread must be"),
        (lambda c: c.start("g", "t", {}, if_running="drop"), "if_running must be one of queue, reject"),
        (lambda c: c.decide("a", "maybe", by="b"), "verdict must be one of approve, reject, answer"),
        (lambda c: c.approve("a", by=""), "by must be"),
        (lambda c: c.signal("t", "n", id="\0"), "id must be"),
    ],
)
def test_names_that_cannot_be_are_refused(tmp_path, act, problem):
    with pytest.raises(errors.InvalidInput, match=problem):
        act(Client(f"file://{tmp_path / 'broker'}"))
    assert not (tmp_path / "broker").exists()


def test_the_broker_and_the_tenant_come_from_the_settings(tmp_path, monkeypatch):
    monkeypatch.setenv("KEEPSTEP_BROKER", "file://here/Q")
    monkeypatch.setenv("KEEPSTEP_TENANT", "acme")
    monkeypatch.setenv("KEEPSTEP_QUEUE", "blue")
    with Client() as client:
        client.pause("t")
    with broker.connection("file://here/Q", commands=True) as connection:
        assert json.loads(connection.channel().basic_get("blue.commands").body)["tenant"] == "acme"


@pytest.mark.parametrize("url", ["sqs://x", "kafka://a:secret@b", "localhost", "file://", "file:///"])
def test_a_broker_that_is_none_is_refused_by_name(url):
    with pytest.raises(errors.InvalidSettings) as caught:
        Client(url)
    assert "redis://" in caught.value.message or "needs a folder" in caught.value.message
    assert "secret" not in caught.value.message
    if "://" in url and not url.startswith("file"):
        assert repr(url.split(":", maxsplit=1)[0]) in caught.value.message


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://:s3cret@host:6379/0", "redis://:***@host:6379/0"),
        ("amqp://user:s3cret@host/vhost", "amqp://user:***@host/vhost"),
        ("redis://u:s3@cr/et@host/0", "redis://u:***@host/0"),
        ("rediss://host/0?ssl_keyfile_password=s3cret&x=1", "rediss://host/0?ssl_keyfile_password=***&x=***"),
        ("amqp://a:s3cret@one;amqp://b:s3cret@two", "amqp://a:***@one;amqp://b:***@two"),
        ("file:///home/a@b/broker", "file:///home/a@b/broker"),
        ("s3cret", "***"),
    ],
)
def test_a_url_is_shown_without_its_passwords(url, shown):
    assert broker.redacted(url) == shown


def test_a_librarys_words_are_shown_without_the_password():
    text = "cannot log in as u with s3@cr%2Fet or s3@cr/et"
    assert broker.scrubbed(text, "redis://u:s3@cr%2Fet@host/0") == "cannot log in as u with *** or ***"


def test_options_of_each_kind_of_broker():
    assert broker.transport_options("file://x", commands=True) == {"fsync": True}
    assert broker.transport_options("file://x", commands=False) == {"fsync": False}
    assert broker.transport_options("memory://", commands=True) == {}
    nudges = {
        "socket_timeout": 5.0, "socket_connect_timeout": 2.0, "socket_keepalive": True, "priority_steps": [0, 1, 2],
        "ack_emulation": False,
    }  # fmt: skip
    assert broker.transport_options("redis://h/0", commands=False) == nudges
    assert broker.transport_options("redis://h/0", commands=True, queue="blue") == nudges | {
        "priority_steps": [0], "ack_emulation": True, "visibility_timeout": 30, "unacked_key": "blue.unacked",
        "unacked_index_key": "blue.unacked_index", "unacked_mutex_key": "blue.unacked_mutex",
        "unacked_mutex_expire": 30, "unacked_restore_interval": 2, "unacked_restore_throttle": 1,
    }  # fmt: skip
    assert broker.transport_options("amqps://h", commands=True, timeout_seconds=2) == {
        "confirm_publish": True, "connect_timeout": 2, "read_timeout": 2, "write_timeout": 2,
    }  # fmt: skip


def test_tls_to_redis_verifies_certificates_unless_the_url_says_otherwise():
    import ssl

    plain = broker.connection("rediss://host/0", commands=True)
    told = broker.connection("rediss://host/0?ssl_cert_reqs=CERT_NONE", commands=True)
    assert plain.ssl == {"ssl_cert_reqs": ssl.CERT_REQUIRED}
    assert told.ssl == {"ssl_cert_reqs": ssl.CERT_NONE}
    assert broker.celery_settings("rediss://host/0")["broker_use_ssl"] == {"ssl_cert_reqs": ssl.CERT_REQUIRED}
    assert "broker_use_ssl" not in broker.celery_settings("redis://host/0")


def test_the_alias_is_registered_once_and_replaces_nothing_of_kombus():
    from kombu.transport import TRANSPORT_ALIASES

    assert TRANSPORT_ALIASES["file"] == "keepstep.filebroker:Transport"
    assert TRANSPORT_ALIASES["redis"] == "kombu.transport.redis:Transport"
    assert TRANSPORT_ALIASES["filesystem"] == "kombu.transport.filesystem:Transport"


def test_commands_have_a_bounded_quorum_queue_on_rabbitmq_and_a_plain_one_elsewhere():
    quorum = broker.commands_queue("amqp://h", "blue")
    assert quorum.name == "blue.commands"
    assert quorum.durable
    assert quorum.queue_arguments == {
        "x-queue-type": "quorum", "x-delivery-limit": 20, "x-dead-letter-exchange": "",
        "x-dead-letter-routing-key": "blue.commands.rejected",
    }  # fmt: skip
    assert broker.rejected_queue("blue").name == "blue.commands.rejected"
    assert broker.commands_queue("redis://h", "blue").queue_arguments == {}


def test_every_graphs_version_has_a_queue_of_its_own():
    assert broker.nudges_name("blue", "refunds@1") == "blue.nudges.refunds@1"
    long = "graph" * 60
    assert broker.nudges_name("blue", f"{long}@1") != broker.nudges_name("blue", f"{long}@2")
    assert all(len(broker.nudges_name("blue", f"{name}@1")) <= 255 for name in (long, "ü" * 200))
    assert broker.nudges_queue("amqp://h", "blue", "refunds@1").queue_arguments == {
        "x-max-priority": 2,
        "x-expires": 7 * 86400 * 1000,
    }
    assert broker.nudges_queue("redis://h", "blue", "refunds@1").queue_arguments == {}
    assert [broker.message_priority("amqp://h", level) for level in (0, 1, 2)] == [2, 1, 0]
    assert [broker.message_priority("redis://h", level) for level in (0, 1, 2)] == [0, 1, 2]


def test_a_reply_goes_to_no_other_queue(tmp_path, caplog):
    with broker.connection(f"file://{tmp_path}", commands=True) as connection:
        producer = kombu.Producer(connection.channel())
        options = {"correlation_id": "c", "queue": "keepstep"}
        assert not broker.publish_reply(producer, b"{}", reply_to="keepstep.commands", **options)
        assert broker.publish_reply(producer, b"{}", reply_to="keepstep.replies.x", **options)
    assert [path.name for path in (tmp_path / "queues").iterdir()] == ["keepstep.replies.x"]


def test_a_producer_service_loads_no_database_and_no_runtime():
    code = (
        "import sys, keepstep; keepstep.Client('memory://').pause; "
        "bad = ('sqlalchemy', 'celery', 'alembic', 'msgspec', 'keepstep.runtime', 'keepstep.store', 'keepstep.tasks'); "
        "sys.exit(repr([m for m in sys.modules if m.startswith(bad)]) if set(bad) & set(sys.modules) else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_message_that_nobody_takes_is_sent_again_a_few_times_only(tmp_path, monkeypatch):
    # A tenth of the real pauses and of the time that the command line waits.
    monkeypatch.setattr("keepstep.client._RESEND_SECONDS_MIN", 0.2)
    monkeypatch.setattr("keepstep.client._RESEND_SECONDS_MAX", 1.0)
    url = f"file://{tmp_path}/broker"
    with Client(url, confirm=True, timeout=1.0) as client, pytest.raises(errors.NotConfirmed):
        client.pause("t")
    with broker.connection(url, commands=True, queue="keepstep", timeout_seconds=1) as connection:
        queue = broker.commands_queue(url, "keepstep")(connection.channel())
        bodies = [message.body for message in iter(lambda: queue.get(no_ack=True), None)]
    assert 2 <= len(bodies) <= 3
    assert len(set(bodies)) == 1
