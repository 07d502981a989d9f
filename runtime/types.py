"""Types that stored data may name: which classes, how an instance is taken apart, how it is put together again.

A class is known by its qualified name (`Invoice.Stage`), not by its module, so that what a script wrote as `__main__`
is read by a worker that imports it as `app`. Nothing is ever looked up by a name found in data: a name is a key of a
`TypeRegistry`, which holds the classes that the graph's annotations reach and no other.

Instances are put together without running user code: neither `__init__`, `__post_init__` nor a validator sees stored
values, so that what comes back is what was there and not what today's code would have made of it.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import enum
import inspect
import sys
import types
import typing
from typing import TYPE_CHECKING, Any

import msgspec
import typing_extensions
from pydantic import BaseModel

from keepstep.errors import GraphError, NotStorable, UnknownType
from keepstep.runtime.scalars import KINDS, SCALARS
from keepstep.runtime.shapes import Refusal, Shape, shape_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

_ALIASES = tuple({typing_extensions.TypeAliasType, getattr(typing, "TypeAliasType", typing_extensions.TypeAliasType)})
_WIDER_MAX = 1024
_SHARED = frozenset({type(None), bool, int, float, complex, str, bytes, type, types.FunctionType, *SCALARS})


class TypeRegistry:
    """The classes that stored data may name.

    `declared` are annotations of any form (`Refund`, `list[Invoice] | None`, `Annotated[…]`); every dataclass, pydantic
    model, msgspec Struct, NamedTuple and enum that they reach is declared with them. Subclasses are not: name them.
    Raises `GraphError` for two classes of one name and for an annotation that cannot be resolved.
    """

    def __init__(self, declared: Iterable[Any] = ()) -> None:
        self._by_name: dict[str, Shape] = {}
        self._by_class: dict[type, Shape] = {}
        self._seen: set[Any] = set()
        self._wider: dict[tuple[Any, ...], TypeRegistry] = {}
        self._declare(tuple(declared))

    def including(self, *declared: Any) -> TypeRegistry:
        """Return a registry that also knows what `declared` reach, or this one when it knows it all."""
        try:
            known = self._wider.get(declared)
        except TypeError:  # Annotated with metadata that has no hash
            return self._widened(declared)
        if known is None:
            if len(self._wider) >= _WIDER_MAX:  # annotations made at run time, without end
                self._wider.clear()
            known = self._wider[declared] = self._widened(declared)
        return known

    def _widened(self, declared: tuple[Any, ...]) -> TypeRegistry:
        wider = TypeRegistry()
        wider._by_name, wider._by_class, wider._seen = dict(self._by_name), dict(self._by_class), set(self._seen)
        wider._declare(declared)
        return self if wider._by_class == self._by_class else wider

    def shape(self, cls: type) -> Shape | None:
        """Return how instances of exactly `cls` are stored, or None when `cls` is not declared."""
        return self._by_class.get(cls)

    def named(self, name: str) -> Shape:
        """Return the declared class that stored data calls `name`; raise `UnknownType` when there is none."""
        shape = self._by_name.get(name)
        if shape is None:
            message = f"type not allowed: the graph does not declare {name!r:.200}"
            raise UnknownType(message)
        return shape

    def names(self) -> list[str]:
        """Return the names of all declared classes, sorted."""
        return sorted(self._by_name)

    def _declare(self, declared: tuple[Any, ...]) -> None:
        # Classes local to a function are invisible to typing; those that are declared by hand can be found by name.
        local = {item.__name__: item for item in declared if isinstance(item, type)}
        todo = list(reversed(declared))
        while todo:
            annotation = todo.pop()
            if annotation is typing.Generic:  # its own origin: it would be met for ever
                continue
            if isinstance(annotation, (type, *_ALIASES)) and typing.get_origin(annotation) is None:
                if annotation in self._seen:
                    continue
                self._seen.add(annotation)
            if isinstance(annotation, type) and typing.get_origin(annotation) is None:
                self._add(annotation)
            todo.extend(reversed(list(_reached(annotation, local))))

    def _add(self, cls: type) -> None:
        shape = shape_of(cls)
        if shape is None:
            return
        if shape.name in KINDS:
            message = f"{cls.__module__}.{shape.name}: stored data calls a builtin type that; rename the class"
            raise GraphError(message)
        other = self._by_name.setdefault(shape.name, shape)
        if other.cls is not cls:
            message = (
                f"two types are called {shape.name!r} in stored data: {other.cls.__module__}.{shape.name} "
                f"and {cls.__module__}.{shape.name}; rename one"
            )
            raise GraphError(message)
        self._by_class[cls] = shape


def _reached(annotation: Any, local: dict[str, type]) -> Iterator[Any]:
    """Yield the annotations one step inside `annotation`."""
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated:
        yield typing.get_args(annotation)[0]
    elif origin is typing.Literal:
        yield from (type(choice) for choice in typing.get_args(annotation) if isinstance(choice, enum.Enum))
    elif origin is not None:
        yield origin
        for argument in typing.get_args(annotation):
            yield from argument if isinstance(argument, list) else (argument,)  # Callable[[A, B], C]
    elif isinstance(annotation, type):
        yield from _members(annotation, local)
    else:
        yield from _named(annotation, local)


def _named(annotation: Any, local: dict[str, type]) -> Iterator[Any]:
    """Yield what a name for an annotation stands for."""
    if isinstance(annotation, _ALIASES):
        yield _evaluated(annotation.__value__, annotation.__module__ or __name__, local)
    elif isinstance(annotation, typing.NewType):
        yield annotation.__supertype__
    elif isinstance(annotation, typing.TypeVar):
        inside = (annotation.__bound__, *annotation.__constraints__, getattr(annotation, "__default__", None))
        yield from (item for item in inside if not isinstance(item, typing.ForwardRef))  # of no use to a value's type
    elif isinstance(annotation, typing.ForwardRef | str):
        name = annotation if isinstance(annotation, str) else annotation.__forward_arg__
        if name not in local:
            message = f"the annotation {name!r} cannot be resolved; declare that class with types=[…]"
            raise GraphError(message)
        yield local[name]


def _members(cls: type, local: dict[str, type]) -> Iterator[Any]:
    """Yield the annotations of the fields of `cls`, when it is a class whose fields are stored."""
    bases = [base for base in getattr(cls, "__orig_bases__", ()) if typing.get_origin(base) is not None]
    if issubclass(cls, BaseModel):
        if not cls.__pydantic_complete__:
            cls.model_rebuild(raise_errors=False, _types_namespace={**vars(sys.modules[cls.__module__]), **local})
        yield from (field.annotation for field in cls.model_fields.values())
        yield cls.__pydantic_generic_metadata__["origin"]
        yield from cls.__pydantic_generic_metadata__["args"]
        yield from _private_hints(cls)
    elif (
        dataclasses.is_dataclass(cls)
        or issubclass(cls, msgspec.Struct)
        or typing_extensions.is_typeddict(cls)
        or (issubclass(cls, tuple) and hasattr(cls, "_fields"))
    ):
        yield from _hints(cls, local).values()
        yield from bases


def _private_hints(model: type[BaseModel]) -> Iterator[Any]:
    """Yield the annotations of a model's private attributes that can be resolved: pydantic itself never reads them."""
    for base in model.__mro__:
        for name, annotation in inspect.get_annotations(base).items():
            if name not in model.__private_attributes__:
                continue
            # What cannot be resolved is no loss: an instance of it is refused when it is stored, with its path.
            with contextlib.suppress(NameError):
                yield _evaluated(annotation, base.__module__, vars(base))


def _evaluated(annotation: Any, module: str, names: Mapping[str, Any]) -> Any:
    """Return an annotation with the names in its texts replaced by what they name in `module`."""
    holder = type("holder", (), {"__annotations__": {"it": annotation}})
    namespace = {**vars(sys.modules[module]), **names}
    return typing_extensions.get_type_hints(holder, namespace, namespace, include_extras=True)["it"]


def _hints(cls: type, local: dict[str, type]) -> dict[str, Any]:
    try:
        return typing_extensions.get_type_hints(cls, include_extras=True)
    except NameError:
        pass
    try:
        return typing_extensions.get_type_hints(cls, localns={**local, **vars(cls)}, include_extras=True)
    except NameError as error:
        message = (
            f"{cls.__module__}.{cls.__qualname__}: an annotation cannot be resolved ({error}); "
            f"declare that class with types=[…]"
        )
        raise GraphError(message) from None


def private_copy(value: Any) -> Any:
    """Return a deep copy of `value` that shares nothing mutable with it; immutable values are shared.

    Faster than `copy.deepcopy`, which it falls back to for types it does not know and for recursive data. An object
    that `value` holds twice comes back as two, as it does from the store. Raises `NotStorable` for what has no copy.
    """
    try:
        return _copied(value)
    except RecursionError:
        return _deep_copied(value)


def _copied(value: Any) -> Any:
    cls = type(value)
    if cls in _SHARED or isinstance(value, enum.Enum):
        return value
    if cls is dict:
        return {key: item if type(item) in _SHARED else _copied(item) for key, item in value.items()}
    if cls is list:
        return [item if type(item) in _SHARED else _copied(item) for item in value]
    if cls in (tuple, set, frozenset):
        return cls(_copied(item) for item in value)
    shape = shape_of(cls)
    if shape is None:
        return _deep_copied(value)
    try:
        content, rest = shape.take(value)
    except Refusal:
        return _deep_copied(value)
    return shape.make(_copied(content), _copied(rest))


def _deep_copied(value: Any) -> Any:
    try:
        return copy.deepcopy(value)
    except (TypeError, RecursionError) as error:
        message = f"a {type(value).__qualname__} cannot be copied: {error}"
        raise NotStorable(message) from None
