"""Ids of what one attempt of a node run asks for: the same on every retry, and none is used by two calls at once."""

from __future__ import annotations

import threading
from typing import Generic, TypeVar

from keepstep.errors import KeepstepError, StepError
from keepstep.ids import checked_name
from keepstep.runtime.blocks import refuse_inside

V = TypeVar("V")


class CallIds(Generic[V]):
    """The ids of one kind of call; safe in threads.

    A call is known by an explicit key, or by what it is given and how often the same came before it.
    """

    def __init__(self, key_kind: str, taken: type[KeepstepError]) -> None:
        """`key_kind` names an explicit key in errors, `taken` is raised for an id that another call is using."""
        self._key_kind = key_kind
        self._taken = taken
        self._lock = threading.RLock()
        self._occurrences: dict[str, int] = {}
        self._closed = False
        self.asked: set[str] = set()
        """Every id that this attempt has asked for."""
        self.under_way: dict[str, V] = {}
        """Those whose call has not ended, each with what `reserve` was given."""

    def reserve(self, what: str, name: str, digest: bytes, key: str | None, value: V) -> str:
        """Return a call's id, under way from now on: two that begin at once must not take each other for the past.

        `what` says it in errors, `name` is what the id begins with.
        """
        refuse_inside(what)
        with self._lock:
            if self._closed:
                message = f"{what} was asked for when the node had ended; nothing was done"
                raise StepError(message)
            call = self._numbered(what, name, digest) if key is None else self._keyed(what, name, key)
            self.asked.add(call)
            self.under_way[call] = value
            return call

    def _keyed(self, what: str, name: str, key: str) -> str:
        call = f"{name}:{checked_name(self._key_kind, key)}"
        if call in self.under_way:
            message = f"key {key!r} of {what} is being used by another call of this node"
            raise self._taken(message)
        return call

    def _numbered(self, what: str, name: str, digest: bytes) -> str:
        base = f"{name}:{digest.hex()[:16]}"
        occurrence = self._occurrences.get(base, 0)
        if occurrence and f"{base}:{occurrence - 1}" in self.under_way:
            message = (
                f"{what} is asked for twice at once with equal arguments; which is the first depends on timing: "
                "give each an explicit key=…"
            )
            raise self._taken(message)
        self._occurrences[base] = occurrence + 1
        return f"{base}:{occurrence}"

    def resume(self, call: str, value: V) -> None:
        """Say that a call which this attempt has asked for is under way again."""
        with self._lock:
            if self._closed:
                message = f"call {call} was to be made again when the node had ended; nothing was done"
                raise StepError(message)
            self.under_way[call] = value

    def end(self, call: str) -> None:
        """Say that a call is not under way any more."""
        with self._lock:
            self.under_way.pop(call, None)

    def close(self) -> None:
        """Take no more calls: the node has ended, and whatever it left running must not act beside the next attempt."""
        with self._lock:
            self._closed = True
