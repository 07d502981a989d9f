"""A run's step limit: of that run alone, kept in the database, and a place to go on from."""

from __future__ import annotations

from collections import Counter
from typing import TypedDict

import pytest

from keepstep import END, START, Graph, crashpoints
from keepstep.crashpoints import Died
from keepstep.errors import WrongStatus
from keepstep.store import workers


class State(TypedDict, total=False):
    count: int
    enough: int


def counting(pages):
    """A graph that counts until it is enough, and reads a page outside in each step; a run may take 25 steps."""
    graph = Graph("counting", state=State, step_limit=25)

    def read(number):
        pages.append(number)

    @graph.node
    def count(state, ctx):
        number = state.get("count", 0) + 1
        ctx.effect(read, number)
        return {"count": number}

    graph.edge(START, "count")
    graph.route("count", lambda state: END if state["count"] >= state["enough"] else "count", to=["count", END])
    return graph


def run_of(d, enough):
    d.start({"enough": enough})
    return d.drain()


def test_a_limit_counts_the_steps_of_its_run_and_can_be_raised(deploy):
    pages = []
    d = deploy(counting(pages))
    assert run_of(d, 20) == "done"
    assert run_of(d, 30) == "done"
    assert run_of(d, 10**6) == "failed"
    assert [(each.status, each.steps) for each in d.reader.runs("t")] == [("done", 20), ("done", 10), ("failed", 25)]
    assert (d.error[0], d.thread.steps, d.queue) == ("step_limit", 25, [])
    assert d.values()["count"] == 55
    assert Counter(pages) == dict.fromkeys(range(1, 56), 1)
    assert d.sweep() == []

    with pytest.raises(WrongStatus):
        d.control("resume")
    d.control("retry", step_limit=40)
    assert d.drain() == "failed"
    assert (d.error[0], d.thread.steps, d.queue) == ("step_limit", 40, [])
    assert d.values()["count"] == 70
    assert Counter(pages) == dict.fromkeys(range(1, 71), 1)
    # Without a higher limit it stops where it is, with no further step.
    d.control("retry")
    assert (d.drain(), d.error[0], d.values()["count"], len(pages)) == ("failed", "step_limit", 70, 70)


@pytest.mark.parametrize("point", ["before_commit", "after_commit"])
def test_steps_are_counted_across_deaths_of_workers(deploy, monkeypatch, point):
    """Each fifth step takes the worker down; what it has counted is in the database."""
    pages = []
    d = deploy(counting(pages))
    d.start({"enough": 10**6})
    reached = Counter()

    def dies(name, _detail):
        if name == point:
            reached[name] += 1
            if reached[name] % 5 == 0:
                raise Died

    monkeypatch.setattr(crashpoints, "hook", dies)
    deaths = 0
    while d.thread.status == "ready":
        try:
            d.drain()
        except Died:
            deaths += 1
            d.queue += workers.release_child(d.store, d.worker.owner.worker, 1, reason="signal 9")
            d.execute("UPDATE keepstep_thread SET next_nudge_at = 0")
            d.sweep()
    assert deaths == 6 if point == "before_commit" else deaths == 5
    assert (d.thread.status, d.error[0], d.thread.steps, d.values()["count"]) == ("failed", "step_limit", 25, 25)
    assert Counter(pages) == dict.fromkeys(range(1, 26), 1)
