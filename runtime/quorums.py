"""Who counts for what when people decide: distinct people, each in one place, and none who may not.

A place is a right to be heard. Somebody who is asked has one; who hands it on with `delegate` gives it to those who are
named instead, who then share it: two names in the place of one person are still one of a quorum.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from keepstep.runtime.principals import Principal

DELEGATE = "delegate"


class Word(NamedTuple):
    """One person's word on a question, as it was stored."""

    by: str
    verdict: str
    place: str
    """Whose place it was given in."""
    to: tuple[str, ...] = ()
    """With `delegate`: who is asked in its place."""

    @classmethod
    def of(cls, said: dict[str, Any]) -> Word:
        """Return a decision's payload as a word."""
        return cls(said["by"], said["verdict"], said.get("place") or said["by"], tuple(said.get("to") or ()))


def place_of(by: str, principal: Principal | None, put_to: Sequence[str], earlier: Iterable[Word]) -> str:
    """Return whose place somebody speaks in: their own, unless they are asked only because others have named them.

    `put_to`: the people and roles that the question itself asks; empty: anybody. `earlier`: in order. `principal`: who
    it is, when that is known; without it nobody knows a role.
    """

    def is_among(named: Sequence[str]) -> bool:
        return by in named if principal is None else principal.is_among(list(named))

    if not put_to or is_among(put_to):
        return by
    handed = [each.place for each in earlier if each.verdict == DELEGATE and is_among(each.to)]
    return handed[-1] if handed else by


def rule(quorum: int, *, self_approval: bool, to: Sequence[str] = (), started_by: str | None = None) -> str | None:
    """Say who must approve; None when one person will do, whoever it is of those asked."""
    of = f" of {', '.join(to)}" if to else ""
    people = f"{quorum} different people{of}" if quorum > 1 else None
    who = f" ({started_by})" if started_by else ""
    others = None if self_approval else f"nobody who started the run{who}"
    return ", ".join(each for each in (people, others) if each is not None) or None
