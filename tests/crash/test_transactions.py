"""Processes are killed in the middle of transactions: the business rows are there once, and the journals agree."""

from __future__ import annotations

import pytest
from sqlalchemy import create_engine, text

from keepstep.store import foreign_journal
from tests.crash import evidence
from tests.crash.matrix import OF_TRANSACTIONS
from tests.worker.deployment import eventually

pytestmark = pytest.mark.kill

_SALES = "CREATE TABLE sale (id serial PRIMARY KEY, thread text NOT NULL)"


@pytest.fixture(scope="module")
def bank(postgresql_server):
    """Another database, with its table of sales and the journal beside it."""
    name = postgresql_server.create_database()
    engine = create_engine(postgresql_server.url(name))
    foreign_journal.install(engine)
    with engine.begin() as connection:
        connection.execute(text(_SALES))
    yield engine
    engine.dispose()
    postgresql_server.drop_database(name)


@pytest.fixture(scope="module")
def market(crew, bank):
    """The crew, whose workers know the bank and whose database has a table of sales, too."""
    crew.deployment.environment["KEEPSTEP_TEST_BANK"] = bank.url.render_as_string(hide_password=False)
    crew.deployment.execute(_SALES)
    return crew


@pytest.mark.parametrize("death", OF_TRANSACTIONS, ids=lambda death: death.id)
def test_a_pool_child_dies_in_a_transaction(market, bank, death):
    [worker], thread = market.workers(1), f"market-{death.id}"
    deployment = market.deployment
    market.arm(death.point, death.at)

    deployment.client.start("market", thread, {})
    deployment.ended(thread)
    point, pid = market.died()
    assert point == death.point

    sales = "SELECT count(*) FROM sale WHERE thread = :thread"
    assert deployment.query(sales, thread=thread) == [(1,)]
    with bank.connect() as connection:
        assert connection.execute(text(sales), {"thread": thread}).scalar_one() == 1
        of_thread = text("SELECT count(*) FROM keepstep_journal WHERE thread = :id AND tape IS NOT NULL")
        [(thread_id,)] = deployment.query("SELECT id FROM keepstep_thread WHERE name = :name", name=thread)
        assert connection.execute(of_thread, {"id": thread_id}).scalar_one() == 1
    assert evidence.state(deployment, thread)["log"] == ["sale 1 in the till", "sale 1 at the bank"]
    assert evidence.history(deployment, thread) == [("input", {}), ("step", dict(death.starts))]
    assert market.outside.calls(thread) == {"enter-sell": death.entered["sell"]}
    assert evidence.journal(deployment, thread) == {
        "transaction:till": ("done", 1),
        "transaction:bank": ("done", death.calls.get("bank", 1)),
    }
    eventually(lambda: [e for e in worker.events("child_lost") if e["pid"] == pid], what="the loss noticed")
