"""Two transactions at once on PostgreSQL: one stands in its middle while the other comes as far as the locks let it."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from typing import Annotated, TypedDict

import pytest
import sqlalchemy

from keepstep import END, START, Graph, Send, append
from keepstep.errors import StepRunning
from keepstep.runtime import commands
from keepstep.store import effects, outcomes, workers

_WAITING = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"


class Log(TypedDict, total=False):
    log: Annotated[list, append]


class Rival:
    """Somebody who acts in the middle of another's transaction: at once, or when that has let go of its locks."""

    def __init__(self, d, act):
        self._d = d
        self._errors = []
        self.overtook = False
        self._thread = threading.Thread(target=self._run, args=(act,))

    def _run(self, act):
        try:
            act()
        except BaseException as error:  # noqa: BLE001  shown by `ended`
            self._errors.append(error)

    def comes(self):
        """Begin, and return when it is done or waits for a lock."""
        if not self._thread.is_alive():
            self._thread.start()
        # A transaction would see the server's processes as they were at its first look.
        engine = sqlalchemy.create_engine(self._d.url, isolation_level="AUTOCOMMIT")
        deadline = time.monotonic() + 20
        with engine.connect() as connection:
            while self._thread.is_alive() and not connection.execute(sqlalchemy.text(_WAITING)).scalar_one():
                assert time.monotonic() < deadline
                time.sleep(0.01)
        engine.dispose()
        self.overtook = not self._thread.is_alive()

    def ended(self):
        """Wait for its end; raise what it raised."""
        self._thread.join(30)
        assert not self._thread.is_alive()
        if self._errors:
            raise self._errors[0]


def in_the_middle(monkeypatch, module, name, act):
    """Do something just after the first call of a function, in the transaction of its caller."""
    original, calls = getattr(module, name), Counter()

    def replaced(*args, **kwargs):
        found = original(*args, **kwargs)
        calls[name] += 1
        if calls[name] == 1:
            act()
        return found

    monkeypatch.setattr(module, name, replaced)
    return calls


def graph_of(body, *, fanned):
    graph = Graph("locks", state=Log, fan_out=fanned)
    graph.node(body, name="body")
    if fanned:
        graph.route(START, lambda _state: [Send("body", {}), Send("body", {})], to=["body"])
    else:
        graph.edge(START, "body")
    graph.edge("body", END)
    return graph


@pytest.mark.parametrize("fanned", [False, True], ids=["thread", "node run"])
def test_a_takeover_waits_for_the_write_that_has_passed_the_fence(served, monkeypatch, fanned):
    paid = []

    def pay(who):
        paid.append(who)

    d = served(graph_of(lambda _state, ctx: {"log": [ctx.effect(pay, ctx.node)]}, fanned=fanned))
    d.start()
    if fanned:
        d.work(d.queue.pop(0))
    other = d.open()
    rival = Rival(d, lambda: workers.release_child(other, d.worker.owner.worker, 1, reason="given up"))
    in_the_middle(monkeypatch, effects, "hold", rival.comes)

    d.work(d.queue.pop(0))

    rival.ended()
    assert rival.overtook is False
    assert paid == ["body"]
    assert d.effects() == [("pay", "done", 1)]


@pytest.mark.parametrize("fanned", [False, True], ids=["thread", "node run"])
def test_a_signal_that_is_sent_while_its_wait_is_opened_finds_it(served, monkeypatch, fanned):
    d = served(graph_of(lambda _state, ctx: {"log": [ctx.wait_signal("go").payload]}, fanned=fanned))
    d.start()
    if fanned:
        d.work(d.queue.pop(0))
    producer = d.worker_of(pid=2)
    rival = Rival(d, lambda: d.signal("go", 1, worker=producer))
    in_the_middle(monkeypatch, outcomes, "take_signal", rival.comes)

    d.work(d.queue.pop(0))

    rival.ended()
    assert len(d.queue) == (2 if fanned else 1), "the one who waited goes on; another node run has not begun"
    if fanned:
        d.signal("go", 2)
    assert d.drain() == "done"
    assert sorted(d.values()["log"]) == ([1, 2] if fanned else [1])


@pytest.mark.parametrize("fanned", [False, True], ids=["thread", "node run"])
def test_a_wait_that_is_opened_while_its_signal_is_sent_finds_it(served, monkeypatch, fanned):
    entered, go_on = threading.Event(), threading.Event()

    def body(_state, ctx):
        entered.set()
        assert go_on.wait(20)
        return {"log": [ctx.wait_signal("go").payload]}

    d = served(graph_of(body, fanned=fanned))
    d.start()
    if fanned:
        d.work(d.queue.pop(0))
    nudge, producer = d.queue.pop(0), d.worker_of(pid=2)
    rival = Rival(d, lambda: d.work(nudge))
    rival._thread.start()
    assert entered.wait(20)

    def parks():
        go_on.set()
        rival.comes()

    with monkeypatch.context() as patched:
        in_the_middle(patched, commands.waits, "wait_for_signal", parks)
        d.signal("go", 1, worker=producer)

    rival.ended()
    assert len(d.queue) == (2 if fanned else 1), "the one who waited goes on; another node run has not begun"
    if fanned:
        d.signal("go", 2)
    assert d.drain() == "done"
    assert sorted(d.values()["log"]) == ([1, 2] if fanned else [1])


@pytest.mark.parametrize("fanned", [False, True], ids=["thread", "node run"])
def test_a_write_waits_for_the_takeover_that_came_first_and_is_refused(served, monkeypatch, fanned):
    paid, entered, go_on = [], threading.Event(), threading.Event()

    def pay(who):
        paid.append(who)

    def body(_state, ctx):
        if ctx.attempt == 1:
            entered.set()
            assert go_on.wait(20)
        return {"log": [ctx.effect(pay, ctx.attempt)]}

    d = served(graph_of(body, fanned=fanned))
    d.start()
    if fanned:
        d.work(d.queue.pop(0))
    nudge, other = d.queue.pop(0), d.open()
    rival = Rival(d, lambda: d.work(nudge))
    rival._thread.start()
    assert entered.wait(20)

    def pays():
        go_on.set()
        rival.comes()

    # In the transaction that takes the lease away, before its commit.
    with monkeypatch.context() as patched:
        in_the_middle(patched, workers, "_released", pays)
        d.queue += workers.release_child(other, d.worker.owner.worker, 1, reason="given up")

    rival.ended()
    assert rival.overtook is False
    assert paid == []
    assert d.effects() == []
    assert d.drain() == "done"
    assert sorted(paid) == ([1, 2] if fanned else [2])
    assert set(d.effects()) == {("pay", "done", 1)}


def asked_again(served):
    """A thread whose node is about to be entered while its question is open; its deployment and its next nudge."""
    entered, go_on = threading.Event(), threading.Event()

    def body(_state, ctx):
        if ctx.attempt == 2:
            entered.set()
            assert go_on.wait(20)
        return {"log": [ctx.attempt, ctx.approve("Go on?").verdict]}

    d = served(graph_of(body, fanned=False))
    d.start()
    assert d.drain() == "waiting"
    d.control("cancel")
    d.control("retry")
    return d, d.queue.pop(0), entered, go_on


def test_a_decision_that_commits_first_is_found_by_the_step_that_parks(served, monkeypatch):
    d, nudge, entered, go_on = asked_again(served)
    person = d.worker_of(pid=2)
    rival = Rival(d, lambda: d.work(nudge))
    rival._thread.start()
    assert entered.wait(20)

    def parks():
        go_on.set()
        rival.comes()

    with monkeypatch.context() as patched:
        in_the_middle(patched, commands.waits, "close_approval", parks)
        d.decide(worker=person)

    rival.ended()
    assert rival.overtook is False, "the park waits for the decision's lock"
    assert [each.kind for each in d.queue] == ["step"]
    assert d.drain() == "done"
    assert d.values() == {"log": [3, "approve"]}


def test_a_decision_that_comes_while_the_step_parks_wakes_it(served, monkeypatch):
    d, nudge, _, go_on = asked_again(served)
    go_on.set()
    person = d.worker_of(pid=2)
    rival = Rival(d, lambda: d.decide(worker=person))
    in_the_middle(monkeypatch, outcomes.events, "emit", rival.comes)

    d.work(nudge)

    rival.ended()
    assert rival.overtook is False, "the decision waits for the park's lock"
    assert [each.kind for each in d.queue] == ["step"]
    assert d.drain() == "done"
    assert d.values() == {"log": [3, "approve"]}


def test_the_join_and_a_cancel_take_their_locks_in_one_order(served, monkeypatch):
    d = served(graph_of(lambda _state, ctx: {"log": [1]}, fanned=True))
    d.start()
    d.work(d.queue.pop(0))
    person = d.worker_of(pid=2)
    rival = Rival(d, lambda: d.control("cancel", worker=person))
    cancels = in_the_middle(monkeypatch, commands.threads, "cancel", lambda: None)
    finishes = in_the_middle(monkeypatch, outcomes.events, "emit", rival.comes)

    d.work(d.queue.pop(0))
    # The other node run could be claimed, and end, before the one who waits for the lock has it.
    rival.ended()

    with contextlib.suppress(IndexError):
        while True:
            d.work(d.queue.pop(0))
    assert d.thread.status == "cancelled"
    # Neither was a deadlock's victim that had to begin again.
    assert (cancels["cancel"], finishes["emit"]) == (1, 1)


# --- edits of a state ---


def chain_of(body, *, fanned):
    """As `graph_of`, behind a step that is committed before the body is due."""
    graph = Graph("locks", state=Log, fan_out=fanned)
    graph.node(lambda _state, _ctx: {"log": ["first"]}, name="first")
    graph.node(body, name="body")
    graph.edge(START, "first")
    if fanned:
        graph.route("first", lambda _state: ["body", "beside"], to=["body", "beside"])
        graph.node(lambda _state, _ctx: {}, name="beside")
        graph.edge("beside", END)
    else:
        graph.edge("first", "body")
    graph.edge("body", END)
    return graph


def due(d, *, fanned):
    """Start the thread; return the nudge of the body, which nobody has claimed."""
    d.start()
    d.work(d.queue.pop(0))
    if fanned:
        d.work(d.queue.pop(0))
    nudge = d.queue.pop(0)
    d.queue.clear()
    return nudge


@pytest.mark.parametrize("fanned", [False, True], ids=["thread", "node run"])
def test_a_claim_in_the_middle_of_an_edit_has_come_too_late(served, monkeypatch, fanned):
    d = served(chain_of(lambda state, _ctx: {"log": [f"after {state['log']}"]}, fanned=fanned))
    nudge, person = due(d, fanned=fanned), d.worker_of(pid=2)
    worked = []
    rival = Rival(d, lambda: worked.append(d.work(nudge)))
    middle = (commands.stateedits.stateedits, "write") if fanned else (commands.stateedits.stateedits, "head")
    in_the_middle(monkeypatch, *middle, rival.comes)

    d.edit({"log": ["edited"]}, worker=person)

    rival.ended()
    assert (rival.overtook, worked) == (False, [False])
    assert d.drain() == "done"
    assert d.values()["log"] == ["edited", "after ['edited']"]


@pytest.mark.parametrize("table", ["thread", "node_run"])
def test_an_edit_in_the_middle_of_a_claim_finds_its_lease(served, table):
    fanned = table == "node_run"
    d = served(chain_of(lambda _state, _ctx: {"log": ["body"]}, fanned=fanned))
    due(d, fanned=fanned)
    before = d.dump()
    refused = []

    def edit():
        with pytest.raises(StepRunning) as caught:
            d.edit({"log": ["edited"]}, worker=person)
        refused.append(caught.value.message)

    person = d.worker_of(pid=2)
    rival = Rival(d, edit)
    with d.store.engine.connect() as connection:
        connection.exec_driver_sql("BEGIN")
        connection.exec_driver_sql(
            f"UPDATE keepstep_{table} SET lease_nonce = 'n', lease_deadline = extract(epoch FROM now()) + 60"
        )
        rival.comes()
        connection.exec_driver_sql("COMMIT")

    rival.ended()
    assert rival.overtook is False
    assert ("node run 'body' is running (and 1 others)" if fanned else "its step is running") in refused[0]
    d.execute(f"UPDATE keepstep_{table} SET lease_nonce = NULL, lease_deadline = NULL")
    assert d.dump() == before


@pytest.mark.parametrize("fanned", [False, True], ids=["thread", "node run"])
def test_a_decision_in_the_middle_of_an_edit_wakes_what_was_moved(served, monkeypatch, fanned):
    d = served(chain_of(lambda _state, ctx: {"log": [ctx.approve("Go?").verdict]}, fanned=fanned))
    due(d, fanned=fanned)
    d.queue += d.control("resume").nudges
    assert d.drain() == "waiting"
    person, approval = d.worker_of(pid=2), d.approvals()[0].id
    rival = Rival(d, lambda: d.decide(approval=approval))
    in_the_middle(monkeypatch, commands.stateedits.stateedits, "write", rival.comes)

    d.edit({"log": ["edited"]}, worker=person)

    rival.ended()
    assert rival.overtook is False
    assert d.drain() == "done"
    assert d.values()["log"] == ["edited", "approve"]


@pytest.mark.parametrize("fanned", [False, True], ids=["thread", "node run"])
def test_an_edit_while_the_step_parks_moves_its_waits(served, monkeypatch, fanned):
    d = served(chain_of(lambda _state, ctx: {"log": [ctx.wait_signal("go").payload]}, fanned=fanned))
    nudge, person = due(d, fanned=fanned), d.worker_of(pid=2)
    rival = Rival(d, lambda: d.edit({"log": ["edited"]}, worker=person))
    in_the_middle(monkeypatch, outcomes, "take_signal", rival.comes)

    d.work(nudge)

    rival.ended()
    assert rival.overtook is False
    d.drain()
    d.signal("go", 1)
    assert d.drain() == "done"
    assert d.values()["log"] == ["edited", 1]
