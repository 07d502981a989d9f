"""The cursor: what runs next in a thread, as a tree of entries and as the small plain form that is stored."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any, Final

import msgspec

from keepstep.errors import HistoryCorrupt
from keepstep.runtime.routing import Goto, Send, Target


class Missing(Enum):
    """The type of `MISSING`."""

    MISSING = "missing"


MISSING: Final = Missing.MISSING
"""There is no value; None is one."""


class Done(msgspec.Struct, frozen=True):
    """How an entry ended: its update, where it chose to go (None: along its edges), what failed in it."""

    update: dict[str, Any] = msgspec.field(default_factory=dict)
    goto: tuple[Target, ...] | None = None
    failures: tuple[dict[str, Any], ...] = ()


class Entry(msgspec.Struct, frozen=True):
    """One node run of a frame: due, or a running subgraph (`frame`), or ended (`done`)."""

    node: str
    index: int = -1
    """Which of the node's Sends in this super-step, from 0; -1: it is due by name."""
    input: Any = MISSING
    frame: Frame | None = None
    done: Done | None = None

    @property
    def id(self) -> str:
        """The node run's id within its frame."""
        return self.node if self.index < 0 else f"{self.node}#{self.index}"


class Frame(msgspec.Struct, frozen=True):
    """The node runs of one graph that are due together; none: the graph has ended."""

    entries: tuple[Entry, ...] = ()
    failures: tuple[dict[str, Any], ...] = ()
    """What failed, and was to be continued after, in the node runs before these."""
    base: dict[str, Any] = msgspec.field(default_factory=dict)


class Cursor(msgspec.Struct, frozen=True):
    """What runs next in a thread, under the step key of that super-step."""

    key: str
    root: Frame

    @property
    def finished(self) -> bool:
        """Whether nothing is due."""
        return not self.root.entries

    @property
    def failures(self) -> list[dict[str, Any]]:
        """What failed in the node runs before those that are due: `{node, run, type, message}`, outer frames first."""
        return list({failure["run"]: failure for failure in _failures(self.root)}.values())

    def to_plain(self) -> dict[str, Any]:
        """Return the cursor in dicts, lists and texts, with the Sends' inputs and waiting updates as they are."""
        return {"key": self.key, **_plain_frame(self.root)}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Cursor:
        """Return the cursor `to_plain` was called on; raise `HistoryCorrupt` when it is not one."""
        try:
            return cls(plain["key"], _frame_of(plain))
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            message = f"the cursor cannot be read: {type(error).__name__}"
            raise HistoryCorrupt(message) from error


class DueRun(msgspec.Struct, frozen=True):
    """A node run that is due."""

    id: str
    """Unique in the super-step: "plan", "audit#3" for the fourth Send to it, "research#0/plan" inside a subgraph."""
    node: str
    """The node's path in the graph: "plan", "research/plan"."""
    input: Any
    """A Send's input, else `MISSING`."""
    frame: str
    """The id of the subgraph's entry it is in, empty for the graph itself."""
    failures: tuple[dict[str, Any], ...] = ()
    """What failed, and was to be continued after, in the node runs before it."""
    within: tuple[Entry, ...] = ()
    """The subgraphs it is in, the outermost first."""


class NodeResult(msgspec.Struct, frozen=True):
    """What a node run gave: a checked update, its own choice of successors, or the failure to continue after."""

    update: dict[str, Any] | None = None
    """From `StateSchema.update`; that of a `Goto` too."""
    goto: Goto | None = None
    error: dict[str, Any] | None = None
    """`{node, run, type, message}` of a node with `on_error="continue"` that has no attempts left."""

    def to_plain(self) -> dict[str, Any]:
        """Return the result in dicts, lists and texts, the update's values as they are."""
        plain: dict[str, Any] = {}
        if self.update:
            plain["update"] = self.update
        if self.goto is not None:
            plain["goto"] = _plain_targets(goto_targets(self.goto))
        if self.error is not None:
            plain["error"] = self.error
        return plain

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> NodeResult:
        """Return a result equal in meaning to the one `to_plain` was called on."""
        goto = plain.get("goto")
        return cls(
            update=plain.get("update"),
            goto=None if goto is None else Goto(_from_plain_targets(goto)),
            error=plain.get("error"),
        )


def _failures(frame: Frame) -> Iterable[dict[str, Any]]:
    yield from frame.failures
    for entry in frame.entries:
        if entry.frame is not None:
            yield from _failures(entry.frame)


# --- plain forms ---
# Small, as every checkpoint holds one: a node that is due by name is its name, one due by Send is [name, input].


def _plain_frame(frame: Frame) -> dict[str, Any]:
    plain: dict[str, Any] = {"due": [_plain_entry(entry) for entry in frame.entries]}
    if frame.failures:
        plain["failures"] = list(frame.failures)
    if frame.base:
        plain["base"] = frame.base
    return plain


def _plain_entry(entry: Entry) -> object:
    if entry.frame is None and entry.done is None:
        return entry.node if entry.index < 0 else [entry.node, entry.input]
    plain: dict[str, Any] = {"node": entry.node}
    if entry.index >= 0:
        plain["sent"] = True
    if entry.frame is not None:
        return plain | _plain_frame(entry.frame)
    if entry.done is not None:
        plain["update"] = entry.done.update
        if entry.done.goto is not None:
            plain["goto"] = _plain_targets(entry.done.goto)
        if entry.done.failures:
            plain["failures"] = list(entry.done.failures)
    return plain


def _frame_of(plain: Mapping[str, Any]) -> Frame:
    sent: dict[str, int] = {}
    entries = tuple(_entry_of(item, sent) for item in plain["due"])
    return Frame(entries, tuple(plain.get("failures", ())), plain.get("base", {}))


def _entry_of(plain: Any, sent: dict[str, int]) -> Entry:
    if isinstance(plain, str):
        return Entry(plain)
    if isinstance(plain, list):
        node, given = plain
        return Entry(node, _next_index(node, sent), given)
    node = plain["node"]
    index = _next_index(node, sent) if plain.get("sent") else -1
    if "due" in plain:
        return Entry(node, index, frame=_frame_of(plain))
    goto = plain.get("goto")
    done = Done(plain["update"], None if goto is None else _from_plain_targets(goto), tuple(plain.get("failures", ())))
    return Entry(node, index, done=done)


def _next_index(node: str, sent: dict[str, int]) -> int:
    index = sent.get(node, 0)
    sent[node] = index + 1
    return index


def goto_targets(goto: Goto) -> tuple[Target, ...]:
    """Return where a `Goto` goes as a tuple."""
    return (goto.node,) if isinstance(goto.node, str | Send) else tuple(goto.node)


def _plain_targets(targets: Iterable[Target]) -> list[object]:
    return [[target.node, target.input] if isinstance(target, Send) else target for target in targets]


def _from_plain_targets(plain: Iterable[Any]) -> tuple[Target, ...]:
    return tuple(item if isinstance(item, str) else Send(*item) for item in plain)
