"""Shapes: how an instance of a class is taken apart into plain content and put together again.

`take` gives the content (a dict of fields, or an enum member's name) and the rest: what an instance carries beside its
fields (`absent` fields, a pydantic model's `set`, `extra` and `private`). `make` is its exact inverse for the class as
it was. For a class that changed since: a new field takes its declared default, everything else is refused.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
from pydantic import BaseModel

from keepstep.errors import NotStorable, UnknownType

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from keepstep.errors import InvalidInput

    Content = Any
    Rest = dict[str, Any]


class Refusal(Exception):  # it becomes NotStorable or TooLarge where the path is complete
    """Why a value cannot be stored, on its way up to where the path to it is known."""

    def __init__(self, reason: str, kind: type[InvalidInput] = NotStorable) -> None:
        super().__init__(reason)
        self.reason = reason
        self.kind = kind
        self.path: list[str] = []  # innermost first


class Shape(Protocol):
    """One class: its name in stored data, and the way there and back."""

    name: str
    cls: type

    def take(self, value: Any) -> tuple[Content, Rest]:
        """Return the content and the rest of an instance; raise `Refusal` when it holds more than can be stored."""
        ...

    def make(self, content: Content, rest: Rest) -> Any:
        """Return the instance; raise `UnknownType` when the class is no longer the one that was stored."""
        ...


_SHAPES_MAX = 4096
_shapes: dict[type, Shape | None] = {}


def shape_of(cls: type) -> Shape | None:
    """Return the shape of `cls`, or None when it is none of the kinds of class that can be stored."""
    try:
        return _shapes[cls]
    except KeyError:
        if len(_shapes) >= _SHAPES_MAX:  # classes made at run time, without end
            _shapes.clear()
        shape = _shapes[cls] = _new_shape(cls)
        return shape


def _new_shape(cls: type) -> Shape | None:
    if issubclass(cls, enum.Enum):
        return _EnumShape(cls)
    if issubclass(cls, BaseModel):
        return _ModelShape(cls)
    if issubclass(cls, msgspec.Struct):
        return _StructShape(cls)
    if issubclass(cls, tuple):
        return _NamedTupleShape(cls) if hasattr(cls, "_field_defaults") else None
    if dataclasses.is_dataclass(cls) and _is_plain(cls):
        return _DataclassShape(cls)
    return None


def _is_plain(cls: type) -> bool:
    """Whether an instance is made of its attributes alone: not an exception, a dict's subclass or an abstract class."""
    try:
        object.__new__(cls)
    except TypeError:
        return False
    return True


class _EnumShape:
    """An enum's member by its name; a flag by its number, as a combination has no name."""

    def __init__(self, cls: type[enum.Enum]) -> None:
        self.cls: type[enum.Enum] = cls
        self.name = cls.__qualname__

    def take(self, value: enum.Enum) -> tuple[Content, Rest]:
        return (value._value_ if isinstance(value, enum.Flag) else value._name_), {}

    def make(self, content: Content, rest: Rest) -> enum.Enum:
        _none_of(rest, self.name)
        if issubclass(self.cls, enum.Flag):
            return self.cls(content)
        member = self.cls.__members__.get(content)
        if member is None:
            message = f"type not allowed: {self.name!r} has no member {content!r:.200}"
            raise UnknownType(message)
        return member


class _DataclassShape:
    """A dataclass by its fields, those of init=False too."""

    def __init__(self, cls: type) -> None:
        self.cls = cls
        self.name = cls.__qualname__
        self._fields = {field.name: field for field in dataclasses.fields(cls)}
        self._defaults: dict[str, Callable[[], Any]] = {}
        for name, field in self._fields.items():
            if field.default is not dataclasses.MISSING:
                self._defaults[name] = functools.partial(_same, field.default)
            elif field.default_factory is not dataclasses.MISSING:
                self._defaults[name] = field.default_factory

    def take(self, value: Any) -> tuple[Content, Rest]:
        content = {name: getattr(value, name) for name in self._fields if hasattr(value, name)}
        _refuse_more(value, self._fields)
        return content, _absent(self._fields, content)

    def make(self, content: Content, rest: Rest) -> Any:
        value: Any = object.__new__(self.cls)
        for name, item in _completed(self.name, content, rest, self._fields, self._defaults).items():
            object.__setattr__(value, name, item)  # frozen ones too
        _none_of(rest, self.name, "absent")
        return value


class _ModelShape:
    """A pydantic model by its fields, its extra ones, which were set, and its private attributes."""

    def __init__(self, cls: type[BaseModel]) -> None:
        self.cls = cls
        self.name = cls.__qualname__
        self._fields = cls.model_fields
        self._defaults: dict[str, Callable[[], Any]] = {
            name: functools.partial(field.get_default, call_default_factory=True)
            for name, field in self._fields.items()
            if not field.is_required() and not field.default_factory_takes_validated_data
        }

    def take(self, value: BaseModel) -> tuple[Content, Rest]:
        attributes = value.__dict__
        content = {name: attributes[name] for name in self._fields if name in attributes}
        _refuse_more(value, self._fields)
        rest = _absent(self._fields, content)
        if value.model_fields_set != self._fields.keys():
            rest["set"] = sorted(value.model_fields_set)  # a set's order differs from process to process
        if value.model_extra is not None:
            rest["extra"] = value.model_extra
        private = value.__pydantic_private__
        if private is not None:
            rest["private"] = private
        return content, rest

    def make(self, content: Content, rest: Rest) -> BaseModel:
        stored_set: Any = rest.get("set", content)  # left out when all fields were set
        value = self.cls.__new__(self.cls)
        BaseModel.__setstate__(  # not model_construct: it adds defaults and runs model_post_init
            value,
            {
                "__dict__": _completed(self.name, content, rest, self._fields, self._defaults),
                "__pydantic_extra__": rest.get("extra"),
                "__pydantic_fields_set__": set(stored_set),
                "__pydantic_private__": rest.get("private"),
            },
        )
        _none_of(rest, self.name, "absent", "set", "extra", "private")
        return value


class _StructShape:
    """A msgspec Struct by its fields."""

    def __init__(self, cls: type[msgspec.Struct]) -> None:
        self.cls = cls
        self.name = cls.__qualname__
        self._fields = dict.fromkeys(cls.__struct_fields__)
        self._defaults: dict[str, Callable[[], Any]] = {}
        for field in msgspec.structs.fields(cls) if _resolves(cls) else ():
            if field.default is not msgspec.NODEFAULT:
                self._defaults[field.name] = functools.partial(_same, field.default)
            elif field.default_factory is not msgspec.NODEFAULT:
                self._defaults[field.name] = field.default_factory
        # Only a subclass can be built past a __post_init__; the instance then becomes one of the class itself.
        self._blank: Callable[..., msgspec.Struct] = cls
        if hasattr(cls, "__post_init__"):
            metaclass: Any = type(cls)
            self._blank = metaclass(cls.__name__, (cls,), {"__post_init__": _ignore})

    def take(self, value: msgspec.Struct) -> tuple[Content, Rest]:
        content = {name: getattr(value, name) for name in self._fields}
        _refuse_more(value, self._fields)
        return content, {}

    def make(self, content: Content, rest: Rest) -> msgspec.Struct:
        _none_of(rest, self.name)
        value = self._blank(**_completed(self.name, content, rest, self._fields, self._defaults))
        if type(value) is not self.cls:
            msgspec.structs.force_setattr(value, "__class__", self.cls)
        return value


class _NamedTupleShape:
    """A named tuple by its fields."""

    def __init__(self, cls: Any) -> None:
        self.cls: type[tuple[Any, ...]] = cls
        self.name: str = cls.__qualname__
        self._fields: dict[str, None] = dict.fromkeys(cls._fields)
        self._defaults = {name: functools.partial(_same, item) for name, item in cls._field_defaults.items()}

    def take(self, value: tuple[Any, ...]) -> tuple[Content, Rest]:
        _refuse_more(value, self._fields)
        return dict(zip(self._fields, value, strict=True)), {}

    def make(self, content: Content, rest: Rest) -> tuple[Any, ...]:
        _none_of(rest, self.name)
        fields = _completed(self.name, content, rest, self._fields, self._defaults)
        return tuple.__new__(self.cls, (fields[name] for name in self._fields))


def _same(value: object) -> object:
    return value


def _ignore(_self: object) -> None:
    """Stand in for a `__post_init__` that must not run again."""


def _resolves(cls: type[msgspec.Struct]) -> bool:
    """Whether msgspec can read the annotations of `cls`, which it needs to tell its defaults."""
    try:
        msgspec.structs.fields(cls)
    except NameError:
        return False
    return True


def _absent(fields: Iterable[str], content: Mapping[str, Any]) -> Rest:
    """Tell fields that the instance lacks from fields that the class did not have yet."""
    absent = [name for name in fields if name not in content]
    return {"absent": absent} if absent else {}


def _refuse_more(value: object, fields: Mapping[str, Any]) -> None:
    """Refuse attributes that are no fields: they would be lost. Values of cached properties are computed again."""
    for name in getattr(value, "__dict__", ()):
        if name not in fields and name != "__orig_class__":  # typing notes Page[Row](…) there
            if isinstance(getattr(type(value), name, None), functools.cached_property):
                continue
            reason = f"the attribute {name!r} of {type(value).__qualname__} is not one of its fields"
            raise Refusal(reason)


def _none_of(rest: Rest, name: str, *known: str) -> None:
    unknown = rest.keys() - set(known)
    if unknown:
        message = f"type not allowed: {name!r} was another kind of class: it was stored with {sorted(unknown)!r:.200}"
        raise UnknownType(message)


def _completed(
    name: str,
    content: Content,
    rest: Rest,
    fields: Mapping[str, Any],
    defaults: Mapping[str, Callable[[], Any]],
) -> dict[str, Any]:
    """Return the fields' values in the class's order; raise `UnknownType` when the class has changed too much."""
    if not isinstance(content, dict):
        message = f"type not allowed: {name!r} was another kind of class"
        raise UnknownType(message)
    if content.keys() == fields.keys():
        return content
    gone = content.keys() - fields.keys()
    if gone:
        message = f"type not allowed: {name!r} no longer has the fields {sorted(gone)!r:.200}"
        raise UnknownType(message)
    absent = rest.get("absent", ())
    completed = {}
    for field in fields:
        if field in content:
            completed[field] = content[field]
        elif field in absent:
            continue
        elif field in defaults:
            completed[field] = defaults[field]()
        else:
            message = f"type not allowed: {name!r} was stored without the field {field!r}, which has no default"
            raise UnknownType(message)
    return completed
