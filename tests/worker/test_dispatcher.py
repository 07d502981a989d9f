"""The process that fans a step out dies, before, in and after the fan-out and while it runs some node runs itself."""

from __future__ import annotations

import os
import signal
from collections import Counter

import pytest

from tests.worker.deployment import eventually

pytestmark = pytest.mark.kill

PARTS = 3


def node_runs(deployment):
    return {
        run: (status, starts, deaths)
        for run, status, starts, deaths in deployment.query("SELECT run, status, starts, deaths FROM keepstep_node_run")
    }


def joined_once(deployment, **again):
    """Check that every part and the join ran once but for those named, and how many checkpoints there are."""
    deployment.ended("f")
    expected = {f"f part {number}": 1 + again.get(f"part{number}", 0) for number in range(PARTS)} | {"f join": 1}
    assert deployment.counts("starts") == Counter(expected)
    assert deployment.query("SELECT kind, seq FROM keepstep_checkpoint ORDER BY seq") == [
        ("input", 0),
        ("step", 1),
        ("step", 2),
    ]
    assert {status for status, *_ in node_runs(deployment).values()} == {"done"}
    assert len(node_runs(deployment)) == PARTS


POINTS = ["before_fan_out@", "after_fan_out@", "before_pending_write@part#1", "after_pending_write@part#1"]


@pytest.mark.parametrize("point", POINTS)
def test_the_dispatcher_dies_at_a_point(served, point, tmp_path):
    mark = tmp_path / "crashed"
    served.worker(concurrency=1, KEEPSTEP_CRASH_AT=point, KEEPSTEP_CRASH_MARK=str(mark))
    served.start("inline", "f", count=PARTS)
    eventually(mark.exists, what="the death")
    served.ended("f")

    # Those that ran beside the one that died may have ended before it, or run again.
    again = {f"part{number}": served.counts("starts")[f"f part {number}"] - 1 for number in range(PARTS)}
    assert set(again.values()) <= {0, 1}
    if "fan_out" in point:
        assert not any(again.values())
    else:
        assert again["part1"] == (point.startswith("before"))
    joined_once(served, **again)
    # Each start is counted before the body is entered, and each that did not come to its end is a death.
    for number in range(PARTS):
        status, starts, deaths = node_runs(served)[f"part#{number}"]
        assert (status, starts - deaths) == ("done", 1)
        assert again[f"part{number}"] <= deaths <= 1


def test_the_dispatcher_dies_while_it_runs_some_of_the_node_runs(served):
    served.worker(concurrency=1)
    served.touch("hold-part")
    served.start("inline", "f", count=PARTS)
    [start] = served.started("f part 1")
    eventually(
        lambda: [status for status, *_ in node_runs(served).values()].count("done") == 2, what="the end of the others"
    )
    assert node_runs(served)["part#1"] == ("ready", 1, 0)

    os.kill(int(start[-2]), signal.SIGKILL)
    served.started("f part 1", 2)
    served.touch("release")
    joined_once(served, part1=1)
    # Those that had ended are not run again, and the join is told once.
    assert node_runs(served) == {"part#0": ("done", 1, 0), "part#1": ("done", 2, 1), "part#2": ("done", 1, 0)}
