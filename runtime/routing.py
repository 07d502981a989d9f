"""The words with which a graph says what runs next: `START`, `END`, `Send`, `Goto`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

from keepstep.errors import GraphError

START = "__start__"
END = "__end__"

_CHOICES = "a node's name, END, Send(node, input) or a list of these"


@dataclass(frozen=True, slots=True)
class Send:
    """One node run of `node` that receives `input` as its state; every Send is a node run of its own."""

    node: str
    input: Any


@dataclass(frozen=True, slots=True)
class Goto:
    """What a node returns to choose its successors itself: `node` replaces the node's edges for this node run.

    `node` is a name, END, a `Send`, or a sequence of these; `update` is what the node would have returned otherwise.
    """

    node: str | Send | Sequence[str | Send]
    update: Any = None


Target = str | Send
Choose = Callable[[Any], "Target | Iterable[Target]"]


def targets_of(chosen: object, *, allowed: Iterable[str], where: str) -> tuple[Target, ...]:
    """Return what a route or a `Goto` chose as a tuple; an empty sequence chooses nothing.

    Raises `GraphError` naming `where` and the `allowed` names when a choice is not one of them. END always is.
    """
    if isinstance(chosen, str | Send):
        picks: tuple[Any, ...] = (chosen,)
    elif isinstance(chosen, Iterable) and not isinstance(chosen, AbstractSet | Mapping | bytes):
        # A set's order differs from process to process, and with it the order of the updates.
        picks = tuple(chosen)
    else:
        message = f"{where} chose {_shown(chosen)}; it must give {_CHOICES}"
        raise GraphError(message)
    for pick in picks:
        name = pick.node if isinstance(pick, Send) else pick
        if not isinstance(name, str):
            message = f"{where} chose {_shown(pick)}; it must give {_CHOICES}"
            raise GraphError(message)
        if name == END and not isinstance(pick, Send):
            continue
        if name not in allowed:
            message = f"{where} chose {name!r}, which is not one of its targets: {', '.join(map(repr, allowed))}"
            raise GraphError(message)
    return picks


def _shown(value: object) -> str:
    # The type only: a value may be a secret, and None is the usual slip (a function that forgot to return).
    return "None" if value is None else f"a value of type {type(value).__name__}"
