"""A worker that cannot work as it is configured says so in one line and ends, instead of starting again for ever."""

from __future__ import annotations

import textwrap

import pytest

from keepstep.tasks.supervise import EXIT_REFUSED
from tests.worker.deployment import deployed


def refusal(deployment, *options):
    worker = deployment.launch(*options)
    assert worker.process.wait(30) == EXIT_REFUSED
    [event] = worker.events("worker_refused")
    return event


def test_an_unknown_schema(tmp_path, empty_postgresql_url):
    with deployed(tmp_path, empty_postgresql_url, f"file://{tmp_path}/broker") as deployment:
        event = refusal(deployment)

        assert event["code"] == "schema_mismatch"
        assert "keepstep db upgrade" in event["reason"]
        with pytest.raises(AssertionError, match="worker_refused"):
            deployment.supervised()
        assert deployment.workers[-1].process.wait(30) == EXIT_REFUSED


def test_no_graphs(tmp_path, sqlite_url):
    with deployed(tmp_path, sqlite_url, f"file://{tmp_path}/broker", graphs="") as deployment:
        assert refusal(deployment)["code"] == "graph"


def test_a_graph_that_does_not_hold_together(tmp_path, sqlite_url):
    (tmp_path / "broken.py").write_text(
        textwrap.dedent("""
            from keepstep import START, Graph
            graph = Graph("broken", state=dict[str, int] if False else __import__("typing").TypedDict("S", {"n": int}))
            graph.edge(START, "nowhere")
        """)
    )
    with deployed(tmp_path, sqlite_url, f"file://{tmp_path}/broker", graphs="broken.py") as deployment:
        event = refusal(deployment)

        assert event["code"] == "graph"
        assert event["reason"].startswith("broken.py: ")
        assert "'nowhere'" in event["reason"]


def test_a_setting_that_cannot_be_used(tmp_path, sqlite_url):
    with deployed(tmp_path, sqlite_url, f"file://{tmp_path}/broker") as deployment:
        deployment.environment["KEEPSTEP_RENEW_SECONDS"] = "soon"
        worker = deployment.launch()

        assert worker.process.wait(30) != 0
        assert "renew_seconds" in worker.log.read_text()
