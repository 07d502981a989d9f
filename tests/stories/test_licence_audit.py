"""The licence audit: the agent in process, and the show that `make run` runs."""

from __future__ import annotations

import hashlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from examples.licence_audit import distributions, report
from examples.licence_audit.agent import LEDGER, QUESTION, graph
from examples.licence_audit.licences import Category, Finding
from examples.licence_audit.report import Review

ROOT = Path(__file__).parents[2]


# --- the agent --------------------------------------------------------------------------------------------------------


def test_every_installed_package_is_audited_and_the_report_is_published_once(tmp_path):
    asked = []

    def decide(approval):
        asked.append(approval)
        kept = [name for name in approval.arguments["accept"] if name != "psycopg2-binary"]
        return {"verdict": "approve", "arguments": {"accept": kept}, "by": "dana", "comment": "Not that one."}

    state = graph.run({"folder": str(tmp_path)}, decisions=decide)

    installed = distributions.installed()
    assert [finding.package for finding in state["findings"]] == installed
    concerns = [finding.package for finding in state["findings"] if finding.concern]
    assert [(each.question, each.arguments, each.to) for each in asked] == [(QUESTION, {"accept": concerns}, ["legal"])]
    accepted = [name for name in concerns if name != "psycopg2-binary"]
    assert state["review"] == Review(concerns, accepted, approved=True, by="dana", comment="Not that one.")

    text = (tmp_path / "report.md").read_text()
    digest = hashlib.sha256(text.encode()).hexdigest()
    assert (state["publication"].path, state["publication"].sha256) == (str(tmp_path / "report.md"), digest)
    [line] = (tmp_path / LEDGER).read_text().splitlines()
    assert line.split()[1] == digest
    assert f"{len(installed)} distributions" in text
    assert "| hypothesis | accepted |" in text
    assert "| psycopg2-binary | **not accepted** |" in text


def test_a_rejected_audit_is_not_published(tmp_path):
    state = graph.run({"folder": str(tmp_path / "published")}, decisions={QUESTION: "reject"})

    assert not state["review"].approved
    assert "publication" not in state
    assert list(tmp_path.iterdir()) == []


def test_nobody_is_asked_when_there_is_nothing_to_ask(tmp_path, monkeypatch):
    monkeypatch.setattr(distributions, "installed", lambda: ["celery", "kombu"])

    state = graph.run({"folder": str(tmp_path)})

    assert state["review"] == Review(asked=[])
    assert "Nobody had to be asked." in (tmp_path / "report.md").read_text()


def test_an_environment_without_packages_is_reported_too(tmp_path, monkeypatch):
    monkeypatch.setattr(distributions, "installed", list)

    graph.run({"folder": str(tmp_path)})

    assert "0 distributions" in (tmp_path / "report.md").read_text()


def test_metadata_breaks_no_table():
    finding = Finding("p|q", "1\n2", Category.UNKNOWN, "<b>", ["License: <b>"])

    text = report.final(report.draft([finding], environment="here", at="now"), Review(["p|q"]))

    assert "| p\\|q | 1 2 | &lt;b> | unknown |  |" in text.splitlines()
    assert "| p\\|q | **not accepted** |" in text.splitlines()
    assert "### p\\|q 1 2" in text.splitlines()


# --- the show ---------------------------------------------------------------------------------------------------------


def show(*options):
    command = [sys.executable, "-m", "examples.licence_audit", *options]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KEEPSTEP_")}
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def workers_of(output):
    """Return the pids of the workers that a show has told of."""
    return [int(pid) for pid in re.findall(r"worker \d: pid (\d+)", output)]


@pytest.mark.kill
@pytest.mark.slow
def test_the_show_proves_what_it_claims_and_leaves_no_process_behind():
    running = show("--pace", "0.15")
    output, _ = running.communicate(timeout=100)

    assert running.returncode == 0, output
    assert "SIGKILL to worker 1 and its pool" in output
    assert "worker 2 has taken over what it held" in output
    assert "0 leases held, 0 messages in the broker" in output
    assert re.search(r"^ *publications in the ledger +1 +1 +yes *$", output, re.MULTILINE), output
    [published] = re.findall(r"^The report: (.*)$", output, re.MULTILINE)
    assert Path(published).read_text().startswith("# Licence audit\n")
    assert len(workers_of(output)) == 2
    assert not any(psutil.pid_exists(pid) for pid in workers_of(output))


@pytest.mark.kill
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_show_that_is_interrupted_stops_what_it_started(number):
    running = show("--pace", "1")
    output = ""
    for line in running.stdout:
        output += line
        if "run of licence-audit accepted" in line:
            break
    children = psutil.Process(running.pid).children(recursive=True)
    assert {child.pid for child in children} >= set(workers_of(output))

    running.send_signal(number)
    rest, _ = running.communicate(timeout=60)

    assert running.returncode == 130, output + rest
    deadline = time.monotonic() + 5
    while (left := [child for child in children if child.is_running()]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left == []
