"""Decoder: a payload's body back to the value it was written from. The forms are told in `codec`."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from keepstep.runtime.scalars import CODES, LOADERS

Build = Callable[[str, Any, dict[str, Any]], object]

UNREADABLE = (msgspec.MsgspecError, ValueError, TypeError, LookupError, ArithmeticError, AttributeError, RecursionError)
"""What reading bytes that nobody wrote as they are may raise."""

# What `str.encode("unicode_escape")` writes.
_ESCAPED = re.compile(r"(?:[^\\]|\\(?:[\\nrt]|x[0-9a-f]{2}|u[0-9a-f]{4}|U[0-9a-f]{8}))*", re.DOTALL)
_KINDS_BY_CODE = {code: kind for kind, code in CODES.items()}
_COLLECTIONS: dict[str, Callable[[list[Any]], object]] = {"tuple": tuple, "set": set, "frozenset": frozenset}


@dataclass(frozen=True, slots=True, eq=False)
class Untyped:
    """A typed object as it is stored, its type not looked up."""

    name: str
    content: Any
    rest: dict[str, Any]


class Reader:
    """Reads bodies; `build` makes a typed object of its name, content and rest."""

    def __init__(self, build: Build) -> None:
        self._build = build
        self._unpack = msgspec.msgpack.Decoder(ext_hook=self._extension).decode

    def read(self, format_name: str, body: memoryview) -> Any:
        """Return the value of a body; raise one of `UNREADABLE`, or what `build` raises."""
        if format_name == "msgpack":
            return self._unpack(body)
        return self._revived(msgspec.json.decode(body))

    def _extension(self, code: int, data: memoryview) -> object:
        kind = _KINDS_BY_CODE[code]
        if kind == "text":
            return str(data, "utf-8", "surrogatepass")
        if kind == "bytearray":
            return bytearray(data)
        content = self._unpack(data)
        if kind == "object":
            name, fields, *rest = content
            return self._build(name, fields, rest[0] if rest else {})
        return _loaded(kind, content)

    def _revived(self, node: Any) -> Any:
        """Return the value that a JSON tree stands for; the tree itself is used up."""
        if type(node) is list:
            for index, item in enumerate(node):
                if type(item) in (list, dict):
                    node[index] = self._revived(item)
        elif type(node) is dict:
            for key, item in node.items():
                if type(item) in (list, dict):
                    node[key] = self._revived(item)
            if "$" in node:
                return self._opened(node)
        return node

    def _opened(self, envelope: dict[str, Any]) -> object:
        kind, content = envelope.pop("$"), envelope.pop("v")
        if kind not in CODES:
            return self._build(kind, content, envelope)
        if kind == "text":
            return _unescaped(content)
        if kind == "bytes":
            return base64.b64decode(content, validate=True)
        if kind == "bytearray":
            return bytearray(base64.b64decode(content, validate=True))
        return _loaded(kind, content)


def _unescaped(content: str) -> str:
    if _ESCAPED.fullmatch(content) is None:  # Python would warn of an escape that nobody wrote, and take it as it is
        message = "a text that was not escaped"
        raise ValueError(message)
    return content.encode("ascii").decode("unicode_escape")


def _loaded(kind: str, content: Any) -> object:
    loader = LOADERS.get(kind)
    if loader is not None:
        return loader(content)
    if type(content) is not list:
        message = f"a {kind} without a list"
        raise TypeError(message)
    if kind == "dict":
        return {key: item for key, item in content}  # noqa: C416  dict() hides which pair is none
    return _COLLECTIONS[kind](content)


def untyped_in(value: Any, path: str, segment: Callable[[object], str]) -> Iterator[tuple[str, Untyped]]:
    """Yield the objects in a value that a `Reader` with `build=Untyped` read, each with its path, inner ones first."""
    if type(value) is dict:
        for key, item in value.items():
            yield from untyped_in(key, path, segment)
            yield from untyped_in(item, path + segment(key), segment)
    elif type(value) in (list, tuple):
        for index, item in enumerate(value):
            yield from untyped_in(item, f"{path}[{index}]", segment)
    elif type(value) in (set, frozenset):
        for item in value:
            yield from untyped_in(item, path + "{…}", segment)
    elif type(value) is Untyped:
        yield from untyped_in(value.content, path, segment)
        for item in value.rest.values():
            yield from untyped_in(item, path, segment)
        yield path, value
