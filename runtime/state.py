"""The state of a graph as channels: one value per key of its state type, checked at every door."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec
import typing_extensions
from pydantic import BaseModel, ValidationError

from keepstep.errors import ConflictingWrites, GraphError, StateError
from keepstep.runtime.codec import private_copy
from keepstep.runtime.fields import StateKey, attempt, problems_of, read_keys
from keepstep.runtime.reducers import add, append, difference, folded, same

__all__ = ["Channels", "StateSchema", "add", "append"]

Channels = dict[str, Any]
HIDDEN: Final = "\x1f"
"""Stands in the names of hidden channels (a running subgraph's), and in no name of a key."""
_PROBLEMS_SHOWN_MAX = 5
_RUNS_SHOWN_MAX = 5


class StateSchema:
    """What a state type allows: a TypedDict, a dataclass, a pydantic model or a msgspec Struct.

    Values of a TypedDict's keys may be absent until somebody writes them; the other types have every key from the
    first checkpoint on. A model's or dataclass's own validation runs on a run's first input (`initial`); what nodes
    write is checked key by key.
    """

    def __init__(self, state: type) -> None:
        self.type = state
        self.name = getattr(state, "__qualname__", repr(state))
        self.is_mapping = typing_extensions.is_typeddict(state)
        known = isinstance(state, type) and (
            self.is_mapping or dataclasses.is_dataclass(state) or issubclass(state, BaseModel | msgspec.Struct)
        )
        if not known:
            message = f"a state is a TypedDict, a dataclass, a pydantic model or a msgspec Struct, not {state!r}"
            raise GraphError(message)
        self.keys: dict[str, StateKey] = read_keys(state)
        self._shape = _shape_of(state)
        self._aliases = _aliases_of(state)
        for name in self.keys:
            if not name.isprintable():
                message = f"key {name!r} of state type {self.name} must consist of printable characters"
                raise GraphError(message)

    # --- inputs ------------------------------------------------------------------------------------------------------

    def initial(self, given: object) -> Channels:
        """Return the channels a thread starts with: an input of the state's keys, the type's defaults added.

        `given` is a mapping (also as JSON carries it: "12.50" for a Decimal, a list for a tuple, a mapping for a
        dataclass), an instance of the state type, or None for nothing. A key with reducer and default starts with the
        input reduced onto the default. Raises `StateError` naming the path of everything that does not fit.
        """
        if not self.is_mapping and isinstance(given, self.type):
            return self._checked_instance(given)
        values = self._named(given)
        problems: list[str] = []
        for name, value in values.items():
            key = self.keys[name]
            if key.reducer is not None:
                fitted = attempt(key.fit_update, value, f"$.{name}", problems)
                if not problems:
                    old = None if key.default is None else key.default()
                    values[name] = self._reduced(key, old, [("the input", fitted)], absent=key.default is None)
            elif not issubclass(self.type, BaseModel):
                values[name] = attempt(key.fit, value, f"$.{name}", problems)
        self._refuse("the input", problems)
        return _copies(values) if self.is_mapping else self._built(values)

    def merge(self, channels: Channels, given: object) -> Channels:
        """Return the channels with a later run's input in them: an update through the reducers.

        Of an instance of the state type, the keys that differ from the channels are the update.
        """
        if not self.is_mapping and isinstance(given, self.type):
            update = self.update(given, channels, node="the input")
        else:
            update = self.fitted(given)
        # What a subgraph of an earlier run left behind, when that run was cancelled in it, is not of this run.
        own = {name: value for name, value in channels.items() if HIDDEN not in name}
        return self.apply(own, [("the input", update)], own)

    def fitted(self, given: object) -> Channels:
        """Return a later run's input as the update that it is; raise `StateError` naming what does not fit."""
        update = self._named(given)
        problems: list[str] = []
        for name, value in update.items():
            update[name] = attempt(self.keys[name].fit_update, value, f"$.{name}", problems)
        self._refuse("the input", problems)
        return _copies(update)

    def edited(self, channels: Mapping[str, Any], given: object) -> Channels:
        """Return the channels with an operator's values in them: each replaces the key's whole value, past reducers.

        `given` is as JSON carries it. Raises `StateError` naming the path of everything that does not fit, unknown keys
        with those that are spelled almost alike.
        """
        values = self._named(given, "the edit")
        problems: list[str] = []
        for name, value in values.items():
            values[name] = attempt(self.keys[name].fit, value, f"$.{name}", problems)
        self._refuse("the edit", problems)
        return {**channels, **_copies(values)}

    def defaults(self, present: Mapping[str, Any]) -> Channels:
        """Return fresh defaults of the keys that `present` has not; raise `StateError` naming keys that have none."""
        made: Channels = {}
        for name, key in self.keys.items():
            if name in present or self.is_mapping:
                continue
            if key.default is None:
                message = f"state type {self.name} needs key {name!r}, which has no value here and no default"
                raise StateError(message)
            made[name] = key.default()
        return made

    def _named(self, given: object, what: str = "the input") -> Channels:
        """Return an input's values by key name; refuse what is no mapping and keys that the type does not have."""
        if given is None:
            return {}
        if not isinstance(given, Mapping):
            message = f"{what} must be a mapping or {self.name}, not {type(given).__name__}"
            raise StateError(message)
        values: Channels = {}
        problems = []
        for given_name, value in given.items():
            name: Any = self._aliases.get(given_name, given_name)
            key = self.keys.get(name)
            if key is None:
                known = f"known: {', '.join(self.keys)}"
                problems.append(f"$.{given_name}: unknown key ({known}){self._near(given_name)}")
            elif not key.settable:
                problems.append(f"$.{given_name}: the type computes this key itself")
            else:
                values[name] = value
        self._refuse(what, problems)
        return values

    def _near(self, name: object) -> str:
        """Ask whether a key was meant that is spelled almost like this one."""
        near = difflib.get_close_matches(str(name), [*self.keys, *self._aliases], n=2)
        return f"; did you mean {' or '.join(map(repr, near))}?" if near else ""

    def _built(self, values: Channels) -> Channels:
        """Return the channels of an instance made of `values`, through the type's own validation."""
        needed = [n for n, key in self.keys.items() if key.settable and key.default is None and n not in values]
        self._refuse("the input", [f"$.{name}: missing" for name in needed])
        try:
            if issubclass(self.type, BaseModel):
                by_alias = {alias: values[name] for alias, name in self._aliases.items() if name in values}
                aliased = set(self._aliases.values())
                instance: Any = self.type.model_validate(
                    {**{n: v for n, v in values.items() if n not in aliased}, **by_alias}
                )
            else:
                instance = self.type(**values)
        except ValidationError as error:
            message = f"the input does not fit {self.name}: {_shown(list(problems_of(error, '$')))}"
            raise StateError(message) from None
        except (TypeError, ValueError) as error:
            message = f"the input does not fit {self.name}: {error}"
            raise StateError(message) from error
        return _copies(self._fields(instance))

    def _checked_instance(self, given: object) -> Channels:
        values = self._fields(given)
        problems: list[str] = []
        for name, value in values.items():
            attempt(self.keys[name].check, value, f"$.{name}", problems)
        self._refuse("the input", problems)
        return _copies(values)

    # --- what nodes see and write -------------------------------------------------------------------------------------

    def present(self, channels: Mapping[str, Any]) -> Any:
        """Return the channels as an instance of the state type, for a node: a copy, the node may do with it anything.

        A TypedDict is a dict. Nothing is validated again and no `__post_init__` runs (but a Struct's).
        """
        keys = self.keys
        values = {name: private_copy(value) for name, value in channels.items() if name in keys}
        if self.is_mapping:
            return values
        if len(values) < len(keys):
            # A key that the type got after the thread had started.
            values |= {n: key.default() for n, key in keys.items() if n not in values and key.default is not None}
        return self._shape(values)

    def update(self, returned: object, seen: object, node: str, *, given: object = None) -> Channels:
        """Return what a node returned as a checked update, by key; the values are copies.

        `returned` is None, a mapping of the keys that change, or an instance of the state type: then its keys that
        differ from `seen`, which are the channels (or the Send's input) that the node was given. So it is with a
        mapping that is `given` itself, the very object the node received. For a key with a reducer only what is new
        counts in these two cases (`reducers.difference`). Raises `StateError` naming node, key and path.
        """
        if returned is None:
            return {}
        is_instance = not self.is_mapping and isinstance(returned, self.type)
        if not is_instance and not isinstance(returned, Mapping):
            message = (
                f"node {node!r} returned {type(returned).__name__}; it must return None, a mapping of the keys that "
                f"change, {self.name} or Goto"
            )
            raise StateError(message)
        values = self._changes(returned, seen) if is_instance or returned is given else returned
        update: Channels = {}
        problems: list[str] = []
        for name, value in values.items():  # type: ignore[attr-defined]  # a mapping by now
            key = self.keys.get(name)
            if key is None:
                problems.append(f"$.{name}: {self.name} has no such key (known: {', '.join(self.keys)})")
            else:
                update[name] = private_copy(attempt(key.check_update, value, f"$.{name}", problems))
        self._refuse(f"what node {node!r} returned", problems)
        return update

    def change(self, name: str, old: object, new: object, *, absent: bool) -> Any:
        """Return the update that makes `new` of a key's `old` value, for a holder of whole values."""
        reducer = self.keys[name].reducer
        return new if reducer is None or absent else difference(reducer, old, new)

    def _changes(self, returned: object, seen: object) -> Channels:
        before = self._parts(seen)
        return {
            name: self.change(name, before.get(name), value, absent=name not in before) if name in self.keys else value
            for name, value in self._parts(returned).items()
            if name not in before or not same(value, before[name])
        }

    def apply(self, channels: Channels, writes: Sequence[tuple[str, Channels]], seen: Mapping[str, Any]) -> Channels:
        """Return the channels with the node runs' updates in them, each `(node run, update)`, in the order given.

        A key without a reducer takes one write; a write of the very value that is in `seen` only passed it through and
        does not count. Raises `ConflictingWrites` naming the key and both node runs; `StateError` when a reducer
        fails or gives what the key cannot hold. The reducers of keys nobody wrote are not called.
        """
        by_key: dict[str, list[tuple[str, Any]]] = {}
        for run, update in writes:
            for name, value in update.items():
                if name in by_key:
                    by_key[name].append((run, value))
                else:
                    by_key[name] = [(run, value)]
        applied = dict(channels)
        for name, wrote in by_key.items():
            key = self.keys[name]
            if key.reducer is not None:
                applied[name] = self._reduced(key, channels.get(name), wrote, absent=name not in channels)
            else:
                applied[name] = wrote[0][1] if len(wrote) == 1 else _the_one_write(name, wrote, seen)
        return applied

    def _reduced(self, key: StateKey, old: object, wrote: list[tuple[str, Any]], *, absent: bool = False) -> object:
        reducer = key.reducer
        if reducer is None:
            return wrote[-1][1]
        runs = _shown([repr(run) for run, _ in wrote], _RUNS_SHOWN_MAX)
        try:
            value = folded(reducer, old, (value for _, value in wrote), absent=absent)
        except Exception as error:
            name = getattr(reducer, "__name__", repr(reducer))
            message = f"reducer {name!r} of key {key.name!r} failed on the update of {runs}: {error!r}"
            raise StateError(message) from error
        # Lists that grew were checked item by item; anything else may have left the key's limits.
        if reducer not in (add, append) or not isinstance(value, list):
            problems: list[str] = []
            value = attempt(key.check, value, f"$.{key.name}", problems)
            self._refuse(f"what the reducer of key {key.name!r} made of the update of {runs}", problems)
        return value

    def _parts(self, value: object) -> Mapping[str, Any]:
        """Return the values of a mapping or an instance of the state type; a Send's input may be neither."""
        if isinstance(value, Mapping):
            return value
        return self._fields(value) if not self.is_mapping and isinstance(value, self.type) else {}

    def _fields(self, instance: Any) -> Channels:
        return {name: getattr(instance, name) for name in self.keys if hasattr(instance, name)}

    def _refuse(self, what: str, problems: list[str]) -> None:
        if problems:
            message = f"{what} does not fit {self.name}: {_shown(problems)}"
            raise StateError(message)


def _copies(values: Mapping[str, Any]) -> Channels:
    return {name: private_copy(value) for name, value in values.items()}


def _the_one_write(name: str, wrote: list[tuple[str, Any]], seen: Mapping[str, Any]) -> object:
    counting = [(run, value) for run, value in wrote if name not in seen or not same(value, seen[name])]
    if len(counting) > 1:
        message = (
            f"key {name!r} was written by node runs {counting[0][0]!r} and {counting[1][0]!r} in one super-step: give "
            f"the key a reducer (Annotated[…, append], add or your own), or let one of them write it"
        )
        raise ConflictingWrites(message)
    return counting[0][1] if counting else seen[name]


def _shown(items: Sequence[str], shown_max: int = _PROBLEMS_SHOWN_MAX) -> str:
    more = len(items) - shown_max
    return "; ".join(items[:shown_max]) + (f"; and {more} more" if more > 0 else "")


def _shape_of(state: type) -> Callable[[Channels], Any]:
    """Return how an instance of a state type is made of values that are known to be valid."""
    if issubclass(state, BaseModel):
        return lambda values: state.model_construct(_fields_set=set(values), **values)
    if issubclass(state, msgspec.Struct):
        return lambda values: state(**values)

    def shape(values: Channels) -> Any:
        instance = object.__new__(state)
        for name, value in values.items():
            object.__setattr__(instance, name, value)
        return instance

    return shape


def _aliases_of(state: type) -> dict[str, str]:
    """Return the names under which a model's input may give a key, where they are not the key's own."""
    if not issubclass(state, BaseModel):
        return {}
    found: Iterable[tuple[Any, str]] = (
        (info.validation_alias or info.alias, name) for name, info in state.model_fields.items()
    )
    return {alias: name for alias, name in found if isinstance(alias, str) and alias != name}
