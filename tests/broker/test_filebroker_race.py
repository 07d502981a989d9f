"""Many processes at one file broker: every message arrives once, whole, and in its producer's order."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections import Counter
from pathlib import Path

import kombu
import pytest

from keepstep import broker, spool

_PRODUCERS = 3
_CONSUMERS = 3
_SMALL = 10_000
_LARGE = 200
_LARGE_BYTES = 200_000
_QUEUE = kombu.Queue("work", kombu.Exchange(""), routing_key="work")

spawn = multiprocessing.get_context("spawn")


def open_broker(folder: Path) -> kombu.Connection:
    return broker.connection(f"file://{folder}", commands=False)


def publish(connection: kombu.Connection, value: object) -> None:
    connection.default_channel  # noqa: B018  opens it
    kombu.Producer(connection.default_channel).publish(value, routing_key="work", declare=[_QUEUE])


def produce(folder: Path, producer: int) -> None:
    with open_broker(folder) as connection:
        every = _SMALL // _LARGE
        for number in range(producer, _SMALL, _PRODUCERS):
            publish(connection, [producer, number, "small"])
            if number % every == producer % every and number // every < _LARGE:
                publish(connection, [producer, number, "x" * _LARGE_BYTES])


def consume(folder: Path, results: Path, no_ack: bool) -> None:
    """Write what arrives, a line each, until everything was sent and the queue is empty."""
    with results.open("w") as out, open_broker(folder) as connection:

        def received(body, message) -> None:
            producer, number, text = body
            out.write(f"{producer} {number} {len(text)}\n")
            if not no_ack:
                message.ack()

        with connection.Consumer([_QUEUE], callbacks=[received], no_ack=no_ack):
            while True:
                done = (folder.parent / "sent").exists()
                try:
                    connection.drain_events(timeout=0.2)
                except TimeoutError:
                    if done:
                        return


@pytest.mark.parametrize("no_ack", [False, True], ids=["acknowledged", "unacknowledged"])
def test_each_of_many_messages_is_delivered_once(tmp_path, no_ack):
    folder = tmp_path / "broker"
    consumers = [spawn.Process(target=consume, args=(folder, tmp_path / f"got{i}", no_ack)) for i in range(_CONSUMERS)]
    producers = [spawn.Process(target=produce, args=(folder, i)) for i in range(_PRODUCERS)]
    for process in [*consumers, *producers]:
        process.start()
    for process in producers:
        process.join(120)
        assert process.exitcode == 0
    (tmp_path / "sent").touch()
    for process in consumers:
        process.join(120)
        assert process.exitcode == 0

    lines = [line for i in range(_CONSUMERS) for line in (tmp_path / f"got{i}").read_text().splitlines()]
    sizes = Counter(int(line.split()[2]) for line in lines)
    assert sizes == {5: _SMALL, _LARGE_BYTES: sizes[_LARGE_BYTES]}
    assert sizes[_LARGE_BYTES] >= _LARGE - 1
    assert set(Counter(lines).values()) == {1}
    assert [str(path) for path in folder.rglob("*.msg")] == []


def test_one_consumer_gets_messages_in_the_order_they_were_sent(tmp_path):
    got = []
    with open_broker(tmp_path) as connection:
        for number in range(3000):
            publish(connection, number)

        def received(body, message):
            got.append(body)
            message.ack()

        with connection.Consumer([_QUEUE], callbacks=[received]):
            while len(got) < 3000:
                connection.drain_events(timeout=5)
    assert got == list(range(3000))


def test_the_order_survives_a_clock_that_is_set_back(tmp_path, monkeypatch):
    with open_broker(tmp_path) as connection:
        publish(connection, "first")
        monkeypatch.setattr(time, "time_ns", lambda: 1)
        publish(connection, "second")
        queue = connection.SimpleQueue(_QUEUE)
        assert [queue.get(timeout=5).payload, queue.get(timeout=5).payload] == ["first", "second"]


@pytest.mark.parametrize(
    "content",
    [b"", b'{"body": "aGFs', b"[]", b'{"body": "x", "properties": {}}', b"\xff\xfe", b"[" * 100_000,
     b'{"body": "a", "properties": {"delivery_tag": "t", "body_encoding": "base64"}}'],
    ids=["empty", "torn", "not an object", "no tag", "not utf-8", "deep", "not base64"],
)  # fmt: skip
def test_a_file_that_is_no_message_is_moved_aside(tmp_path, content, caplog):
    with open_broker(tmp_path) as connection:
        publish(connection, "before")
        torn = tmp_path / "queues/work" / "99999999999999999999-1.msg"
        torn.write_bytes(content)
        queue = connection.SimpleQueue(_QUEUE)
        message = queue.get(timeout=5)
        assert message.payload == "before"
        message.ack()
        with pytest.raises(queue.Empty):
            queue.get(timeout=0.01)
        assert (tmp_path / "rejected/work" / torn.name).read_bytes() == content
        publish(connection, "after")
        assert queue.get(timeout=5).payload == "after"
    assert [record.levelname for record in caplog.records if record.name == "keepstep.spool"] == ["ERROR"]


def test_what_is_rejected_or_not_acknowledged_goes_back_to_its_place(tmp_path):
    with open_broker(tmp_path) as connection:
        publish(connection, 1)
        publish(connection, 2)
        channel = connection.channel()
        first = channel.basic_get("work")
        assert first.delivery_info.get("redelivered") is None
        first.reject(requeue=True)
        again = channel.basic_get("work")
        # The listing of the first call is worked off before a returned message is seen.
        assert again.payload == 2
        channel.close()
    with open_broker(tmp_path) as connection:
        channel = connection.channel()
        messages = [channel.basic_get("work") for _ in range(2)]
        assert [(m.payload, m.delivery_info["redelivered"]) for m in messages] == [(1, True), (2, True)]
        messages[0].ack()
        messages[1].reject()
        assert channel.basic_get("work") is None
    with open_broker(tmp_path) as connection:
        assert connection.channel().basic_get("work") is None


def test_queues_of_any_name_have_a_size_and_can_be_purged_and_deleted(tmp_path):
    with open_broker(tmp_path) as connection:
        channel = connection.channel()
        for name in ("a/b", "..", ".hidden", "ü %2F"):
            kombu.Queue(name, kombu.Exchange(""), routing_key=name)(channel).declare()
            for _ in range(2):
                kombu.Producer(channel).publish("x", routing_key=name)
            assert channel.queue_declare(name, passive=True).message_count == 2
        assert sorted(path.name for path in (tmp_path / "queues").iterdir()) == [
            "%2E.", "%2Ehidden", "%C3%BC%20%252F", "a%2Fb",
        ]  # fmt: skip
        assert channel.queue_purge("a/b") == 2
        assert channel.queue_declare("a/b", passive=True).message_count == 0
        channel.queue_delete("..")
        with pytest.raises(kombu.exceptions.ChannelError, match="NOT_FOUND"):
            channel.queue_declare("..", passive=True)


def test_broadcasts_are_refused_with_a_way_out(tmp_path):
    with open_broker(tmp_path) as connection, pytest.raises(kombu.exceptions.ChannelError, match="no fanout exchanges"):
        kombu.Exchange("reply", type="fanout")(connection.channel()).declare()


def test_an_expiring_queue_vanishes_when_nobody_asks_for_it(tmp_path):
    folder = str(tmp_path / "broker")
    opened = spool.opened(folder)
    opened.declare("short", expires_seconds=0.001)
    opened.declare("long", expires_seconds=100)
    opened.declare("for ever", expires_seconds=None)
    os.utime(Path(folder, "queues/short/.expires"), (1, 1))
    opened.look_after()
    assert sorted(path.name for path in Path(folder, "queues").iterdir()) == ["for%20ever", "long"]


@pytest.mark.parametrize("url", ["file://Some.Folder/Broker", "file://{cwd}/Some.Folder/Broker"])
def test_the_folder_is_taken_from_the_url_as_it_stands(tmp_path, monkeypatch, url):
    monkeypatch.chdir(tmp_path)
    with broker.connection(url.replace("{cwd}", str(tmp_path)), commands=True) as connection:
        publish(connection, "x")
        assert connection.as_uri() == url.replace("{cwd}", str(tmp_path))
        assert connection.clone().channel().basic_get("work").payload == "x"
    assert (tmp_path / "Some.Folder/Broker/queues/work").is_dir()


def test_only_its_owner_may_look_into_a_new_broker_folder(tmp_path):
    with open_broker(tmp_path / "broker") as connection:
        publish(connection, "x")
    assert (tmp_path / "broker").stat().st_mode & 0o777 == 0o700


def test_a_folder_that_is_deleted_under_a_connection_is_made_again(tmp_path):
    import shutil

    with open_broker(tmp_path / "broker") as connection:
        channel = connection.channel()
        publish(connection, 1)
        channel.basic_get("work").ack()
        shutil.rmtree(tmp_path / "broker")
        assert channel.basic_get("work") is None
        publish(connection, 2)
        assert channel.basic_get("work").payload == 2


def test_a_forked_child_has_an_in_flight_folder_of_its_own_and_gives_back_nothing_of_its_parents(tmp_path):
    with open_broker(tmp_path) as connection:
        publish(connection, 1)
        publish(connection, 2)
        message = connection.channel().basic_get("work")
        child = os.fork()
        if child == 0:
            try:
                connection.release()  # as Celery does with what a child has inherited
                with open_broker(tmp_path) as own:
                    got = own.channel().basic_get("work")
                    folders = len(list((tmp_path / "in-flight").glob("*.lock")))
                    got.ack()
                    os._exit(10 * folders + got.payload)
            finally:
                os._exit(99)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 22
        message.ack()
        assert connection.channel().basic_get("work") is None
