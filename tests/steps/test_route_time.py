"""Routes and reducers are code of the user's: one that hangs is ended as a node is."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Annotated, TypedDict

import pytest

from keepstep import END, START, Graph, append
from tests.steps.driver import Deployment

TIMEOUT = 0.2


def slow_sum(old, new):
    """A reducer that hangs on 13."""
    if new == 13:
        hang()
    return (old or 0) + new


class State(TypedDict, total=False):
    total: Annotated[int, slow_sum]
    log: Annotated[list[str], append]
    first: bool


def hang():
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        time.sleep(0.01)


def routed(where, cured, starts, *, fan_out=False):
    """A graph of one node (or two at once) with a hanging route from START, after the node, or a hanging reducer."""
    graph = Graph("routed", state=State, fan_out=fan_out)
    names = ("a", "b") if fan_out else ("a",)
    for name in names:

        @graph.node(name=name, timeout=TIMEOUT)
        def node(state, ctx, name=name):
            starts.append(name)
            return {"log": [name], "total": 13 if where == "reducer" and not cured else 1}

        graph.route(name, lambda _state: hang() if where == "after" and not cured else END, to=[END])
    graph.route(START, lambda _state: hang() if where == "start" and not cured else list(names), to=list(names))
    return graph


@pytest.mark.parametrize("where", ["after", "reducer"])
@pytest.mark.parametrize("fan_out", [False, True])
def test_what_hangs_after_a_node_is_told_that_its_time_is_over(deploy, where, fan_out):
    cured, starts = [], []
    d = deploy(routed(where, cured, starts, fan_out=fan_out), timeout_grace_seconds=0.1)
    d.start({"total": 0})
    begun = time.monotonic()
    assert d.drain() == "failed"
    assert time.monotonic() - begun < 10
    assert d.error[0] == "node_timeout"
    named = "'a', 'b'" if fan_out else "'a'"
    assert d.error[1] == f"the routes and reducers after {named} ran longer than their timeout"
    cured.append(True)
    if where == "reducer" and fan_out:
        return  # what the node runs wrote is durable: only other code for the reducer helps
    d.control("retry")
    assert d.drain() == "done"
    # Node runs of a fan-out have ended and are not run again.
    assert starts == (["a", "b"] if fan_out else ["a", "a"])


def test_a_route_from_start_that_hangs_is_no_matter_of_who_takes_in_commands(deploy):
    cured, starts = [], []
    d = deploy(routed("start", cured, starts), node_timeout_seconds=TIMEOUT, timeout_grace_seconds=0.1)
    begun = time.monotonic()
    d.start()
    assert time.monotonic() - begun < TIMEOUT
    assert d.drain() == "failed"
    assert d.error == ("node_timeout", "the routes from START ran longer than their timeout")
    cured.append(True)
    d.start()
    assert d.drain() == "done"
    assert starts == ["a"]
    assert [run.status for run in d.reader.runs("t")] == ["failed", "done"]


_HANGS = """
    import ctypes, os, signal, sys
    sys.path.insert(0, {root!r})
    from keepstep import END, START, Graph
    from tests.steps.driver import Deployment
    from tests.steps.test_route_time import State

    where = {where!r}
    graph = Graph("routed", state=State)

    def hang(state):
        print("hangs", flush=True)
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
        ctypes.CDLL(None).sleep(60)  # in C: it hears nothing
        return END

    @graph.node(timeout=0.2)
    def a(state, ctx):
        return {{"log": ["a"]}}

    if where == "start":
        graph.route(START, lambda state: "a" if state.get("first") else hang(state), to=["a", END])
        graph.edge("a", END)
    else:
        graph.edge(START, "a")
        graph.route("a", lambda state: END if state.get("first") else hang(state), to=[END])
    d = Deployment({url!r}, graph, timeout_grace_seconds=0.3, node_timeout_seconds=0.2)
    d.worker.end_process = lambda: os.kill(os.getpid(), signal.SIGKILL)
    d.start({{"first": True}})
    d.drain()
    d.start({{"first": False}})
    d.drain()
    print("returned", flush=True)
"""


@pytest.mark.kill
@pytest.mark.parametrize("where", ["start", "after"])
def test_a_route_that_hears_nothing_is_ended_with_its_process(store_url, where):
    program = textwrap.dedent(_HANGS).format(root=str(Path(__file__).parents[2]), url=store_url, where=where)
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == -signal.SIGKILL, ran.stderr
    assert "returned" not in ran.stdout
    assert ran.stdout.count("hangs") == 1

    d = Deployment(store_url, routed("", [True], []))
    row = d.thread.row
    assert (d.thread.status, row.lease_worker, row.deaths) == ("failed", None, 0)
    code, message = d.error
    assert code == "node_timeout"
    assert message.endswith("ran longer than their timeout and did not end when told; their process was ended")
    # Of two runs the one that hung has failed, not the one before.
    assert [run.status for run in d.reader.runs("t")] == ["done", "failed"]
    d.close()
