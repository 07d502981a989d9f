"""The log of events: what happened stands there when it has happened, in order, and a reader misses nothing."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from datetime import timedelta
from types import SimpleNamespace
from typing import Annotated, TypedDict

import pytest

from keepstep import END, START, Graph, Send, append, eventkinds
from keepstep.cli import events as command
from keepstep.cli.program import run
from keepstep.errors import InvalidInput
from keepstep.store import events, outcomes
from keepstep.tasks import events as service
from keepstep.tasks.events import Events


class Log(TypedDict, total=False):
    log: Annotated[list, append]


def graph_of(body, name="told", **options):
    graph = Graph(name, state=Log, **options)
    graph.node(body, name="body")
    graph.edge(START, "body")
    graph.edge("body", END)
    return graph


def told(d, kind=None):
    """(kind, payload) of the thread's events, in order."""
    return [(each.kind, each.payload) for each in d.reader.events(d.name, kind=kind)]


def kinds(d):
    return [each.kind for each in d.reader.events(d.name)]


def test_a_run_tells_that_it_begins_what_it_emits_and_how_it_ends(deploy):
    def body(_state, ctx):
        ctx.emit({"part": 1})
        return {"log": ["ok"]}

    d = deploy(graph_of(body))
    run = d.start().run_id
    assert kinds(d) == []  # accepted is not begun
    d.drain()
    first = d.reader.events(d.name)
    assert [(each.kind, each.run, each.node, each.payload) for each in first] == [
        ("thread.started", run, "", None),
        ("node.emitted", run, "body", {"part": 1}),
        ("thread.done", run, "", None),
    ]
    again = d.start().run_id
    d.drain()
    later = d.reader.events(d.name, after=first[-1].cursor)
    assert [(each.kind, each.run) for each in later] == [
        ("thread.started", again),
        ("node.emitted", again),
        ("thread.done", again),
    ]


def test_a_question_is_told_with_all_that_is_needed_to_answer_it(deploy):
    def body(_state, ctx):
        return {
            "log": [ctx.approve("Pay?", arguments={"amount": "12.50"}, to=["finance"], quorum=2, expires=60).verdict]
        }

    d = deploy(graph_of(body))
    d.start()
    d.drain()
    approval = d.approvals()[0].id
    _, opened, waiting = d.reader.events(d.name)
    assert (opened.kind, opened.approval, opened.node) == ("approval.opened", approval, "body")
    expires_at = opened.payload.pop("expires_at")
    assert expires_at == pytest.approx(opened.at.timestamp() + 60, abs=5)
    assert opened.payload == {
        "kind": "approve",
        "question": "Pay?",
        "arguments": {"amount": "12.50"},
        "to": ["finance"],
        "quorum": 2,
        "on_expiry": "reject",
    }
    assert waiting.kind == "thread.waiting"
    assert isinstance(waiting.payload["waits"][0].pop("due_at"), float)
    assert waiting.payload == {"waits": [{"kind": "approval", "approval": approval}]}

    seen = waiting.cursor
    d.decide("approve", by="anna")
    assert d.reader.events(d.name, after=seen) == []
    d.decide("delegate", by="bert", to=["chris"])
    d.decide("approve", by="chris", approval=approval)
    d.drain()
    reassigned = {**opened.payload, "expires_at": expires_at, "to": ["finance", "chris"], "by": "bert"}
    assert [(each.kind, each.approval, each.payload) for each in d.reader.events(d.name, after=seen)] == [
        ("approval.reassigned", approval, reassigned),
        ("approval.closed", approval, {"status": "approved", "by": "chris"}),
        ("thread.done", None, None),
    ]


def test_time_reassigns_and_closes_questions(timed, clock):
    def body(_state, ctx):
        ctx.approve("Pay?", to=["finance"], expires=timedelta(minutes=1), on_expiry="escalate", escalate_to=["boss"])

    d = timed(graph_of(body))
    d.start()
    d.drain()
    seen = d.reader.events(d.name)[-1].cursor
    clock.now += 61
    escalated_at = clock.now
    d.sweep()
    clock.now += 61
    d.sweep()
    d.drain()
    after = [(each.kind, each.payload) for each in d.reader.events(d.name, after=seen)]
    assert [kind for kind, _ in after[:2]] == ["approval.reassigned", "approval.closed"]
    asked, closed = after[0][1], after[1][1]
    assert (asked["question"], asked["to"], asked["expires_at"]) == ("Pay?", ["boss"], escalated_at + 60)
    assert closed == {"status": "expired"}
    # What the log has said stays as it was.
    assert d.reader.events(d.name, kind="approval.opened")[0].payload["expires_at"] == escalated_at - 1


def test_a_cancel_withdraws_what_is_asked_and_a_retry_asks_again(deploy):
    def body(_state, ctx):
        ctx.approve("Pay?")
        ctx.wait_signal("go", key="k")

    d = deploy(graph_of(body))
    run = d.start().run_id
    d.drain()
    approval = d.approvals()[0].id
    d.control("cancel", by="anna", reason="no more")
    d.control("retry", by="anna")
    d.drain()
    d.decide()
    d.drain()
    error = {"code": "cancelled", "message": "no more", "by": "anna"}
    found = [(each.kind, each.approval, each.payload) for each in d.reader.events(d.name, after=0)]
    assert found[3:] == [
        ("approval.closed", approval, {"status": "withdrawn"}),
        ("thread.cancelled", None, {"error": error}),
        ("thread.retried", None, None),
        ("approval.opened", approval, found[1][2]),
        ("thread.waiting", None, {"waits": [{"kind": "approval", "approval": approval}]}),
        ("approval.closed", approval, {"status": "approved", "by": "anna"}),
        ("thread.waiting", None, {"waits": [{"kind": "signal", "signal": "go", "key": "k"}]}),
    ]
    assert {each.run for each in d.reader.events(d.name)} == {run}


def test_each_run_that_a_cancel_ends_is_told(deploy):
    d = deploy(graph_of(lambda _state, ctx: ctx.wait_signal("go")))
    runs = [d.start().run_id for _ in range(3)]
    d.drain()
    d.control("cancel")
    ended = [(each.kind, each.run) for each in d.reader.events(d.name, kind="thread.cancelled")]
    assert sorted(ended) == sorted(("thread.cancelled", run) for run in runs)


def test_failing_blocking_and_going_on_is_told(deploy):
    fails = [RuntimeError("broken")]

    def body(_state, _ctx):
        if fails:
            raise fails.pop()
        return {"log": ["ok"]}

    d = deploy(graph_of(body))
    d.start()
    d.drain()
    assert d.thread.status == "failed"
    error = d.thread.error
    d.control("retry")
    d.drain()
    assert told(d) == [
        ("thread.started", None),
        ("thread.failed", {"error": error}),
        ("thread.retried", None),
        ("thread.done", None),
    ]


def test_pauses_are_told(deploy):
    d = deploy(graph_of(lambda _state, ctx: ctx.sleep(0)))
    d.start()
    d.control("pause")
    d.control("resume")
    assert kinds(d) == ["thread.paused", "thread.resumed"]


def test_a_blocked_thread_is_told_with_its_error(deploy):
    def body(_state, ctx):
        ctx.effect(lambda: 1 / 0 if ctx.attempt == 1 else 1)

    d = deploy(graph_of(body), deaths_max=1)
    d.start()
    d.drain()
    d.execute("UPDATE keepstep_thread SET status = 'ready', deaths = 5, next_nudge_at = 0, due_at = 0")
    d.sweep()
    d.drain()
    kind, payload = told(d)[-1]
    assert (kind, payload) == ("thread.blocked", {"error": d.thread.error})


def test_a_run_that_cannot_begin_has_failed(deploy):
    d = deploy(graph_of(lambda _state, _ctx: {}))
    d.start()
    d.execute("UPDATE keepstep_run SET input = :bad", bad=b"KS1j- 1 \n" + json.dumps({"none": 1}).encode())
    d.drain()
    assert d.thread.status == "failed"
    assert told(d) == [("thread.failed", {"error": d.thread.error})]


def test_parallel_node_runs_each_tell_that_they_wait(deploy):
    graph = Graph("told", state=Log, fan_out=True)
    graph.node(lambda _state, ctx: ctx.wait_signal("go", key=ctx.node), name="body")
    graph.route(START, lambda _state: [Send("body", {}), Send("body", {})], to=["body"])
    graph.edge("body", END)
    d = deploy(graph)
    d.start()
    d.drain()
    waiting = d.reader.events(d.name, kind="thread.waiting")
    assert sorted(each.node for each in waiting) == ["body#0", "body#1"]


def test_an_attempt_that_lost_its_lease_tells_nothing(deploy, monkeypatch):
    d = deploy(graph_of(lambda _state, ctx: ctx.wait_signal("go")))
    d.start()
    real = outcomes.lock

    def stolen(transaction, fence):
        transaction.cursor.execute("UPDATE keepstep_thread SET lease_nonce = 'another'")
        return real(transaction, fence)

    with monkeypatch.context() as patched:
        patched.setattr(outcomes, "lock", stolen)
        d.drain()
    assert kinds(d) == ["thread.started"]


# --- the log ---


def work_off(d):
    """Work until the queue is empty, of whichever threads."""
    while d.queue:
        d.work(d.queue.pop(0))


def place_all(d, limit=100):
    while events.place(d.store, limit=limit):
        pass


def test_the_log_has_everybodys_events_of_a_tenant_in_order(deploy):
    d = deploy(graph_of(lambda _state, _ctx: {}))
    for thread in ("a", "b", "c"):
        d.start(thread=thread)
    d.start(thread="d", tenant="another")
    work_off(d)
    assert d.reader.events() == []  # they have no place yet
    assert events.pending(d.store).unplaced is True
    place_all(d, limit=3)
    log = d.reader.events()
    assert sorted((each.thread, each.kind) for each in log) == sorted(
        (thread, kind) for thread in ("a", "b", "c") for kind in ("thread.started", "thread.done")
    )
    assert [each.cursor for each in log] == sorted(each.cursor for each in log)
    of_all = events.of_all(d.store, after=0, limit=100)
    assert [each.position for each in of_all] == list(range(1, 9))
    # Page by page it is the same, and nothing comes after the end.
    pages, after = [], 0
    while page := d.reader.events(after=after, limit=4):
        pages += page
        after = page[-1].cursor
    assert pages == log
    assert events.pending(d.store) == events.Pending(False, 8)


def test_an_event_that_is_committed_late_comes_after_those_that_were_read(served):
    """Ids are given before commits: a reader that went by them would pass over the late one."""
    d = served(graph_of(lambda _state, _ctx: {}))
    d.start(thread="late")
    d.start(thread="early")
    work_off(d)
    d.execute("DELETE FROM keepstep_event")
    thread_ids = {each.name: each.id for each in d.reader.threads()}
    written, go_on = threading.Event(), threading.Event()

    def slowly():
        with d.open().transaction() as transaction:
            events.record(transaction, thread_ids["late"], eventkinds.PAUSED)
            written.set()
            assert go_on.wait(20)

    slow = threading.Thread(target=slowly)
    slow.start()
    assert written.wait(20)
    with d.store.transaction() as transaction:
        events.record(transaction, thread_ids["early"], eventkinds.PAUSED)
    place_all(d)
    [first] = d.reader.events()
    go_on.set()
    slow.join(20)
    place_all(d)
    [second] = d.reader.events(after=first.cursor)

    assert (first.thread, second.thread) == ("early", "late")
    assert second.id < first.id


def test_two_that_place_at_once_give_each_event_one_place(served):
    d = served(graph_of(lambda _state, _ctx: {}))
    for number in range(30):
        d.start(thread=f"t{number}")
    work_off(d)
    stores, errors, barrier = [d.open() for _ in range(4)], [], threading.Barrier(4)

    def places(store):
        try:
            barrier.wait(20)
            while events.pending(store).unplaced:
                events.place(store, limit=5)
        except BaseException as error:  # noqa: BLE001  shown below
            errors.append(error)

    crowd = [threading.Thread(target=places, args=(store,)) for store in stores]
    for each in crowd:
        each.start()
    for each in crowd:
        each.join(60)
    assert errors == []
    assert [each.position for each in events.of_all(d.store, after=0, limit=100)] == list(range(1, 61))


def test_one_publishes_at_a_time_until_it_is_given_up(timed, clock):
    d = timed(graph_of(lambda _state, _ctx: {}))
    d.start()
    d.drain()
    place_all(d)
    assert events.hold_publishing(d.store, "one", seconds=10) == 0
    assert events.hold_publishing(d.store, "two", seconds=10) is None
    events.published(d.store, 1)
    assert events.hold_publishing(d.store, "one", seconds=10) == 1
    clock.now += 11
    assert events.hold_publishing(d.store, "two", seconds=10) == 1
    events.let_go(d.store, "one")  # late: it is another's by now
    assert events.hold_publishing(d.store, "three", seconds=10) is None
    events.published(d.store, 2)
    events.published(d.store, 1)  # late: the mark does not go back
    events.let_go(d.store, "two")
    assert events.hold_publishing(d.store, "three", seconds=10) == 2
    assert events.pending(d.store) == events.Pending(False, 0)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"kind": "approval"}, "kind: there is no event 'approval'"),
        ({"kind": "nothing.*"}, "kind: there is no event 'nothing.\\*'"),
        ({"kind": "appr*"}, "kind: there is no event 'appr\\*'"),
        ({"kind": "%"}, "kind: there is no event '%'"),
        ({"graph": "told"}, "graph: name a thread of it, too"),
        ({"after": None}, "after: a whole number from 0 on is needed, not None"),
        ({"after": "x"}, "after: a whole number from 0 on is needed, not 'x'"),
        ({"limit": 0}, "limit: a whole number from 1 on is needed, not 0"),
    ],
)
def test_what_no_event_is_called_is_refused(deploy, given, says):
    d = deploy(graph_of(lambda _state, _ctx: {}))
    with pytest.raises(InvalidInput, match=says):
        d.reader.events(**given)


def test_kinds_are_chosen_by_their_beginning(deploy):
    d = deploy(graph_of(lambda _state, ctx: ctx.approve("Go on?") and None))
    d.start()
    d.drain()
    d.decide()
    d.drain()
    place_all(d)
    assert [each.kind for each in d.reader.events(kind="approval.*")] == ["approval.opened", "approval.closed"]
    assert [each.kind for each in d.reader.events(d.name, kind="thread.*")] == [
        "thread.started",
        "thread.waiting",
        "thread.done",
    ]
    assert len(d.reader.events(kind="*")) == 5


def test_what_did_not_change_is_not_told(deploy):
    d = deploy(graph_of(lambda _state, ctx: ctx.approve("Go on?") and None))
    d.start()
    d.drain()
    for action in ("resume", "pause", "pause", "resume", "resume"):
        d.control(action)
    assert [each.kind for each in d.reader.events(d.name)][3:] == ["thread.paused", "thread.resumed"]


def test_a_cancel_of_a_queued_run_leaves_the_one_before_as_it_ended(deploy):
    def body(_state, _ctx):
        raise ValueError

    d = deploy(graph_of(body))
    one = d.start().run_id
    d.drain()
    two = d.start().run_id
    d.queue.clear()
    d.control("cancel")
    told = [(each.kind, each.run) for each in d.reader.events(d.name)]
    assert told[1:] == [("thread.failed", one), ("thread.cancelled", two)]
    assert [run.status for run in d.reader.runs(d.name)] == ["failed", "cancelled"]


class Heard(list):
    """A broker that keeps what is published."""

    def publish(self, body, _key, **_properties):
        self.append(json.loads(body))


def test_what_is_larger_than_a_message_is_not_even_read(deploy, monkeypatch):
    def body(_state, ctx):
        ctx.emit("x" * 3000)
        ctx.emit("y")
        ctx.approve("Pay?", arguments={"text": "z" * 3000})

    d = deploy(graph_of(body), message_bytes_max=2000)
    d.start()
    d.drain()
    place_all(d)
    rows = events.of_all(d.store, after=0, limit=10, bytes_max=2000)
    assert [(row.kind, row.left_out) for row in rows] == [
        ("thread.started", 0), ("approval.opened", 1), ("node.emitted", 1), ("node.emitted", 0), ("thread.waiting", 0),
    ]  # fmt: skip
    assert [row.payload is None and row.question is None for row in rows] == [True, True, True, False, True]
    heard = Heard()
    monkeypatch.setattr(Events, "_connected", lambda _service: heard)
    Events(d.settings, "w", d.store).work()
    assert [event.get("left_out", False) for event in heard] == [False, True, True, False, False]
    assert len(d.reader.events(d.name, kind="node.emitted")[0].payload) == 3000


def test_a_slow_broker_has_the_mark_moved_before_another_may_take_it(deploy, monkeypatch):
    d = deploy(graph_of(lambda _state, _ctx: {}))
    for number in range(5):
        d.start(thread=f"t{number}")
    work_off(d)
    place_all(d)
    heard = Heard()
    monkeypatch.setattr(service, "_PUBLISH_SECONDS_MAX", -1)  # over at once
    monkeypatch.setattr(Events, "_connected", lambda _service: heard)
    one, two = Events(d.settings, "one", d.store), Events(d.settings, "two", d.open())
    while events.pending(d.store).unpublished:
        assert one.work() == 0.0
        two.work()
    assert [event["position"] for event in heard] == list(range(1, 11))


def test_who_finds_that_another_has_published_it_all_looks_again_soon(deploy, monkeypatch):
    d = deploy(graph_of(lambda _state, _ctx: {}))
    d.start()
    d.drain()
    place_all(d)
    monkeypatch.setattr(Events, "_connected", lambda _service: Heard())
    events.published(d.store, 2)
    monkeypatch.setattr(events, "pending", lambda _store: events.Pending(False, 2))  # as it was a moment ago
    assert 0 < Events(d.settings, "late", d.store).work() < 1


def test_one_who_stands_still_while_placing_does_not_stop_the_others_for_ever(served, monkeypatch):
    d = served(graph_of(lambda _state, _ctx: {}))
    d.start()
    d.drain()
    monkeypatch.setattr(events, "_NOT_FOR_LONG", "SET LOCAL idle_in_transaction_session_timeout = '300ms'")
    stands_still, taken = d.open(), threading.Event()
    real = events._HOLD_PLACED.execute

    def held(cursor, dialect, params):
        real(cursor, dialect, params)
        if threading.current_thread().name == "frozen":
            taken.set()
            assert over.wait(30)

    over = threading.Event()
    monkeypatch.setattr(events._HOLD_PLACED, "execute", held)

    def stands():
        with contextlib.suppress(Exception):  # its connection is gone when it wakes up
            events.place(stands_still, limit=10)

    frozen = threading.Thread(target=stands, name="frozen")
    frozen.start()
    assert taken.wait(20)
    deadline = time.monotonic() + 20
    while not events.place(d.store, limit=10):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    over.set()
    frozen.join(20)
    assert [each.position for each in events.of_all(d.store, after=0, limit=10)] == [1, 2]


# --- the command ---


def shown(d, capsys, *arguments):
    assert run(["events", "--database", d.url, *arguments]) == 0
    return capsys.readouterr().out


def test_the_command_shows_the_log_and_a_program_reads_on_from_its_cursors(deploy, capsys):
    d = deploy(graph_of(lambda _state, ctx: ctx.approve("Go on?") and None))
    d.start()
    d.drain()
    assert shown(d, capsys).startswith("nothing has happened here")
    place_all(d)
    approval = d.approvals()[0].id
    lines = shown(d, capsys).splitlines()
    assert [line.split("  ")[0] for line in lines] == ["1", "2", "3"]
    assert lines[0].endswith("  thread.started  told/t")
    assert f"  approval.opened  told/t  body  {approval}  " in lines[1]
    assert '"question": "Go on?"' in lines[1]

    d.decide()
    d.drain()
    place_all(d)
    latest = json.loads(shown(d, capsys, "--limit", "2", "--json"))
    assert [(each["cursor"], each["kind"]) for each in latest] == [(4, "approval.closed"), (5, "thread.done")]
    after = json.loads(shown(d, capsys, "--after", "2", "--limit", "2", "--json"))
    assert [each["cursor"] for each in after] == [3, 4]
    asked = json.loads(shown(d, capsys, "t", "--graph", "told", "--kind", "approval.*", "--json"))
    assert [(each["kind"], each["thread"], each["approval"]) for each in asked] == [
        ("approval.opened", "t", approval),
        ("approval.closed", "t", approval),
    ]


def test_the_command_follows_what_happens(deploy, monkeypatch, capsys):
    d = deploy(graph_of(lambda _state, ctx: ctx.approve("Go on?") and None))
    d.start()
    d.drain()
    place_all(d)

    def happens(_seconds):
        if d.thread.status == "done":
            raise KeyboardInterrupt
        d.decide()
        d.drain()
        place_all(d)

    monkeypatch.setattr(command, "time", SimpleNamespace(sleep=happens))
    assert run(["events", "--database", d.url, "--after", "2", "--follow", "--json", "--kind", "thread.*"]) == 130
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(each["cursor"], each["kind"]) for each in found] == [(3, "thread.waiting"), (5, "thread.done")]
