"""The cases of `keepstep policy test`: calls, and what the policies are expected to say of them."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from keepstep.cli import values
from keepstep.errors import InvalidInput
from keepstep.runtime.policies import Policies, PolicyDecision, PolicyRequest
from keepstep.runtime.policytexts import SUFFIX, length_seconds

_ENDING = "tests.toml"


class Case(BaseModel):
    """One `[[case]]` of a file. What it does not expect (None) may be anything."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, hide_input_in_errors=True)

    name: str = ""
    tool: str
    risk: Literal["low", "medium", "high"]
    version: str = "1"
    scopes: list[str] = Field(default_factory=list)
    arguments: dict[str, Any] = Field(default_factory=dict)
    tenant: str = "default"
    graph: str = "test"
    thread: str = "test"
    node: str = "test"

    expect: Literal["allow", "deny", "approve"] | None = None
    policies: list[str] | None = None
    to: list[str] | None = None
    quorum: int | None = None
    self_approval: bool | None = None
    expires: str | None = None
    mask: list[str] | None = None
    limits: list[str] | None = None

    def decided_by(self, policies: Policies) -> PolicyDecision:
        """Return what policies say of the case's call."""
        return policies.decide(
            PolicyRequest(
                tenant=self.tenant,
                graph=self.graph,
                thread=self.thread,
                run="test",
                node=self.node,
                tool=self.tool,
                version=self.version,
                risk=self.risk,
                scopes=tuple(self.scopes),
                arguments=self.arguments,
            )
        )

    def differences(self, decision: PolicyDecision) -> list[str]:
        """Say in what a decision is not the expected one; the order of names does not matter."""
        obligations = decision.obligations
        pairs: dict[str, tuple[Any, Any]] = {
            "verdict": (self.expect, decision.verdict),
            "policies": (_sorted(self.policies), sorted(decision.policies)),
            "to": (_sorted(self.to), sorted(obligations.to)),
            "quorum": (self.quorum, obligations.quorum),
            "self_approval": (self.self_approval, obligations.self_approval),
            "expires": (None if self.expires is None else length_seconds(self.expires), obligations.expires_seconds),
            "mask": (_sorted(self.mask), sorted(obligations.mask)),
            "limits": (_sorted(self.limits), sorted(limit for limit, _policy in obligations.limits)),
        }
        return [
            f"{what}: expected {_shown(expected)}, is {_shown(found)}"
            for what, (expected, found) in pairs.items()
            if expected is not None and expected != found
        ]


class Outcome(NamedTuple):
    """What became of a case."""

    file: str
    case: Case
    decision: PolicyDecision
    differences: list[str]


def tried(policies: Policies, path: Path) -> list[Outcome]:
    """Return what became of all cases beside the policies at a path; raise `InvalidInput` when there are none."""
    outcomes = []
    for file in _files(path):
        for case in _cases(file):
            decision = case.decided_by(policies)
            outcomes.append(Outcome(file.name, case, decision, case.differences(decision)))
    if not outcomes:
        message = f"there are no cases beside {path}: write them ({_expected_at(path)}), or name a call: --tool NAME"
        raise InvalidInput(message)
    return outcomes


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        return sorted(each for each in path.iterdir() if each.name == _ENDING or each.name.endswith(f".{_ENDING}"))
    beside = path.with_name(_expected_at(path))
    return [beside] if beside.exists() else []


def _expected_at(path: Path) -> str:
    return _ENDING if path.is_dir() else f"{path.name.removesuffix(SUFFIX)}.{_ENDING}"


def _cases(file: Path) -> Iterator[Case]:
    text = values.from_file(str(file), "cases")
    try:
        document = tomllib.loads(text, parse_float=Decimal)
    except (tomllib.TOMLDecodeError, InvalidOperation, RecursionError) as error:
        message = f"{file.name}: is not TOML: {error}"
        raise InvalidInput(message) from None
    except ValueError:
        message = f"{file.name}: an integer has too many digits"
        raise InvalidInput(message) from None
    cases = document.pop("case", None)
    if document or not isinstance(cases, list):
        message = f"{file.name}: cases, each under [[case]], and nothing else"
        raise InvalidInput(message)
    for number, given in enumerate(cases, 1):
        yield _case(f"{file.name}: case {number}", given)


def _case(what: str, given: object) -> Case:
    try:
        case = Case.model_validate(given)
    except ValidationError as error:
        found = error.errors(include_input=False)
        problems = "; ".join(": ".join([*filter(None, [".".join(map(str, e["loc"]))]), e["msg"]]) for e in found)
        message = f"{what}: {problems}"
        raise InvalidInput(message) from None
    if not case.name or case.expect is None:
        message = f"{what}: needs a name, and expect = allow, deny or approve"
        raise InvalidInput(message)
    if case.expires is not None and length_seconds(case.expires) is None:
        message = f"{what}: expires: a number and s, m, h or d, like 2d"
        raise InvalidInput(message)
    return case


def _sorted(names: list[str] | None) -> list[str] | None:
    return None if names is None else sorted(names)


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(value) or "none"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g} s" if isinstance(value, float) else "none" if value is None else str(value)
