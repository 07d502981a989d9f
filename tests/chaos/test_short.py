"""A short chaos on each broker: nothing is lost, nothing happens twice, and everything ends."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]


@pytest.mark.kill
@pytest.mark.slow
@pytest.mark.timeout(420)
def test_nothing_is_lost_and_nothing_happens_twice():
    size = ["--broker", "both", "--runs", "32", "--faults", "30", "--seconds", "60", "--seed", "7"]
    ran = subprocess.run(
        [sys.executable, "-m", "tests.chaos", *size], cwd=_ROOT, capture_output=True, text=True, check=False
    )

    assert ran.returncode == 0, ran.stdout[-10_000:] + ran.stderr[-5_000:]
    told = json.loads(ran.stdout.splitlines()[-1])
    assert {name: told[name] for name in ("lost", "duplicated", "divergent", "stuck")} == {
        "lost": 0,
        "duplicated": 0,
        "divergent": 0,
        "stuck": 0,
    }
    # That nothing is found must not be because nothing happened: on a slow machine the time ends the faults early.
    assert told["runs"] >= 12
    assert told["faults"] >= 10
    assert told["recovery_ms_max"] > 0
    if told["skipped"]:
        pytest.skip("; ".join(told["skipped"]))  # the half of it
