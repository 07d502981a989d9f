"""An agent that audits the licences of what is installed beside it.

It lists the distributions of its environment, fans out one node run for each, joins what they found, drafts a report,
asks a person about the packages that need one, and publishes the report once.

    keepstep worker examples/licence_audit/agent.py
    keepstep start licence-audit my-audit folder=audit
"""

from __future__ import annotations

import hashlib
import os
import platform
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypedDict

from examples.licence_audit import distributions, report
from examples.licence_audit.licences import Evidence, Finding, classify
from examples.licence_audit.report import Review
from keepstep import END, START, Context, Graph, Retry, Send, append, effect

LEDGER = "publications.txt"
QUESTION = "Publish the audit with these packages accepted?"


@dataclass(frozen=True)
class Publication:
    """A published report."""

    path: str
    sha256: str


class Audit(TypedDict, total=False):
    """The state. `folder` and `pace_seconds` are given, everything else is found."""

    folder: str
    """Where the report is published."""
    pace_seconds: float
    """The least time that a package takes: a few milliseconds are too quick for people to watch."""
    environment: str
    packages: list[str]
    findings: Annotated[list[Finding], append]
    concerns: dict[str, str]
    draft: str
    review: Review
    publication: Publication


graph = Graph("licence-audit", state=Audit, fan_out=True)


# --- reads: safe to repeat, and yet a recorded one is never repeated --------------------------------------------------


@effect(idempotent=True)
def list_packages() -> list[str]:
    """Return what is installed."""
    return distributions.installed()


@effect(idempotent=True)
def read_evidence(package: str) -> Evidence:
    """Return what a package says about its licence."""
    return distributions.evidence_of(package)


# --- nodes ------------------------------------------------------------------------------------------------------------


@graph.node
def plan(state: Audit, ctx: Context) -> dict[str, Any]:
    """Find out what there is to audit."""
    packages = ctx.effect(list_packages)
    environment = f"{sys.prefix} (Python {platform.python_version()})"
    ctx.log.info("audit_planned", packages=len(packages), folder=state.get("folder"))
    return {"packages": packages, "environment": environment}


def one_each(state: Audit) -> list[str | Send]:
    """Give every package a node run of its own."""
    pace = state.get("pace_seconds", 0.0)
    sends: list[str | Send] = [Send("audit", {"package": name, "pace_seconds": pace}) for name in state["packages"]]
    return sends or ["join"]


@graph.node(retry=Retry(attempts=3), timeout=60)
def audit(state: dict[str, Any], ctx: Context) -> dict[str, Any]:
    """Judge the licence of one package."""
    started = time.monotonic()
    finding = classify(ctx.effect(read_evidence, state["package"]))
    time.sleep(max(0.0, state["pace_seconds"] - (time.monotonic() - started)))
    ctx.emit({"package": finding.package, "category": finding.category.value, "licence": finding.licence})
    return {"findings": [finding]}


@graph.node
def join(state: Audit, ctx: Context) -> dict[str, Any]:  # noqa: ARG001  a node takes both
    """Pick out what a person has to look at."""
    concerns = {each.package: each.concern for each in state.get("findings", []) if each.concern is not None}
    return {"concerns": concerns}


@graph.node
def draft(state: Audit, ctx: Context) -> dict[str, Any]:
    """Write the report as far as it can be written without a person."""
    at = ctx.now().strftime("%Y-%m-%d %H:%M UTC")
    return {"draft": report.draft(state.get("findings", []), environment=state["environment"], at=at)}


@graph.node
def review(state: Audit, ctx: Context) -> dict[str, Any]:
    """Ask a person about the concerns: which packages may stay? The approver may take some off the list."""
    concerns = state["concerns"]
    if not concerns:
        return {"review": Review(asked=[])}
    decision = ctx.approve(QUESTION, arguments={"accept": list(concerns)}, context=concerns, to="legal")
    accepted = [name for name in decision.arguments.get("accept", []) if name in concerns]
    return {
        "review": Review(list(concerns), accepted, decision.approved, decision.by, decision.comment),
    }


def if_approved(state: Audit) -> str:
    """Publish nothing that was rejected."""
    return "publish" if state["review"].approved else END


@graph.node
def publish(state: Audit, ctx: Context) -> dict[str, Any]:
    """Publish the report, once."""
    text = report.final(state["draft"], state["review"])
    return {"publication": ctx.effect(publish_report, state.get("folder", "licence-audit"), text)}


@effect
def publish_report(folder: str, text: str, *, idempotency_key: str) -> Publication:
    """Write the report, and a line into the ledger of publications: whoever counts its lines knows how often.

    At risk: nothing here would notice a second publication, so that Keepstep alone answers for there being one.
    """
    place = Path(folder).resolve()
    place.mkdir(parents=True, exist_ok=True)
    path = place / "report.md"
    hidden = place / f".report-{os.getpid()}"
    hidden.write_text(text, encoding="utf-8")
    hidden.replace(path)
    digest = hashlib.sha256(text.encode()).hexdigest()
    with (place / LEDGER).open("a", encoding="utf-8") as ledger:
        ledger.write(f"{time.time():.3f} {digest} {idempotency_key}\n")
    return Publication(str(path), digest)


graph.edge(START, "plan")
graph.route("plan", one_each, to=["audit", "join"])
graph.edge("audit", "join")
graph.edge("join", "draft")
graph.edge("draft", "review")
graph.route("review", if_approved, to=["publish"])
graph.edge("publish", END)
