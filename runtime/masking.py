"""Masking: what stands instead of a secret's text, wherever that turned up.

A text is looked for as it is and in the forms in which clients and error messages carry it: quoted by `repr` or JSON,
URL-encoded, in hexadecimal, and in base64, also in the middle of a longer base64 text (`Authorization: Basic …` holds
user and password in one).
"""

from __future__ import annotations

import base64
import copy
import dataclasses
import json
import threading
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar
from urllib.parse import quote, quote_plus

import msgspec
from pydantic import BaseModel

from keepstep.errors import NotStorable
from keepstep.runtime.encoder import DEPTH_MAX, segment
from keepstep.runtime.secrets import Secret

MASK = "***"
LENGTH_MIN = 4
"""Shorter secrets are not looked for: they would be found everywhere."""

_INNER_BASE64_BYTES_MIN = 8
"""From here on, what is left of a text inside a longer base64 text is long enough to be nothing else."""

T = TypeVar("T", str, bytes)


class Masker:
    """Finds and masks secrets. Threads may share it, and secrets may be added while they do."""

    def __init__(self, secrets: Iterable[Secret] = ()) -> None:
        self._lock = threading.Lock()
        self._texts: tuple[str, ...] = ()
        self._bytes: tuple[bytes, ...] = ()
        for secret in secrets:
            self.add(secret)

    def add(self, secret: Secret) -> None:
        """Look for this secret as well."""
        text = secret.reveal()
        if len(text) < LENGTH_MIN:
            return
        with self._lock:
            forms = tuple(sorted({*self._texts, *_forms(text)}))
            self._bytes = tuple(form.encode() for form in forms)
            self._texts = forms

    def __bool__(self) -> bool:
        """Whether there is anything to look for."""
        return bool(self._texts)

    def is_in(self, data: str | bytes) -> bool:
        """Tell whether a text, or what was encoded from one, holds a secret."""
        if isinstance(data, str):
            return any(form in data for form in self._texts)
        return any(form in data for form in self._bytes)

    def text(self, text: str) -> str:
        """Return a text with `***` in place of every secret."""
        return _masked(text, self._texts, MASK) if self._texts else text

    def data(self, data: bytes) -> bytes:
        """Return bytes with `***` in place of every secret."""
        return _masked(data, self._bytes, MASK.encode()) if self._bytes else data

    def value(self, value: Any) -> Any:
        """Return a value with every secret in it masked; the value itself when it holds none.

        Texts, bytes, dicts (their keys, too), lists, tuples and sets, and the fields of dataclasses, pydantic models
        and msgspec Structs. Of any other object that shows a secret when it is printed, that text is left, masked.
        """
        return self._value(value, {}, 0) if self._texts else value

    def refuse(self, value: Any, path: str, encoded: bytes | None = None) -> None:
        """Raise `NotStorable` naming the path when a value is about to be stored with a secret's text in it.

        `encoded` is what would be stored; None: the value is a text, or None.
        """
        if not self._texts or not self.is_in((value or "") if encoded is None else encoded):
            return
        message = (
            f"{self.path_in(value, path)}: it holds the text of a secret that this attempt resolved, which is never "
            "stored: keep the secret's reference, and resolve that where it is used"
        )
        raise NotStorable(message)

    def path_in(self, value: Any, path: str) -> str:
        """Return the path of the first secret in a value, which begins with `path`; that alone when it is not found."""
        return next(self._paths(value, path, 0), path)

    def _paths(self, value: Any, path: str, depth: int) -> Iterator[str]:
        if depth > DEPTH_MAX:
            return
        if isinstance(value, str | bytes | bytearray):
            if self.is_in(bytes(value) if isinstance(value, bytearray) else value):
                yield path
            return
        for key, item in _parts(value):
            if isinstance(key, str | bytes) and self.is_in(key):
                yield path
            yield from self._paths(item, path + self.text(segment(key)), depth + 1)

    def _value(self, value: Any, known: dict[int, tuple[Any, Any]], depth: int) -> Any:
        if isinstance(value, str):
            return self.text(value) if self.is_in(value) else value
        if isinstance(value, bytes | bytearray):
            data = bytes(value)
            return type(value)(self.data(data)) if self.is_in(data) else value
        if value is None or isinstance(value, bool | int | float | Secret):
            return value
        if depth > DEPTH_MAX:
            return MASK
        found = known.get(id(value))
        if found is not None:
            return found[1]
        known[id(value)] = (value, MASK)  # of what holds itself: it must not bring its unmasked self along
        masked = self._rebuilt(value, known, depth + 1)
        known[id(value)] = (value, masked)  # with the value, whose id nothing else can have then
        return masked

    def _rebuilt(self, value: Any, known: dict[int, tuple[Any, Any]], depth: int) -> Any:
        if isinstance(value, dict):
            pairs = {self._value(key, known, depth): self._value(item, known, depth) for key, item in value.items()}
            same = len(pairs) == len(value) and all(
                key is old and item is value[old] for (key, item), old in zip(pairs.items(), value, strict=True)
            )
            return value if same else pairs
        if isinstance(value, list | tuple | set | frozenset):
            items = [self._value(item, known, depth) for item in value]
            if all(new is old for new, old in zip(items, value, strict=True)):
                return value
            if isinstance(value, tuple) and hasattr(value, "_make"):
                return value._make(items)
            plain = next(kind for kind in (list, tuple, set, frozenset) if isinstance(value, kind))
            return plain(items)
        fields = _fields(value)
        if fields is None:
            return self._unknown(value)
        changed = {name: new for name, old in fields.items() if (new := self._value(old, known, depth)) is not old}
        return _with(value, changed) if changed else value

    def _unknown(self, value: Any) -> Any:
        try:
            shown = repr(value)
        except Exception:  # noqa: BLE001  an object of the user's: what cannot be printed is not printed
            return value
        return self.text(shown) if self.is_in(shown) else value


def _forms(text: str) -> set[str]:
    raw = text.encode()
    forms = {text, repr(text)[1:-1], json.dumps(text)[1:-1], json.dumps(text, ensure_ascii=False)[1:-1]}
    encoded = {quote(text, safe=""), quote(text), quote_plus(text)}
    forms |= encoded | {_lower_escapes(each) for each in encoded}
    forms |= {raw.hex(), raw.hex().upper()}
    standard = {base64.b64encode(raw).decode()}
    if len(raw) >= _INNER_BASE64_BYTES_MIN:
        standard |= {_inner_base64(raw, before) for before in range(3)}
    standard |= {form.rstrip("=") for form in standard}
    forms |= standard | {form.replace("+", "-").replace("/", "_") for form in standard}
    return {form for form in forms if len(form) >= LENGTH_MIN}


def _inner_base64(raw: bytes, before: int) -> str:
    """Return the characters that stand for these bytes alone in a base64 text, with `before` bytes in their group."""
    text = base64.b64encode(b"\0" * before + raw).decode()
    first = -(-before * 8 // 6)
    last = (before + len(raw)) * 8 // 6
    return text[first:last]


def _lower_escapes(text: str) -> str:
    """Return a URL-encoded text as the clients spell it that write %2f."""
    head, *rest = text.split("%")
    return "%".join([head, *(part[:2].lower() + part[2:] for part in rest)])


def _masked(text: T, forms: Iterable[T], mask: T) -> T:
    spans: list[tuple[int, int]] = []
    for form in forms:
        start = text.find(form)
        while start >= 0:
            spans.append((start, start + len(form)))
            start = text.find(form, start + 1)
    if not spans:
        return text
    # Together: of two that overlap, masking one would leave the rest of the other.
    kept: list[T] = []
    end = 0
    spans.sort()
    first, last = spans[0]
    for start, stop in [*spans[1:], (len(text) + 1, len(text) + 1)]:
        if start <= last:
            last = max(last, stop)
            continue
        kept += [text[end:first], mask]
        first, end, last = start, last, stop
    kept.append(text[end:])
    return text[:0].join(kept)


def _parts(value: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(value, dict):
        return value.items()
    if isinstance(value, list | tuple | set | frozenset):
        return enumerate(value)
    return (_fields(value) or {}).items()


def _fields(value: Any) -> dict[str, Any] | None:
    """Return an object's fields; None when it is none of the kinds whose fields are known."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names: Iterable[str] = [field.name for field in dataclasses.fields(value)]
    elif isinstance(value, BaseModel):
        return {**value.__dict__, **(value.__pydantic_extra__ or {})}
    elif isinstance(value, msgspec.Struct):
        names = value.__struct_fields__
    else:
        return None
    return {name: getattr(value, name) for name in names if hasattr(value, name)}


def _with(value: Any, changed: dict[str, Any]) -> Any:
    """Return a copy of an object with other fields, made without its own code."""
    if isinstance(value, BaseModel):
        return value.model_copy(update=changed)
    other = copy.copy(value)
    for name, new in changed.items():
        if isinstance(value, msgspec.Struct):
            msgspec.structs.force_setattr(other, name, new)
        else:
            object.__setattr__(other, name, new)  # of a frozen one as well
    return other
