"""What the database says of the audit, held against what must be true."""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from examples.check import Check
from examples.licence_audit.agent import LEDGER
from keepstep import Reader
from keepstep.store.views import EffectView

GRAPH = "licence-audit"


@dataclass(frozen=True)
class Story:
    """What the show did, which the database must tell alike."""

    thread: str
    folder: Path
    """Where the report was published."""
    killed: list[str]
    """The node runs that were under way in the worker that was killed."""
    approval: str
    by: str
    accepted: list[str]


def steps(reader: Reader, thread: str) -> list[tuple[str, str, str, str]]:
    """Return (checkpoint, node runs, times started, due next) of every checkpoint; their digests hold together."""
    rows = []
    for each in reader.history(thread, graph=GRAPH):
        starts = [node["starts"] for node in each.nodes]
        total = f"{len(starts)} runs" if len(starts) > 1 else "".join(node["run"] for node in each.nodes)
        rows.append((str(each.seq), total or "the input", str(sum(starts) or ""), _few(each.next) or "the end"))
    return rows


def checks(reader: Reader, story: Story) -> list[Check]:
    """Return what must be true of the thread, its node runs, effects, waits and of the world outside."""
    return [*_of_steps(reader, story), *_of_effects(reader, story), *_of_waits(reader, story), *_outside(reader, story)]


def _of_steps(reader: Reader, story: Story) -> list[Check]:
    thread = reader.get(story.thread, graph=GRAPH)
    history = reader.history(story.thread, graph=GRAPH)
    node_runs = reader.node_runs(story.thread, graph=GRAPH)
    state = reader.state(story.thread, graph=GRAPH)
    again = sorted(row.run for row in node_runs if row.starts > 1)
    packages = state["packages"]
    audited = Counter(finding["v"]["package"] for finding in state["findings"])
    return [
        Check("the thread", "done", thread.status),
        Check("checkpoints, chained by digest", "0 1 2 3 4 5 6", " ".join(str(each.seq) for each in history)),
        Check(
            "node runs of the fan-out, done", str(len(packages)), str(sum(row.status == "done" for row in node_runs))
        ),
        Check("started once", str(len(packages) - len(story.killed)), str(sum(row.starts == 1 for row in node_runs))),
        Check("started again: those of the killed worker", _few(sorted(story.killed)), _few(again)),
        Check("deaths counted", str(len(story.killed)), str(sum(row.deaths for row in node_runs))),
        Check("retries after an error", "0", str(sum(row.failures for row in node_runs))),
        Check("packages audited, each once", str(len(packages)), str(sum(audited[name] == 1 for name in packages))),
    ]


def _of_effects(reader: Reader, story: Story) -> list[Check]:
    packages = len(reader.state(story.thread, graph=GRAPH)["packages"])
    effects = reader.effects(story.thread, graph=GRAPH)
    told = {
        name: _told([each for each in effects if each.name == name]) for name in ("read_evidence", "publish_report")
    }
    return [
        Check("effect read_evidence", f"recorded {packages}, called {packages} x", told["read_evidence"]),
        Check("effect publish_report (at risk)", "recorded 1, called 1 x", told["publish_report"]),
        Check("effects begun without a result", "0", str(sum(each.state == "intent" for each in effects))),
    ]


def _of_waits(reader: Reader, story: Story) -> list[Check]:
    waits = reader.waits(story.thread, graph=GRAPH)
    answered = Counter(each.kind for each in waits if each.answered_at is not None)
    decisions = reader.decisions(story.approval)
    told = ", ".join(f"{each['verdict']} by {each['by']}" for each in decisions)
    review = reader.state(story.thread, graph=GRAPH)["review"]["v"]
    return [
        Check("waits", "1", str(len(waits))),
        Check("waits answered", "1 approval", ", ".join(f"{count} {kind}" for kind, count in answered.items())),
        Check("decisions", f"approve by {story.by}", told),
        Check("packages accepted, as decided", _few(story.accepted), _few(review["accepted"])),
    ]


def _outside(reader: Reader, story: Story) -> list[Check]:
    publication = reader.state(story.thread, graph=GRAPH)["publication"]["v"]
    lines = (story.folder / LEDGER).read_text(encoding="utf-8").splitlines()
    report = (story.folder / "report.md").read_bytes()
    return [
        Check("publications in the ledger", "1", str(len(lines))),
        Check(
            "the report's SHA-256, state and file", publication["sha256"][:16], hashlib.sha256(report).hexdigest()[:16]
        ),
    ]


def _told(effects: list[EffectView]) -> str:
    recorded = sum(each.state == "done" for each in effects)
    return f"recorded {recorded}, called {sum(each.calls for each in effects)} x"


def _few(names: list[str], most: int = 6) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
