"""Encoder: a value to what msgspec says by itself, or a refusal with the path. The forms are told in `codec`.

A value is walked once. What needs no tag is left where it is, so that a plain state is handed to msgspec uncopied.
"""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from keepstep.errors import TooLarge
from keepstep.runtime.decoder import Untyped
from keepstep.runtime.scalars import CODES, SCALARS, float_to_text, int_to_text
from keepstep.runtime.secrets import Secret
from keepstep.runtime.shapes import Refusal, shape_of
from keepstep.runtime.types import TypeRegistry

DEPTH_MAX = 100
"""Deepest nesting of containers and objects in one value."""

_INT_MIN, _INT_MAX = -(2**63), 2**64 - 1
_JSON_EXACT_MAX = 2**53
_SURROGATES = re.compile("[\ud800-\udfff]")
_SURROGATES_AND_NUL = re.compile("[\x00\ud800-\udfff]")
_TEXT = frozenset({str})
_BUILTINS = (str, int, float, bytes, bytearray, list, dict, tuple, set, frozenset)

Handler = Callable[["Writer", Any, int], object]


@dataclass(frozen=True, slots=True)
class Form:
    """One way of writing: what stands as it is, how the rest is tagged, what packs the result."""

    atoms: frozenset[type]
    pack: Callable[[object], bytes]
    tag: Callable[[str, Any], object]
    tag_object: Callable[[str, Any, dict[str, Any]], object]
    handlers: Mapping[type, Handler]
    is_odd_key: Callable[[str], object] | None


class Writer:
    """Writes one value; counts its items, so that data that holds one list a million times is stopped early."""

    __slots__ = ("atoms", "form", "handlers", "items_left", "items_max", "types")

    def __init__(self, form: Form, types: TypeRegistry, items_max: int) -> None:
        self.form = form
        self.types = types
        self.atoms = form.atoms
        self.handlers = form.handlers
        self.items_left = self.items_max = items_max

    def plain(self, value: Any, depth: int = 0) -> Any:
        """Return `value` itself when nothing in it is special, else what stands for it; raise `Refusal`."""
        cls = type(value)
        if cls in self.atoms:
            return value
        if depth > DEPTH_MAX:
            reason = f"nested more than {DEPTH_MAX} deep, or it holds itself"
            raise Refusal(reason)
        handler = self.handlers.get(cls)
        if handler is not None:
            return handler(self, value, depth + 1)
        shape = self.types.shape(cls)
        if shape is None:
            raise Refusal(_why_not(value))
        content, rest = shape.take(value)
        plain_rest = {name: self.plain(item, depth + 1) for name, item in rest.items()} if rest else rest
        return self.form.tag_object(shape.name, self.plain(content, depth), plain_rest)

    def count(self, items: int) -> None:
        """Count the items of one container; raise `Refusal` when there are more than the bytes that they may take."""
        self.items_left -= items
        if self.items_left < 0:
            reason = f"more than {self.items_max} items, which take more bytes than a value may have"
            raise Refusal(reason, TooLarge)


def segment(key: object) -> str:
    """Return one step of a path: `.key`, `['any text']` or `[1]`; what is not printable is escaped."""
    if type(key) is str and key.isidentifier():
        return f".{key}"
    return f"[{key!r:.100}]" if type(key) in (str, int, bool, float, bytes) else f"[{type(key).__qualname__}]"


def _why_not(value: object) -> str:
    """Say why a value cannot be stored; never with the value, which may be a secret."""
    cls = type(value)
    if isinstance(value, Secret):
        return f"the secret {value.ref!r} is never stored: keep its reference, and resolve that where it is used"
    name = f"{cls.__module__}.{cls.__qualname__}"
    if shape_of(cls) is not None:
        return f"the graph does not declare {name}: name it in an annotation of the state or in Graph(types=[…])"
    for base in _BUILTINS:
        if isinstance(value, base):
            return f"{name} is a subclass of {base.__name__}, as which it would come back"
    return (
        f"{name} is no dataclass, pydantic model, msgspec Struct, NamedTuple or enum, nor a builtin type that is stored"
    )


# --- containers ---


def _write_dict(writer: Writer, value: dict[Any, Any], depth: int) -> object:
    writer.count(len(value))
    is_odd_key = writer.form.is_odd_key
    # Told before any value is written: telling it half-way would write the values twice, at every level.
    if not _TEXT.issuperset(map(type, value)) or (is_odd_key is not None and any(map(is_odd_key, value))):
        return _write_pairs(writer, value, depth)
    atoms = writer.atoms
    changed: dict[Any, Any] | None = None
    key: Any = None
    try:
        for key, item in value.items():
            if type(item) in atoms:
                continue
            plain = writer.plain(item, depth)
            if plain is not item:
                if changed is None:
                    changed = dict(value)
                changed[key] = plain
    except Refusal as refusal:
        refusal.path.append(segment(key))
        raise
    return value if changed is None else changed


def _write_pairs(writer: Writer, value: dict[Any, Any], depth: int) -> object:
    pairs = []
    for key, item in value.items():
        try:
            plain_key = writer.plain(key, depth)
        except Refusal as refusal:
            refusal.reason = f"a key: {refusal.reason}"
            raise
        try:
            pairs.append([plain_key, writer.plain(item, depth)])
        except Refusal as refusal:
            refusal.path.append(segment(key))
            raise
    return writer.form.tag("dict", pairs)


def _write_list(writer: Writer, value: list[Any], depth: int) -> list[Any]:
    writer.count(len(value))
    atoms = writer.atoms
    changed: list[Any] | None = None
    index = 0
    try:
        for index, item in enumerate(value):
            if type(item) in atoms:
                continue
            plain = writer.plain(item, depth)
            if plain is not item:
                if changed is None:
                    changed = list(value)
                changed[index] = plain
    except Refusal as refusal:
        refusal.path.append(f"[{index}]")
        raise
    return value if changed is None else changed


def _write_tuple(writer: Writer, value: tuple[Any, ...], depth: int) -> object:
    return writer.form.tag("tuple", _write_list(writer, list(value), depth))


def _write_set(writer: Writer, value: Iterable[Any], depth: int) -> object:
    try:
        items = _write_list(writer, list(value), depth)
    except Refusal as refusal:
        if refusal.path:
            refusal.path[-1] = "{…}"  # an element has no place
        raise
    return writer.form.tag(type(value).__name__, sorted(items, key=writer.form.pack))


def _write_untyped(writer: Writer, value: Untyped, depth: int) -> object:
    rest = {name: writer.plain(item, depth) for name, item in value.rest.items()}
    return writer.form.tag_object(value.name, writer.plain(value.content, depth - 1), rest)  # one level, as in `plain`


# --- scalars ---


def _scalar(kind: str, content: Callable[[Any], object]) -> Handler:
    return lambda writer, value, _depth: writer.form.tag(kind, content(value))


def _write_int(writer: Writer, value: int, _depth: int) -> object:
    return value if _INT_MIN <= value <= _INT_MAX else writer.form.tag("int", int_to_text(value))


def _write_int_view(writer: Writer, value: int, _depth: int) -> object:
    return value if abs(value) <= _JSON_EXACT_MAX else writer.form.tag("int", int_to_text(value))


def _write_text(writer: Writer, value: str, _depth: int) -> object:
    if value.isascii() or _SURROGATES.search(value) is None:
        return value
    return writer.form.tag("text", value.encode("utf-8", "surrogatepass"))


def _write_text_json(writer: Writer, value: str, _depth: int) -> object:
    if _SURROGATES_AND_NUL.search(value) is None:  # PostgreSQL's JSON has no NUL
        return value
    return writer.form.tag("text", value.encode("unicode_escape").decode("ascii"))


def _write_float_json(writer: Writer, value: float, _depth: int) -> object:
    return value if math.isfinite(value) else writer.form.tag("float", float_to_text(value))


def _write_bytearray(writer: Writer, value: bytearray, _depth: int) -> object:
    return writer.form.tag("bytearray", bytes(value))


def _write_bytes_json(writer: Writer, value: bytes | bytearray, _depth: int) -> object:
    return writer.form.tag(type(value).__name__, base64.b64encode(value).decode("ascii"))


# --- forms ---

_pack = msgspec.msgpack.Encoder().encode


def _tag_json(kind: str, content: Any) -> object:
    return {"$": kind, "v": content}


def _tag_object_json(name: str, content: Any, rest: dict[str, Any]) -> object:
    return {"$": name, "v": content, **rest}


def _tag_msgpack(kind: str, content: Any) -> object:
    return msgspec.msgpack.Ext(CODES[kind], content if type(content) is bytes else _pack(content))


def _tag_object_msgpack(name: str, content: Any, rest: dict[str, Any]) -> object:
    return msgspec.msgpack.Ext(CODES["object"], _pack([name, content, rest] if rest else [name, content]))


_HANDLERS: dict[type, Handler] = {
    dict: _write_dict,
    list: _write_list,
    tuple: _write_tuple,
    set: _write_set,
    frozenset: _write_set,
    bytearray: _write_bytearray,
    **{cls: _scalar(kind, content) for cls, (kind, content) in SCALARS.items()},
}

MSGPACK = Form(
    atoms=frozenset({type(None), bool, int, float, str, bytes}),
    pack=_pack,
    tag=_tag_msgpack,
    tag_object=_tag_object_msgpack,
    handlers=_HANDLERS,
    is_odd_key=None,
)
"""msgpack for nearly every value: texts and ints are not looked at, and msgspec raises for those it cannot say."""

MSGPACK_CAREFUL = Form(
    atoms=frozenset({type(None), bool, float, bytes}),
    pack=_pack,
    tag=_tag_msgpack,
    tag_object=_tag_object_msgpack,
    handlers={**_HANDLERS, int: _write_int, str: _write_text},
    is_odd_key=_SURROGATES.search,
)
"""msgpack for the values for which msgspec raised."""

JSON = Form(
    atoms=frozenset({type(None), bool}),
    pack=msgspec.json.Encoder().encode,
    tag=_tag_json,
    tag_object=_tag_object_json,
    handlers={
        **_HANDLERS,
        int: _write_int,
        str: _write_text_json,
        float: _write_float_json,
        bytes: _write_bytes_json,
        bytearray: _write_bytes_json,
    },
    is_odd_key=lambda key: key == "$" or _SURROGATES_AND_NUL.search(key),
)

VIEW = Form(
    atoms=JSON.atoms,
    pack=JSON.pack,
    tag=_tag_json,
    tag_object=_tag_object_json,
    handlers={**JSON.handlers, int: _write_int_view, Untyped: _write_untyped},
    is_odd_key=JSON.is_odd_key,
)
"""JSON for people and other languages: ints that JavaScript would round are tagged, types are not looked up."""
