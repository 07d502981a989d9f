"""A decision that comes before its question is refused in so many words: never accepted and lost."""

from __future__ import annotations

import threading
from collections import Counter

import pytest

from keepstep import END, START, Graph, crashpoints, errors
from keepstep.crashpoints import Died
from keepstep.errors import NotFound, NothingAsked
from keepstep.ids import new_id
from keepstep.runtime import waits
from keepstep.store import workers
from tests.steps.agents import State


def chain(starts, body=lambda _ctx: None):
    """A graph that asks, after `body(ctx)`, and goes on to another node."""
    graph = Graph("asks", state=State)

    @graph.node
    def ask(state, ctx):
        starts["ask"] += 1
        body(ctx)
        return {"log": [ctx.approve("Pay?").verdict]}

    @graph.node
    def follow(state, ctx):
        starts["follow"] += 1
        return {"log": ["followed"]}

    graph.edge(START, "ask")
    graph.edge("ask", "follow")
    graph.edge("follow", END)
    return graph


def test_a_decision_before_the_question_is_committed_is_refused_and_taken_when_it_is_sent_again(deploy):
    """A chat bot says yes while the node that will ask is still running."""
    starts, entered, release = Counter(), threading.Event(), threading.Event()

    def hold(_ctx):
        entered.set()
        assert release.wait(20)

    d = deploy(chain(starts, hold))
    other = d.worker_of(pid=2)
    d.start()
    running = threading.Thread(target=d.work, args=(d.queue.pop(0), other))
    running.start()
    assert entered.wait(20)
    before = d.dump()
    early = new_id()
    with pytest.raises(NothingAsked, match=r"'t' asks nothing yet \(ready\): send it again when it does"):
        d.decide(approval=None, thread="t", id=early)
    assert d.dump() == before
    release.set()
    running.join()
    assert (d.thread.status, len(d.approvals())) == ("waiting", 1)
    # Nothing of it was kept: sent again under the same id it is a decision like any other.
    accepted = d.decide(approval=None, thread="t", id=early)
    assert accepted.duplicate is False
    assert d.decide(approval=None, thread="t", id=early).duplicate is True
    assert d.drain() == "done"
    assert starts == {"ask": 2, "follow": 1}
    assert d.values()["log"] == ["approve", "followed"]
    with pytest.raises(NotFound) as ended:
        d.decide(approval=None, thread="t")
    assert (ended.value.code, ended.value.retryable) == ("not_found", False)


def test_that_nothing_is_asked_yet_says_that_it_may_be_sent_again():
    assert (NothingAsked.code, NothingAsked.retryable) == ("nothing_asked", True)
    assert errors.by_code("nothing_asked") is NothingAsked


@pytest.mark.parametrize("point", ["before_park", "after_park"])
def test_a_worker_that_dies_around_the_commit_leaves_one_question(deploy, monkeypatch, point):
    """The id of a question that was never committed answers nothing; that of one that was answers it still."""
    starts, made = Counter(), []

    def made_known():
        made.append(new_id())
        return made[-1]

    monkeypatch.setattr(waits, "new_id", made_known)
    d = deploy(chain(starts))
    d.start()

    def dies(name, _detail):
        if name == point:
            raise Died

    monkeypatch.setattr(crashpoints, "hook", dies)
    with pytest.raises(Died):
        d.work(d.queue.pop(0))
    monkeypatch.setattr(crashpoints, "hook", None)
    (first,) = made
    asked = [each.id for each in d.approvals(None)]
    if point == "before_park":
        assert asked == []
        before = d.dump()
        with pytest.raises(NotFound, match=f"there is no approval '{first}'"):
            d.decide(approval=first)
        assert d.dump() == before
        d.queue += workers.release_child(d.store, d.worker.owner.worker, 1, reason="signal 9")
        assert d.drain() == "waiting"
        (asked,) = ([each.id for each in d.approvals(None)],)
        assert asked != [first]
        with pytest.raises(NotFound):
            d.decide(approval=first)
    else:
        assert asked == [first]
    assert [each.id for each in d.approvals()] == asked
    d.decide(approval=asked[0])
    assert d.drain() == "done"
    assert starts == {"ask": 3 if point == "before_park" else 2, "follow": 1}
    assert len(d.approvals(None)) == 1
