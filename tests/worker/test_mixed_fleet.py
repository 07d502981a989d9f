"""Workers that carry different graphs: what needs one of them reaches a worker that has it."""

from __future__ import annotations

import contextlib
import textwrap
from datetime import datetime, timedelta

import pytest

import keepstep
from keepstep.errors import NotCarried
from keepstep.store import workers
from keepstep.store.engine import Store
from tests.worker.deployment import eventually

OTHER = """
from typing import TypedDict
from keepstep import END, START, Graph

class State(TypedDict, total=False):
    n: int

graph = Graph("other", state=State)
graph.node(lambda state, ctx: {}, name="only")
graph.edge(START, "only")
graph.edge("only", END)
"""


@contextlib.contextmanager
def closing_store(url):
    store = Store.open(url)
    yield store
    store.dispose()


@pytest.fixture
def stranger(served):
    """Start a worker that carries a graph nobody here uses."""
    (served.folder / "other.py").write_text(textwrap.dedent(OTHER))
    return lambda: served.worker(KEEPSTEP_GRAPHS=str(served.folder / "other.py"))


@pytest.fixture
def waiting(served):
    """A thread that waits, and nobody who carries its graph any more."""
    carrier = served.worker()
    served.start("asking", "a")
    served.ended("a", status="waiting")
    assert carrier.stop() == 0
    return "a"


def kinds(served):
    return [kind for (kind,) in served.query("SELECT kind FROM keepstep_checkpoint ORDER BY seq")]


def test_an_edit_is_left_to_a_worker_that_carries_the_graph(served, stranger, waiting):
    passer = stranger()
    # One that carries it is alive, as far as the database knows, and comes to take commands in only later.
    with closing_store(served.settings.database) as store:
        fleet = {"host": "box", "pid": 1, "concurrency": 1, "release": "1", "window_seconds": 60.0}
        workers.register(store, graphs=[("asking", "1")], **fleet)
    with keepstep.Client(settings=served.settings) as client:
        receipt = client.edit(waiting, {"done": ["edited"]}, by="anna")
        eventually(lambda: passer.events("command_left_to_others"), what="the edit left to others")
        served.worker()
        reply = receipt.accepted(30)
    left = passer.events("command_left_to_others")
    assert [(event["command_id"], event["times"]) for event in left] == [
        (receipt.id, number) for number in range(1, len(left) + 1)
    ]
    assert passer.events("command_refused") == []
    assert reply.duplicate is False
    assert kinds(served) == ["input", "edit"]


def test_an_edit_that_nobody_can_check_is_refused_in_the_end(served, stranger, waiting):
    passer = stranger()
    with pytest.raises(NotCarried, match="no live worker carries graph 'asking' version '1'"):
        served.client.edit(waiting, {"done": ["edited"]}, by="anna")

    # It went round three times, each of at least a second.
    left, refused = passer.events("command_left_to_others"), passer.events("command_refused")
    assert {event["times"] for event in left} == {1, 2, 3}
    first, last = (datetime.fromisoformat(event["timestamp"]) for event in (left[0], refused[0]))
    assert last - first >= timedelta(seconds=3)
    assert kinds(served) == ["input"]
