"""What came of a node run: data, not exception flow.

`Parked` and `NodeOverdue` alone are raised, through user code; they are no `Exception`, so that a node's
`except Exception` cannot swallow them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from keepstep.errors import KeepstepError, StaleLease, ThreadBlocked, Unavailable
from keepstep.runtime.faults import place_of, text_of
from keepstep.runtime.masking import Masker
from keepstep.runtime.planner import NodeResult
from keepstep.store.outcomes import NewWait


@dataclass(frozen=True, slots=True)
class Done:
    """The node returned (or failed and is to be continued after)."""

    result: NodeResult


@dataclass(frozen=True, slots=True)
class Waiting:
    """The node asked for something that is not there yet; `waits` are those it asked for the first time."""

    waits: tuple[NewWait, ...]


@dataclass(frozen=True, slots=True)
class Retry:
    """The attempt failed and another one is allowed after a delay. `failures` counts this one, if it was one."""

    delay_seconds: float
    failures: int
    error: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Failed:
    """The attempt failed and no other is allowed."""

    failures: int
    error: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Blocked:
    """Going on needs an operator."""

    error: Mapping[str, Any]


Outcome = Done | Waiting | Retry | Failed | Blocked


class Parked(BaseException):
    """Raised through a node that waits."""

    def __init__(self, waits: tuple[NewWait, ...]) -> None:
        super().__init__("the node waits; let this pass")
        self.waits = waits


class NodeOverdue(BaseException):
    """Raised into a node whose time is over."""


def ungrouped(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return what a group of errors, as an `asyncio.TaskGroup` raises it, means for the attempt.

    What takes the attempt out of the node's hands counts first, then the node's own errors. When all that was raised is
    that it waits, it waits for all of that.
    """
    leaves = list(_leaves(group))
    for kind in (StaleLease, NodeOverdue, ThreadBlocked, Unavailable):
        found = next((leaf for leaf in leaves if isinstance(leaf, kind)), None)
        if found is not None:
            return found
    if all(isinstance(leaf, Parked) for leaf in leaves):
        return Parked(tuple(wait for leaf in leaves if isinstance(leaf, Parked) for wait in leaf.waits))
    own = [leaf for leaf in leaves if not isinstance(leaf, Parked)]
    return own[0] if len(own) == 1 else BaseExceptionGroup(group.message, own)


def _leaves(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error


def described(error: BaseException, *, masker: Masker | None = None, **ids: Any) -> dict[str, Any]:
    """Return an error as it is kept: {code, type, message} and the ids of where it happened.

    Of a user's exception the type and message are kept, never its traceback: frames hold values. `masker` knows the
    secrets that may stand in the message.
    """
    code = error.code if isinstance(error, KeepstepError) else "node_failed"
    message = text_of(error) if masker is None else text_of(error, masker.text)
    where = place_of(error)
    place = {"where": where} if where and not isinstance(error, KeepstepError) else {}
    return {"code": code, "type": type(error).__qualname__, "message": message, **place, **ids}
