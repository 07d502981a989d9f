"""What the doctor finds in workers and threads: each finding is brought about, and has its way out."""

from __future__ import annotations

import contextlib
import socket
import time
from types import SimpleNamespace
from typing import TypedDict

import pytest

from keepstep import END, START, Graph, Retry, Send, __version__, effect
from keepstep.cli.program import run
from keepstep.cli.session import Session
from keepstep.settings import load
from keepstep.store import claims, events, limits, workers
from keepstep.store.engine import Store
from keepstep.store.leases import Owner
from keepstep.tasks.liveness import Liveness
from tests.servers import free_port
from tests.steps.driver import Deployment
from tests.unit.test_cli_checks import examined, found
from tests.unit.test_cli_program import fill

pytestmark = pytest.mark.usefixtures("durable_postgresql")


class State(TypedDict, total=False):
    n: int


def registered(url, *graphs, release=__version__, window=60.0, host="box", pid=7):
    store = Store.open(url)
    worker_id = workers.register(
        store, host=host, pid=pid, concurrency=4, graphs=list(graphs), release=release, window_seconds=window
    )
    store.dispose()
    return worker_id


def graph_of(body, name="work", **options):
    graph = Graph(name, state=State, **options.pop("graph", {}))
    graph.node(body, name="body", **options)
    if graph.fan_out:
        graph.route(START, lambda _state: [Send("body", {}), Send("body", {})], to=["body"])
    else:
        graph.edge(START, "body")
    graph.edge("body", END)
    return graph


@pytest.fixture
def deploy(store_url):
    """Make a deployment on this test's database, with a worker that carries its graph."""
    with contextlib.ExitStack() as stack:

        def make(graph, **options):
            deployment = Deployment(store_url, graph, **options)
            stack.callback(deployment.close)
            deployment.execute("UPDATE keepstep_worker SET release = :release", release=__version__)
            return deployment

        yield make


# --- workers ----------------------------------------------------------------------------------------------------------


def test_live_workers_and_what_they_carry_are_listed(capsys, store_url):
    registered(store_url, ("refunds", "1"), ("audits", "2"))
    registered(store_url, ("refunds", "1"), release="0.0.1")
    checks = examined(capsys, "--database", store_url, code=0)
    assert found(checks, "worker", "ok") == [
        (f"box, pid 7, 4 at once: refunds 1, audits 2 (release {__version__})", None)
    ]
    assert found(checks, "worker", "warning") == [
        (
            "box, pid 7, 4 at once: refunds 1 (release 0.0.1)",
            f"this is release {__version__}: run one release everywhere",
        )
    ]


@pytest.mark.parametrize(("skew", "said"), [(180.0, "3 min ahead of"), (-30.5, "30 s behind"), (1.5, None)])
def test_a_workers_clock_that_is_wrong_is_a_warning(capsys, postgresql_url, monkeypatch, skew, said):
    worker_id = registered(postgresql_url, ("idle", "1"))
    monkeypatch.setattr("time.time", lambda: time.clock_gettime(time.CLOCK_REALTIME) + skew)
    liveness = Liveness(load(database=postgresql_url), SimpleNamespace(worker_id=worker_id))
    for _ in range(2):
        liveness.work()
    liveness.finish()
    monkeypatch.undo()
    checks = examined(capsys, "--database", postgresql_url, code=0)
    warned = found(checks, "clock", "warning")
    if said is None:
        assert warned == []
        return
    [(text, way_out)] = warned
    assert text.startswith(f"box, pid 7: its clock is {said} the database's. No step depends on it")
    assert way_out == "let that machine follow a time server"


def leased_by_the_dead(deploy, *, others):
    d = deploy(graph_of(lambda _state, _ctx: None))
    d.start()
    store, nudge = d.store, d.queue.pop(0)
    fleet = {"host": "gone", "concurrency": 1, "graphs": [("work", "1")], "release": __version__}
    dead = workers.register(store, pid=9, window_seconds=0.0, **fleet)
    owner = Owner(dead, 10)
    assert claims.claim_thread(store, nudge.thread_id, nudge.version, owner=owner, carried=d.worker.carried)
    if not others:
        workers.leave(store, d.worker.owner.worker)
    return d


def test_leases_of_a_dead_worker_are_taken_over_by_the_living(capsys, deploy):
    d = leased_by_the_dead(deploy, others=True)
    checks = examined(capsys, "--database", d.url, code=0)
    [(text, way_out)] = found(checks, "worker", "warning")
    assert text.startswith("gone, pid 9 was to renew 0.")
    assert text.endswith(" ago at the latest and holds a lease")
    assert way_out.startswith("the live workers take them over")


def test_a_dead_worker_that_nobody_gives_up_is_a_problem(capsys, deploy):
    d = leased_by_the_dead(deploy, others=True)
    d.execute("UPDATE keepstep_worker SET alive_until = alive_until - 3600 WHERE host = 'gone'")
    [(text, _)] = found(examined(capsys, "--database", d.url, code=1), "worker", "problem")
    assert text == "gone, pid 9 was to renew 60 min ago at the latest and holds a lease"


def test_leases_of_a_dead_worker_that_nobody_can_take_over_are_a_problem(capsys, deploy):
    d = leased_by_the_dead(deploy, others=False)
    [(text, way_out)] = found(examined(capsys, "--database", d.url, code=1), "worker", "problem")
    assert text.endswith("and holds a lease")
    assert way_out == "keepstep worker MODULE: it takes them over after one liveness window"
    d.execute("DELETE FROM keepstep_worker")
    checks = examined(capsys, "--database", d.url, code=1)
    assert found(checks, "workers", "problem") == [("1 leases are held by workers that are gone", way_out)]


# --- threads ----------------------------------------------------------------------------------------------------------


def test_due_threads_of_a_graph_that_nobody_carries_are_a_problem(capsys, store_url):
    fill(store_url, 2)
    registered(store_url, ("other", "1"))
    checks = examined(capsys, "--database", store_url, code=1)
    assert found(checks, "threads", "ok") == [("2 ready (tenant default)", None)]
    [(text, way_out)] = found(checks, "graphs", "problem")
    assert text == "2 ready of idle version 1, which no live worker carries"
    assert way_out.startswith("run a worker with the module that defines it")
    assert found(checks, "lag", "ok") == []


def overdue(capsys, d, *, seconds):
    for table in ("thread", "node_run"):
        d.execute(f"UPDATE keepstep_{table} SET due_at = due_at - :seconds WHERE status = 'ready'", seconds=seconds)
    return examined(capsys, "--database", d.url, code=1 if seconds > 24 else 0)


@pytest.mark.parametrize("fanned", [False, True])
def test_due_steps_that_nobody_takes(capsys, deploy, fanned):
    d = deploy(graph_of(lambda _state, _ctx: None, graph={"fan_out": fanned}))
    for number in range(1 if fanned else 2):
        d.start(thread=f"t{number}")
    if fanned:
        d.work(d.queue.pop(0))
    checks = overdue(capsys, d, seconds=0.0)
    [(text, way_out)] = found(checks, "lag", "ok")
    assert text.startswith("2 steps are due and in nobody's hands, the oldest for ")
    assert way_out is None

    checks = overdue(capsys, d, seconds=15.0)
    [(text, way_out)] = found(checks, "lag", "warning")
    assert text.startswith("2 steps are due and in nobody's hands, the oldest for 1")
    assert way_out == "workers are behind: raise --concurrency or add some"
    assert found(checks, "threads", "problem") == []

    checks = overdue(capsys, d, seconds=100.0)
    what = "node runs of work" if fanned else "of work"
    [(text, way_out)] = found(checks, "threads", "problem")
    assert text == (
        f"2 {what} version 1 have been due for over 24 s in nobody's hands, although a live worker carries it"
    )
    assert way_out.startswith("all workers may be busy")


def test_what_a_limit_holds_back_is_not_late(capsys, deploy):
    d = deploy(graph_of(lambda _state, _ctx: None))
    for number in range(3):
        d.start(thread=f"t{number}")
    for nudge in d.queue:
        claims.claim_thread(
            d.store,
            nudge.thread_id,
            nudge.version,
            owner=d.worker.owner,
            carried=d.worker.carried,
            running_max={limits.of_graph("work"): 1},
        )
    d.execute("UPDATE keepstep_thread SET due_at = due_at - 1000")
    checks = examined(capsys, "--database", d.url, code=0)
    assert found(checks, "lag", "ok") == [
        ("2 steps are due where a limit says how many may run at once: work of tenant default", None)
    ]
    assert [each for each in checks if each[0] != "ok"] == []


def test_what_is_paused_put_off_or_running_is_not_late(capsys, deploy):
    def body(_state, _ctx):
        raise ConnectionError

    d = deploy(graph_of(body, retry=Retry(attempts=2, delay=3600.0, jitter=0.0)))
    d.start(thread="put off")
    d.work(d.queue.pop(0))
    d.start(thread="paused")
    d.control("pause", thread="paused")
    nudge = d.start(thread="running").nudges[0]
    owner, carried = d.worker.owner, d.worker.carried
    assert claims.claim_thread(d.store, nudge.thread_id, nudge.version, owner=owner, carried=carried)
    d.execute("UPDATE keepstep_thread SET due_at = due_at - 1000 WHERE name != 'put off'")
    checks = examined(capsys, "--database", d.url, code=0)
    assert [each for each in checks if each[0] != "ok"] == []


def test_a_long_wait_is_nobodys_fault(capsys, deploy):
    d = deploy(graph_of(lambda _state, ctx: ctx.approve("Well?") and None))
    d.start()
    assert d.drain() == "waiting"
    d.execute("UPDATE keepstep_approval SET created_at = created_at - 8640000")
    d.execute("UPDATE keepstep_wait SET created_at = created_at - 8640000")
    d.execute("UPDATE keepstep_thread SET due_at = due_at - 8640000, updated_at = updated_at - 8640000")
    checks = examined(capsys, "--database", d.url, code=0)
    assert [each for each in checks if each[0] != "ok"] == []


def test_blocked_threads_are_told_by_their_reason(capsys, deploy):
    @effect
    def pay(who):
        raise KeyboardInterrupt

    def body(state, ctx):
        if state["n"] == 1:
            ctx.effect(pay, ctx.thread)
        return {"n": object()} if state["n"] == 2 else None

    graph = Graph("work", state=State)
    graph.node(body, name="body")
    graph.edge(START, "body")
    graph.route("body", lambda _state: "nowhere", to=["body"])
    d = deploy(graph)
    for name in ("a", "b"):
        d.start({"n": 0}, thread=name)
    d.start({"n": 1}, thread="c")
    while d.queue:
        with contextlib.suppress(KeyboardInterrupt):
            d.work(d.queue.pop(0))
    with contextlib.suppress(KeyboardInterrupt):
        d.sweep()
    d.execute("UPDATE keepstep_thread SET next_nudge_at = 0 WHERE status = 'ready'")
    d.sweep()
    for nudge in d.queue:
        d.work(nudge)
    checks = examined(capsys, "--database", d.url, code=0)
    told = dict(found(checks, "threads", "warning"))
    # Those that were blocked last come first.
    assert set(told) == {"2 blocked as graph: b, a", "1 blocked as effect_unknown: c"}
    [of_graph] = [way for text, way in told.items() if "graph" in text]
    hint = Session(database=d.url).hint
    assert of_graph == f"deploy code that has the node, then {hint('retry THREAD')}"
    assert f"{hint('effects')} lists it with the commands" in told["1 blocked as effect_unknown: c"]


@pytest.mark.parametrize("fanned", [False, True])
def test_a_node_that_takes_its_process_down_is_a_warning_until_it_is_blocked(capsys, deploy, fanned):
    d = deploy(graph_of(lambda _state, _ctx: None, graph={"fan_out": fanned}))
    d.start()
    if fanned:
        d.work(d.queue.pop(0))
    owner, carried = d.worker.owner, d.worker.carried
    for _ in range(2):
        nudge = d.queue[0]
        claimed = (
            claims.claim_node(
                d.store, nudge.thread_id, nudge.seq, nudge.run, nudge.version, owner=owner, carried=carried
            )
            if fanned
            else claims.claim_thread(d.store, nudge.thread_id, nudge.version, owner=owner, carried=carried)
        )
        assert claimed is not None
        workers.release_child(d.store, owner.worker, owner.child, reason="signal 9 (SIGKILL)")
    checks = examined(capsys, "--database", d.url, code=0)
    run_named = ", node run body#0," if fanned else ""
    assert found(checks, "poison", "warning") == [
        (
            f"work/t{run_named} has taken its process down 2 times (last: signal 9 (SIGKILL)): after 3 it is blocked",
            f"look at that worker's log and at its memory; {Session(database=d.url).hint('show t')}",
        )
    ]


# --- probes -----------------------------------------------------------------------------------------------------------


def probed(capsys, probe, *arguments, code):
    return examined(capsys, *arguments, "--probe", probe, code=code)


@pytest.mark.parametrize("probe", ["liveness", "readiness"])
def test_a_probe_passes_while_a_worker_of_its_host_is_alive(capsys, store_url, probe):
    here = socket.gethostname()
    registered(store_url, ("idle", "1"))
    checks = probed(capsys, probe, "--database", store_url, code=1)
    assert found(checks, "worker", "problem") == [(f"none of {here} has renewed in time", "its log says why")]
    registered(store_url, ("idle", "1"), host=here)
    checks = probed(capsys, probe, "--database", store_url, code=0)
    assert found(checks, "worker", "ok") == [(f"1 alive on {here}", None)]


def test_no_restart_mends_a_database_that_is_away(capsys):
    url = f"postgresql://127.0.0.1:{free_port()}/x"
    checks = probed(capsys, "liveness", "--database", url, code=0)
    assert [level for level, *_ in checks] == ["warning"]
    checks = probed(capsys, "readiness", "--database", url, code=1)
    [(text, _)] = found(checks, "database", "problem")
    assert "Connection refused" in text


def test_a_worker_is_not_ready_without_its_broker_or_schema(capsys, postgresql_url, empty_postgresql_url):
    registered(postgresql_url, ("idle", "1"), host=socket.gethostname())
    url = f"redis://127.0.0.1:{free_port()}/0"
    checks = probed(capsys, "readiness", "--database", postgresql_url, "--broker", url, code=1)
    assert len(found(checks, "broker", "problem")) == 1
    assert len(found(checks, "worker", "ok")) == 1
    checks = probed(capsys, "readiness", "--database", empty_postgresql_url, code=1)
    assert len(found(checks, "schema", "problem")) == 1
    assert probed(capsys, "liveness", "--database", empty_postgresql_url, code=0)[0][0] == "warning"


def test_a_probe_of_nothing(capsys):
    for probe in ("liveness", "readiness"):
        assert len(found(probed(capsys, probe, code=1), "database", "problem")) == 1
    assert run(["doctor", "--probe", "vitality"]) == 2


# --- schedules and events ---------------------------------------------------------------------------------------------


def test_a_tick_that_nobody_can_start_is_a_problem(capsys, deploy):
    d = deploy(graph_of(lambda _state, _ctx: {}))
    d.send("schedule", name="nightly", graph="work", cron="@daily", by="anna")
    d.send("schedule", name="hourly", graph="work", cron="@hourly", by="anna")
    assert found(examined(capsys, "--database", d.url, code=0), "schedules", "problem") == []
    d.execute("UPDATE keepstep_worker SET carried = ''")
    d.execute("UPDATE keepstep_schedule SET next_at = next_at - 200000, due_at = 0 WHERE name = 'nightly'")
    d.sweep()
    [(text, way)] = found(examined(capsys, "--database", d.url, code=1), "schedules", "problem")
    assert text.startswith("schedule 'nightly' has started nothing at its tick of ")
    assert text.endswith("ago: no worker carries a graph named 'work'")
    assert way == "a worker that carries graph 'work': the tick waits for it"


def test_events_that_nobody_places_or_publishes_are_found(capsys, deploy):
    d = deploy(graph_of(lambda _state, _ctx: {}))
    d.start()
    d.drain()
    assert found(examined(capsys, "--database", d.url, code=0), "events", "warning") == []
    d.execute("UPDATE keepstep_event SET at = at - 60")
    [(text, _)] = found(examined(capsys, "--database", d.url, code=1), "events", "problem")
    assert text == "what has happened since 60 s ago has no place in the log: who reads it does not see it"
    events.place(d.store, limit=10)
    [(text, _)] = found(examined(capsys, "--database", d.url, code=0), "events", "warning")
    assert text == "what has happened since 60 s ago is not published; in the log it stands"
    events.published(d.store, 2)
    assert found(examined(capsys, "--database", d.url, code=0), "events", "warning") == []
