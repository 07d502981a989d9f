"""Deciding several questions with one command: each is a decision of its own."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.worker.deployment import eventually


@pytest.fixture
def asked(deployment):
    """A deployment with three threads that ask, and its command line."""
    deployment.worker()
    deployment.start("asking", "a", "b", "c")
    deployment.ended("a", "b", "c", status="waiting")

    def keepstep(*arguments, code=0):
        ran = subprocess.run(
            [sys.executable, "-m", "keepstep", *arguments, "--by", "anna", "--json"],
            env=deployment.environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert ran.returncode == code, ran.stderr
        return json.loads(ran.stdout)

    return deployment, keepstep


def test_all_that_is_open_is_approved(asked):
    deployment, keepstep = asked
    told = keepstep("approve", "--all", "--graph", "asking")
    assert [each["accepted"] for each in told["decisions"]] == [True, True, True]
    deployment.ended("a", "b", "c")
    assert keepstep("approve", "--all") == {"decisions": [], "by": "anna"}


def test_one_that_is_refused_stops_none_of_the_others(asked):
    deployment, keepstep = asked
    told = keepstep("reject", "a", "0000", "b", "--comment", "no", code=1)
    assert [each["accepted"] for each in told["decisions"]] == [True, False, True]
    assert "there is no approval '0000'" in told["decisions"][1]["error"]
    deployment.ended("a", "b")
    assert deployment.statuses()["c"] == "waiting"


def test_a_thread_that_asks_one_thing_is_named_instead(asked):
    deployment, keepstep = asked
    keepstep("approve", "c")
    deployment.ended("c")
    (decided,) = eventually(lambda: deployment.query('SELECT "by", verdict FROM keepstep_decision'))
    assert decided == ("anna", "approve")
