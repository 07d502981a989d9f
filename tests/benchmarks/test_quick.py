"""The benchmark runs: on real servers, with real workers, for a moment. What it measures then means nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.__main__ import TARGETS, Target
from benchmarks.measure import quantile

ROOT = Path(__file__).parents[2]
FIGURES = {
    "sync_vs_stock_celery",
    "sync_vs_lean_celery_one_tx",
    "hop_ms_p50",
    "hop_ms_p99",
    "statements_per_step",
    "commits_per_step",
    "messages_per_step",
    "bytes_per_step",
    "admission_100000_due_vs_100",
    "decision_to_running_ms_p50",
}


@pytest.mark.slow
def test_a_quick_run_prints_every_figure_and_ends_with_one_json_object():
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "--quick"],
        cwd=ROOT,
        env=dict(os.environ),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=110,
    )
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines if line.split()[1:2] == ["1"]] == ["stock", "lean", "keepstep"]
    figures = json.loads(lines[-1])
    assert figures.keys() >= FIGURES
    assert all(figures[name] > 0 for name in FIGURES)
    # These are counted, not timed: they are the same on every machine.
    assert round(figures["statements_per_step"]) == 2
    assert round(figures["messages_per_step"]) == 1
    assert figures["waiting_threads"] == 300
    assert figures["waiting_messages"] == 0
    assert figures["waiting_connections_delta"] == 0
    assert figures["decisions_applied_once"] == figures["decisions_at_once"] == 100
    assert figures["targets"].keys() == {target.figure for target in TARGETS}
    for target in TARGETS:
        said = figures["targets"][target.figure]
        assert said == {
            "target": target.shown,
            "measured": figures[target.figure],
            "met": target.met(figures[target.figure]),
        }


def test_a_target_is_met_at_its_limit():
    assert Target("speed", at_least=1.25).met(1.25)
    assert not Target("speed", at_least=1.25).met(1.249)
    assert Target("cost", at_most=2.0).met(2.0)
    assert not Target("cost", at_most=2.0).met(2.01)


def test_a_quantile_is_a_measured_value():
    assert [quantile([1.0, 2.0, 3.0, 4.0], part) for part in (0.0, 0.5, 0.99)] == [1.0, 3.0, 4.0]
