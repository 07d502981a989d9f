"""Retries: short ones in place, long ones as rows; what is no use to retry is not; deaths are counted."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Annotated, Any, TypedDict

import pytest

from keepstep import END, START, Graph, Retry, append
from keepstep.crashpoints import Died
from keepstep.errors import DatabaseUnavailable, InvalidInput
from keepstep.store import workers


class State(TypedDict, total=False):
    log: Annotated[list[Any], append]


def node_graph(body, **options):
    """A graph of one node whose body gives what is logged."""
    graph = Graph("g", state=State)
    starts = []

    @graph.node(**options)
    def node(state, ctx):
        starts.append(ctx.attempt)
        return {"log": [body(ctx)]}

    graph.edge(START, "node")
    graph.edge("node", END)
    graph.starts = starts
    return graph


def fails(times, error=ConnectionError):
    def body(ctx):
        if ctx.attempt <= times:
            message = f"attempt {ctx.attempt}"
            raise error(message)
        return ctx.attempt

    return body


def test_short_waits_are_waited_in_place(deploy):
    graph = node_graph(fails(2), retry=Retry(attempts=3, delay=0.01))
    d = deploy(graph)
    d.start()
    nudge = d.queue.pop(0)
    d.work(nudge)
    assert (d.thread.status, d.queue) == ("done", [])
    assert graph.starts == [1, 2, 3]
    (_, step) = d.reader.history("t")
    assert [(node["run"], node["starts"], node["failures"]) for node in step.nodes] == [("node", 3, 2)]


def test_long_waits_hold_no_worker(timed, clock):
    graph = node_graph(fails(2), retry=Retry(attempts=3, delay=60, factor=2, delay_max=300, jitter=0))
    d = timed(graph)
    d.start()
    for failures, wait in ((1, 60), (2, 120)):
        assert d.drain() == "ready"
        row = d.thread.row
        assert (row.lease_worker, row.failures, row.due_at) == (None, failures, clock.now + wait)
        assert d.error == ("node_failed", f"attempt {failures}")
        clock.now += wait - 1
        assert d.sweep() == []
        clock.now += 1
        assert len(d.sweep()) == 1
    assert d.drain() == "done"
    assert graph.starts == [1, 2, 3]
    assert d.thread.error is None


def test_when_no_attempt_is_left_the_thread_fails_and_can_be_retried(deploy):
    graph = node_graph(fails(4), retry=Retry(attempts=2, delay=0))
    d = deploy(graph)
    d.start()
    assert d.drain() == "failed"
    error = d.thread.error
    assert error == {
        "code": "node_failed",
        "type": "ConnectionError",
        "message": "attempt 2",
        "where": "test_retry.py:45 in body",
        "node": "node",
        "run": "node",
    }
    d.control("retry")
    assert d.drain() == "failed"
    d.control("retry")
    assert d.drain() == "done"
    assert graph.starts == [1, 2, 3, 4, 5]
    assert [run.status for run in d.reader.runs("t")] == ["done"]


@pytest.mark.parametrize("error", [InvalidInput, NameError, NotImplementedError])
def test_what_every_attempt_would_meet_again_is_one_attempt(deploy, error):
    graph = node_graph(fails(9, error), retry=Retry(attempts=3, delay=0))
    d = deploy(graph)
    d.start()
    assert d.drain() == "failed"
    assert graph.starts == [1]


def test_a_world_that_is_away_costs_no_attempt(deploy):
    graph = node_graph(fails(1, DatabaseUnavailable))
    d = deploy(graph, retry_in_place_seconds_max=0.0)
    d.start()
    assert d.drain() == "ready"
    assert (d.thread.row.failures, d.error[0]) == (0, "database_unavailable")


def test_an_error_text_keeps_what_it_says(deploy):
    text = "O\x00K\x00 caf\udce9 \ud83d" + "x" * 5000
    d = deploy(node_graph(lambda ctx: (_ for _ in ()).throw(ValueError(text))))
    d.start()
    assert d.drain() == "failed"
    assert d.error == ("node_failed", text[:4000])
    assert d.reader.runs("t")[0].error is not None


# --- time ---


def test_a_sync_node_is_told_that_its_time_is_over(deploy):
    def hang(ctx):
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            time.sleep(0.01)

    d = deploy(node_graph(hang, timeout=0.1))
    d.start()
    started = time.monotonic()
    assert d.drain() == "failed"
    assert time.monotonic() - started < 10
    assert d.error == ("node_timeout", "node 'node' ran longer than its timeout of 0.1 s")


def test_an_async_node_is_cancelled(deploy):
    import asyncio

    graph = Graph("g", state=State)
    ended = []

    @graph.node(timeout=0.1)
    async def node(state, ctx):
        try:
            await asyncio.sleep(20)
        finally:
            ended.append(True)

    graph.edge(START, "node")
    graph.edge("node", END)
    d = deploy(graph)
    d.start()
    assert d.drain() == "failed"
    assert d.error[0] == "node_timeout"
    assert ended == [True]


def test_a_timeout_is_retried_when_the_policy_says_so(deploy):
    def slow_once(ctx):
        if ctx.attempt == 1:
            time.sleep(20)
        return "in time"

    graph = node_graph(slow_once, timeout=0.1, retry=Retry(attempts=2, delay=0))
    d = deploy(graph)
    d.start()
    assert d.drain() == "done"
    assert graph.starts == [1, 2]


def test_a_nodes_own_timeout_error_is_its_own(deploy):
    d = deploy(node_graph(fails(9, TimeoutError), timeout=60))
    d.start()
    assert d.drain() == "failed"
    assert d.thread.error["type"] == "TimeoutError"
    assert d.error[0] == "node_failed"


_HANGS = """
    import ctypes, os, signal, sys
    sys.path.insert(0, {root!r})
    from keepstep import END, START, Graph, Retry
    from keepstep.runtime import superstep
    from tests.steps.driver import Deployment
    from typing import TypedDict

    class State(TypedDict, total=False):
        n: int

    graph = Graph("g", state=State)

    @graph.node(timeout=0.2, retry=Retry(attempts=2, delay=30, jitter=0) if {retried} else None)
    def hang(state, ctx):
        print("started", flush=True)
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
        ctypes.CDLL(None).sleep(60)  # in C: it hears nothing

    graph.edge(START, "hang")
    graph.edge("hang", END)
    d = Deployment({url!r}, graph, timeout_grace_seconds=0.3)
    d.worker.end_process = lambda: os.kill(os.getpid(), signal.SIGKILL)
    d.start()
    d.work(d.queue.pop(0))
    print("returned", flush=True)
"""


@pytest.mark.kill
@pytest.mark.parametrize("retried", [False, True])
def test_a_node_that_hears_nothing_is_ended_with_its_process(deploy, store_url, retried):
    root = str(Path(__file__).parents[2])
    program = textwrap.dedent(_HANGS).format(root=root, url=store_url, retried=retried)
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == -signal.SIGKILL, ran.stderr
    assert "returned" not in ran.stdout
    assert ran.stdout.count("started") == 1

    d = deploy(node_graph(lambda _ctx: 0))
    row = d.thread.row
    assert (row.lease_worker, row.failures, row.deaths) == (None, 1, 0)
    assert d.thread.status == ("ready" if retried else "failed")
    assert d.error[0] == "node_timeout"
    assert "its process was ended" in d.error[1]


# --- deaths ---


def test_a_node_that_takes_its_process_down_three_times_is_blocked(deploy):
    class Killed(Died):
        pass

    cured = []

    def die(ctx):
        if not cured:
            raise Killed
        return "alive"

    graph = node_graph(die)
    d = deploy(graph)
    d.start()
    for deaths in (1, 2, 3):
        nudge = d.queue.pop(0)
        with pytest.raises(Killed):
            d.work(nudge)
        d.queue += workers.release_child(d.store, d.worker.owner.worker, 1, reason=f"signal 9, {deaths}")
    assert d.drain() == "blocked"
    assert d.error[0] == "worker_lost"
    assert "3 times (last: signal 9, 3)" in d.error[1]
    assert graph.starts == [1, 2, 3]
    cured.append(True)
    d.control("retry")
    assert d.drain() == "done"
    assert graph.starts[:3] == [1, 2, 3]
    assert len(graph.starts) == 4


def test_a_deploy_counts_no_death(deploy):
    class Killed(Died):
        pass

    def body(ctx):
        if ctx.attempt <= 5:
            raise Killed
        return "alive"

    graph = node_graph(body)
    d = deploy(graph)
    d.start()
    for pid in range(2, 7):
        worker = d.worker_of(pid=pid)
        with pytest.raises(Killed):
            d.work(d.queue.pop(0), worker)
        d.queue += workers.leave(worker.store, worker.owner.worker)
    assert d.drain() == "done"
    assert d.thread.row.deaths == 0
    assert graph.starts == [1, 2, 3, 4, 5, 6]


def test_a_commit_forgets_earlier_deaths(deploy):
    class Killed(Died):
        pass

    graph = Graph("g", state=State)

    def add(name, after):
        @graph.node(name=name)
        def node(state, ctx):
            if ctx.attempt <= 2:
                raise Killed
            return {"log": [name]}

        graph.edge(after, name)

    add("a", START)
    add("b", "a")
    graph.edge("b", END)
    d = deploy(graph)
    d.start()
    while d.queue:
        try:
            d.work(d.queue.pop(0))
        except Killed:
            d.queue += workers.release_child(d.store, d.worker.owner.worker, 1, reason="signal 9")
    assert d.thread.status == "done"
    assert d.values()["log"] == ["a", "b"]
