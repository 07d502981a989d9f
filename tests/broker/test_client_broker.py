"""The client on real brokers: what is sent arrives, replies come back, and a broker that fails costs bounded time."""

from __future__ import annotations

import json
import multiprocessing
import socket
import threading
import time
from contextlib import closing, contextmanager, suppress
from typing import Self

import kombu
import pytest

from keepstep import Client, broker, errors
from keepstep.settings import load
from keepstep.tasks import messages


@pytest.fixture(params=["file", "redis", "rabbitmq"])
def url(request, tmp_path):
    if request.param == "file":
        return f"file://{tmp_path / 'broker'}"
    return request.getfixturevalue(f"{request.param}_url")


@pytest.fixture(params=["redis", "rabbitmq"])
def server(request):
    """A server to freeze, kill and start again, and its URL."""
    if request.param == "redis":
        redis = request.getfixturevalue("spare_redis")
        return redis, redis.url
    return request.getfixturevalue("rabbitmq_server"), request.getfixturevalue("rabbitmq_url")


@pytest.fixture(params=["redis", "rabbitmq"])
def proxied(request):
    """A proxy, the broker's URL through it, the one past it, and a part of every message that is sent to it."""
    proxy = request.getfixturevalue(f"{request.param}_proxy")
    past = request.getfixturevalue(f"{request.param}_url")
    if request.param == "redis":
        return proxy, f"redis://127.0.0.1:{proxy.port}/0", past, b"LPUSH"
    return proxy, request.getfixturevalue("proxied_rabbitmq_url"), past, b'"verb":'


class Worker:
    """Takes commands as a worker does; answers each with the next of `answers`, at last the last. None: not at all."""

    def __init__(self, url: str, *answers: dict | None) -> None:
        self._url = url
        self._answers = list(answers)
        self._stop = threading.Event()
        self.taken: list[dict] = []
        self.ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        with broker.connection(self._url, commands=True) as connection:
            self._producer = kombu.Producer(connection.channel())
            with connection.Consumer([broker.commands_queue(self._url, "keepstep")], on_message=self._take):
                self.ready.set()
                while not self._stop.is_set():
                    with suppress(TimeoutError):
                        connection.drain_events(timeout=0.1)

    def _take(self, message) -> None:
        raw = message.body
        command = messages.parse(raw.encode() if isinstance(raw, str) else raw, size_max=10**6)
        self.taken.append(json.loads(raw))
        answer = self._answers[0] if len(self._answers) == 1 else self._answers.pop(0)
        if answer is not None:
            broker.publish_reply(
                self._producer,
                messages.reply(command.id, **answer),
                reply_to=message.properties["reply_to"],
                correlation_id=command.id,
                queue="keepstep",
            )
        message.ack()

    def __enter__(self) -> Self:
        self._thread.start()
        assert self.ready.wait(30)
        return self

    def __exit__(self, *_) -> None:
        self._stop.set()
        self._thread.join(30)
        assert not self._thread.is_alive()


def test_a_command_is_accepted_and_the_reply_says_of_what(url):
    with Worker(url, {"thread_id": "T", "run_id": "R"}) as worker, Client(url) as client:
        receipt = client.start("g", "t", {"n": 2**80})
        reply = receipt.accepted(timeout=10)
        assert (reply.id, reply.thread_id, reply.run_id, reply.duplicate) == (receipt.id, "T", "R", False)
        assert receipt.accepted(timeout=0) == reply
    assert [command["input"] for command in worker.taken] == [{"n": 2**80}]


def test_a_refusal_is_the_workers_typed_error(url):
    refusal = {"error": errors.UnknownGraph("no worker carries the graph g")}
    with Worker(url, refusal), Client(url) as client:
        receipt = client.start("g", "t", {})
        for _ in range(2):
            with pytest.raises(errors.UnknownGraph, match="no worker carries the graph g"):
                receipt.accepted(timeout=10)
        with Client(url, confirm=True) as confirming, pytest.raises(errors.UnknownGraph):
            confirming.start("g", "t", {})


def test_nobody_answers(url):
    with Client(url) as client:
        receipt = client.pause("t")
        start = time.monotonic()
        with pytest.raises(errors.NotConfirmed, match=f"no worker has confirmed command {receipt.id} within 0.3 s"):
            receipt.accepted(timeout=0.3)
        assert time.monotonic() - start < 2
        # It can be asked again, and a worker that comes late still answers.
        with Worker(url, {"thread_id": "T"}):
            assert receipt.accepted(timeout=10).thread_id == "T"


def test_a_confirming_client_sends_the_same_command_until_it_is_accepted(url):
    with (
        Worker(url, None, None, {"thread_id": "T", "duplicate": True}) as worker,
        Client(url, confirm=True, timeout=20) as client,
    ):
        receipt = client.signal("t", "paid", {"n": 1})
        assert receipt.accepted(timeout=0).duplicate
    assert len(worker.taken) == 3
    assert worker.taken[0] == worker.taken[1] == worker.taken[2]


def make_queue(url):
    """Make the queue of commands, which takes RabbitMQ longer than those who follow should have to wait."""
    with broker.connection(url, commands=True, timeout_seconds=20) as connection:
        broker.commands_queue(url, "keepstep")(connection.channel()).declare()


def test_a_confirming_client_gives_up_in_time(url):
    make_queue(url)
    with Client(url, confirm=True, timeout=1) as client:
        start = time.monotonic()
        with pytest.raises(errors.NotConfirmed, match="within 1 s"):
            client.pause("t")
        assert time.monotonic() - start < 3


def test_threads_share_a_client(url):
    with Worker(url, {"thread_id": "T"}) as worker, Client(url) as client:
        replies = []

        def work(number: int) -> None:
            replies.extend(client.signal(f"t{number}", "s", step).accepted(timeout=20).id for step in range(10))

        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert sorted(replies) == sorted(command["id"] for command in worker.taken)
        assert len(set(replies)) == 40


def test_replies_that_nobody_asks_for_do_not_pile_up(url):
    with Worker(url, {"thread_id": "T"}) as worker, Client(url) as client:
        receipts = [client.signal("t", "s", number) for number in range(250)]
        receipts[-1].accepted(timeout=20)
        with broker.connection(url, commands=False) as connection:
            size = broker.replies_queue(client._replies.name)(connection.channel()).queue_declare().message_count
        assert size == 0
        assert receipts[0].accepted(timeout=0).thread_id == "T"
    assert [command["payload"] for command in worker.taken] == list(range(250))


def test_a_closed_client_leaves_nothing_behind(url, request, tmp_path):
    with Worker(url, {"thread_id": "T"}):
        with Client(url) as client:
            client.pause("t").accepted(timeout=10)
            start = time.monotonic()
        assert time.monotonic() - start < 0.8  # it does not sit out a blocking read
    with broker.connection(url, commands=False) as connection:
        if url.startswith("file"):
            assert [path.name for path in (tmp_path / "broker/queues").iterdir()] == ["keepstep.commands"]
        elif url.startswith("redis"):
            assert connection.channel().client.keys("*") == []
        else:
            names = request.getfixturevalue("rabbitmq_server").queues(request.getfixturevalue("rabbitmq_vhost"))
            assert names == ["keepstep.commands"]


def test_a_client_that_was_made_before_a_fork_works_in_the_child(url):
    with Worker(url, {"thread_id": "T"}) as worker, Client(url) as client:
        client.pause("before").accepted(timeout=10)

        def child(outcome) -> None:
            outcome.put(client.pause("child").accepted(timeout=10).thread_id)
            client.close()

        context = multiprocessing.get_context("fork")
        outcome = context.SimpleQueue()
        process = context.Process(target=child, args=(outcome,))
        process.start()
        process.join(30)
        assert (process.exitcode, outcome.get()) == (0, "T")
        assert client.pause("after").accepted(timeout=10).thread_id == "T"
    assert [command["thread"] for command in worker.taken] == ["before", "child", "after"]


# --- brokers that fail ------------------------------------------------------------------------------------------------


@contextmanager
def bounded(url: str, seconds: float):
    """The block ends with `BrokerUnavailable` naming the broker, within about `seconds`."""
    start = time.monotonic()
    with pytest.raises(errors.BrokerUnavailable) as caught:
        yield
    assert time.monotonic() - start < seconds * 2 + 1
    assert broker.redacted(url) in caught.value.message
    assert "s3cret" not in caught.value.message


@pytest.mark.parametrize("scheme", ["redis", "amqp"])
def test_a_broker_that_refuses(scheme):
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        port = server.getsockname()[1]
    url = f"{scheme}://u:s3cret@127.0.0.1:{port}//"
    with bounded(url, 1), Client(url, timeout=1) as client:
        client.pause("t")


@pytest.mark.parametrize("scheme", ["redis", "amqp", "rediss", "amqps"])
def test_a_broker_that_accepts_and_never_answers(scheme):
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        url = f"{scheme}://u:s3cret@127.0.0.1:{server.getsockname()[1]}/0"
        with bounded(url, 1), Client(url, timeout=1) as client:
            client.pause("t")


def test_a_host_that_is_none():
    url = "redis://u:s3cret@no-such-host.invalid/0"
    with bounded(url, 1), Client(url, timeout=1) as client:
        client.pause("t")


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("in the way")
    url = f"file://{tmp_path}/file/broker"
    with bounded(url, 0.5), Client(url, timeout=0.5) as client:
        client.pause("t")


def test_a_broker_that_freezes_under_an_open_connection(server):
    frozen, url = server
    make_queue(url)
    with Client(url, timeout=2) as client:
        client.pause("t")
        frozen.freeze()
        try:
            with bounded(url, 2):
                client.pause("t")
        finally:
            frozen.thaw()
        # A server that was frozen may take a while to answer its first caller.
        with Client(url, timeout=10) as patient:
            patient.pause("t")


def test_a_broker_that_comes_back_while_the_client_tries(server):
    kept, url = server
    with Client(url, timeout=40) as client:
        client.pause("before")
        kept.kill()
        restart = threading.Timer(0.5, kept.start)
        restart.start()
        client.pause("during")
        restart.join()
        with broker.connection(url, commands=True) as connection:
            # What RabbitMQ has confirmed it keeps.
            expected = ["during"] if url.startswith("redis") else ["before", "during"]
            assert [json.loads(message.body)["thread"] for message in waiting(connection)] == expected


def waiting(connection):
    """Take out what waits in the queue of commands."""
    channel = connection.channel()
    return list(iter(lambda: channel.basic_get("keepstep.commands"), None))


@pytest.mark.parametrize("end", ["reply", "request"])
def test_an_answer_or_a_message_that_is_lost_is_sent_again(proxied, end):
    proxy, url, past, needle = proxied
    with Client(url, timeout=10) as client:
        client.pause("first")
        (proxy.lose_reply if end == "reply" else proxy.lose_request)(needle)
        receipt = client.pause("second")
        assert proxy.lost.is_set()
        with broker.connection(past, commands=True) as connection:
            taken = waiting(connection)
    # Nobody knows whether the first try arrived, so where its answer was lost it is there twice, as one command.
    times = 2 if end == "reply" else 1
    assert [json.loads(m.body)["thread"] for m in taken] == ["first", *["second"] * times]
    assert [json.loads(m.body)["id"] for m in taken[1:]] == [receipt.id] * times


def test_a_rabbitmq_without_memory_is_unavailable_and_holds_one_connection(rabbitmq_url, rabbitmq_server):
    make_queue(rabbitmq_url)
    with Client(rabbitmq_url, timeout=2) as client:
        client.pause("before")
        rabbitmq_server.alarm()
        with bounded(rabbitmq_url, 2):
            client.pause("during")
        # The one for commands, which ends with the alarm; no reply was waited for.
        assert rabbitmq_server.connections() == 1
        rabbitmq_server.end_alarm()
        client.pause("after")
        with broker.connection(rabbitmq_url, commands=True) as connection:
            taken = [json.loads(message.body)["thread"] for message in waiting(connection)]
    # What was being sent may arrive late, as an answer that was lost: once more than it was told.
    assert sorted(set(taken)) == ["after", "before", "during"]
    assert len(taken) == 3


def test_a_rabbitmq_whose_memory_comes_back_takes_the_command(rabbitmq_url, rabbitmq_server):
    with Client(rabbitmq_url, timeout=20) as client:
        client.pause("before")
        rabbitmq_server.alarm()
        end = threading.Timer(0.5, rabbitmq_server.end_alarm)
        end.start()
        client.pause("during")
        end.join()
        with broker.connection(rabbitmq_url, commands=True) as connection:
            taken = [json.loads(message.body) for message in waiting(connection)]
    assert [command["thread"] for command in taken] == ["before", "during", "during"]
    assert taken[1]["id"] == taken[2]["id"]


# --- options that a connection really has -----------------------------------------------------------------------------


def test_commands_on_redis_come_back_when_their_consumer_is_gone(redis_url):
    with broker.connection(redis_url, commands=True) as connection:
        channel = connection.channel()
        with Client(redis_url) as client:
            client.pause("t")
        assert channel.basic_get("keepstep.commands") is not None
        redis = channel.client
        assert sorted(redis.keys("*")) == [b"keepstep.unacked", b"keepstep.unacked_index"]
        channel.close()  # gives back what it had not acknowledged
        assert connection.channel().basic_get("keepstep.commands").payload["thread"] == "t"


def test_nudges_on_redis_leave_nothing_to_acknowledge(redis_url):
    with broker.connection(redis_url, commands=False) as connection:
        channel = connection.channel()
        kombu.Producer(channel).publish("x", routing_key="keepstep.nudges")
        assert channel.basic_get("keepstep.nudges").payload == "x"
        assert channel.client.keys("*") == []


def test_a_redis_channel_keeps_one_client_until_it_is_forked(redis_url):
    with broker.connection(redis_url, commands=False) as connection:
        channel = connection.channel()
        with channel.conn_or_acquire() as first, channel.conn_or_acquire() as second:
            assert first is second
        channel._after_fork()
        with channel.conn_or_acquire() as third:
            assert third is not first
            assert third.ping()


def test_replies_on_redis_expire_and_the_worker_forgets_their_queues(redis_url):
    with broker.connection(redis_url, commands=True) as connection:
        channel = connection.channel()
        producer = kombu.Producer(channel)
        broker.publish_reply(
            producer, b"{}", reply_to="keepstep.replies.gone", correlation_id="c", queue="keepstep"
        )  # fmt: skip
        assert 0 < channel.client.ttl("keepstep.replies.gone") <= 600
        assert channel._expires == {}


def test_a_password_of_redis_that_is_wrong_is_not_told(spare_redis):
    with closing(spare_redis.client()) as admin:
        admin.config_set("requirepass", "right")
    url = f"redis://:s3cret@127.0.0.1:{spare_redis.port}/0"
    with bounded(url, 0.5), Client(url, timeout=0.5) as client:
        client.pause("t")


def test_settings_name_the_queues(redis_url):
    with Client(redis_url, settings=load(queue="blue")) as client:
        client.pause("t")
        with broker.connection(redis_url, commands=True, queue="blue") as connection:
            assert connection.channel().basic_get("blue.commands").payload["thread"] == "t"
