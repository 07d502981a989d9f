"""Cancelled in the middle of a node, and taken up again: what had ended stays, the rest runs again."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Annotated, TypedDict

import pytest

from keepstep import END, START, Graph, append
from keepstep.cli.program import run
from keepstep.errors import ApprovalClosed, WrongStatus
from keepstep.store import outcomes


class State(TypedDict, total=False):
    log: Annotated[list[str], append]


class Held:
    """A node's body that a test holds, once."""

    def __init__(self):
        self.entered, self.release = threading.Event(), threading.Event()
        self._again = False

    def __call__(self):
        if not self._again:
            self._again = True
            self.entered.set()
            assert self.release.wait(20)


def in_background(d, *nudges, worker):
    def work():
        for nudge in nudges:
            d.work(nudge, worker)

    running = threading.Thread(target=work)
    running.start()
    return running


def beside(held, starts, mailed):
    """A graph whose `fetch`, `report`, `ask` and `late` are due together; `report` is held, then mails."""
    graph = Graph("beside", state=State, fan_out=True)

    def mail(what):
        mailed.append(what)

    def body(name, state, ctx):
        starts[name] += 1
        if name == "report":
            held()
            ctx.effect(mail, "report")
        if name == "ask":
            ctx.approve("Send it?")
        return {"log": [name]}

    for name in ("fetch", "ask", "report", "late"):
        graph.node(lambda state, ctx, name=name: body(name, state, ctx), name=name)
        graph.edge(START, name)
        graph.edge(name, END)
    return graph


def test_a_fan_out_that_was_cancelled_goes_on_where_it_was(deploy, store_url, monkeypatch, capsys):
    monkeypatch.setenv("KEEPSTEP_DATABASE", store_url)
    held, starts, mailed = Held(), Counter(), []
    d = deploy(beside(held, starts, mailed))
    other = d.worker_of(pid=2)
    d.start()
    for _ in range(3):
        d.work(d.queue.pop(0))  # the fan-out, fetch, ask
    running = in_background(d, d.queue.pop(0), worker=other)
    assert held.entered.wait(20)
    approval = d.approvals()[0].id
    d.control("cancel", by="anna")
    cancelled = d.dump()
    held.release.set()
    running.join()

    assert d.drain() == "cancelled"
    assert d.dump() == cancelled
    assert mailed == []
    assert starts == {"fetch": 1, "ask": 1, "report": 1}
    row = d.thread.row
    runs = outcomes.node_runs(d.store, d.thread.id, row.branch, row.seq + 1)
    assert {each.run: (each.status, each.starts, each.write is None) for each in runs} == {
        "fetch": ("done", 1, False),
        "ask": ("cancelled", 1, True),
        "report": ("cancelled", 1, True),
        "late": ("cancelled", 0, True),
    }
    with pytest.raises(ApprovalClosed):
        d.decide(approval=approval)
    assert run(["show", "t"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "Node runs of the step that was cancelled (1 of 4 ended)" in out
    assert "late never started 1 report cancelled 1" in out

    d.control("retry")
    assert d.thread.status == "waiting"
    assert (d.thread.row.control, d.thread.row.pending, d.thread.error) == ("", 3, None)
    assert [each.id for each in d.approvals()] == [approval]
    assert d.drain() == "waiting"
    assert starts == {"fetch": 1, "ask": 2, "report": 2, "late": 1}
    d.decide(approval=approval)
    assert d.drain() == "done"

    assert mailed == ["report"]
    assert starts == {"fetch": 1, "ask": 3, "report": 2, "late": 1}
    assert d.values() == {"log": ["fetch", "ask", "report", "late"]}
    assert [run.status for run in d.reader.runs("t")] == ["done"]
    assert len(d.approvals(status=None)) == 1


def test_a_step_that_waited_asks_the_same_again(deploy):
    graph = Graph("asks", state=State)
    starts = []

    @graph.node
    def ask(state, ctx):
        starts.append(ctx.attempt)
        return {"log": [ctx.approve("Go on?").verdict, ctx.wait_signal("go").payload]}

    graph.edge(START, "ask")
    graph.edge("ask", END)
    d = deploy(graph)
    d.start()
    assert d.drain() == "waiting"
    d.decide()
    assert d.drain() == "waiting"
    d.control("cancel")
    d.control("retry")
    assert d.thread.status == "ready"
    # The signal that comes before the node has been entered again is not missed.
    d.signal("go", "on")
    assert d.drain() == "done"
    assert starts == [1, 2, 3]
    assert d.values() == {"log": ["approve", "on"]}


def test_a_new_run_after_a_cancelled_one_begins_from_the_state_it_left(deploy):
    held, starts, mailed = Held(), Counter(), []
    d = deploy(beside(held, starts, mailed))
    held.entered.set()
    held._again = True
    d.start()
    for _ in range(3):
        d.work(d.queue.pop(0))
    d.control("cancel")
    d.start({"log": ["anew"]})
    assert d.drain() == "waiting"
    d.decide()
    assert d.drain() == "done"
    assert [run.status for run in d.reader.runs("t")] == ["cancelled", "done"]
    assert d.values() == {"log": ["anew", "fetch", "ask", "report", "late"]}
    assert starts == {"fetch": 2, "ask": 3, "report": 1, "late": 1}
    with pytest.raises(WrongStatus, match="is done"):
        d.control("retry")


def test_a_node_run_that_failed_shows_and_is_retried_while_others_are_under_way(deploy, store_url, monkeypatch, capsys):
    monkeypatch.setenv("KEEPSTEP_DATABASE", store_url)
    starts, cured = Counter(), []
    graph = Graph("beside", state=State, fan_out=True)

    def body(name, state, ctx):
        starts[name] += 1
        if name == "breaks" and not cured:
            message = "not yet"
            raise ValueError(message)
        if name == "waits":
            ctx.wait_signal("go")
        return {"log": [name]}

    for name in ("breaks", "waits", "dies"):
        graph.node(lambda state, ctx, name=name: body(name, state, ctx), name=name)
        graph.edge(START, name)
        graph.edge(name, END)
    d = deploy(graph)
    d.start()
    d.work(d.queue.pop(0))
    d.execute("UPDATE keepstep_node_run SET deaths = 3, last_death = 'signal 9' WHERE run = 'dies'")
    assert d.drain() == "waiting"
    assert (d.thread.row.pending, starts) == (1, {"breaks": 1, "waits": 1})
    assert run(["show", "t"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "breaks failed 1 node_failed: not yet" in out
    assert "dies blocked 1 worker_lost: node 'dies' took its process down 3 times" in out
    assert "beside those under way: keepstep retry t" in out

    cured.append(True)
    d.control("retry")
    assert (d.thread.status, d.thread.row.pending) == ("waiting", 3)
    assert sorted(nudge.run for nudge in d.queue) == ["breaks", "dies"]
    assert d.drain() == "waiting"
    with pytest.raises(WrongStatus, match="is waiting"):
        d.control("retry")
    d.signal("go")
    assert d.drain() == "done"
    assert starts == {"breaks": 2, "waits": 2, "dies": 1}
    assert d.values() == {"log": ["breaks", "waits", "dies"]}


def test_what_a_cancelled_attempt_had_begun_is_still_recorded(deploy):
    """No call is left without what came of it, though its attempt had been told to stop."""
    held, charged = Held(), []
    graph = Graph("pays", state=State)

    def charge():
        held()
        charged.append(1)
        return "charged"

    @graph.node
    def pay(state, ctx):
        return {"log": [ctx.effect(charge)]}

    graph.edge(START, "pay")
    graph.edge("pay", END)
    d = deploy(graph)
    other = d.worker_of(pid=2)
    d.start()
    running = in_background(d, d.queue.pop(0), worker=other)
    assert held.entered.wait(20)
    d.control("cancel")
    assert d.effects() == [("charge", "intent", 1)]
    held.release.set()
    running.join()
    assert d.effects() == [("charge", "done", 1)]
    d.control("retry")
    assert d.drain() == "done"
    assert (charged, d.values()) == ([1], {"log": ["charged"]})
