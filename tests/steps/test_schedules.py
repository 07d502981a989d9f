"""Schedules: each tick has at most one run, whoever fires it, dies, comes twice or comes late."""

from __future__ import annotations

import datetime as dt
import json
import threading
from typing import Annotated, TypedDict

import pytest

from keepstep import END, START, Graph, append, crashpoints
from keepstep.crashpoints import Died
from keepstep.errors import Conflict, InvalidInput, InvalidSchedule, NotFound, StateError, UnknownGraph
from keepstep.store import firing, schedules, sweep, ticks
from tests.steps.test_locks import Rival, in_the_middle

HOUR, DAY = 3600.0, 86400.0


class Report(TypedDict, total=False):
    region: str
    log: Annotated[list, append]


def report(version="1"):
    graph = Graph("report", state=Report, version=version)

    @graph.node
    def write(state, ctx):
        return {"log": [f"{ctx.thread} of {state['region']}"]}

    graph.edge(START, "write")
    graph.edge("write", END)
    return graph


def asking():
    graph = Graph("report", state=Report)

    @graph.node
    def write(_state, ctx):
        return {"log": [ctx.ask("Which region?")]}

    graph.edge(START, "write")
    graph.edge("write", END)
    return graph


def made(d, name="nightly", **fields):
    """Make a schedule whose ticks come every day."""
    given = {"name": name, "graph": "report", "input": {"region": "eu"}, "cron": "@daily", **fields}
    return d.send("schedule", **given)


def seen(d, name="nightly"):
    [found] = d.reader.schedules(name)
    return found


def stands_at(d, tick, name="nightly"):
    """Have the schedule's next tick come at some time."""
    d.execute("UPDATE keepstep_schedule SET next_at = :at, due_at = :at WHERE name = :name", at=tick, name=name)


def now(d):
    """Return the database's time."""
    with d.store.transaction() as transaction:
        return schedules.now(transaction)


def today(d):
    """Return the last midnight of the database's clock."""
    return now(d) // DAY * DAY


def runs(d):
    """Return (thread, number, request) of every run, in order of their making; one clock may have made several."""
    with d.store.engine.connect() as connection:
        rows = connection.exec_driver_sql(
            "SELECT t.name, r.number, r.request_id FROM keepstep_run r JOIN keepstep_thread t ON t.id = r.thread_id "
            "ORDER BY r.created_at, t.name, r.number"
        )
        return [tuple(row) for row in rows]


def audited(d, action):
    with d.store.engine.connect() as connection:
        rows = connection.exec_driver_sql("SELECT action, actor, thread_id, detail FROM keepstep_audit ORDER BY id")
        return [(row[1], row[2], json.loads(row[3])) for row in rows if row[0] == action]


def named(tick, name="nightly"):
    return f"{name}-{ticks.text(tick)}"


# --- firing -----------------------------------------------------------------------------------------------------------


def test_a_tick_that_has_come_gives_a_thread_of_its_own_a_run(deploy):
    d = deploy(report())
    made(d, by="anna", priority="high", step_limit=7)
    day = today(d)
    assert d.sweep() == []
    assert runs(d) == []
    stands_at(d, day)

    d.sweep()

    name = named(day)
    assert runs(d) == [(name, 1, f"schedule {seen(d).id} {ticks.text(day)}")]
    assert d.queue[0].priority == 0
    for nudge in d.queue:
        d.work(nudge)
    found = d.reader.get(name)
    assert found.status == "done"
    assert d.reader.state(name) == {"region": "eu", "log": [f"{name} of eu"]}
    shown = seen(d)
    assert (shown.outcome, shown.run_thread, shown.error) == ("done", name, None)
    assert shown.last_tick == shown.run_tick == dt.datetime.fromtimestamp(day, dt.UTC)
    assert shown.next_at == dt.datetime.fromtimestamp(day + DAY, dt.UTC)
    [(actor, thread_id, detail)] = audited(d, "start")
    assert (actor, thread_id) == ("schedule", found.id)
    assert detail == {"schedule": "nightly", "run": shown.run, "tick": ticks.text(day)}
    before = d.dump()
    assert d.sweep() == []
    assert d.dump() == before


def test_ticks_without_a_thread_of_their_own_are_runs_of_one_thread(deploy):
    d = deploy(report())
    made(d, thread="t", missed="all")
    day = today(d)
    stands_at(d, day - 2 * DAY)

    d.sweep()

    assert d.drain() == "done"
    assert [(name, number) for name, number, _ in runs(d)] == [("t", 1), ("t", 2), ("t", 3)]
    assert d.values()["log"] == ["t of eu"] * 3
    assert seen(d).outcome == "done"


@pytest.mark.parametrize("missed", ["skip", "last", "all"])
def test_the_clock_jumps_a_week(timed, clock, missed):
    d = timed(report())
    made(d, cron="@hourly", missed=missed)
    first = clock.now // HOUR * HOUR + HOUR  # it is 46 minutes and 40 seconds past an hour
    assert seen(d).next_at == dt.datetime.fromtimestamp(first, dt.UTC)

    clock.now += 7 * DAY
    d.sweep()
    d.sweep()

    last = clock.now // HOUR * HOUR
    due = [first + HOUR * number for number in range(168)]
    assert due[-1] == last
    expected = {"skip": [], "last": [last], "all": due[-100:]}[missed]
    assert [name for name, _, _ in runs(d)] == [named(tick) for tick in expected]
    shown = seen(d)
    skipped = {"skip": last, "last": last - HOUR, "all": due[67]}[missed]
    assert shown.skipped_tick == dt.datetime.fromtimestamp(skipped, dt.UTC)
    assert shown.last_tick == dt.datetime.fromtimestamp(last, dt.UTC)
    assert shown.outcome == ("skipped" if missed == "skip" else "queued")
    assert (shown.error or {}).get("code") == ("missed" if missed == "skip" else None)
    assert shown.next_at == dt.datetime.fromtimestamp(last + HOUR, dt.UTC)
    assert audited(d, "skip") == [
        ("schedule", None, {"schedule": "nightly", "from": ticks.text(first), "to": ticks.text(skipped)})
    ]


def test_a_clock_that_is_set_back_fires_no_tick_again(timed, clock):
    d = timed(report())
    made(d, cron="@hourly")
    clock.now += HOUR
    d.sweep()
    clock.now -= HOUR
    made(d, cron="0 * * * *", by="bert")  # the same times, said otherwise: its next tick is looked for afresh
    clock.now += HOUR
    [only] = runs(d)

    d.sweep()

    assert runs(d) == [only]
    assert seen(d).run_tick == seen(d).last_tick


def test_two_sweeps_at_once_start_one_run(deploy):
    d = deploy(report())
    made(d, missed="all")
    day = today(d)
    stands_at(d, day - 4 * DAY)
    stores = [d.open() for _ in range(4)]
    together, errors = threading.Barrier(len(stores)), []

    def sweeps(store):
        try:
            together.wait(20)
            for _ in range(3):
                sweep.sweep(store, takeover=False, limit=100)
        except BaseException as error:  # noqa: BLE001  shown below
            errors.append(error)

    crowd = [threading.Thread(target=sweeps, args=(store,)) for store in stores]
    for each in crowd:
        each.start()
    for each in crowd:
        each.join(60)

    assert errors == []
    assert [name for name, _, _ in runs(d)] == [named(day - DAY * back) for back in (4, 3, 2, 1, 0)]


def test_a_sweep_leaves_a_tick_to_the_one_that_fires_it(served, monkeypatch):
    d = served(report())
    made(d)
    stands_at(d, today(d))
    other, found = d.open(), []
    rival = Rival(d, lambda: found.extend(firing.fire_due(other, limit=10)))
    calls = in_the_middle(monkeypatch, firing, "carried_version", rival.comes)

    nudges = firing.fire_due(d.worker.store, limit=10)

    rival.ended()
    assert rival.overtook, "it waited for the lock"
    assert (len(nudges), found, calls["carried_version"]) == (1, [], 1)
    assert len(runs(d)) == 1


@pytest.mark.parametrize("point", ["inside_tick", "after_tick"])
def test_a_worker_that_dies_over_a_tick_costs_it_nothing(deploy, monkeypatch, point):
    d = deploy(report())
    made(d, missed="all")
    day = today(d)
    stands_at(d, day - DAY)

    def dies(name, _detail):
        if name == point:
            raise Died

    monkeypatch.setattr(crashpoints, "hook", dies)
    with pytest.raises(Died):
        d.sweep()
    monkeypatch.setattr(crashpoints, "hook", None)
    fired = [named(day - DAY)] if point == "after_tick" else []
    assert [name for name, _, _ in runs(d)] == fired
    # What it was to nudge is found when that should have been long ago.
    d.execute("UPDATE keepstep_thread SET next_nudge_at = 0")

    d.sweep()

    assert [name for name, _, _ in runs(d)] == [named(day - DAY), named(day)]
    for nudge in d.queue:
        d.work(nudge)
    assert [d.reader.get(name).status for name, _, _ in runs(d)] == ["done", "done"]


def test_a_tick_that_has_its_run_gets_no_other_whatever_its_row_says(deploy):
    d = deploy(report())
    made(d)
    day = today(d)
    stands_at(d, day)
    d.sweep()
    stands_at(d, day)

    assert d.sweep() == []

    [(name, number, _)] = runs(d)
    assert (name, number) == (named(day), 1)
    assert seen(d).run == d.reader.runs(name)[0].id


# --- who waits for whom -----------------------------------------------------------------------------------------------


def test_a_graph_that_nobody_carries_makes_the_schedule_wait(deploy):
    d = deploy(report())
    made(d)
    day = today(d)
    stands_at(d, day)
    d.execute("UPDATE keepstep_worker SET alive_until = 0")

    assert d.sweep() == []

    shown = seen(d)
    assert shown.error == {"code": "unknown_graph", "message": "no worker carries a graph named 'report'"}
    assert (shown.next_at, shown.last_tick) == (dt.datetime.fromtimestamp(day, dt.UTC), None)
    # It is left alone for a moment, so that it costs the sweeps of a fleet nothing.
    before = d.dump()
    assert d.sweep() == []
    assert d.dump() == before
    d.worker_of(pid=2)
    stands_at(d, day)
    d.sweep()
    assert [name for name, _, _ in runs(d)] == [named(day)]
    assert seen(d).error is None


def test_a_worker_that_does_not_carry_the_graph_fires_it_for_one_that_does(deploy):
    d = deploy(report(), report("2"))
    made(d, version="1")
    stands_at(d, today(d))

    firing.fire_due(d.open(), limit=10)

    [(name, _, _)] = runs(d)
    assert d.reader.get(name).version == "1"


def test_a_version_that_nobody_carries_makes_the_schedule_wait(deploy):
    d = deploy(report())
    with pytest.raises(UnknownGraph, match="no worker carries a graph named 'report' in version '2'"):
        made(d, version="2")
    made(d, version="1")
    d.execute("UPDATE keepstep_schedule SET graph_version = '2'")
    stands_at(d, today(d))
    d.sweep()
    assert runs(d) == []
    assert seen(d).error["message"] == "no worker carries a graph named 'report' in version '2'"


def test_a_schedule_that_cannot_fire_holds_up_no_other(deploy):
    d = deploy(report())
    made(d, "broken")
    made(d)
    day = today(d)
    stands_at(d, day - DAY, "broken")
    stands_at(d, day)
    d.execute("UPDATE keepstep_schedule SET timezone = 'Mars/Olympus' WHERE name = 'broken'")

    d.sweep()

    assert [name for name, _, _ in runs(d)] == [named(day)]
    shown = seen(d, "broken")
    assert shown.error["code"] == "error"
    assert "Mars/Olympus" in shown.error["message"]


@pytest.mark.parametrize("thread", [None, "t"], ids=["new threads", "one thread"])
def test_ticks_may_come_while_the_run_before_goes_on(deploy, thread):
    d = deploy(report())
    made(d, missed="all", overlap="allow", thread=thread)
    day = today(d)
    stands_at(d, day - DAY)

    d.sweep()

    threads = [("t", 1), ("t", 2)] if thread else [(named(day - DAY), 1), (named(day), 1)]
    assert [(name, number) for name, number, _ in runs(d)] == threads
    assert (seen(d).outcome, seen(d).error) == ("queued", None)


@pytest.mark.parametrize("thread", [None, "t"], ids=["new threads", "one thread"])
def test_a_tick_may_be_skipped_while_the_run_before_goes_on(deploy, thread):
    d = deploy(asking())
    made(d, missed="all", overlap="skip", thread=thread)
    day = today(d)
    stands_at(d, day - 2 * DAY)

    d.sweep()

    [first] = runs(d)
    shown = seen(d)
    assert (shown.run_tick, shown.skipped_tick, shown.last_tick) == tuple(
        dt.datetime.fromtimestamp(day - back * DAY, dt.UTC) for back in (2, 0, 0)
    )
    assert shown.outcome == "skipped"
    assert shown.error == {"code": "overlap", "message": "the run of an earlier tick had not ended"}
    d.work(d.queue[0])
    d.queue.clear()
    stands_at(d, day)
    d.sweep()
    assert runs(d) == [first]
    [question] = d.approvals()
    d.send("decide", approval=question.id, verdict="answer", answer="eu")
    d.work(d.queue.pop())
    stands_at(d, day)

    d.sweep()

    assert [(name, number) for name, number, _ in runs(d)][1:] == [("t", 2) if thread else (named(day), 1)]
    assert (seen(d).outcome, seen(d).error) == ("queued", None)


# --- commands ---------------------------------------------------------------------------------------------------------


def test_the_same_schedule_again_changes_nothing_and_another_of_its_name_does(deploy):
    d = deploy(report())
    assert not made(d, by="anna").duplicate
    before, shown = d.dump()["keepstep_schedule"], seen(d)
    again = made(d, by="bert")
    assert (again.duplicate, again.thread_id) == (True, None)
    assert d.dump()["keepstep_schedule"] == before

    assert not made(d, by="bert", cron="30 2 * * *", timezone="Europe/Berlin", missed="all", overlap="skip").duplicate

    changed = seen(d)
    assert (changed.id, changed.created_by, changed.updated_by) == (shown.id, "anna", "bert")
    assert (changed.cron, changed.timezone, changed.missed, changed.overlap) == (
        "30 2 * * *", "Europe/Berlin", "all", "skip",
    )  # fmt: skip
    assert changed.next_at == dt.datetime.fromtimestamp(ticks.after("30 2 * * *", "Europe/Berlin", now(d)), dt.UTC)
    assert [(actor, detail.get("unchanged"), detail.get("cron")) for actor, _, detail in audited(d, "schedule")] == [
        ("anna", None, "@daily"), ("bert", True, None), ("bert", None, "30 2 * * *"),
    ]  # fmt: skip


def test_a_tick_that_is_due_is_not_lost_to_a_change_of_something_else(deploy):
    d = deploy(report())
    made(d)
    day = today(d)
    stands_at(d, day)
    made(d, input={"region": "us"}, by="bert")
    d.sweep()
    assert [name for name, _, _ in runs(d)] == [named(day)]
    d.work(d.queue.pop())
    assert d.reader.state(named(day))["log"] == [f"{named(day)} of us"]


def test_a_command_that_is_delivered_again_does_not_undo_what_came_after_it(deploy):
    d = deploy(report())
    made(d, id="c1")
    made(d, id="c2")
    made(d, id="c3", cron="@hourly")
    before = d.dump()
    for each in ("c1", "c2"):
        assert made(d, id=each).duplicate
    assert d.dump() == before
    with pytest.raises(Conflict, match="command id 'c1' was used before for something else"):
        made(d, id="c1", cron="@hourly")
    d.send("unschedule", name="nightly", id="c4")
    assert d.send("unschedule", name="nightly", id="c4").duplicate
    assert made(d, id="c1").duplicate
    assert d.reader.schedules() == []


def test_two_that_make_the_same_schedule_at_once_make_one(deploy):
    d = deploy(report())
    producers = [d.worker_of(pid=pid) for pid in (2, 3, 4)]
    together, accepted = threading.Barrier(len(producers)), []

    def makes(worker):
        together.wait(20)
        accepted.append(made(d, worker=worker))

    crowd = [threading.Thread(target=makes, args=(worker,)) for worker in producers]
    for each in crowd:
        each.start()
    for each in crowd:
        each.join(60)

    assert sorted(each.duplicate for each in accepted) == [False, True, True]
    assert len(d.reader.schedules()) == 1


def test_a_paused_schedule_fires_nothing_and_makes_up_for_nothing(timed, clock):
    d = timed(report())
    made(d, cron="@hourly", missed="all")
    d.send("schedule_control", name="nightly", action="pause", by="anna", reason="holidays")
    shown = seen(d)
    assert (shown.paused, shown.next_at) == (True, None)
    made(d, missed="all", cron="*/30 * * * *")
    assert seen(d).next_at is None
    clock.now += DAY
    d.sweep()
    assert d.send("schedule_control", name="nightly", action="pause").duplicate

    d.send("schedule_control", name="nightly", action="resume")

    tick = clock.now // HOUR * HOUR + HOUR
    assert seen(d).next_at == dt.datetime.fromtimestamp(tick, dt.UTC)
    assert d.send("schedule_control", name="nightly", action="resume").duplicate
    d.sweep()
    assert runs(d) == []
    clock.now = tick
    d.sweep()
    assert [name for name, _, _ in runs(d)][-1] == named(tick)
    assert audited(d, "pause")[0] == ("anna", None, {"schedule": "nightly", "reason": "holidays"})


def test_a_schedule_that_is_removed_leaves_its_runs(deploy):
    d = deploy(report())
    made(d)
    day = today(d)
    stands_at(d, day)
    d.sweep()
    d.send("unschedule", name="nightly", by="anna")
    assert d.reader.schedules() == []
    assert d.reader.get(named(day)).status == "ready"
    for verb, more in (("unschedule", {}), ("schedule_control", {"action": "pause"})):
        with pytest.raises(NotFound, match="there is no schedule 'nightly' in application 'default'"):
            d.send(verb, name="nightly", **more)


def test_schedules_of_applications_and_tenants_are_apart(deploy):
    d = deploy(report())
    made(d)
    made(d, application="shop")
    made(d, tenant="acme")
    assert [(each.name, each.application) for each in d.reader.schedules()] == [
        ("nightly", "default"), ("nightly", "shop"),
    ]  # fmt: skip
    d.send("unschedule", name="nightly", application="shop")
    assert [each.application for each in d.reader.schedules()] == ["default"]


@pytest.mark.parametrize(
    ("fields", "error", "problem"),
    [
        ({"cron": "61 * * * *"}, InvalidSchedule, r"\$\.cron: '61' is no minute; five fields are needed"),
        ({"cron": "0 0 30 2 *"}, InvalidSchedule, r"\$\.cron: '0 0 30 2 \*' never comes"),
        ({"timezone": "Mars/Olympus"}, InvalidSchedule, r"\$\.timezone: 'Mars/Olympus' is no time zone: use a name"),
        ({"thread": "report-{day}"}, InvalidSchedule, r"\$\.thread: of what stands in braces only \{tick\} is known"),
        ({"thread": "t" * 190 + "{tick}"}, InvalidInput, r"\$\.thread, with the tick's time in it, must be 1 to 200"),
        ({"input": {"region": 7}}, StateError, r"\$\.region"),
        ({"input": {"colour": "red"}}, StateError, "colour"),
        ({"graph": "nobody"}, UnknownGraph, "no worker carries a graph named 'nobody'"),
        ({"name": "a\n"}, InvalidInput, "schedule must be 1 to 200 printable characters"),
    ],
)
def test_what_cannot_be_used_is_refused_and_changes_nothing(deploy, fields, error, problem):
    d = deploy(report())
    made(d)
    before = d.dump()
    for name in ("nightly", "other"):
        with pytest.raises(error, match=problem):
            made(d, **{"name": name, **fields})
    assert d.dump() == before


def test_a_thread_that_is_there_is_given_a_further_input(deploy):
    class Strict(TypedDict):
        region: str

    graph = Graph("report", state=Strict)
    graph.node(lambda _state, _ctx: {}, name="write")
    graph.edge(START, "write")
    graph.edge("write", END)
    d = deploy(graph)
    d.start({"region": "eu"}, thread="t")
    made(d, thread="t", input={})
    with pytest.raises(StateError):
        made(d, thread="t", input={"region": 7})


def test_a_sweep_with_nothing_due_is_one_indexed_statement(served):
    d = served(report())
    made(d)
    with d.store.engine.connect() as connection:
        connection.exec_driver_sql("ANALYZE keepstep_schedule")
        text, _, _ = firing._DUE.prepared(d.store.engine.dialect)
        connection.exec_driver_sql("SET enable_seqscan = off")  # as of a table that is worth it
        plan = "\n".join(connection.exec_driver_sql(f"EXPLAIN {text}", {"limit": 200}).scalars())
    assert "using keepstep_schedule_due on keepstep_schedule" in plan
    assert "Index Cond: (due_at <= " in plan


def test_a_command_that_dies_before_its_commit_is_nothing(deploy, monkeypatch):
    d = deploy(report())

    def dies(name, _detail):
        if name == "inside_command":
            raise Died

    monkeypatch.setattr(crashpoints, "hook", dies)
    before = d.dump()
    with pytest.raises(Died):
        made(d, id="c1")
    monkeypatch.setattr(crashpoints, "hook", None)
    assert d.dump() == before
    assert not made(d, id="c1").duplicate
