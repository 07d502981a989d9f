"""What docs/producers.md shows, run."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing

import pytest

from keepstep.store.outbox import Outbox
from tests.docs.test_examples import ROOT, blocks

SHOWN = blocks(ROOT / "docs" / "producers.md")


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
    exec(SHOWN[1], service)  # noqa: S102  the example
    service["refund_asked"](connection, "81", "12.50")
    with pytest.raises(sqlite3.IntegrityError):
        service["refund_asked"](connection, "81", "12.50")
    service["client"].close()
    with outbox.batch(10) as batch:
        (only,) = [json.loads(each.body) for each in batch.found]
    assert (only["graph"], only["thread"], only["input"]) == ("refunds", "order-81", {"order": "81", "amount": "12.50"})
    assert connection.execute("SELECT * FROM refund").fetchall() == [("81", "12.50")]


def test_the_first_example_stands_as_it_is_shown():
    service: dict = {}
    exec(SHOWN[0], service)  # noqa: S102  the example: it connects when it is used
    assert callable(service["refund_asked"])
    service["client"].close()
