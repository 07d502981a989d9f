r"""Codec: values to bytes and back, exactly or not at all.

A payload is a header line and a body. The header `KS1m- 1 \n` says: Keepstep, version 1 of this format, msgpack (`j`:
JSON), compression (`-`: none), schema version 1, id of the encryption key (none). What msgpack and JSON can say
themselves is written as they say it; everything else has a kind:

* msgpack: an extension type, whose code is the kind's (`scalars.CODES`) and whose data is the packed content; for
  `text` and `bytearray` the bytes themselves;
* JSON: `{"$": kind, "v": content}`; for a typed object the kind is the type's name and `v` its fields. A dict of the
  user's that has the key "$", or keys that are not text, is `{"$": "dict", "v": [[key, value], …]}`: data that looks
  like an envelope comes back as itself.

A set is written in the order of its elements' bytes, so that one state has one digest in every process; a dict keeps
its order. An object that a value holds twice comes back as two equal ones. A time zone that is neither a ZoneInfo with
a key nor of a fixed offset is refused; another library's fixed offset comes back as `datetime.timezone`. A pydantic
model's private attributes are stored with it, or refused as any other value; cached properties are computed again.
"""

from __future__ import annotations

import hashlib
import re
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from keepstep.errors import HistoryCorrupt, InvalidSettings, ThreadBlocked, TooLarge, UnknownType
from keepstep.runtime.decoder import UNREADABLE, Reader, Untyped, untyped_in
from keepstep.runtime.encoder import DEPTH_MAX, JSON, MSGPACK, MSGPACK_CAREFUL, VIEW, Writer, segment
from keepstep.runtime.shapes import Refusal
from keepstep.runtime.types import TypeRegistry, private_copy

__all__ = ["DEPTH_MAX", "Codec", "Header", "TypeRegistry", "digest", "private_copy", "read_header", "view"]

_FORMAT_VERSION = 1
_HEADER = re.compile(rb"KS(\d+)([mj])(\S) (\d{1,9}) (\S{0,200})\n")
_HEADER_BYTES_MAX = 240
_LETTERS = {"msgpack": "m", "json": "j"}
_FORMATS = {letter: name for name, letter in _LETTERS.items()}
_VIEWER = Reader(Untyped)
_NO_TYPES = TypeRegistry()


class Header(NamedTuple):
    """What a payload says of itself."""

    format: str
    schema_version: int
    compression: str
    key_id: str


class Codec:
    """Encodes and decodes values for one set of declared types. Make it once; threads may share it.

    `format` is "msgpack" or "json"; both are read. `value_bytes_max` bounds each entry of a top-level dict by itself,
    any other value as a whole, in encoded bytes.
    """

    def __init__(
        self,
        types: TypeRegistry,
        *,
        format: str = "msgpack",  # noqa: A002  the word for it; nothing here needs the builtin
        value_bytes_max: int,
        schema_version: int = 1,
    ) -> None:
        if format not in _LETTERS:
            message = f"codec: must be msgpack or json, not {format!r:.50}"
            raise InvalidSettings(message)
        self.types = types
        self.format = format
        self.schema_version = schema_version
        self.value_bytes_max = value_bytes_max
        self._header = f"KS{_FORMAT_VERSION}{_LETTERS[format]}- {schema_version} \n".encode()
        self._reader = Reader(self._rebuilt)
        self._wider: WeakKeyDictionary[TypeRegistry, Codec] = WeakKeyDictionary()

    def including(self, *declared: Any) -> Codec:
        """Return a codec of the same format that also knows the types `declared` reach."""
        types = self.types.including(*declared)
        if types is self.types:
            return self
        wider = self._wider.get(types)
        if wider is None:
            wider = self._wider[types] = Codec(
                types, format=self.format, value_bytes_max=self.value_bytes_max, schema_version=self.schema_version
            )
        return wider

    def encode(self, value: object, *, path: str = "$") -> bytes:
        """Return the payload of `value`; raise `NotStorable` or `TooLarge` naming the path (`$.order.lines[2]`)."""
        body = self._body(value, path)
        if len(body) > self.value_bytes_max:
            self._refuse_large(value, path, len(body))
        return self._header + body

    def decode(self, data: bytes | memoryview) -> Any:
        """Return the value of a payload of either format.

        Raises `UnknownType` for a type that is not declared, with its path; `ThreadBlocked` for another schema version;
        `HistoryCorrupt` for what cannot be read.
        """
        data = memoryview(data)
        length = len(self._header)
        if data[:length] == self._header:
            format_name = self.format
        else:
            header, length = _parsed_header(data)
            format_name = header.format
            if header.schema_version != self.schema_version:
                message = (
                    f"stored with schema version {header.schema_version}, this graph has {self.schema_version}, "
                    f"and no migration between them is known"
                )
                raise ThreadBlocked(message)
        body = data[length:]
        try:
            return self._reader.read(format_name, body)
        except UnknownType as error:
            raise self._located(error, format_name, body) from None
        except UNREADABLE as error:
            raise _corrupt(error) from None

    def _body(self, value: object, path: str) -> bytes:
        items_max = self.value_bytes_max * (len(value) or 1 if type(value) is dict else 1)
        try:
            if self.format == "json":
                return JSON.pack(Writer(JSON, self.types, items_max).plain(value))
            try:
                return MSGPACK.pack(Writer(MSGPACK, self.types, items_max).plain(value))
            except (UnicodeEncodeError, OverflowError):
                return MSGPACK_CAREFUL.pack(Writer(MSGPACK_CAREFUL, self.types, items_max).plain(value))
        except Refusal as refusal:
            message = f"{path}{''.join(reversed(refusal.path))}: {refusal.reason}"
            raise refusal.kind(message) from None

    def _refuse_large(self, value: object, path: str, size: int) -> None:
        sizes = {path: size}
        if type(value) is dict:
            paths = {path + segment(key): item for key, item in value.items()}
            sizes = {where: len(self._body(item, where)) for where, item in paths.items()}
        for where, length in sizes.items():
            if length > self.value_bytes_max:
                message = f"{where}: {length} bytes, the limit is {self.value_bytes_max} bytes"
                raise TooLarge(message)

    def _rebuilt(self, name: str, content: Any, rest: dict[str, Any]) -> object:
        return self.types.named(name).make(content, rest)

    def _located(self, error: UnknownType, format_name: str, body: memoryview) -> UnknownType:
        """Return `error` with the path of the object that raised it, which a reader from the inside out cannot know."""
        try:
            tree = _VIEWER.read(format_name, body)
        except UNREADABLE:
            return error
        for path, item in untyped_in(tree, "$", segment):
            try:
                self._rebuilt(item.name, item.content, item.rest)
            except UnknownType as again:
                if again.message == error.message:
                    return UnknownType(f"{path}: {error.message}")
            except UNREADABLE:  # content that is itself not rebuilt may not fit: the search goes on
                continue
        return error


def view(data: bytes | memoryview) -> Any:
    """Return a payload as a plain tree that JSON can say, without any type: for people and other languages.

    Typed objects are `{"$": "Invoice", "v": {…}}`, ints over 2**53 `{"$": "int", "v": "…"}`, as in the JSON format.
    Raises `HistoryCorrupt` for what cannot be read.
    """
    data = memoryview(data)
    header, length = _parsed_header(data)
    try:
        value = _VIEWER.read(header.format, data[length:])
        return Writer(VIEW, _NO_TYPES, len(data)).plain(value)
    except (*UNREADABLE, Refusal) as error:
        raise _corrupt(error) from None


def read_header(data: bytes | memoryview) -> Header:
    """Return a payload's header; raise `HistoryCorrupt` when there is none that this release can read."""
    return _parsed_header(memoryview(data))[0]


def digest(*parts: bytes) -> bytes:
    """Return 32 bytes that identify `parts`: each is framed by its length, so that ("ab", "c") is not ("a", "bc")."""
    hashed = hashlib.blake2b(digest_size=32)
    for part in parts:
        hashed.update(len(part).to_bytes(8, "big"))
        hashed.update(part)
    return hashed.digest()


def _corrupt(error: Exception) -> HistoryCorrupt:
    """Say that reading failed, and how; the error's own text may quote what was stored."""
    return HistoryCorrupt(f"stored data cannot be read: {type(error).__name__}")


def _parsed_header(data: memoryview) -> tuple[Header, int]:
    found = _HEADER.match(bytes(data[:_HEADER_BYTES_MAX]))
    if found is None:
        message = "stored data has no Keepstep header"
        raise HistoryCorrupt(message)
    version, letter, compression, schema_version, key_id = (part.decode("latin-1") for part in found.groups())
    if int(version) != _FORMAT_VERSION or compression != "-" or key_id:
        message = (
            f"stored data has format version {version}, compression {compression!r}, encryption key {key_id!r}: "
            f"this release reads version {_FORMAT_VERSION}, neither compressed nor encrypted"
        )
        raise HistoryCorrupt(message)
    return Header(_FORMATS[letter], int(schema_version), compression, key_id), found.end()
