"""Transactions on another database, whose own journal says which were committed: once, whatever the store has heard."""

from __future__ import annotations

import os
import threading
from decimal import Decimal
from urllib.parse import urlsplit

import pytest
from sqlalchemy import create_engine, event, make_url, text
from sqlalchemy.orm import Session

from keepstep import START, Graph, crashpoints
from keepstep.crashpoints import Died
from keepstep.errors import GraphError
from keepstep.runtime.databases import Database
from keepstep.store import foreign_journal, workers
from tests.steps.business import Crash, Order, crash, metadata, overtake, pay, transactions
from tests.steps.test_effects import AGAIN, State, acts


@pytest.fixture
def bank_url(store_url, tmp_path, postgresql_server):
    """The URL of another database, of the store's kind."""
    if store_url.startswith("sqlite"):
        yield f"sqlite:///{tmp_path / 'bank.db'}"
        return
    name = postgresql_server.create_database()
    yield postgresql_server.url(name)
    postgresql_server.drop_database(name)


@pytest.fixture
def bank(bank_url):
    """Another database, with the user's tables and the journal beside them."""
    engine = create_engine(bank_url)
    assert foreign_journal.install(engine)
    assert not foreign_journal.install(engine)
    metadata.create_all(engine)
    with engine.begin() as connection:
        connection.execute(text("INSERT INTO account VALUES ('anna', 100)"))
    yield engine
    engine.dispose()


@pytest.fixture
def shop(deploy, bank):
    """Make deployments of one node that may have transactions on the bank."""

    def make(body, engine=None, **options):
        graph = acts(body, **{"retry": AGAIN, **options})
        graph.database("bank", engine or bank)
        return deploy(graph)

    return make


def amounts(bank):
    """The amounts of the entries there, in order."""
    with bank.connect() as connection:
        return [float(amount) for amount in connection.execute(text("SELECT amount FROM entry ORDER BY id")).scalars()]


def recorded(bank):
    """How many transactions the other database has recorded."""
    with bank.connect() as connection:
        return connection.execute(text("SELECT count(*) FROM keepstep_journal WHERE tape IS NOT NULL")).scalar_one()


def one_there(ctx):
    """A node's body that pays once at the bank."""
    with ctx.transaction("bank") as conn:
        return pay(conn, Decimal("1.00"))


def dies_at(monkeypatch, point):
    """Let the next process that reaches a point die there."""

    def die(reached, _detail):
        if reached == point:
            monkeypatch.setattr(crashpoints, "hook", None)
            raise Died

    monkeypatch.setattr(crashpoints, "hook", die)


def killed(d):
    """Work until the worker dies, and let its death be noticed."""
    with pytest.raises(Died):
        d.work(d.queue.pop(0))
    d.queue += workers.release_child(d.store, d.worker.owner.worker, 1, reason="signal 9 (SIGKILL)")


def later(d):
    """Let the time pass for which a node run was put off."""
    d.execute("UPDATE keepstep_thread SET due_at = 0, next_nudge_at = 0")
    d.sweep()


def test_rows_are_committed_once_and_recorded_there_and_here(shop, bank):
    def body(ctx):
        with ctx.transaction("bank") as conn:
            number = pay(conn, Decimal("1.00"))
            with Session(bind=conn) as session:
                session.add(Order(name="chairs"))
                session.commit()
        decision = ctx.approve("Go on?")
        with ctx.transaction("bank") as conn:
            return [number, decision.verdict, pay(conn, Decimal("2.00"))]

    d = shop(body)
    thread_id = d.start().thread_id
    assert d.drain() == "waiting"
    assert (amounts(bank), recorded(bank)) == ([1.0], 1)
    d.decide()
    assert d.drain() == "done"
    assert (amounts(bank), recorded(bank)) == ([1.0, 2.0], 2)
    assert d.values()["log"] == [[1, "approve", 2]]
    assert transactions(d) == [("done", 1), ("done", 1)]
    with bank.connect() as connection:
        rows = connection.execute(text("SELECT key, thread FROM keepstep_journal ORDER BY key")).all()
    assert [row.thread for row in rows] == [thread_id] * 2
    assert [row.key.rpartition(":")[2] for row in rows] == ["0", "1"]
    assert all(row.key.startswith(f"{thread_id}/0/1/node/transaction:") for row in rows)


def test_a_block_that_is_played_again_asks_no_database(shop, bank):
    opened = []

    def body(ctx):
        with ctx.transaction("bank") as conn:
            number = pay(conn, Decimal("1.00"))
        if ctx.attempt == 1:
            event.listen(bank, "checkout", lambda *_: opened.append(ctx.attempt))
            raise Crash
        return number

    d = shop(body)
    d.start()
    assert d.drain() == "done"
    assert d.values()["log"] == [1]
    assert opened == []
    assert amounts(bank) == [1.0]


def test_an_exception_is_a_known_failure_and_a_retry_may_go_another_way(shop, bank):
    def body(ctx):
        if ctx.attempt == 1:
            with ctx.transaction("bank", key="first") as conn:
                pay(conn, Decimal("1.00"))
                crash()
        with ctx.transaction("bank", key="second") as conn:
            return pay(conn, Decimal("2.00"))

    d = shop(body)
    d.start()
    assert d.drain() == "done"
    assert (amounts(bank), recorded(bank)) == ([2.0], 1)
    assert transactions(d) == [("failed", 1), ("done", 1)]


@pytest.mark.parametrize(("point", "calls"), [("after_intent", 2), ("inside_transaction", 2), ("after_transaction", 2)])
def test_a_process_may_die_anywhere(shop, bank, monkeypatch, point, calls):
    d = shop(one_there)
    d.start()
    dies_at(monkeypatch, point)
    killed(d)
    assert amounts(bank) == ([1.0] if point == "after_transaction" else [])
    assert transactions(d) == [("intent", 1)]
    assert d.drain() == "done"
    assert (amounts(bank), recorded(bank)) == ([1.0], 1)
    assert transactions(d) == [("done", calls)]


def test_an_outcome_that_is_not_known_and_another_way_is_diverged(shop, bank, monkeypatch):
    d = shop(lambda ctx: one_there(ctx) if ctx.attempt == 1 else "another way")
    d.start()
    dies_at(monkeypatch, "after_transaction")
    killed(d)
    assert d.drain() == "blocked"
    assert d.error[0] == "diverged"
    assert amounts(bank) == [1.0]


def test_an_attempt_that_was_overtaken_commits_nothing(shop, bank):
    entered, go_on = threading.Event(), threading.Event()

    def body(ctx):
        with ctx.transaction("bank") as conn:
            number = pay(conn, Decimal(ctx.attempt))
            if ctx.attempt == 1:
                entered.set()
                assert go_on.wait(30)
            return number

    d = shop(body)
    d.start()
    first = threading.Thread(target=d.work, args=(d.queue.pop(0),))
    first.start()
    assert entered.wait(30)
    other = overtake(d)
    second = threading.Thread(target=d.drain, args=(other,))
    second.start()
    # The second waits for the first one's key, or comes after it: either way the first is not let in.
    go_on.set()
    first.join(30)
    second.join(30)
    assert d.thread.status == "done"
    assert (amounts(bank), recorded(bank)) == ([2.0], 1)


def test_one_that_was_overtaken_in_the_middle_of_its_commit_is_found(shop, bank, monkeypatch):
    about_to_commit, taken_over, go_on = threading.Event(), threading.Event(), threading.Event()

    def pause(point, _detail):
        if threading.current_thread() is first and point == "inside_transaction":
            about_to_commit.set()
            assert go_on.wait(30)
        if threading.current_thread() is second and point == "after_intent":
            taken_over.set()

    def body(ctx):
        with ctx.transaction("bank") as conn:
            number = pay(conn, Decimal("1.00"))
        bodies.append(ctx.attempt)
        return number

    bodies = []
    d = shop(body)
    d.start()
    first = threading.Thread(target=d.work, args=(d.queue.pop(0),))
    second = threading.Thread(target=d.drain, args=(d.worker_of(pid=9),))
    monkeypatch.setattr(crashpoints, "hook", pause)
    first.start()
    assert about_to_commit.wait(30)
    overtake(d)
    second.start()
    assert taken_over.wait(30)
    go_on.set()
    first.join(30)
    second.join(30)
    assert d.thread.status == "done"
    assert (amounts(bank), recorded(bank)) == ([1.0], 1)
    assert d.values()["log"] == [1]
    # The first learns that it is overtaken; its body does not go on.
    assert bodies == [2]


@pytest.mark.parametrize("trap", ["lose_reply", "lose_request"])
def test_a_commit_whose_answer_is_lost_is_looked_up(shop, bank, postgresql_proxy, trap):
    if bank.dialect.name == "sqlite":
        return  # nothing is between SQLite and its caller
    name = urlsplit(bank.url.render_as_string()).path
    behind = create_engine(f"postgresql+psycopg2://postgres@127.0.0.1:{postgresql_proxy.port}{name}?sslmode=disable")
    bodies = []

    def body(ctx):
        with ctx.transaction("bank") as conn:
            bodies.append(ctx.attempt)
            number = pay(conn, Decimal("1.00"))
            if ctx.attempt == 1:
                getattr(postgresql_proxy, trap)(b"COMMIT")
        return number

    d = shop(body, behind)
    d.start()
    assert d.drain() == "done"
    assert postgresql_proxy.lost.is_set()
    assert bodies == ([1] if trap == "lose_reply" else [1, 2])
    assert (len(amounts(bank)), recorded(bank)) == (1, 1)
    assert transactions(d) == [("done", len(bodies))]
    behind.dispose()


def test_a_persons_word_does_not_stand_for_the_databases(shop, bank, monkeypatch):
    d = shop(one_there)
    d.start()
    dies_at(monkeypatch, "after_transaction")
    killed(d)
    [effect] = d.reader.effects("t")
    key = f"{effect.step}/{effect.run}/{effect.call}"
    d.send("resolve", effect=key, outcome="happened", result=7)
    assert d.drain() == "blocked"
    assert d.error[0] == "effect_unknown"
    assert "resolve it as not happened, and that is asked" in d.error[1]
    d.send("resolve", effect=key, outcome="not_happened")
    assert d.drain() == "done"
    assert d.values()["log"] == [1]
    assert (amounts(bank), recorded(bank)) == ([1.0], 1)


def test_a_database_that_cannot_be_asked_puts_off_what_may_have_happened(shop, bank, monkeypatch):
    d = shop(one_there)
    d.start()
    dies_at(monkeypatch, "after_transaction")
    killed(d)
    with monkeypatch.context() as away:
        away.setattr(bank, "connect", _refused)
        d.drain()
    assert d.thread.status == "ready"
    assert d.error[0] == "effect_pending"
    assert "may have been committed by an earlier attempt" in d.error[1]
    later(d)
    assert d.drain() == "done"
    assert (amounts(bank), recorded(bank)) == ([1.0], 1)


def _refused():
    message = "connection refused"
    raise ConnectionRefusedError(message)


def test_a_database_that_cannot_be_reached_is_a_failure_of_the_node(shop):
    missing = create_engine("postgresql+psycopg2://nobody@127.0.0.1:1/none")
    d = shop(one_there, missing)
    d.start()
    assert d.drain() == "failed"
    assert d.thread.error["type"] == "OperationalError"
    assert transactions(d) == [("failed", 3)]


def test_a_missing_journal_names_the_command(shop, bank):
    foreign_journal.journal.drop(bank)
    d = shop(one_there, retry=None)
    d.start()
    assert d.drain() == "failed"
    assert d.error[0] == "journal_missing"
    assert d.error[1] == (
        "database 'bank' has no table keepstep_journal, in which its transactions are recorded: run keepstep db "
        "install-journal on it"
    )
    assert amounts(bank) == []


def test_what_is_refused_is_undone_there(shop, bank):
    def body(ctx):
        with ctx.transaction("bank") as conn:
            pay(conn, Decimal("1.00"))
            conn.commit()

    d = shop(body)
    d.start()
    assert d.drain() == "failed"
    assert d.error[0] == "transaction_refused"
    assert (amounts(bank), recorded(bank)) == ([], 0)
    assert transactions(d) == [("failed", 1)]


def test_both_databases_in_one_node(shop, bank):
    def body(ctx):
        with ctx.transaction() as conn:
            here = pay(conn, Decimal("5.00"))
        with ctx.transaction("bank") as conn:
            there = pay(conn, Decimal("6.00"))
        if ctx.attempt == 1:
            raise Crash
        return [here, there]

    d = shop(body)
    metadata.create_all(d.store.engine)
    d.execute("INSERT INTO account VALUES ('anna', 100.00)")
    d.start()
    assert d.drain() == "done"
    assert d.values()["log"] == [[1, 1]]
    assert amounts(bank) == [6.0]
    assert amounts(d.store.engine) == [5.0]


@pytest.mark.parametrize("isolation", ["AUTOCOMMIT", "SERIALIZABLE"])
def test_engines_of_any_isolation_level(shop, bank_url, bank, isolation, monkeypatch):
    engine = create_engine(bank_url, isolation_level=isolation)
    d = shop(one_there, engine)
    d.start()
    dies_at(monkeypatch, "after_transaction")
    killed(d)
    assert d.drain() == "done"
    assert (amounts(bank), recorded(bank)) == ([1.0], 1)
    engine.dispose()


def test_a_function_is_called_once_and_must_return_an_engine(shop, bank):
    made = []

    def make():
        made.append("engine")
        return bank

    d = shop(lambda ctx: [one_there(ctx) for _ in range(3)], make)
    d.start()
    assert d.drain() == "done"
    assert made == ["engine"]
    d = shop(one_there, lambda: None, retry=None)
    d.name = "other"
    d.start()
    assert d.drain() == "failed"
    assert d.error[1] == "the function of database 'bank' returned no engine but NoneType"


def test_a_process_that_was_forked_has_connections_of_its_own(bank):
    database = Database("bank", bank)
    assert database.opened() is database.opened()
    with bank.connect():
        pass
    parents = bank.pool
    child = os.fork()
    if not child:
        os._exit(0 if database.opened().engine.pool is not parents else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert database.opened().engine.pool is parents


def test_other_kinds_of_databases_are_refused():
    assert foreign_journal.problem_of(make_url("sqlite:///file.db")) is None
    assert foreign_journal.problem_of(make_url("postgresql+psycopg2://host/name")) is None
    for url in ("sqlite+aiosqlite://", "postgresql+asyncpg://host/name", "mysql+pymysql://host/name"):
        problem = foreign_journal.problem_of(make_url(url))
        assert problem is not None
        assert "(postgresql+psycopg2, sqlite+pysqlite)" in problem


def test_registering_is_checked():
    graph = Graph("acts", state=State)
    graph.database("bank", create_engine("sqlite://"))
    with pytest.raises(GraphError, match="has a database 'bank' already"):
        graph.database("bank", create_engine("sqlite://"))
    with pytest.raises(GraphError, match="must be a SQLAlchemy engine"):
        graph.database("other", "sqlite://")


def test_a_subgraph_brings_its_databases():
    engine = create_engine("sqlite://")
    inner, outer = acts(one_there), Graph("outer", state=State)
    inner.database("bank", engine)
    outer.node(inner, name="acts")
    outer.edge(START, "acts")
    assert list(outer.compile().databases) == ["bank"]
    outer.database("bank", engine)
    assert list(outer.compile().databases) == ["bank"]
    clash = Graph("clash", state=State)
    clash.node(inner, name="acts")
    clash.edge(START, "acts")
    clash.database("bank", create_engine("sqlite://"))
    with pytest.raises(GraphError, match="mean different databases by 'bank'"):
        clash.compile()
