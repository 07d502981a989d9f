"""`keepstep policy`: what tools may be called, looked at and tried before it counts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from keepstep.cli import values
from keepstep.cli.command import app, command
from keepstep.cli.session import Session
from keepstep.errors import InvalidInput, NotFound

if TYPE_CHECKING:
    from rich.text import Text

    from keepstep.cli.policycases import Outcome
    from keepstep.runtime.policies import Obligations, Policies, PolicyDecision
    from keepstep.runtime.policytexts import Policy

group = typer.Typer(
    name="policy", no_args_is_help=True, rich_markup_mode="rich", help="Look at policies of tool calls, and try them."
)
app.add_typer(group, name="policy", rich_help_panel="Operate")

_STYLES = {"allow": "green", "approve": "yellow", "deny": "red"}
_PathArgument = Annotated[
    str | None,
    typer.Argument(metavar="PATH", help="A folder or file of policies (*.cedar). Without it: KEEPSTEP_POLICIES."),
]


@command(
    "check",
    panel="Operate",
    group=group,
    has_tenant=False,
    example="keepstep policy check\nkeepstep policy check policies/",
)
def check(session: Session, *, path: _PathArgument = None) -> None:
    """Read policies as a worker does, and list them with what they oblige to.

    What is wrong is told with its file and line. The version is a digest of the texts: it stands with each decision.
    """
    policies, _path = _loaded(session, path)
    if session.as_json:
        listed = [_policy_document(each) for each in policies.listed]
        session.output.document({"version": policies.version, "policies": listed})
        return
    session.output.table(
        ("POLICY", "EFFECT", "AT", "OBLIGES TO"),
        [(each.id, each.effect, f"{each.file}:{each.line}", _obliges(each)) for each in policies.listed],
    )
    session.output.line(f"{len(policies.listed)} policies, version {policies.version}")


@command(
    "test",
    panel="Operate",
    group=group,
    example="""\
keepstep policy test
keepstep policy test policies/ --tool send_payment --risk high --scope payments --arguments '{"amount": 120.00}'""",
)
def dry_run(
    session: Session,
    *,
    path: _PathArgument = None,
    tool: Annotated[str | None, typer.Option("--tool", metavar="NAME", help="The tool of one call to try.")] = None,
    risk: Annotated[
        Literal["low", "medium", "high"] | None,
        typer.Option("--risk", metavar="low|medium|high", help="The tool's risk."),
    ] = None,
    scope: Annotated[
        list[str] | None, typer.Option("--scope", metavar="NAME", help="A scope of the tool; may be given again.")
    ] = None,
    version: Annotated[str | None, typer.Option("--tool-version", metavar="TEXT", help="The tool's version.")] = None,
    arguments: Annotated[
        str | None,
        typer.Option(
            "--arguments",
            metavar="JSON",
            help='The arguments, a JSON object: 12 is a long, 12.50 a decimal, "12.50" a text.',
        ),
    ] = None,
    graph: Annotated[str | None, typer.Option("--graph", "-g", metavar="NAME", help="The graph that calls.")] = None,
    thread: Annotated[str | None, typer.Option("--thread", metavar="NAME", help="The thread that calls.")] = None,
    node: Annotated[str | None, typer.Option("--node", metavar="NAME", help="The node that calls.")] = None,
    expect: Annotated[
        Literal["allow", "deny", "approve"] | None,
        typer.Option("--expect", metavar="allow|deny|approve", help="Exit code 1 unless this is what comes out."),
    ] = None,
) -> None:
    """Say what policies would decide; nothing is called.

    With --tool of one call. Without it of all cases in tests.toml and *.tests.toml beside the policies, and exit code
    1 unless each is decided as it expects.
    """
    said = {
        "tool": tool,
        "risk": risk,
        "scopes": scope or None,
        "version": version,
        "arguments": None if arguments is None else values.an_object(arguments, "--arguments", decimals=True),
        "graph": graph,
        "thread": thread,
        "node": node,
        "expect": expect,
    }
    given = {name: value for name, value in said.items() if value is not None}
    if tool is None and given:
        message = "a call to try is named by its tool: --tool NAME"
        raise InvalidInput(message)
    if tool is not None and risk is None:
        message = "say the tool's risk, which policies may ask: --risk low, medium or high"
        raise InvalidInput(message)
    policies, at = _loaded(session, path)
    passed = _try_cases(session, policies, at) if tool is None else _try_call(session, policies, given)
    if not passed:
        raise typer.Exit(1)


def _loaded(session: Session, path: str | None) -> tuple[Policies, Path]:
    from keepstep.runtime.policies import Policies

    chosen = path or session.settings.policies
    if not chosen:
        message = "no policies are configured: name a folder or file, or set KEEPSTEP_POLICIES"
        raise NotFound(message)
    return Policies.load(chosen), Path(chosen)


# --- check ------------------------------------------------------------------------------------------------------------


def _obliges(policy: Policy) -> str:
    approve = None if policy.approve is None else f"approval by {', '.join(policy.approve) or 'anybody'}"
    if approve is not None and policy.quorum > 1:
        approve += f", {policy.quorum} of them"
    if approve is not None and not policy.self_approval:
        approve += ", not who started the run"
    if approve is not None and policy.expires_seconds is not None:
        approve += f", within {_length(policy.expires_seconds)}"
    mask = f"mask {', '.join(policy.mask)}" if policy.mask else None
    limit = None if policy.limit is None else f"limit {policy.limit}"
    return "; ".join(each for each in (approve, mask, limit) if each is not None)


def _policy_document(policy: Policy) -> dict[str, Any]:
    return {
        "id": policy.id,
        "effect": policy.effect,
        "file": policy.file,
        "line": policy.line,
        "approve": policy.approve,
        "quorum": policy.quorum,
        "self_approval": policy.self_approval,
        "expires_seconds": policy.expires_seconds,
        "mask": policy.mask,
        "limit": policy.limit,
    }


def _length(seconds: float) -> str:
    from keepstep.cli.output import duration

    return duration(seconds)


# --- test -------------------------------------------------------------------------------------------------------------


def _try_call(session: Session, policies: Policies, given: dict[str, Any]) -> bool:
    from keepstep.cli.policycases import Case

    case = Case.model_validate({"tenant": session.settings.tenant, **given})
    decision = case.decided_by(policies)
    passed = not case.differences(decision)
    if session.as_json:
        document = _decision_document(decision) | {"version": decision.version}
        session.output.document(document if case.expect is None else {**document, "passed": passed})
        return passed
    obligations = decision.obligations
    session.output.facts(
        {
            "verdict": _verdict(decision.verdict),
            "expected": case.expect,
            "reason": decision.reason,
            "policies": ", ".join(decision.policies),
            **_facts(decision.verdict, obligations),
            "version": decision.version,
        }
    )
    return passed


def _facts(verdict: str, obligations: Obligations) -> dict[str, str | None]:
    expires = obligations.expires_seconds
    asked = verdict == "approve"
    return {
        "to": (", ".join(obligations.to) or "anybody") if asked else None,
        "quorum": str(obligations.quorum) if asked else None,
        "not": "who started the run" if asked and not obligations.self_approval else None,
        "expires": None if expires is None else f"in {_length(expires)}",
        "mask": ", ".join(obligations.mask),
        "limits": ", ".join(f"{limit} ({policy})" for limit, policy in obligations.limits),
    }


def _try_cases(session: Session, policies: Policies, path: Path) -> bool:
    from keepstep.cli import policycases

    outcomes = policycases.tried(policies, path)
    failed = [each for each in outcomes if each.differences]
    if session.as_json:
        cases = [_outcome_document(each) for each in outcomes]
        session.output.document({"version": policies.version, "passed": not failed, "cases": cases})
        return not failed
    rows = []
    for each in outcomes:
        found = "; ".join((*each.differences, each.decision.reason))
        result = _result(passed=not each.differences)
        rows.append((result, f"{each.file}: {each.case.name}", _verdict(each.decision.verdict), found))
    session.output.table(("", "CASE", "VERDICT", "FOUND"), rows)
    session.output.line(f"{len(outcomes) - len(failed)} of {len(outcomes)} as expected, version {policies.version}")
    return not failed


def _result(*, passed: bool) -> Text:
    from rich.text import Text

    return Text("ok", style="green") if passed else Text("failed", style="bold red")


def _verdict(verdict: str) -> Text:
    from rich.text import Text

    return Text(verdict, style=_STYLES[verdict])


def _outcome_document(outcome: Outcome) -> dict[str, Any]:
    return {
        "file": outcome.file,
        "name": outcome.case.name,
        "passed": not outcome.differences,
        "expected": outcome.case.expect,
        **_decision_document(outcome.decision),
        "differences": outcome.differences,
    }


def _decision_document(decision: PolicyDecision) -> dict[str, Any]:
    obligations = decision.obligations
    return {
        "verdict": decision.verdict,
        "reason": decision.reason,
        "policies": decision.policies,
        "obligations": {
            "to": obligations.to,
            "quorum": obligations.quorum,
            "self_approval": obligations.self_approval,
            "expires_seconds": obligations.expires_seconds,
            "mask": obligations.mask,
            "limits": [{"limit": limit, "policy": policy} for limit, policy in obligations.limits],
        },
    }
