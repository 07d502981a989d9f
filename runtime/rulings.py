"""What is decided about one tool call: by policies, and by what people and the outside said.

Each ruling that lets the call not simply go on is kept in the journal, in order, beside the call. A replay reads them
and comes to the same; then it may come to new ones, which only ever ask for more.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from decimal import Decimal
from typing import Any, Final, Literal

from pydantic import TypeAdapter

from keepstep.runtime.effects import effect
from keepstep.runtime.journal import Call, Journal, Recorded
from keepstep.runtime.policies import PolicyDecision
from keepstep.runtime.tools import Tool
from keepstep.store.calls import NewAudit
from keepstep.store.errortext import error_text

ALLOW: Final = "allow"
APPROVE: Final = "approve"
DENY: Final = "deny"
REJECTED: Final = "rejected"
FAILED: Final = "failed"
_DETAIL_CHARACTERS_MAX = 16_384


@dataclass(frozen=True, slots=True)
class Ruling:
    """One decision about a call."""

    verdict: Literal["allow", "approve", "deny", "rejected", "failed"]
    policies: tuple[str, ...] = ()
    version: str = ""
    """Of the policies; empty: none are configured."""
    reason: str = ""
    to: tuple[str, ...] = ()
    quorum: int = 1
    expires_seconds: float | None = None
    mask: tuple[str, ...] = ()
    limits: tuple[tuple[str, str], ...] = ()
    tool_version: str = ""
    """The version of the tool that it is about: an approval is of that one."""
    self_approval: bool = True
    """Whether who started the run may approve."""

    @classmethod
    def of(cls, decision: PolicyDecision, tool: Tool[..., Any]) -> Ruling:
        """Return what policies decided, with what the tool asks for by itself."""
        owed = decision.obligations
        ruling = cls(
            decision.verdict,
            decision.policies,
            decision.version,
            decision.reason,
            owed.to,
            owed.quorum,
            owed.expires_seconds,
            owed.mask,
            owed.limits,
            tool.version,
            owed.self_approval,
        )
        if not tool.asks or decision.verdict == DENY:
            return ruling
        if decision.verdict == APPROVE and not (owed.to and tool.approvers):
            return replace(ruling, to=owed.to or tool.approvers)
        # Both name roles: those who are of both, or else the tool's, whose author knew what it does.
        both = tuple(role for role in owed.to if role in tool.approvers) or tool.approvers
        return replace(ruling, verdict=APPROVE, to=both)

    def covers(self, other: Ruling) -> bool:
        """Tell whether who has approved under this ruling could also approve under the other."""
        everybody_may = not other.to or (bool(self.to) and set(self.to) <= set(other.to))
        as_strict = self.quorum >= other.quorum and (other.self_approval or not self.self_approval)
        return everybody_may and as_strict and self.tool_version == other.tool_version

    def is_of_version(self, other: Ruling) -> bool:
        """Tell whether another ruling is about the same version of the tool."""
        return self.tool_version == other.tool_version

    def once_more(self, following: Ruling) -> Ruling:
        """Return this demand for an approval, made again of the version that a later ruling is about."""
        merged = tuple(dict.fromkeys((*self.mask, *following.mask)))
        return replace(
            self, version=following.version, tool_version=following.tool_version, mask=merged, limits=following.limits
        )


@effect(idempotent=True, name="keepstep.ruling")
def _ruling(tool: str, arguments: bytes) -> None:
    """What a ruling is about: rulings are of one call, and other arguments are another call."""


class Hearing:
    """The rulings about one call, read from the journal and added to it."""

    def __init__(self, journal: Journal, tool: Tool[..., Any], call: Call, thread: str) -> None:
        self._journal = journal
        self._tool = tool
        self._thread = thread
        self.number = 0
        """How many rulings there were so far."""
        self.mask: tuple[str, ...] = ()
        """The arguments that they mask."""
        self._about = {"tool": tool.name, "arguments": call.digest}
        self.call = call
        """The call, with the arguments that it was asked for with."""

    @property
    def key(self) -> str:
        """The call's idempotency key."""
        place = self.call.key
        return f"{place.step}/{place.run}/{place.call}"

    @property
    def suffix(self) -> str:
        """What tells the call from others of its tool: the key of the effects around it."""
        return self.call.key.call.partition(":")[2]

    def next(self) -> Ruling | None:
        """Return the next ruling that was recorded before; None when there is none."""
        following = self.ahead()
        return None if following is None else self._heard(following)

    def ahead(self) -> Ruling | None:
        """Return what `next` will return."""
        call = self._identified()
        begun = self._journal.open(call)
        if isinstance(begun, Recorded):
            return Ruling(**begun.result)
        self._journal.end(call)
        return None

    def add(self, ruling: Ruling, action: str | None = None, detail: Mapping[str, Any] | None = None) -> None:
        """Record a ruling, unless it is; with it what the audit says: `action`, and `detail` beside the rest."""
        call = self._identified()
        if action is not None:
            call = replace(call, audit=self.audit(action, f"{self.key}#{self.number}", ruling, detail or {}))
        begun = self._journal.open(call)
        if not isinstance(begun, Recorded):
            self._journal.succeed(call, asdict(ruling))
        self._heard(ruling)

    def _heard(self, ruling: Ruling) -> Ruling:
        self.number += 1
        self.mask = tuple(dict.fromkeys((*self.mask, *ruling.mask)))
        return ruling

    def _identified(self) -> Call:
        return self._journal.identify(_ruling, (), self._about, f"{self._tool.name}/{self.suffix}#{self.number}")

    def audit(self, action: str, key: str, ruling: Ruling, detail: Mapping[str, Any]) -> NewAudit:
        """Return what the audit says of the call."""
        said = {
            "tool": self._tool.name,
            "version": self._tool.version,
            "risk": self._tool.risk,
            "key": self.key,
            "policies": list(ruling.policies),
            "policy_version": ruling.version,
            "reason": ruling.reason,
        }
        text = error_text({**said, **detail})
        if len(text) > _DETAIL_CHARACTERS_MAX:
            short = {name: value for name, value in detail.items() if name not in {"asked", "ran"}}
            text = error_text({**said, **short, "left_out": "the arguments: they are too long"})
        return NewAudit(action, self._thread, key, text)


def shown(arguments: Mapping[str, Any], mask: tuple[str, ...], masked: str) -> dict[str, Any]:
    """Return arguments as people see them: plain values, those that are masked hidden."""
    return {name: masked if name in mask else plain(value) for name, value in arguments.items()}


def plain(value: Any) -> Any:
    """Return a value without classes that only the tool knows."""
    if isinstance(value, enum.Enum):
        return plain(value.value)
    if value is None or isinstance(value, str | bytes | bool | int | float | Decimal):
        return value
    if isinstance(value, Mapping):
        return {str(name): plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(each) for each in value]
    return json.loads(TypeAdapter(type(value)).dump_json(value))
