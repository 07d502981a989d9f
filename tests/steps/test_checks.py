"""A node that works for long by itself asks whether it is still wanted, and is left when it is not."""

from __future__ import annotations

import threading
import time

import pytest

from keepstep import END, START, Graph
from keepstep.errors import StaleLease
from keepstep.runtime import leaselook
from keepstep.store import leases
from tests.steps.agents import State


class Work:
    """What a node does by itself until it is told to stop."""

    def __init__(self):
        self.entered, self.left_by, self.after = threading.Event(), [], []

    def until_told(self, check):
        deadline = time.monotonic() + 30
        try:
            while time.monotonic() < deadline:
                check()
                self.entered.set()
        except BaseException as error:
            self.left_by.append(type(error))
            raise
        self.after.append("nobody told it")


def computes(work, *, asynchronous, fan_out):
    graph = Graph("computes", state=State, fan_out=fan_out)
    if asynchronous:

        @graph.node
        async def compute(state, ctx):
            deadline = time.monotonic() + 30
            try:
                while time.monotonic() < deadline:
                    await ctx.check()
                    work.entered.set()
            except BaseException as error:
                work.left_by.append(type(error))
                raise

    else:

        @graph.node
        def compute(state, ctx):
            work.until_told(ctx.check)

    def beside(state, ctx):
        pass

    if fan_out:
        graph.node(beside)
    for name in ("compute", "beside") if fan_out else ("compute",):
        graph.edge(START, name)
        graph.edge(name, END)
    return graph


@pytest.fixture(autouse=True)
def _always_look(monkeypatch):
    monkeypatch.setattr(leaselook, "_LOOK_SECONDS", 0.0)


@pytest.mark.parametrize("fan_out", [None, True], ids=["alone", "fanned-out"])
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_a_node_is_left_when_its_thread_is_cancelled(deploy, asynchronous, fan_out):
    work = Work()
    d = deploy(computes(work, asynchronous=asynchronous, fan_out=fan_out))
    other = d.worker_of(pid=2)
    d.start()
    if fan_out:
        d.work(d.queue.pop(0))
    cancelled = []

    def cancel():
        assert work.entered.wait(20)
        d.control("cancel")
        cancelled.append(d.dump())

    cancelling = threading.Thread(target=cancel)
    cancelling.start()
    d.work(d.queue.pop(0), other)
    cancelling.join()
    assert (work.left_by, work.after) == ([StaleLease], [])
    assert (d.drain(), d.dump()) == ("cancelled", *cancelled)


def test_a_node_that_is_wanted_goes_on(deploy):
    graph = Graph("computes", state=State)

    @graph.node
    def compute(state, ctx):
        ctx.check()
        return {"log": ["computed"]}

    graph.edge(START, "compute")
    graph.edge("compute", END)
    d = deploy(graph)
    d.start()
    assert d.drain() == "done"
    assert d.values()["log"] == ["computed"]
    assert graph.run({})["log"] == ["computed"]


def test_the_database_is_asked_once_a_second_at_most(monkeypatch):
    looks, now = [], [0.0]
    monkeypatch.setattr(leaselook, "_LOOK_SECONDS", 1.0)
    monkeypatch.setattr(leases, "is_held", lambda _store, _fence: looks.append(now[0]) or now[0] < 3)
    look = leaselook.LeaseLook(None, None, clock=lambda: now[0])
    for tenths in range(25):
        now[0] = tenths / 10
        look.check()
    assert looks == [0.0, 1.0, 2.0]
    now[0] = 3.0
    for _ in range(2):
        with pytest.raises(StaleLease):
            look.check()
    assert looks == [0.0, 1.0, 2.0, 3.0]
