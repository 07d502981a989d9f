"""Transactions on the store's database: business rows and the journal's row together, once, however often it runs."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from decimal import Decimal

import pytest
from sqlalchemy import select, text

from keepstep import END, START, Graph, Send, crashpoints, effect
from keepstep.crashpoints import Died
from keepstep.errors import Diverged, TransactionRefused
from keepstep.store import workers
from tests.steps.business import (
    Crash,
    account,
    crash,
    entry,
    furnish,
    one_payment,
    overtake,
    pay,
    rows,
    transactions,
)
from tests.steps.test_effects import AGAIN, State, acts


@effect(idempotent=True)
def read():
    return 1


def test_rows_and_journal_are_committed_together_and_a_retry_is_given_the_same(shop):
    bodies = []

    def body(ctx):
        with ctx.transaction() as conn:
            bodies.append(ctx.attempt)
            balance = conn.execute(select(account.c.balance)).scalar_one()
            conn.execute(account.update().values(balance=balance - 10))
            number = pay(conn, Decimal("10.00"))
            day = conn.execute(select(entry.c.day).where(entry.c.id == number)).scalar_one()
        if ctx.attempt < 3:
            raise Crash
        return [balance, number, day]

    d = shop(acts(body, retry=AGAIN))
    d.start()
    assert d.drain() == "done"
    assert bodies == [1, 2, 3]
    assert d.values()["log"] == [[Decimal("100.00"), 1, "today"]]
    assert [(name, float(amount)) for name, amount in rows(d)] == [("anna", 10.0)]
    assert [float(balance) for _, balance in rows(d, "account", "name, balance")] == [90.0]
    assert transactions(d) == [("done", 1)]


def test_a_transaction_before_a_wait_is_not_repeated_after_it(shop):
    def body(ctx):
        with ctx.transaction() as conn:
            number = pay(conn, Decimal("5.00"))
        ctx.approve("Go on?")
        with ctx.transaction() as conn:
            return [number, pay(conn, Decimal("6.00"))]

    d = shop(acts(body))
    d.start()
    assert d.drain() == "waiting"
    assert [float(amount) for _, amount in rows(d)] == [5.0]
    d.decide()
    assert d.drain() == "done"
    assert [float(amount) for _, amount in rows(d)] == [5.0, 6.0]
    assert d.values()["log"] == [[1, 2]]
    assert transactions(d) == [("done", 1), ("done", 1)]


def test_an_exception_undoes_it_and_leaves_nothing_behind(shop):
    def body(ctx):
        with ctx.transaction() as conn:
            pay(conn, Decimal("1.00"))
            if ctx.attempt == 1:
                raise Crash
            return pay(conn, Decimal("2.00"))

    d = shop(acts(body, retry=AGAIN))
    d.start()
    assert d.drain() == "done"
    assert [float(amount) for _, amount in rows(d)] == [1.0, 2.0]
    assert transactions(d) == [("done", 1)]


def test_a_node_may_handle_the_exception_and_go_another_way(shop):
    def body(ctx):
        try:
            with ctx.transaction() as conn:
                pay(conn, Decimal("1.00"))
                crash()
        except Crash:
            with ctx.transaction(key="instead") as conn:
                return pay(conn, Decimal("3.00"))

    d = shop(acts(body))
    d.start()
    assert d.drain() == "done"
    assert [float(amount) for _, amount in rows(d)] == [3.0]


def test_a_block_that_says_something_else_is_diverged(shop):
    def body(ctx):
        with ctx.transaction() as conn, contextlib.suppress(Diverged):  # it is not the block's to decide
            pay(conn, Decimal(100 + ctx.attempt))
        raise Crash

    d = shop(acts(body, retry=AGAIN))
    d.start()
    assert d.drain() == "blocked"
    assert d.error[0] == "diverged"
    assert "statement 1 is now another, or has other parameters: INSERT INTO entry" in d.error[1]
    assert [float(amount) for _, amount in rows(d)] == [101.0]


@pytest.mark.parametrize(
    ("first", "second", "how"), [(1, 2, "a statement more"), (2, 1, "it now runs 1 statements, then 2")]
)
def test_a_block_with_more_or_fewer_statements_is_diverged(shop, first, second, how):
    def body(ctx):
        with ctx.transaction() as conn:
            for _ in range(first if ctx.attempt == 1 else second):
                pay(conn, Decimal("1.00"))
        raise Crash

    d = shop(acts(body, retry=AGAIN))
    d.start()
    assert d.drain() == "blocked"
    assert d.error[0] == "diverged"
    assert how in d.error[1]
    assert len(rows(d)) == first


def test_a_retry_that_leaves_the_transaction_out_is_diverged(shop):
    def body(ctx):
        if ctx.attempt == 1:
            with ctx.transaction() as conn:
                pay(conn, Decimal("1.00"))
            raise Crash

    d = shop(acts(body, retry=AGAIN))
    d.start()
    assert d.drain() == "blocked"
    assert d.error[0] == "diverged"
    assert "'transaction'" in d.error[1]


def test_a_new_transaction_after_another_way_was_gone_is_not_begun(shop):
    def body(ctx):
        with ctx.transaction(key=f"attempt {ctx.attempt}") as conn:
            pay(conn, Decimal("1.00"))
        raise Crash

    d = shop(acts(body, retry=AGAIN))
    d.start()
    assert d.drain() == "blocked"
    assert d.error[0] == "diverged"
    assert len(rows(d)) == 1


def test_a_stale_owner_commits_nothing(served):
    entered, overtaken = threading.Event(), threading.Event()

    def body(ctx):
        with ctx.transaction() as conn:
            number = pay(conn, Decimal(ctx.attempt))
            if ctx.attempt == 1:
                entered.set()
                assert overtaken.wait(30)
            return number

    d = served(acts(body))
    furnish(d)
    d.start()
    first = threading.Thread(target=d.work, args=(d.queue.pop(0),))
    first.start()
    assert entered.wait(30)
    other = overtake(d)
    assert d.drain(other) == "done"
    overtaken.set()
    first.join(30)
    assert [float(amount) for _, amount in rows(d)] == [2.0]
    assert transactions(d) == [("done", 1)]


def test_a_cancelled_attempt_commits_nothing(served):
    def body(ctx):
        with ctx.transaction() as conn:
            pay(conn, Decimal("1.00"))
            d.control("cancel")

    d = served(acts(body))
    furnish(d)
    d.start()
    assert d.drain() == "cancelled"
    assert rows(d) == []
    assert transactions(d) == []


def test_a_process_that_dies_before_the_commit_leaves_nothing(shop, monkeypatch):
    def die(point, detail):
        if point == "inside_transaction":
            monkeypatch.setattr(crashpoints, "hook", None)
            raise Died

    d = shop(acts(one_payment))
    d.start()
    nudge = d.queue.pop(0)
    monkeypatch.setattr(crashpoints, "hook", die)
    with pytest.raises(Died):
        d.work(nudge)
    assert rows(d) == []
    d.queue += workers.release_child(d.store, d.worker.owner.worker, 1, reason="signal 9 (SIGKILL)")
    assert d.drain() == "done"
    assert [float(amount) for _, amount in rows(d)] == [1.0]
    assert transactions(d) == [("done", 1)]


@pytest.mark.parametrize("trap", ["lose_reply", "lose_request"])
def test_a_commit_whose_answer_is_lost_is_looked_up(served, proxied_url, postgresql_proxy, trap):
    bodies = []

    def body(ctx):
        with ctx.transaction() as conn:
            bodies.append(ctx.attempt)
            number = pay(conn, Decimal("1.00"))
            if ctx.attempt == 1:
                getattr(postgresql_proxy, trap)(b"COMMIT")
        return number

    d = served(acts(body))
    furnish(d)
    behind = d.worker_of(pid=2, url=proxied_url)
    d.start()
    d.work(d.queue.pop(0), behind)
    assert postgresql_proxy.lost.wait(30)
    if trap == "lose_request":
        # Nothing landed: the store was away, which costs the node nothing.
        assert rows(d) == []
        assert d.thread.status == "ready"
        d.execute("UPDATE keepstep_thread SET due_at = 0, next_nudge_at = 0")
        d.sweep()
    assert d.drain(behind) == "done"
    assert bodies == ([1] if trap == "lose_reply" else [1, 2])
    assert len(rows(d)) == 1
    assert transactions(d) == [("done", 1)]


def test_a_connection_that_is_lost_inside_the_block_costs_the_node_no_attempt(served, proxied_url, postgresql_proxy):
    def body(ctx):
        with ctx.transaction() as conn:
            pay(conn, Decimal("1.00"))
            if ctx.attempt == 1:
                postgresql_proxy.cut()
            return pay(conn, Decimal("2.00"))

    d = served(acts(body))
    furnish(d)
    behind = d.worker_of(pid=2, url=proxied_url)
    d.start()
    d.work(d.queue.pop(0), behind)
    assert d.thread.status == "ready"
    assert d.error[0] == "database_unavailable"
    d.execute("UPDATE keepstep_thread SET due_at = 0, next_nudge_at = 0")
    d.sweep()
    assert d.drain(behind) == "done"
    assert [float(amount) for _, amount in rows(d)] == [1.0, 2.0]


def test_the_database_ends_a_statement_when_the_nodes_time_is_over(served):
    graph = Graph("acts", state=State)

    @graph.node(timeout=0.5)
    def node(state, ctx):
        with ctx.transaction() as conn:
            conn.execute(text("SELECT pg_sleep(60)"))

    graph.edge(START, "node")
    graph.edge("node", END)
    d = served(graph)
    d.start()
    # Not in the main thread, where an alarm would interrupt it: the limit is the database's.
    worked = threading.Thread(target=d.drain)
    worked.start()
    worked.join(30)
    assert d.thread.status == "failed"
    assert d.error[0] == "node_timeout"


def test_two_at_once_need_keys(shop):
    def body(ctx):
        told = []

        def one(name):
            try:
                with ctx.transaction(key=name) as conn:
                    told.append(pay(conn, Decimal("1.00")))
            except Exception as error:  # noqa: BLE001  shown by the test
                told.append(error)

        threads = [threading.Thread(target=one, args=(name,)) for name in ("a", "b")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if ctx.attempt == 1:
            raise Crash
        return sorted(told)

    d = shop(acts(body, retry=AGAIN))
    d.start()
    assert d.drain() == "done"
    assert d.values()["log"] == [[1, 2]]
    assert len(rows(d)) == 2


def test_async_nodes_have_the_same(shop):
    async def body(ctx):
        async with ctx.transaction() as conn:
            first = pay(conn, Decimal("1.00"))
            with pytest.raises(TransactionRefused):
                await ctx.effect(read)

        async def one(name):
            async with ctx.transaction(key=name) as conn:
                return pay(conn, Decimal("2.00"))

        others = await asyncio.gather(one("a"), one("b"))
        with contextlib.suppress(Crash):
            async with ctx.transaction(key="undone") as conn:
                pay(conn, Decimal("3.00"))
                crash()
        if ctx.attempt == 1:
            raise Crash
        return [first, sorted(others), await ctx.effect(read)]

    d = shop(acts(body, retry=AGAIN, asynchronous=True))
    d.start()
    assert d.drain() == "done"
    assert d.values()["log"] == [[1, [2, 3], 1]]
    assert [float(amount) for _, amount in rows(d)] == [1.0, 2.0, 2.0]


def test_many_at_once_in_an_async_node(shop):
    async def body(ctx):
        async def one(number):
            async with ctx.transaction(key=f"t{number}") as conn:
                return pay(conn, Decimal(number))

        return sorted(await asyncio.gather(*(one(number) for number in range(12))))

    d = shop(acts(body, asynchronous=True))
    d.start()
    assert d.drain() == "done"
    assert d.values()["log"] == [list(range(1, 13))]
    assert len(rows(d)) == 12


def test_an_async_block_that_is_cancelled_is_undone(shop):
    async def body(ctx):
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.05), ctx.transaction(key="cancelled") as conn:
                pay(conn, Decimal("1.00"))
                await asyncio.Event().wait()
        return await ctx.effect(read)

    d = shop(acts(body, asynchronous=True))
    d.start()
    assert d.drain() == "done"
    assert rows(d) == []
    assert transactions(d) == []


def test_parallel_node_runs_have_transactions_under_their_own_leases(shop):
    graph = Graph("acts", state=State)

    @graph.node
    def plan(state, ctx):
        return {}

    @graph.node(retry=AGAIN)
    def part(state, ctx):
        with ctx.transaction() as conn:
            pay(conn, Decimal(state["log"][0]))
        if ctx.attempt == 1:
            raise Crash
        return {"log": [state["log"][0]]}

    graph.edge(START, "plan")
    graph.route("plan", lambda state: [Send("part", {"log": [number]}) for number in (1, 2, 3)], to=["part"])
    graph.edge("part", END)
    d = shop(graph)
    d.start()
    assert d.drain() == "done"
    assert d.values()["log"] == [1, 2, 3]
    assert sorted(float(amount) for _, amount in rows(d)) == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("how", ["returns", "waits"])
def test_a_block_that_outlives_its_node_is_undone_and_the_node_fails(shop, how):
    entered, ended, told, lingering = threading.Event(), threading.Event(), [], []

    def body(ctx):
        def linger():
            try:
                with ctx.transaction() as conn:
                    pay(conn, Decimal("1.00"))
                    entered.set()
                    assert ended.wait(30)
            except Exception as error:  # noqa: BLE001  shown by the test
                told.append(str(error))

        lingering.append(threading.Thread(target=linger))
        lingering[0].start()
        assert entered.wait(30)
        if how == "waits":
            ctx.wait_signal("go")

    d = shop(acts(body))
    d.start()
    assert d.drain() == "failed"
    assert d.error[1] == "the node ended while ctx.transaction() was open; it was undone"
    ended.set()
    lingering[0].join()
    assert told == ["ctx.transaction() was open when the node ended; it was undone"]
    assert rows(d) == []


def test_after_the_node_has_ended_nothing_is_begun(shop):
    kept = []
    d = shop(acts(kept.append))
    d.start()
    assert d.drain() == "done"
    with pytest.raises(Exception, match=r"ctx\.transaction was asked for when the node had ended"):
        kept[0].transaction().__enter__()


def test_one_key_for_two_databases_is_refused(shop):
    def body(ctx):
        with ctx.transaction(key="k") as conn:
            pay(conn, Decimal("1.00"))
        with ctx.transaction("shop", key="k"):
            pytest.fail("it was begun")

    graph = acts(body)
    graph.database("shop", lambda: pytest.fail("it was opened"))
    d = shop(graph)
    d.start()
    assert d.drain() == "failed"
    assert d.error[0] == "effect_conflict"
    assert len(rows(d)) == 1


def test_an_unknown_database_is_named(shop):
    graph = acts(lambda ctx: ctx.transaction("shpo").__enter__())
    graph.database("shop", lambda: None)
    d = shop(graph)
    d.start()
    assert d.drain() == "failed"
    assert d.error == (
        "unknown_database",
        "ctx.transaction: the graph registers no database 'shpo' (registered: 'shop')",
    )


@pytest.mark.parametrize("alarmed", [True, False], ids=["alarmed", "not-alarmed"])
def test_a_node_out_of_time_commits_nothing(shop, alarmed):
    graph = Graph("acts", state=State)

    @graph.node(timeout=0.2)
    def node(state, ctx):
        with ctx.transaction() as conn:
            pay(conn, Decimal("1.00"))
            threading.Event().wait(0.4)

    graph.edge(START, "node")
    graph.edge("node", END)
    d = shop(graph)
    d.start()
    # Only the main thread has an alarm, which interrupts the block.
    worked = threading.Thread(target=d.drain)
    d.drain() if alarmed else worked.start()
    if not alarmed:
        worked.join(30)
    assert d.thread.status == "failed"
    assert d.error[0] == "node_timeout"
    assert rows(d) == []
    assert transactions(d) == []


def test_graph_run_has_transactions():
    def body(ctx):
        with ctx.transaction() as conn:
            conn.execute(text("CREATE TABLE thing (id INTEGER PRIMARY KEY, name TEXT)"))
            conn.execute(text("INSERT INTO thing (name) VALUES ('a')"))
        if ctx.attempt == 1:
            raise Crash
        with ctx.transaction() as conn:
            return conn.execute(text("SELECT name FROM thing")).scalars().all()

    assert acts(body, retry=AGAIN).run()["log"] == [["a"]]
