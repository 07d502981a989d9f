"""What crashes cost at the model is measured: on real servers, with real workers, for a moment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.modelstub import StubCall
from benchmarks.wasted import ON_ITS_WAY_SECONDS, Measurement

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.kill
def test_a_short_measurement_counts_what_it_did():
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.wasted", "--runs", "4"],
        cwd=ROOT,
        env=dict(os.environ),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=110,
    )
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures["runs"] == 4
    assert 80 <= figures["nodes"] <= 120
    assert figures["kills"] >= 1
    assert figures["model_calls_recorded"] == figures["nodes"]
    assert figures["model_calls_paid"] == figures["nodes"] + figures["model_calls_wasted"]
    fates = ("wasted_in_flight", "wasted_on_their_way", "wasted_answered")
    assert sum(figures[name] for name in fates) == figures["model_calls_wasted"]
    assert (figures["wasted_answered"], figures["effects_doubled"], figures["effects_missing"]) == (0, 0, 0)


@pytest.mark.parametrize(
    ("answered_at", "killed_at", "returned_at", "fate"),
    [
        (None, 5.0, None, "in flight"),
        (5.5, 5.0, None, "in flight"),
        (4.5, 5.0, None, "on its way"),
        (4.5, 5.0, 5.0 - ON_ITS_WAY_SECONDS / 2, "on its way"),
        (4.5, 5.0, 5.0 - ON_ITS_WAY_SECONDS * 2, "answered"),
        (5.0, None, 5.0, "answered"),
    ],
)
def test_a_wasted_call_is_judged_by_its_callers_death(answered_at, killed_at, returned_at, fate):
    measurement = object.__new__(Measurement)
    measurement._fleet = SimpleNamespace(killed_at={} if killed_at is None else {7: killed_at})
    call = StubCall("model", "t", 1, "k", 7, 4.0, answered_at)
    assert measurement._fate(call, returned_at) == fate
