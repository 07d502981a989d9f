"""docs/recurring.md: what it shows is done, by a worker that carries its graph."""

from __future__ import annotations

import re
import shlex

import pytest

from keepstep import Reader
from keepstep.cli.program import run
from tests.docs.test_examples import ROOT, blocks
from tests.worker.deployment import deployed, eventually

PAGE = ROOT / "docs" / "recurring.md"
AGENT, SERVICE = blocks(PAGE)
[SESSION] = re.findall(r"^```console\n(.*?)^```", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


@pytest.fixture
def deployment(tmp_path, sqlite_url, monkeypatch):
    agents = tmp_path / "agents.py"
    agents.write_text(AGENT, encoding="utf-8")
    broker = f"file://{tmp_path}/broker"
    monkeypatch.setenv("KEEPSTEP_DATABASE", sqlite_url)
    monkeypatch.setenv("KEEPSTEP_BROKER", broker)
    with deployed(tmp_path, sqlite_url, broker, graphs=str(agents)) as made:
        made.worker()
        yield made


def test_what_the_page_shows_is_done(deployment, capsys):
    for _ in range(2):  # at each start of the service
        exec(SERVICE, {})  # noqa: S102  the example
    deployment.execute("UPDATE keepstep_schedule SET next_at = 0, due_at = 0")
    eventually(lambda: "done" in deployment.statuses().values(), what="the run")
    with Reader() as reader:
        [shown] = reader.schedules()
        assert (shown.outcome, shown.updated_by) == ("done", "anna@example.com")
        assert re.fullmatch(r"report-eu-\d{4}-\d\d-\d\dT0[01]:30Z", shown.run_thread)
        assert reader.state(shown.run_thread)["text"] == f"{shown.run_thread} of eu"

    said = []
    for line in SESSION.splitlines():
        assert run(shlex.split(line)[1:]) == 0, line
        said.append(capsys.readouterr().out)
    assert [each.splitlines()[0].partition(",")[0] for each in (said[0], *said[3:])] == [
        "schedule report-us accepted",
        "schedule report-us paused",
        "schedule report-us resumed",
        "schedule report-us removed",
    ]
    assert [line.split()[0] for line in said[1].splitlines()] == ["NAME", "report-eu", "report-us"]
    assert "02:30 (in " in said[1]
    assert re.search(r"^region +us$", said[2], flags=re.MULTILINE)
