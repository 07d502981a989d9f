"""Reminders: told as long as nobody has answered, each once, on the database's time."""

from __future__ import annotations

from datetime import timedelta
from typing import TypedDict

import pytest

from keepstep import END, START, Graph
from keepstep.errors import InvalidInput
from keepstep.store import reminders


class State(TypedDict, total=False):
    verdict: str


def asking(**options):
    graph = Graph("asking", state=State)

    @graph.node
    def ask(_state, ctx):
        return {"verdict": ctx.approve("Pay?", arguments={"amount": "1"}, to=["finance"], **options).verdict}

    graph.edge(START, "ask")
    graph.edge("ask", END)
    return graph


def told(d):
    return [each.payload["reminders"] for each in d.reader.events(d.name, kind="approval.reminder")]


def test_people_are_reminded_until_somebody_has_answered(timed, clock):
    d = timed(asking(remind=timedelta(hours=1)))
    d.start()
    assert d.drain() == "waiting"
    for seconds, reminded in [(3599, []), (1, [1]), (0, [1]), (3599, [1]), (1, [1, 2])]:
        clock.now += seconds
        d.sweep()
        assert told(d) == reminded
    clock.now += 10 * 3600  # nothing ran all the while: what was missed is told once
    d.sweep()
    d.sweep()
    assert told(d) == [1, 2, 3]
    [approval] = d.approvals()
    assert (approval.remind_seconds, approval.reminders) == (3600.0, 3)
    d.decide()
    clock.now += 3600
    d.sweep()
    assert told(d) == [1, 2, 3]
    assert d.drain() == "done"


def test_a_reminder_has_the_question_in_it(timed, clock):
    d = timed(asking(remind=60))
    d.start()
    d.drain()
    clock.now += 60
    d.sweep()
    opened, reminder = d.reader.events(d.name, kind="approval.*")
    assert (reminder.approval, reminder.node) == (opened.approval, "ask")
    assert reminder.payload == {**opened.payload, "reminders": 1}
    assert reminder.payload["arguments"] == {"amount": "1"}


def test_a_reminder_names_those_who_are_asked_by_now(timed, clock):
    d = timed(asking(remind=90, expires=60, on_expiry="escalate", escalate_to=["boss"]))
    d.start()
    d.drain()
    clock.now += 60
    d.sweep()
    d.decide("delegate", by="boss", to=["deputy"])
    clock.now += 30
    d.sweep()
    [reminder] = d.reader.events(d.name, kind="approval.reminder")
    assert (reminder.payload["to"], reminder.payload["expires_at"]) == (["deputy"], clock.now + 30)


def test_a_question_that_is_asked_again_is_reminded_of_anew(timed, clock):
    d = timed(asking(remind=60))
    d.start()
    d.drain()
    clock.now += 59
    d.control("cancel")
    clock.now += 600
    d.sweep()
    d.control("retry")
    d.drain()
    d.sweep()
    assert told(d) == []
    clock.now += 60
    d.sweep()
    assert told(d) == [1]


def test_one_that_wants_none_has_none_and_answers_are_not_bound_to_it(timed, clock):
    d = timed(asking())
    d.start()
    d.drain()
    clock.now += 1e6
    d.sweep()
    assert told(d) == []
    assert [(each.remind_seconds, each.reminders) for each in d.approvals()] == [(None, 0)]


def test_two_that_sweep_at_once_remind_once(served):
    d = served(asking(remind=3600))
    d.start()
    d.drain()
    d.execute("UPDATE keepstep_approval SET remind_at = 0")
    other = d.open()
    with other.transaction() as busy:
        busy.cursor.execute("SELECT 1 FROM keepstep_thread FOR UPDATE")
        assert reminders.remind_due(d.store, limit=10) == 0
    assert reminders.remind_due(d.store, limit=10) == 1
    assert reminders.remind_due(other, limit=10) == 0
    assert told(d) == [1]


@pytest.mark.parametrize("remind", [0, -1, "often", float("nan"), timedelta(days=100_000)])
def test_a_time_that_is_none_is_refused(remind):
    with pytest.raises(InvalidInput, match="remind"):
        asking(remind=remind).run({})
