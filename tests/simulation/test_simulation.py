"""The simulation in the test suite: many seeds hold, a seed replays exactly, and a broken line is found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from keepstep.store import outcomes, threads
from tests.simulation import runner
from tests.simulation.scenario import simulate

_ROOT = Path(__file__).parents[2]
_SEEDS = 2000


def _simulation(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.simulation", *arguments]
    return subprocess.run(
        command, cwd=_ROOT, env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_invariant_holds_under_every_seed():
    ran = _simulation("--seeds", str(_SEEDS))
    assert ran.returncode == 0, ran.stdout[-20_000:] + ran.stderr[-5_000:]
    told = json.loads(ran.stdout.splitlines()[-1])
    assert (told["seeds"], told["failed"]) == (_SEEDS, 0)
    # That nothing is found must not be because nothing happened.
    least = {"events": 100_000, "crashes": 2_000, "zombies": 2_000, "fenced_off": 500, "database_failures": 500}
    assert {name: told[name] for name in least if told[name] < least[name]} == {}


def test_a_seed_makes_one_schedule():
    shown = [_simulation("--seed", "62", PYTHONHASHSEED=seed).stdout for seed in ("1", "2")]
    assert "again: make simulate SEED=62" in shown[0]
    assert shown[0] == shown[1]


def test_seeds_that_found_something_come_first():
    found = runner.known()
    assert found
    assert runner.chosen(len(found) + 2, first=1_000_000) == [*found, 1_000_000, 1_000_001]
    assert sorted(set(runner.chosen(100))) == sorted(runner.chosen(100))


def test_a_command_that_is_forgotten_is_found(monkeypatch):
    monkeypatch.setattr(threads, "audited", lambda *_: None)
    report = next(found for found in map(simulate, range(50)) if found.violation)
    told = runner.told(report)
    assert f"FAILED: {report.violation}" in told
    assert told.endswith(f"again: make simulate SEED={report.seed}")
    assert json.loads(runner.summary(report.counts, [report]))["failed_seeds"] == [report.seed]


def test_a_lock_that_does_not_look_is_found(monkeypatch):
    monkeypatch.setattr(outcomes, "hold", lambda *_: None)
    violations = {report.violation.split(":")[0] for report in map(simulate, range(200)) if report.violation}
    assert "a stale owner wrote" in violations
