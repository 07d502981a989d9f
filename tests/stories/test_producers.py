"""What docs/producers.md shows, run."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from functools import partial
from types import SimpleNamespace
from typing import TypedDict

import pytest
from kombu import Producer

from keepstep import END, START, Client, Graph, broker, topics
from keepstep.store import events
from keepstep.store.outbox import Outbox
from keepstep.tasks import contractpage
from tests.docs.test_examples import ROOT, blocks
from tests.steps.driver import deployed

SHOWN = blocks(ROOT / "docs" / "producers.md")


class Log(TypedDict, total=False):
    log: list


@pytest.fixture
def shop(tmp_path, monkeypatch):
    monkeypatch.setenv("KEEPSTEP_BROKER", f"file://{tmp_path / 'broker'}")
    outbox = Outbox.open(f"sqlite:///{tmp_path / 'shop.db'}")
    outbox.install()
    with closing(sqlite3.connect(tmp_path / "shop.db")) as connection:
        connection.execute("CREATE TABLE refund (order_id text PRIMARY KEY, amount text)")
        yield connection, outbox
    outbox.dispose()


def test_a_start_in_your_own_transaction(shop):
    connection, outbox = shop
    service: dict = {}
    exec(SHOWN[3], service)  # noqa: S102  the example
    service["refund_asked"](connection, "81", "12.50")
    with pytest.raises(sqlite3.IntegrityError):
        service["refund_asked"](connection, "81", "12.50")
    service["client"].close()
    with outbox.batch(10) as batch:
        (only,) = [json.loads(each.body) for each in batch.found]
    assert (only["graph"], only["thread"], only["input"]) == ("refunds", "order-81", {"order": "81", "amount": "12.50"})
    assert connection.execute("SELECT * FROM refund").fetchall() == [("81", "12.50")]


def test_people_are_asked_by_a_service_that_listens(tmp_path, capsys):
    service: dict = {}
    exec(SHOWN[1], service)  # noqa: S102  the example: it connects when it is used
    service["client"].close()
    url = f"file://{tmp_path / 'broker'}"
    event = {**contractpage.example_event(), "tenant": "acme"}
    with Client(url, tenant="acme") as client:
        client.events("helpdesk", kind="approval.opened").close()
        with broker.connection(url, commands=True) as connection:
            announcer = topics.Announcer(Producer(connection.channel(), auto_declare=False), "keepstep")
            announcer.publish(json.dumps(event).encode(), topics.routing_key(event["event"], "acme", "refunds"))
            announcer.publish(json.dumps(event).encode(), topics.routing_key(event["event"], "other", "refunds"))
        service["client"] = SimpleNamespace(events=partial(client.events, timeout=0))
        service["ask_people"]()
    assert capsys.readouterr().out == f"{event['thread']} {event['payload']['question']} {event['approval']}\n"


def test_a_reader_keeps_its_cursor_and_reads_on(sqlite_url, capsys):
    service: dict = {}
    exec(SHOWN[2], service)  # noqa: S102  the example
    graph = Graph("told", state=Log)
    graph.node(lambda _state, ctx: ctx.emit("half way"), name="body")
    graph.edge(START, "body")
    graph.edge("body", END)
    cursors = [0]
    with deployed(sqlite_url, graph) as d:
        for _ in range(2):
            d.start()
            d.drain()
            events.place(d.store, limit=100)
            cursors.append(service["read_on"](d.reader, cursors[-1]))
    assert cursors == [0, 3, 6]
    assert [line.split()[1:] for line in capsys.readouterr().out.splitlines()] == [
        ["told", "t", "thread.started"],
        ["told", "t", "thread.done"],
    ] * 2


def test_the_first_example_stands_as_it_is_shown():
    service: dict = {}
    exec(SHOWN[0], service)  # noqa: S102  the example: it connects when it is used
    assert callable(service["refund_asked"])
    service["client"].close()
