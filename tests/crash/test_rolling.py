"""Workers are replaced while they work, by others of the same or of another release."""

from __future__ import annotations

import datetime as dt
import signal
import textwrap

import pytest

from keepstep.store.leases import Nudge, queue_of
from keepstep.tasks.publish import Publisher
from tests.crash import evidence
from tests.crash.conftest import on_each_broker
from tests.worker.deployment import eventually

THREADS = [f"rolling-{number}" for number in range(30)]


def held_by(deployment, worker):
    """Return the threads whose node a worker is running."""
    rows = deployment.query(
        "SELECT t.name FROM keepstep_thread t JOIN keepstep_worker w ON w.id = t.lease_worker "
        "WHERE w.pid = :pid AND t.status = 'ready'",
        pid=worker.pid,
    )
    return [name for (name,) in rows]


def walking(deployment, outside, worker, number):
    """Wait until all of a worker's children are held in a node; return their threads."""

    def look():
        names = held_by(deployment, worker)
        return names if len([n for n in names if outside.calls(n).get("walk")]) == number else None

    return eventually(look, seconds=60, what="work for the worker")


@pytest.mark.kill
@pytest.mark.slow
@pytest.mark.timeout(300)  # nine workers start, one after the other
@on_each_broker
def test_three_workers_are_replaced_twice_under_thirty_threads(served, outside):
    workers = [served.worker(concurrency=2) for _ in range(3)]
    outside.hold("walk", *THREADS)
    served.start("errand", *THREADS)

    stuck = None
    for turn in range(6):
        worker = workers.pop(0)
        running = walking(served, outside, worker, 2)
        workers.append(served.launch(concurrency=2))
        worker.process.send_signal(signal.SIGTERM)
        eventually(lambda worker=worker: worker.events("worker_stopping"), what="the stop")
        if turn == 2:
            # One of its nodes does not end in its grace time: the worker is killed with it.
            stuck = running.pop()
        outside.let_go("walk", *running)
        if stuck in held_by(served, worker):
            eventually(lambda left=[stuck], worker=worker: held_by(served, worker) == left, what="the other node's end")
            worker.kill()
            # It is due elsewhere when its worker has been missed, not when some message comes back.
            seconds = served.settings.liveness_window_seconds + 2 * served.settings.sweep_seconds + 3.0
            eventually(lambda worker=worker: not held_by(served, worker), seconds=seconds, what="the takeover")
        else:
            assert worker.process.wait(60) == 0
            assert worker.events("worker_left")
        workers[-1].ready(60)
    outside.let_go("walk", *THREADS)
    served.ended(*THREADS, seconds=100)

    once = {"enter-go": 1, "shop": 1, "walk": 1, "goods": 1, "enter-home": 1}
    for thread in THREADS:
        twice = {"enter-go": 2, "walk": 2} if thread == stuck else {}
        assert outside.calls(thread) == once | twice
        starts = [{}, {"go": 2 if thread == stuck else 1}, {"home": 1}]
        assert [runs for _, runs in evidence.history(served, thread)] == starts


# --- two releases side by side ----------------------------------------------------------------------------------------

FERRY = """
    from typing import TypedDict
    from keepstep import END, START, Graph
    from agents import entered, ask_outside, errand

    class Cargo(TypedDict, total=False):
        goods: int

    def release(version):
        ferry = Graph("ferry", state=Cargo, version=version)

        @ferry.node(name="load")
        def load(state, ctx):
            entered(ctx, "load")
            ask_outside("walk", ctx.thread)
            return {"goods": 1}

        @ferry.node(name="unload")
        def unload(state, ctx):
            entered(ctx, f"unload-{version}")
            return {"goods": 0}

        ferry.edge(START, "load")
        ferry.edge("load", "unload")
        ferry.edge("unload", END)
        return ferry
"""


@pytest.fixture
def releases(served):
    """Start a worker of a release: the old one knows no ferry, the next one its version 1, the newest its version 2."""
    folder = served.folder
    (folder / "ferry.py").write_text(textwrap.dedent(FERRY))
    (folder / "next.py").write_text('from ferry import release\n\nferry = release("1")\n')
    (folder / "newest.py").write_text('from ferry import release\n\nferry = release("2")\n')
    agents = served.environment["KEEPSTEP_GRAPHS"]
    carried = {"old": agents, "next": f"{agents},next.py", "newest": f"{agents},newest.py"}

    def start(release):
        return served.worker(concurrency=1, KEEPSTEP_GRAPHS=carried[release])

    return start


def test_a_worker_takes_no_thread_of_a_graph_it_does_not_carry(served, releases, outside):
    old, following = releases("old"), releases("next")
    threads = [f"ferry-{number}" for number in range(12)]
    errands = [f"beside-{number}" for number in range(4)]
    outside.hold("walk", *threads)
    # Either worker takes in the commands, and either one's child gets the nudges.
    served.start("ferry", *threads)
    served.start("errand", *errands)
    served.ended(*errands, seconds=60)
    eventually(
        lambda: [name for name in threads if outside.calls(name).get("walk")], seconds=60, what="a ferry's start"
    )

    # The release that carries the graph goes away between two steps: the threads wait, and can be seen to.
    following.process.send_signal(signal.SIGTERM)
    eventually(lambda: following.events("worker_stopping"), what="the stop")
    outside.let_go("walk", *threads)
    assert following.process.wait(60) == 0
    rows = served.query("SELECT name, status, starts, deaths, failures FROM keepstep_thread WHERE agent = 'ferry'")
    waiting = {name for name, status, *_ in rows if status == "ready"}
    assert len(waiting) == len(threads)
    assert {tuple(counts) for _, _, *counts in rows} == {(0, 0, 0)}
    served.start("errand", "meanwhile")
    served.ended("meanwhile", seconds=60)
    newest = releases("newest")
    served.start("errand", "later")
    served.ended("later", seconds=60)
    # Neither the release before nor the one after has touched them, and nobody nudges what it cannot run.
    assert {status for name, status in served.statuses().items() if name in waiting} == {"ready"}
    assert [event["nudged"] for worker in (old, newest) for event in worker.events("swept")] == []

    releases("next")
    # A nudge that the others take is lost on them; here they are gone before the next one.
    old.stop()
    newest.stop()
    evidence.hasten(served)
    served.ended(*threads, seconds=60)
    for thread in threads:
        assert outside.calls(thread) == {"enter-load": 1, "walk": 1, "enter-unload-1": 1}
        assert [runs for _, runs in evidence.history(served, thread)] == [{}, {"load": 1}, {"unload": 1}]


def test_nudges_for_a_release_that_is_busy_are_told_of_and_come_back_slowly(served, releases, outside):
    old, following = releases("old"), releases("next")
    outside.hold("walk", "ferry-held")
    served.start("ferry", "ferry-held")
    # Whichever worker took its nudge: the one that can run it has found it.
    evidence.hasten(served)
    outside.called("walk", "ferry-held")
    served.start("ferry", "ferry-behind")
    [(thread_id, version)] = served.query("SELECT id, version FROM keepstep_thread WHERE name = 'ferry-behind'")
    # Each release has queues of its own: what lies in another's was put there by one that had none.
    publish = Publisher(served.settings)
    publish([Nudge("step", thread_id, version, queue_of("errand", "1"), 1)] * 3)
    publish.close()
    told = eventually(lambda: old.events("graph_not_carried"), seconds=60, what="the warning")
    assert [(each["graph"], each["version"], each["level"]) for each in told] == [("ferry", "1", "warning")]
    before = served.query("SELECT version, starts, failures, deaths FROM keepstep_thread WHERE name = 'ferry-behind'")
    assert before == [(version, 0, 0, 0)]

    # The one that carries it nudges again while it is busy, and more and more slowly.
    evidence.hasten(served)
    eventually(lambda: len(following.events("admitted")) >= 3, seconds=60, what="a third look")
    times = [dt.datetime.fromisoformat(each["timestamp"]) for each in following.events("admitted")][-2:]
    assert (times[1] - times[0]).total_seconds() > 1.0
    assert len(old.events("graph_not_carried")) == 1, "said once a minute"
    after = served.query("SELECT version, starts, failures, deaths FROM keepstep_thread WHERE name = 'ferry-behind'")
    assert after == before

    outside.let_go("walk", "ferry-held")
    old.stop()
    evidence.hasten(served)
    served.ended("ferry-held", "ferry-behind", seconds=60)
    for name in ("ferry-held", "ferry-behind"):
        assert outside.calls(name) == {"enter-load": 1, "walk": 1, "enter-unload-1": 1}


def test_two_versions_of_a_graph_run_side_by_side(served, releases, outside):
    releases("next")
    served.start("ferry", "of-1")
    served.ended("of-1", seconds=60)
    outside.hold("walk", "old-run")
    served.start("ferry", "old-run")
    outside.called("walk", "old-run")
    newest = releases("newest")
    outside.let_go("walk", "old-run")
    served.ended("old-run", seconds=60)
    served.workers[0].stop()
    served.start("ferry", "of-2")
    served.ended("of-2", seconds=60)

    assert dict(served.query("SELECT name, graph_version FROM keepstep_thread")) == {
        "of-1": "1",
        "old-run": "1",
        "of-2": "2",
    }
    assert outside.calls("old-run") == {"enter-load": 1, "walk": 1, "enter-unload-1": 1}
    assert outside.calls("of-2") == {"enter-load": 1, "walk": 1, "enter-unload-2": 1}
    assert newest.process.poll() is None
