"""A thread is cancelled in the middle of a node: what runs may end, and can do and write nothing more."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import Counter

import pytest

from tests.worker.deployment import eventually


def shown(deployment, thread):
    """Return what `keepstep show` tells of a thread."""
    command = [sys.executable, "-m", "keepstep", "show", thread, "--json"]
    ran = subprocess.run(command, env=deployment.environment, capture_output=True, text=True, check=True)
    return json.loads(ran.stdout)


def cancelled(deployment, thread):
    """Start a thread, cancel it while its report runs, and let that come to its end; return the workers."""
    # Room for the held one and one other: what is last in line has not begun when the cancel comes.
    worker = deployment.worker(concurrency=1)
    deployment.start("busy", thread)
    # Its node runs are begun in their order by one child, which the report then holds.
    deployment.started(f"{thread} report")
    begun = time.monotonic()
    deployment.client.cancel(thread, graph="busy", by="anna", reason="enough")
    deployment.ended(thread, status="cancelled", seconds=deployment.settings.renew_seconds + 2.0)
    assert time.monotonic() - begun < deployment.settings.renew_seconds + 2.0
    deployment.touch(f"release-{thread}")
    eventually(lambda: worker.events("lease_lost"), what="the report's end")
    # Its slot is free again.
    deployment.start("quick", f"after-{thread}")
    deployment.ended(f"after-{thread}")
    return worker


def counts(deployment, thread):
    return Counter({line.split()[1]: n for line, n in deployment.counts("starts").items() if line.split()[0] == thread})


def runs(deployment, thread):
    """Return (status, starts, whether there is a pending write) of each node run of the step under way."""
    rows = deployment.query(
        "SELECT n.run, n.status, n.starts, n.write IS NOT NULL FROM keepstep_node_run n "
        "JOIN keepstep_thread t ON t.id = n.thread_id AND n.seq = t.seq + 1 WHERE t.name = :name",
        name=thread,
    )
    return {run: tuple(rest) for run, *rest in rows}


@pytest.mark.slow
def test_a_cancel_refuses_what_runs_and_begins_nothing_more(served):
    cancelled(served, "c")

    assert served.notes("charged") == []
    assert counts(served, "c") == {"fetch": 1, "report": 1}
    assert runs(served, "c") == {
        "fetch": ("done", 1, 1),
        "report": ("cancelled", 1, 0),
        "rounds/turn": ("cancelled", 0, 0),
    }
    document = shown(served, "c")
    assert document["thread"]["status"] == "cancelled"
    assert {(each["run"], each["status"], each["starts"]) for each in document["node_runs"]} == {
        ("fetch", "done", 1),
        ("report", "cancelled", 1),
        ("rounds/turn", "cancelled", 0),
    }
    assert document["effects"] == []
    assert [(each["status"], each["error"]) for each in document["runs"]] == [("cancelled", None)]

    # New input: another run, from the state that the first one left.
    served.start("busy", "c")
    served.ended("c")
    assert counts(served, "c") == {"fetch": 2, "report": 2, "turn": 5}
    assert served.counts("charged") == {"c": 1}
    assert served.query(
        "SELECT status FROM keepstep_run WHERE thread_id = :id ORDER BY number", id=thread_id(served, "c")
    ) == [
        ("cancelled",),
        ("done",),
    ]
    assert effects(served) == [("charge", "done", 1)]


@pytest.mark.slow
def test_what_was_cancelled_is_taken_up_again_where_it_was(served):
    cancelled(served, "r")

    served.client.retry("r", graph="busy")
    served.ended("r")

    # What had ended is not run again; the others are.
    assert counts(served, "r") == {"fetch": 1, "report": 2, "turn": 5}
    assert served.counts("charged") == {"r": 1}
    assert effects(served) == [("charge", "done", 1)]
    state = subprocess.run(
        [sys.executable, "-m", "keepstep", "state", "r", "--json"],
        env=served.environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert Counter(json.loads(state.stdout)["state"]["done"]) == {"fetch": 1, "report": 1, "turn": 5}


def thread_id(deployment, name):
    [(found,)] = deployment.query("SELECT id FROM keepstep_thread WHERE name = :name", name=name)
    return found


def effects(deployment):
    """Return every effect of the journal: none is left without what came of it."""
    return deployment.query("SELECT name, state, calls FROM keepstep_effect")
