"""An operator's edit of a thread's state: the pending step goes on from it, and nothing that was done is done again."""

from __future__ import annotations

import json
import threading
from collections import Counter
from decimal import Decimal
from typing import Annotated, TypedDict

import pytest

from keepstep import END, START, Graph, Retry, Send, append, effect
from keepstep.errors import Conflict, NotCarried, StaleEdit, StateError, StepRunning, TooLarge, WrongStatus
from keepstep.runtime.codec import view
from keepstep.store import claims, leases, workers


class State(TypedDict, total=False):
    amount: Decimal
    count: int
    log: Annotated[list[str], append]


class Outside:
    """What was done outside, and under which keys."""

    def __init__(self):
        self.calls = Counter()
        self.keys = []

    def __call__(self, name, key):
        self.calls[name] += 1
        self.keys.append(key)
        return name


def paying(outside):
    @effect
    def pay(what: str, *, idempotency_key: str) -> str:
        return outside(what, idempotency_key)

    return pay


def asks(outside, name="asks"):
    """A graph whose second node pays, asks, and pays again what the state then says."""
    graph = Graph(name, state=State)
    pay = paying(outside)

    @graph.node
    def before(state, ctx):
        return {"log": ["before"]}

    @graph.node
    def ask(state, ctx):
        ctx.effect(pay, "first", key="first")
        ctx.emit("asking")
        decision = ctx.approve("Pay?")
        ctx.effect(pay, "second", key="second")
        return {"log": [f"{decision.verdict} {state['amount']}"]}

    for pair in ((START, "before"), ("before", "ask"), ("ask", END)):
        graph.edge(*pair)
    return graph


def pending_key(d):
    """The key of the step that is due, as the head's cursor has it."""
    return view(d.reader.head_rows(d.thread.id)[-1].cursor)["key"]


def refused(d, error, text, values, **fields):
    before = d.dump()
    with pytest.raises(error) as caught:
        d.edit(values, **fields)
    assert text in caught.value.message
    assert d.dump() == before


def test_an_edit_while_a_decision_is_waited_for(deploy):
    outside = Outside()
    d = deploy(asks(outside))
    thread_id = d.start({"amount": "100.00"}).thread_id
    assert d.drain() == "waiting"
    old = d.reader.history("t")[-1]

    accepted = d.edit({"amount": "9.50", "log": ["edited"]}, by="anna", reason="A typing error")

    assert (accepted.thread_id, accepted.duplicate, accepted.nudges) == (thread_id, False, [])
    assert d.thread.status == "waiting"
    assert d.values() == {"amount": Decimal("9.50"), "log": ["edited"]}
    new = d.reader.history("t")[-1]
    assert (new.seq, new.kind, new.parent, new.changed) == (2, "edit", old.id, ["amount", "log"])
    assert new.meta["edit"] == {"by": "anna", "keys": ["amount", "log"], "reason": "A typing error"}
    assert new.next == ["ask"]
    entry = d.reader.audit("t")[-1]
    assert (entry.actor, entry.action) == ("anna", "edit")
    assert json.loads(entry.detail) == {
        "keys": ["amount", "log"],
        "reason": "A typing error",
        "seq": 2,
        "checkpoint": new.id,
        "before": old.digest,
        "after": new.digest,
    }

    d.decide()
    assert d.drain() == "done"
    assert d.values()["log"] == ["edited", "approve 9.50"]
    assert d.checkpoints() == [(0, "input"), (1, "step"), (2, "edit"), (3, "step")]
    assert outside.calls == {"first": 1, "second": 1}
    assert outside.keys == [f"{thread_id}/0/2/ask/pay:{name}" for name in ("first", "second")]
    assert [event.payload for event in d.reader.events("t", kind="node.emitted")] == ["asking"]
    assert {wait.status for wait in d.reader.waits("t")} == {"closed"}
    assert d.thread.steps == 2


def test_the_key_stays_through_several_edits(deploy):
    outside = Outside()
    d = deploy(asks(outside))
    thread_id = d.start({"amount": 1}).thread_id
    d.drain()
    for amount in range(2, 5):
        d.edit({"amount": amount})
        assert pending_key(d) == f"{thread_id}/0/2"
    d.decide()
    assert d.drain() == "done"
    assert d.values()["log"] == ["before", "approve 4"]
    assert outside.calls == {"first": 1, "second": 1}
    assert pending_key(d) == ""
    assert [kind for _, kind in d.checkpoints()] == ["input", "step", "edit", "edit", "edit", "step"]
    assert [event.payload for event in d.reader.events("t", kind="node.emitted")] == ["asking"]


@pytest.mark.parametrize("kind", ["signal", "timer"])
def test_an_edit_while_something_else_is_waited_for(timed, clock, kind):
    graph = Graph("waits", state=State)

    @graph.node
    def wait(state, ctx):
        if kind == "signal":
            ctx.wait_signal("go")
        else:
            ctx.sleep(60.0)
        return {"log": [f"went on with {state['count']}"]}

    graph.edge(START, "wait")
    graph.edge("wait", END)
    d = timed(graph)
    d.start({"count": 1})
    assert d.drain() == "waiting"
    d.edit({"count": 2})
    if kind == "signal":
        d.signal("go")
    else:
        clock.now += 61.0
        d.sweep()
    assert d.drain() == "done"
    assert d.values()["log"] == ["went on with 2"]


def test_an_edit_while_a_child_is_joined(deploy):
    child, graph = asks(Outside(), name="child"), Graph("parent", state=State)

    @graph.node
    def lead(state, ctx):
        [ended] = ctx.join(ctx.spawn(child, {"amount": "7"}))
        return {"log": [f"{ended['log'][-1]}, now {state['count']}"]}

    graph.edge(START, "lead")
    graph.edge("lead", END)
    d = deploy(graph, child)
    d.start({"count": 1})
    assert d.drain() == "waiting"
    d.edit({"count": 2})
    d.decide()
    assert d.drain() == "done"
    assert d.values()["log"] == ["approve 7, now 2"]
    assert len(d.reader.threads(graph="child")) == 1


def test_a_failed_step_is_mended_and_retried_under_its_key(deploy):
    outside = Outside()
    graph, pay = Graph("fails", state=State), paying(outside)

    @graph.node(retry=Retry(attempts=1))
    def check(state, ctx):
        ctx.effect(pay, "fee", key="fee")
        if state["count"] > 10:
            message = "too many"
            raise ValueError(message)
        return {"log": ["checked"]}

    graph.edge(START, "check")
    graph.edge("check", END)
    d = deploy(graph)
    d.start({"count": 11})
    assert d.drain() == "failed"
    d.edit({"count": 3})
    assert d.thread.status == "failed"
    d.control("retry")
    assert d.drain() == "done"
    assert d.values() == {"count": 3, "log": ["checked"]}
    assert outside.calls == {"fee": 1}
    assert d.effects() == [("pay", "done", 1)]


def test_a_blocked_step_stays_blocked_and_goes_on_when_retried(deploy):
    graph = Graph("blocks", state=State)

    @graph.node
    def choose(state, ctx):
        return {}

    @graph.node
    def good(state, ctx):
        return {"log": ["good"]}

    graph.edge(START, "choose")
    graph.route("choose", lambda state: "good" if state["count"] else "nowhere", to=["good"])
    graph.edge("good", END)
    d = deploy(graph)
    d.start({"count": 0})
    assert d.drain() == "blocked"
    error = d.error
    d.edit({"count": 1})
    assert (d.thread.status, d.error) == ("blocked", error)
    d.control("retry")
    assert d.drain() == "done"
    assert d.values()["log"] == ["good"]


def test_a_paused_thread_is_edited_between_two_steps(deploy):
    outside = Outside()
    d = deploy(asks(outside))
    d.start({"amount": 1})
    d.work(d.queue.pop(0))
    d.control("pause")
    stale = list(d.queue)

    assert d.edit({"amount": 2}).nudges == []
    assert d.drain() == "ready"
    d.control("resume")
    assert d.queue == [stale[0]._replace(version=stale[0].version + 1)]
    assert d.drain() == "waiting"
    d.decide()
    assert d.drain() == "done"
    assert d.values()["log"] == ["before", "approve 2"]


def test_a_thread_in_nobodys_hands_is_nudged_again(deploy):
    d = deploy(asks(Outside()))
    d.start({"amount": 1})
    d.work(d.queue.pop(0))
    [stale] = d.queue
    accepted = d.edit({"amount": 2})
    assert accepted.nudges == [stale._replace(version=stale.version + 1)]
    assert d.work(stale) is False
    assert d.drain() == "waiting"


def test_a_retry_that_was_put_off_stays_so(timed, clock):
    graph = Graph("flaky", state=State)

    @graph.node(retry=Retry(attempts=2, delay=30.0, jitter=0.0))
    def flaky(state, ctx):
        if ctx.attempt == 1:
            raise ConnectionError
        return {"log": [f"attempt {ctx.attempt}"]}

    graph.edge(START, "flaky")
    graph.edge("flaky", END)
    d = timed(graph)
    d.start({})
    d.drain()
    d.edit({"count": 1})
    assert d.drain() == "ready"
    clock.now += 29.0
    assert d.sweep() == []
    clock.now += 2.0
    d.sweep()
    assert d.drain() == "done"
    assert d.values() == {"count": 1, "log": ["attempt 2"]}


def test_what_the_step_has_asked_is_not_asked_otherwise(deploy):
    """An answer goes to the question that was asked: an edit that changes that blocks the thread, and can be undone."""
    graph = Graph("bound", state=State)

    @graph.node
    def ask(state, ctx):
        decision = ctx.approve("Pay?", arguments={"amount": state["amount"]})
        return {"log": [f"{decision.verdict} {decision.arguments['amount']}"]}

    graph.edge(START, "ask")
    graph.edge("ask", END)
    d = deploy(graph)
    d.start({"amount": 100})
    d.drain()
    d.edit({"amount": 9000})
    d.decide()
    assert d.drain() == "blocked"
    assert d.error[0] == "diverged"
    d.edit({"amount": 100})
    d.control("retry")
    assert d.drain() == "done"
    assert d.values()["log"] == ["approve 100"]


# --- fanned out ---


def fans(outside, *, hook=None):
    """A graph that sends 0 … count-1 to `part`, of which the odd ones ask, and joins."""
    graph = Graph("fan", state=State, fan_out=True)
    pay = paying(outside)

    @graph.node
    def part(state, ctx):
        number = state["count"]
        ctx.effect(pay, f"part {number}", key="part")
        if hook:
            hook(number)
        if number % 2:
            ctx.emit(f"asking {number}")
            ctx.approve(f"part {number}?")
        return {"log": [f"part {number}"]}

    @graph.node
    def join(state, ctx):
        return {"log": [f"joined {state['amount']}"]}

    graph.route(START, lambda state: [Send("part", {"count": n}) for n in range(state["count"])], to=["part"])
    graph.edge("part", "join")
    graph.edge("join", END)
    return graph


def test_an_edit_while_some_node_runs_are_done(deploy):
    outside = Outside()
    d = deploy(fans(outside))
    thread_id = d.start({"count": 4, "amount": 1}).thread_id
    d.work(d.queue.pop(0))
    for _ in range(2):  # part 0 ends, part 1 asks; 2 and 3 have not begun
        d.work(d.queue.pop(0))
    stale = list(d.queue)
    d.queue.clear()

    accepted = d.edit({"amount": 2})

    assert [(nudge.seq, nudge.run) for nudge in accepted.nudges] == [(2, "part#2"), (2, "part#3")]
    assert accepted.nudges == [nudge._replace(seq=2) for nudge in stale]
    assert [d.work(nudge) for nudge in stale] == [False, False]
    assert [(run.run, run.seq, run.status) for run in d.reader.node_runs("t")] == [
        (f"part#{number}", 2, status) for number, status in enumerate(("done", "waiting", "ready", "ready"))
    ]
    assert d.drain() == "waiting"
    d.edit({"amount": 3})
    for approval in d.approvals():
        d.decide(approval=approval.id)
    assert d.drain() == "done"
    assert d.values() == {
        "count": 4,
        "amount": 3,
        "log": ["part 0", "part 1", "part 2", "part 3", "joined 3"],
    }
    assert [kind for _, kind in d.checkpoints()] == ["input", "edit", "edit", "step", "step"]
    assert outside.calls == {f"part {number}": 1 for number in range(4)}
    assert all(key.startswith(f"{thread_id}/0/1/part#") for key in outside.keys)
    assert sorted(event.payload for event in d.reader.events("t", kind="node.emitted")) == ["asking 1", "asking 3"]
    assert {wait.status for wait in d.reader.waits("t")} == {"closed"}


def test_an_edit_between_the_last_node_run_and_the_join(deploy):
    outside = Outside()
    d = deploy(fans(outside))
    d.start({"count": 2, "amount": 1})
    assert d.drain() == "waiting"
    d.decide()
    d.work(d.queue.pop(0))
    assert (d.thread.status, d.thread.row.pending, d.thread.row.fanned) == ("ready", 0, 2)
    d.edit({"amount": 2})
    assert d.drain() == "done"
    assert d.values()["log"] == ["part 0", "part 1", "joined 2"]
    assert outside.calls == {"part 0": 1, "part 1": 1}


def test_a_node_run_that_is_running_is_not_disturbed(deploy):
    """It keeps its lease and its work: the edit is refused, and is accepted when the pause has let it end."""
    problems = []

    def hook(number):
        if number == 0:
            d.control("pause")
            refused(d, StepRunning, "node run 'part#0' is running. Pause the thread", {"amount": 2})
            problems.append(number)

    outside = Outside()
    d = deploy(fans(outside, hook=hook))
    d.start({"count": 2, "amount": 1})
    d.work(d.queue.pop(0))
    d.work(d.queue.pop(0))
    assert problems == [0]
    d.drain()
    assert [run.status for run in d.reader.node_runs("t")] == ["done", "ready"]

    assert d.edit({"amount": 2}).nudges == []
    d.control("resume")
    d.drain()
    d.decide()
    assert d.drain() == "done"
    assert d.values()["log"] == ["part 0", "part 1", "joined 2"]
    assert outside.calls == {"part 0": 1, "part 1": 1}


# --- leases ---


def test_a_running_step_is_not_edited_under(deploy):
    graph = Graph("busy", state=State)

    @graph.node
    def work(state, ctx):
        refused(d, StepRunning, "its step is running. Pause the thread", {"count": 2})
        return {"log": [f"worked on {state['count']}"]}

    graph.edge(START, "work")
    graph.edge("work", END)
    d = deploy(graph)
    d.start({"count": 1})
    assert d.drain() == "done"
    assert d.values() == {"count": 1, "log": ["worked on 1"]}


@pytest.mark.parametrize("fanned", [False, True])
def test_a_lease_that_has_outlived_its_deadline_is_ended(deploy, fanned):
    outside = Outside()
    d = deploy(fans(outside) if fanned else asks(outside))
    d.start({"count": 2, "amount": 1})
    d.work(d.queue.pop(0))
    claim = claims.claim_node if fanned else claims.claim_thread
    nudge = d.queue.pop(0)
    place = (nudge.thread_id, nudge.seq, nudge.run, nudge.version) if fanned else (nudge.thread_id, nudge.version)
    held = claim(d.store, *place, owner=d.worker.owner, carried=d.worker.carried)
    refused(d, StepRunning, "is running", {"amount": 2})
    table = "node_run" if fanned else "thread"
    d.execute(f"UPDATE keepstep_{table} SET lease_deadline = 1 WHERE lease_nonce IS NOT NULL")

    d.edit({"amount": 2})

    with pytest.raises(leases.StaleLease):
        leases.begin_attempt(d.store, held.fence, failures=0)
    row = d.reader.node_runs("t")[0] if fanned else d.thread.row
    assert (row.lease_worker, row.deaths, row.last_death) == (None, 1, "it overstayed its deadline")
    d.drain()
    d.decide()
    assert d.drain() == "done"
    assert d.values()["log"][-1] == ("joined 2" if fanned else "approve 2")


@pytest.mark.parametrize("fanned", [False, True])
def test_an_edit_that_races_a_claim(deploy, fanned):
    """Whoever is first wins, whole: the step runs from the state before the edit or from the one after it."""
    outside = Outside()
    d = deploy(fans(outside) if fanned else asks(outside))
    worker, editor = d.worker_of(pid=2), d.worker_of(pid=3)
    seen = Counter()
    for round_number in range(8):
        name = f"race {round_number}"
        d.name = name
        d.start({"count": 2, "amount": 1})
        d.work(d.queue.pop(0))
        nudges, outcome, barrier = list(d.queue), [], threading.Barrier(2)
        d.queue.clear()

        def edit():
            barrier.wait(10)  # noqa: B023
            try:
                d.edit({"amount": 2}, worker=editor)
                outcome.append("edited")  # noqa: B023
            except (StepRunning, StaleEdit) as error:
                outcome.append(error.code)  # noqa: B023

        racer = threading.Thread(target=edit)
        racer.start()
        barrier.wait(10)
        for nudge in nudges:
            d.work(nudge, worker)
        racer.join()
        d.drain(worker)
        for approval in d.approvals():
            d.decide(approval=approval.id)
        assert d.drain(worker) == "done"
        seen[outcome[0]] += 1
        assert outcome[0] in ("edited", "step_running")
        edits = [kind for _, kind in d.checkpoints()].count("edit")
        assert edits == (outcome[0] == "edited")
        assert d.reader.state(name)["amount"] == {"$": "decimal", "v": str(1 + edits)}
    calls = {"part 0": 8, "part 1": 8} if fanned else {"first": 8, "second": 8}
    assert outside.calls == calls


# --- ended ---


@pytest.mark.parametrize("status", ["done", "cancelled"])
def test_a_later_run_starts_from_the_edit_of_a_thread_that_has_ended(deploy, status):
    outside = Outside()
    d = deploy(asks(outside))
    d.start({"amount": 1})
    d.drain()
    if status == "done":
        d.decide()
        d.drain()
    else:
        d.control("cancel")
    assert d.thread.status == status
    d.edit({"log": ["kept"]})
    assert (d.thread.status, d.queue) == (status, [])

    d.start({"amount": 5})
    assert d.drain() == "waiting"
    d.decide()
    assert d.drain() == "done"
    assert d.values()["log"] == ["kept", "before", "approve 5"]
    kinds = ["input", "step", "step"] if status == "done" else ["input", "step"]
    assert [kind for _, kind in d.checkpoints()] == [*kinds, "edit", "input", "step", "step"]
    assert len(set(outside.keys)) == len(outside.keys)


def test_a_thread_without_a_state_is_not_edited(deploy):
    d = deploy(asks(Outside()))
    d.start({"amount": 1})
    refused(d, WrongStatus, "has no state yet", {"amount": 2})


# --- what does not fit ---


@pytest.mark.parametrize(
    ("values", "error", "text"),
    [
        ({"amount": "much"}, StateError, "$.amount: "),
        ({"count": 1.5}, StateError, "$.count: "),
        ({"count": 2, "log": ["a", 1]}, StateError, "$.log.1: "),
        ({"log": "not a list"}, StateError, "$.log: "),
        ({"amuont": 1}, StateError, "$.amuont: unknown key (known: amount, count, log); did you mean 'amount'?"),
        ({"log": ["x" * 300]}, TooLarge, "$.log"),
    ],
)
def test_an_edit_that_does_not_fit_changes_nothing(deploy, values, error, text):
    d = deploy(asks(Outside()), value_bytes_max=200)
    d.start({"amount": 1})
    d.drain()
    refused(d, error, text, values)


def test_an_edit_of_what_has_moved_on(deploy):
    d = deploy(asks(Outside()))
    d.start({"amount": 1})
    d.drain()
    head = d.thread
    d.edit({"amount": 2}, expect=head.checkpoint)
    text = f"is at checkpoint {d.thread.checkpoint} (seq 2) and no longer at "
    refused(d, StaleEdit, f"{text}{head.checkpoint}: ", {"amount": 3}, expect=head.checkpoint)
    refused(d, StaleEdit, f"{text}1: ", {"amount": 3}, expect=1)
    d.edit({"amount": 3}, expect=2)
    assert d.values()["amount"] == 3


def test_an_edit_twice_under_one_id_is_one(deploy):
    d = deploy(asks(Outside()))
    d.start({"amount": 1})
    d.drain()
    head = d.thread.checkpoint
    d.edit({"amount": 2}, id="e1", expect=head)
    before = d.dump()
    assert d.edit({"amount": 2}, id="e1", expect=head).duplicate is True
    assert d.dump() == before
    refused(d, Conflict, "'e1' was used before", {"amount": 3}, id="e1", expect=head)


def test_a_state_that_cannot_be_trusted_is_not_edited(deploy):
    d = deploy(asks(Outside()))
    d.start({"amount": 1})
    d.drain()
    d.execute("UPDATE keepstep_checkpoint SET digest = :x WHERE seq = 1", x=b"x")
    refused(d, WrongStatus, "does not match its digest", {"amount": 2})


def test_a_worker_without_the_graph_leaves_the_edit_to_others(deploy):
    d = deploy(asks(Outside()), asks(Outside(), name="other"))
    d.start({"amount": 1})
    d.drain()
    stranger = d.worker_of(pid=9)
    stranger.graphs = {key: graph for key, graph in stranger.graphs.items() if key[0] == "other"}
    before = d.dump()
    with pytest.raises(NotCarried, match="the worker that took the edit does not carry graph 'asks' version") as one:
        d.edit({"amount": 2}, worker=stranger)
    assert one.value.elsewhere is True
    workers.leave(d.store, d.worker.owner.worker)
    workers.leave(d.store, stranger.owner.worker)
    with pytest.raises(NotCarried, match="no live worker carries graph 'asks' version '1'") as two:
        d.edit({"amount": 2}, worker=stranger)
    assert two.value.elsewhere is False
    assert d.dump() == before


@pytest.mark.parametrize("kind", ["approval", "sleep", "signal"])
def test_what_a_cancel_closed_is_asked_again_after_an_edit(deploy, kind):
    graph = Graph("asks", state=State)

    @graph.node
    def ask(state, ctx):
        if kind == "approval":
            return {"log": [f"{ctx.approve('Pay?').verdict} {state['amount']}"]}
        if kind == "sleep":
            ctx.sleep(86400)
            return {"log": ["slept"]}
        return {"log": [ctx.wait_signal("go").payload]}

    graph.edge(START, "ask")
    graph.edge("ask", END)
    d = deploy(graph)
    d.start({"amount": "1"})
    assert d.drain() == "waiting"
    d.control("cancel")
    d.edit({"amount": "2"})
    d.control("retry")
    assert d.drain() == "waiting"
    assert [wait.status for wait in d.reader.waits("t")] == ["open"]
    if kind == "approval":
        d.decide()
        assert d.drain() == "done"
        assert d.values()["log"] == ["approve 2"]


def test_a_wait_that_was_closed_without_an_answer_is_never_taken_for_a_time_out(deploy):
    d = deploy(asks(Outside()))
    d.start({"amount": "1"})
    assert d.drain() == "waiting"
    d.control("cancel")
    d.execute("UPDATE keepstep_wait SET seq = 77")
    d.control("retry")
    assert d.drain() == "blocked"
    assert d.error[0] == "diverged"
    assert "closed without an answer" in d.error[1]
