"""Cancelled while one node run has ended, one is in the middle of its work and one has a child that loops."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Annotated, Any, TypedDict

import pytest

from keepstep import END, START, Graph, append
from keepstep.errors import WrongStatus


class State(TypedDict, total=False):
    log: Annotated[list[Any], append]
    pages: int
    enough: int


class World:
    """What the graphs do outside, and what holds them."""

    def __init__(self) -> None:
        self.starts: Counter[str] = Counter()
        self.mailed: list[str] = []
        self.entered, self.release = threading.Event(), threading.Event()

    def hold(self) -> None:
        """Keep the first one who comes."""
        if not self.entered.is_set():
            self.entered.set()
            assert self.release.wait(30)


def graphs(world):
    """`fetch`, `report` (held, then mails) and `research` (joins a child that loops) are due together."""
    reading = Graph("reading", state=State)

    @reading.node
    def read(state, ctx):
        world.starts["read"] += 1
        return {"pages": state.get("pages", 0) + 1}

    reading.edge(START, "read")
    reading.route("read", lambda state: END if state["pages"] >= state["enough"] else "read", to=["read", END])

    lead = Graph("lead", state=State, fan_out=True)

    def mail(what):
        world.mailed.append(what)

    @lead.node
    def fetch(state, ctx):
        world.starts["fetch"] += 1
        return {"log": ["fetched"]}

    @lead.node
    def report(state, ctx):
        world.starts["report"] += 1
        world.hold()
        ctx.effect(mail, "report")
        return {"log": ["reported"]}

    @lead.node
    def research(state, ctx):
        world.starts["research"] += 1
        (child,) = ctx.join(ctx.spawn(reading, {"enough": 6}))
        return {"log": [f"read {child['pages']} pages"]}

    for name in ("fetch", "report", "research"):
        lead.edge(START, name)
        lead.edge(name, END)
    return lead, reading


@pytest.fixture
def cancelled(deploy):
    """A run that was cancelled in the middle, and the world: the child has read three of six pages."""
    world = World()
    d = deploy(*graphs(world))
    other = d.worker_of(pid=2)
    d.start()
    d.work(d.queue.pop(0))  # the fan-out
    (reporting,) = [each for each in d.queue if each.run == "report"]
    d.queue.remove(reporting)
    running = threading.Thread(target=d.work, args=(reporting, other))
    running.start()
    assert world.entered.wait(30)
    while world.starts["read"] < 3:
        d.work(d.queue.pop(0))
    accepted = d.control("cancel", by="anna")
    at_once = d.dump()
    statuses = {each.graph: each.status for each in d.reader.threads()}
    world.release.set()
    running.join()
    assert accepted.duplicate is False
    assert (d.drain(), d.dump()) == ("cancelled", at_once)
    assert statuses == {"lead": "cancelled", "reading": "cancelled"}
    return d, world


def test_nothing_begins_after_a_cancel_and_what_was_done_is_kept(cancelled):
    d, world = cancelled
    assert world.mailed == []
    assert world.starts == {"fetch": 1, "report": 1, "research": 1, "read": 3}
    assert {each.run: (each.status, each.starts) for each in d.reader.node_runs("t")} == {
        "fetch": ("done", 1),
        "report": ("cancelled", 1),
        "research": ("cancelled", 1),
    }
    assert d.sweep() == []
    with pytest.raises(WrongStatus):
        d.control("resume")


def test_a_retry_runs_what_had_not_ended_again_and_nothing_else(cancelled):
    d, world = cancelled
    d.control("retry")
    assert d.drain() == "done"
    assert world.mailed == ["report"]
    # The child goes on from its third page; who joined it is entered again when the child has ended.
    assert world.starts == {"fetch": 1, "report": 2, "research": world.starts["research"], "read": 6}
    assert d.values()["log"] == ["fetched", "reported", "read 6 pages"]
    assert [each.status for each in d.reader.runs("t")] == ["done"]
    assert {each.state for each in d.reader.effects("t")} == {"done"}


def test_new_input_after_a_cancel_is_a_run_of_its_own(cancelled):
    d, world = cancelled
    d.start({"log": ["anew"]})
    assert d.drain() == "done"
    assert world.mailed == ["report"]
    assert d.values()["log"] == ["anew", "fetched", "reported", "read 6 pages"]
    assert [each.status for each in d.reader.runs("t")] == ["cancelled", "done"]
    # The child of the run that was cancelled stays where it was: the new run has one of its own.
    assert sorted(each.status for each in d.reader.threads() if each.graph == "reading") == ["cancelled", "done"]
    assert world.starts["read"] == 9
