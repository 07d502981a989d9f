"""Classes of every kind that can be stored, and what it means that a value came back exactly."""

from __future__ import annotations

import datetime as dt
import enum
import functools
import json
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from decimal import Decimal
from http import HTTPStatus
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, field_validator

from keepstep.runtime.codec import Codec, TypeRegistry, view


def shown(value: object) -> str:
    """Return a value's name as a test's parameter: the same in every process, whatever order a set has there."""
    members = sorted(map(repr, value)) if isinstance(value, set | frozenset) else None
    return repr(value) if members is None else f"{type(value).__name__} {', '.join(members)}"


T = TypeVar("T")
FORMATS = ("msgpack", "json")
LIMIT = 1_000_000


class Invoice(BaseModel):
    class Stage(enum.Enum):
        DRAFT = "draft"
        SENT = "sent"

    stage: Stage
    amount: Decimal = Decimal("0.00")
    numbers: list[int] = Field(default_factory=list)


class Priority(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Color(enum.StrEnum):
    RED = "red"


class Permission(enum.Flag):
    READ = enum.auto()
    WRITE = enum.auto()


class Row(BaseModel):
    model_config = ConfigDict(frozen=True)
    id: int


class Page(BaseModel, Generic[T]):
    items: list[T]
    next: str | None = None


class Open(BaseModel):
    model_config = ConfigDict(extra="allow")
    name: str
    _token: list[int] = PrivateAttr(default_factory=list)
    _unset: int


class Strict(BaseModel):
    even: int

    @field_validator("even")
    @classmethod
    def _even(cls, value: int) -> int:
        if value % 2:
            raise AssertionError
        return value

    @functools.cached_property
    def half(self) -> float:
        return self.even / 2


@dataclass
class Order:
    name: str
    total: int = field(init=False)
    lines: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.total = -1


@dataclass(frozen=True, slots=True)
class Point:
    x: float
    y: tuple[int, ...] = ()


@dataclass
class Later:
    known: int
    unknown: int = field(init=False)


class Pair(NamedTuple):
    left: Any
    right: Any = None


POST_INIT_CALLS: list[str] = []


class Event(msgspec.Struct, frozen=True, tag=True, rename="camel"):
    event_name: str
    when: dt.datetime | msgspec.UnsetType = msgspec.UNSET
    tags: set[str] = msgspec.field(default_factory=set)

    def __post_init__(self) -> None:
        POST_INIT_CALLS.append(self.event_name)


class Counter(msgspec.Struct):
    value: int = 0


DECLARED = TypeRegistry(
    [
        Invoice,
        Priority,
        Color,
        Permission,
        Row,
        Page[Row],
        Page,
        Open,
        Strict,
        Order,
        Point,
        Later,
        Pair,
        Event,
        Counter,
        HTTPStatus,
    ]
)


def _pairs(value: dict[Any, Any]) -> Any:
    return [(canonical(key), canonical(item)) for key, item in value.items()]


def _fields(value: Any) -> Any:
    return [canonical(getattr(value, name, "absent")) for name in type(value).__dataclass_fields__]


_ESSENCE: dict[type, Callable[[Any], Any]] = {
    enum.Enum: id,
    bool: repr,
    int: hex,
    float: lambda value: struct.pack(">d", value).hex(),
    dict: _pairs,
    tuple: lambda value: [canonical(item) for item in value],
    list: lambda value: [canonical(item) for item in value],
    set: lambda value: sorted((canonical(item) for item in value), key=repr),
    frozenset: lambda value: sorted((canonical(item) for item in value), key=repr),
    dt.datetime: lambda value: (value.replace(tzinfo=None).isoformat(), value.fold, repr(value.tzinfo)),
    dt.time: lambda value: (value.replace(tzinfo=None).isoformat(), value.fold, repr(value.tzinfo)),
    BaseModel: lambda value: [canonical(part) for part in value.__getstate__().values()],
    msgspec.Struct: lambda value: [canonical(getattr(value, name)) for name in value.__struct_fields__],
    Order: _fields,
    Later: _fields,
    Point: _fields,
    object: repr,
}


def canonical(value: Any) -> Any:
    """Return all that makes a value what it is in a form that `==` tells apart: type, bits, order, zone, identity."""
    essence = next(essence for cls, essence in _ESSENCE.items() if isinstance(value, cls))
    return (type(value), essence(value))


def assert_exact(codec: Codec, value: Any) -> Any:
    """Round-trip `value`, assert that it comes back as it was and that it is written the same way again."""
    data = codec.encode(value)
    back = codec.decode(data)
    assert canonical(back) == canonical(value)
    assert codec.encode(back) == data
    assert canonical(codec.decode(memoryview(data))) == canonical(value)
    json.dumps(view(data), allow_nan=False).encode()  # a view is JSON
    return back
