"""Ways out of stopped threads: one table, in line with docs/operating.md; and what else is said of threads in words."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from keepstep.cli.output import clock
from keepstep.cli.records import said
from keepstep.cli.session import Session
from keepstep.cli.show import asked_for, waited_for
from keepstep.cli.waysout import way_out

OPERATING = Path(__file__).parents[2] / "docs" / "operating.md"


@pytest.mark.parametrize(
    ("status", "code", "way"),
    [
        (
            "blocked",
            "effect_unknown",
            (
                "find out whether it happened, and say so: keepstep effects lists it with the commands; a result that "
                "did not fit is given again: keepstep resolve KEY (keepstep effects T shows the key)"
            ),
        ),
        (
            "blocked",
            "diverged",
            (
                "see what the earlier attempt did (keepstep show T). If an edit of the state led elsewhere: edit it "
                "back, keepstep retry T. Else: keepstep cancel T"
            ),
        ),
        ("blocked", "history_corrupt", "restore the stored checkpoint: nothing runs on it"),
        ("blocked", "worker_lost", "mend what takes its worker down, then keepstep retry T"),
        (
            "blocked",
            "undo_failed",
            (
                "mend what the undo meets, then keepstep retry T; or undo it by hand, and say so: keepstep resolve "
                "KEY/undo --happened null (keepstep effects T shows the key)"
            ),
        ),
        ("blocked", "undo_unavailable", "deploy code that declares the undo, then keepstep retry T"),
        ("blocked", "unheard_of", "look at it (keepstep show T), then keepstep retry T or keepstep cancel T"),
        ("failed", "step_limit", "keepstep retry T --step-limit N"),
        (
            "failed",
            "child_failed",
            "what the child came to stands (keepstep show T): once that is mended, give the thread another run",
        ),
        ("failed", "node_failed", "once its cause is mended: keepstep retry T"),
        ("failed", "graph", "once its cause is mended: keepstep retry T"),
        ("cancelled", "cancelled", None),
        ("done", None, None),
    ],
)
def test_each_code_has_its_way_out(status, code, way):
    error = None if code is None else {"code": code, "message": "m"}
    assert way_out(Session(), "T", status, error) == way


def test_every_code_of_a_blocked_thread_in_the_operators_manual_has_a_way_out_of_its_own():
    table = OPERATING.read_text().partition("| code of a blocked thread |")[2].partition("\n\n")[0]
    codes = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
    assert "effect_unknown" in codes
    other = way_out(Session(), "T", "blocked", {"code": "unheard_of"})
    for code in codes:
        assert way_out(Session(), "T", "blocked", {"code": code}) != other, code


def test_a_run_that_was_undone_is_not_retried():
    error = {"code": "node_failed", "message": "m", "undone": 2}
    way = "what its run did was undone (keepstep effects T): once its cause is mended, give the thread another run"
    assert way_out(Session(), "T", "failed", error) == way


def test_hints_keep_the_options_that_were_given():
    found = way_out(Session(tenant="acme"), "T", "failed", {"code": "node_failed"})
    assert found == "once its cause is mended: keepstep --tenant acme retry T"


@pytest.mark.parametrize(
    ("error", "text"),
    [
        ({"code": "cancelled", "message": "cancelled", "by": "anna"}, "cancelled by anna"),
        ({"code": "cancelled", "message": "enough", "by": "anna"}, "cancelled by anna: enough"),
        ({"code": "cancelled", "message": "cancelled", "by": None}, "cancelled"),
        ({"code": "node_failed", "message": "closed"}, "node_failed: closed"),
    ],
)
def test_of_a_cancelled_run_it_is_said_who_wanted_it(error, text):
    assert said(error) == text


@pytest.mark.parametrize(
    ("action", "detail", "text"),
    [
        ("call", {"tool": "pay", "reason": "permitted by small", "edited": False}, "call pay (permitted by small)"),
        (
            "call",
            {"tool": "pay", "reason": "large asks for approval", "edited": True, "by": "anna"},
            "call pay (large asks for approval, approved by anna, edited)",
        ),
        ("call_denied", {"tool": "pay", "reason": "forbidden by never"}, "call_denied pay (forbidden by never)"),
        ("call_rejected", {"tool": "pay", "verdict": "reject", "by": "anna"}, "call_rejected pay (reject)"),
        ("call", {"tool": "pay"}, "call pay"),
        ("decide", {"verdict": "approve"}, "decide (approve)"),
        ("start", None, "start"),
    ],
)
def test_what_was_asked_for_names_the_tool_and_whose_approval_it_ran_on(action, detail, text):
    assert asked_for(SimpleNamespace(action=action, detail=None if detail is None else json.dumps(detail))) == text


def test_a_wait_told_once_names_a_time_that_stays_the_same():
    asleep = SimpleNamespace(kind="time", due_at=2_000_000_000.0)
    signal = SimpleNamespace(kind="signal", signal_name="paid", due_at=2_000_000_000.0)
    at = clock(2_000_000_000.0)
    assert re.fullmatch(r"2033-05-1[78] \d\d:\d\d:20", at)
    assert waited_for(asleep, None, absolute=True) == f"time: until {at}"
    assert waited_for(signal, None, absolute=True) == f"signal paid, {at} at the latest"
