"""Schedules under real workers: a tick that is due starts one run, however many of them sweep."""

from __future__ import annotations

import json

from keepstep.cli.program import run
from tests.worker.deployment import eventually


def make_due(deployment, name, *, at=0):
    """Let the tick that comes next have come long ago, so that nobody has to wait for it."""
    moved = "UPDATE keepstep_schedule SET next_at = :at, due_at = :at WHERE name = :name"
    assert deployment.execute(moved, at=at, name=name) == 1


def fired(deployment):
    """Return how many schedules have moved on."""
    return deployment.query("SELECT count(*) FROM keepstep_schedule WHERE next_at > 0")[0][0]


def test_two_workers_start_one_run_for_each_tick(deployment):
    workers = [deployment.launch(), deployment.launch()]
    for worker in workers:
        worker.ready()
    names = [f"s{number}" for number in range(20)]
    for name in names:
        deployment.client.schedule(name, "quick", "0 0 1 1 *", {}, thread=name)

    # The tick of one moment, that of the last new year, comes to them three times.
    for _ in range(3):
        for name in names:
            make_due(deployment, name)
        eventually(lambda: fired(deployment) == len(names), what="all fired")
    deployment.ended(*names)

    rows = deployment.query("SELECT t.name, t.runs FROM keepstep_thread t ORDER BY t.name")
    assert rows == [(name, 1) for name in sorted(names)]
    assert deployment.query("SELECT count(*), count(DISTINCT request_id) FROM keepstep_run") == [(20, 20)]
    assert [event for worker in workers for event in worker.events("service_failed")] == []


def test_a_schedule_is_run_from_the_command_line(served, capsys):
    deployment = served
    database, broker = ["--database", deployment.settings.database], ["--broker", deployment.settings.broker]

    def typed(*arguments, code=0):
        assert run(["schedule", *arguments, *(database if arguments[0] in {"list", "show"} else broker)]) == code
        out, err = capsys.readouterr()
        return err if code else out

    def document(*arguments):
        return json.loads(typed(*arguments, "--json"))

    deployment.worker()
    added = document("add", "nightly", "quick", "0 0 1 1 *", "-z", "Europe/Berlin", "--by", "anna")
    assert (added["accepted"], added["duplicate"], added["thread_id"]) == (True, False, None)
    assert document("add", "nightly", "quick", "0 0 1 1 *", "-z", "Europe/Berlin", "--by", "bert")["duplicate"] is True
    assert "$.cron: '0 0 30 2 *' never comes" in typed("add", "nightly", "quick", "0 0 30 2 *", code=2)
    assert "no worker carries a graph named 'quack'" in typed("add", "other", "quack", "@daily", code=2)

    make_due(deployment, "nightly")
    eventually(deployment.statuses, what="the run")
    [(thread, status)] = eventually(
        lambda: [each for each in deployment.statuses().items() if each[1] == "done"], what="its end"
    )

    [shown] = document("list")["schedules"]
    assert (shown["outcome"], shown["run_thread"], shown["created_by"]) == (status, thread, "anna")
    assert thread == f"nightly-{shown['run_tick'].removesuffix(':00+00:00')}Z"
    assert f"done ({thread})" in typed("list")
    assert "01-01 00:00" in typed("show", "nightly")
    assert document("pause", "nightly", "--reason", "holidays")["accepted"] is True
    assert [each["paused"] for each in document("list")["schedules"]] == [True]
    assert "paused" in typed("list")
    assert document("resume", "nightly")["accepted"] is True
    assert typed("remove", "nightly") == "schedule nightly removed\n"
    assert typed("list").startswith("no schedules; make one: keepstep")
    assert "there is no schedule 'nightly'" in typed("remove", "nightly", code=2)
    assert "there is no schedule 'nightly'" in typed("show", "nightly", code=2)
    actions = deployment.query("SELECT action FROM keepstep_audit WHERE thread_id IS NULL ORDER BY id")
    assert [action for (action,) in actions] == ["schedule", "schedule", "skip", "pause", "resume", "unschedule"]
