"""The keys of a state type: their types as pydantic checks them, their reducers and defaults."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, Literal, NotRequired, Required, Union, get_args, get_origin, get_type_hints

import msgspec
import typing_extensions
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetPydanticSchema,
    PlainValidator,
    PydanticSchemaGenerationError,
    PydanticUserError,
    TypeAdapter,
    ValidationError,
    WrapValidator,
)
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, core_schema

from keepstep.errors import GraphError
from keepstep.runtime.reducers import Reducer, add, append

_REQUIREMENTS = {Required, NotRequired, typing_extensions.ReadOnly, getattr(typing, "ReadOnly", Required)}
_NO_JSON = "needs_python_object"
_VALIDATORS: dict[str, Callable[[Any], Any]] = {
    "before": BeforeValidator,
    "after": AfterValidator,
    "plain": PlainValidator,
    "wrap": WrapValidator,
}


@dataclasses.dataclass(frozen=True, slots=True)
class StateKey:
    """One key of a state type."""

    name: str
    adapter: TypeAdapter[Any] | None
    """Checks a value; None: anything fits."""
    reducer: Reducer | None
    default: Callable[[], Any] | None
    """Makes the key's default, fresh each time; None: it has none."""
    settable: bool = True
    """False: the type computes it, an input cannot give it (`field(init=False)`)."""
    coerces: bool = False
    """The type is a pydantic model, which chooses for itself how lax it is with input."""
    normalises: bool = False
    """The type has validators of its own for the key, which may change a value."""

    def check(self, value: object) -> Any:
        """Return a node's value as it is if it has the key's type exactly; raise `ValidationError` if not."""
        if self.adapter is None:
            return value
        checked = self.adapter.validator.validate_python(value, strict=True)
        # pydantic copies containers and turns 1 into 1.0; what a node returned is what the next one gets.
        return checked if self.normalises else value

    def check_update(self, value: object) -> Any:
        """Return a node's update of the key if its reducer can take it; raise `ValidationError` if not.

        An own reducer may take anything: what it gives is checked instead.
        """
        if self.reducer is None or self.reducer is add:
            return self.check(value)
        if self.reducer is append:
            return self.check(value) if isinstance(value, list) else self.check([value])[0]
        return value

    def fit(self, value: object) -> Any:
        """Return an input as the key's type: as it is if it fits exactly, else as what JSON carries for the type."""
        if self.adapter is None:
            return value
        validator = self.adapter.validator
        if self.coerces:
            return validator.validate_python(value)
        try:
            return self.check(value)
        except ValidationError:
            carried = _as_json(value)
        if carried is None:
            return validator.validate_python(value)
        try:
            return validator.validate_json(carried, strict=True)
        except ValidationError:
            if not isinstance(value, str):
                raise
            # A command line has nothing but texts: "7" for an int, "true" for a bool.
            return validator.validate_python(value)

    def fit_update(self, value: object) -> Any:
        """Return an input as an update of the key, for its reducer."""
        if self.reducer is None or self.reducer is add:
            return self.fit(value)
        if self.reducer is append:
            return self.fit(value) if isinstance(value, list) else self.fit([value])[0]
        try:
            return self.fit(value)
        except ValidationError:
            return value


def attempt(check: Callable[[Any], Any], value: object, path: str, problems: list[str]) -> Any:
    """Return what `check` makes of a value; when it refuses, None, and what is wrong is added to `problems`."""
    try:
        return check(value)
    except ValidationError as error:
        problems.extend(problems_of(error, path))
        return None


def _as_json(value: object) -> str | None:
    try:
        return json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        return None


def read_keys(state: type) -> dict[str, StateKey]:
    """Return the keys of a state type in its order; raise `GraphError` naming the type, the key and what to do."""
    if issubclass(state, BaseModel):
        return _model_keys(state)
    try:
        hints = get_type_hints(state, include_extras=True)
    except NameError as error:
        message = (
            f"the annotations of state type {state.__qualname__} name {error.name!r}, which is not found in module "
            f"{state.__module__}: define it there at the top level (not in a function, not under TYPE_CHECKING)"
        )
        raise GraphError(message) from error
    if issubclass(state, msgspec.Struct):
        return {
            info.name: _key(state, info.name, hints[info.name], _struct_default(info))
            for info in msgspec.structs.fields(state)
        }
    if dataclasses.is_dataclass(state):
        return {
            field.name: _key(state, field.name, hints[field.name], _dataclass_default(field), settable=field.init)
            for field in dataclasses.fields(state)
        }
    return {name: _key(state, name, hint, None) for name, hint in hints.items()}


def _model_keys(state: type[BaseModel]) -> dict[str, StateKey]:
    keys = {}
    for name, info in state.model_fields.items():
        own = _own_validators(state, name)
        hint = Annotated[(info.annotation, *info.metadata, *own)] if info.metadata or own else info.annotation
        default = None if info.is_required() else functools.partial(_model_default, info)
        key = _key(state, name, hint, default)
        keys[name] = dataclasses.replace(key, coerces=True, normalises=bool(own))
    return keys


def _own_validators(state: type[BaseModel], name: str) -> list[object]:
    """Return a model's `@field_validator`s of one key as annotations, so that they hold for nodes' updates too."""
    decorators = state.__pydantic_decorators__.field_validators.values()
    return [_VALIDATORS[d.info.mode](d.func) for d in decorators if name in d.info.fields or "*" in d.info.fields]


def _model_default(info: FieldInfo) -> Any:
    return info.get_default(call_default_factory=True, validated_data={})


def _dataclass_default(field: dataclasses.Field[Any]) -> Callable[[], Any] | None:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory
    if field.default is dataclasses.MISSING:
        return None
    default = field.default
    # A pydantic dataclass may hold pydantic's own field description as the default.
    if isinstance(default, FieldInfo):
        return None if default.is_required() else functools.partial(_model_default, default)
    return lambda: default


def _struct_default(info: msgspec.structs.FieldInfo) -> Callable[[], Any] | None:
    if info.default_factory is not msgspec.NODEFAULT:
        return typing.cast("Callable[[], Any]", info.default_factory)
    return None if info.default is msgspec.NODEFAULT else lambda: info.default


def _key(state: type, name: str, hint: object, default: Callable[[], Any] | None, *, settable: bool = True) -> StateKey:
    where = f"key {name!r} of state type {state.__qualname__}"
    plain, metadata = _unwrapped(hint)
    reducers = [item for item in metadata if _is_reducer(item)]
    if len(reducers) > 1:
        message = f"{where} has {len(reducers)} reducers; a key has one"
        raise GraphError(message)
    reducer = reducers[0] if reducers else None
    if reducer is not None and not takes_two(reducer):
        message = f"the reducer of {where} must take (old, new) and give the value"
        raise GraphError(message)
    rest = [item for item in metadata if item is not reducer]
    wanted = Annotated[(plain, *rest)] if rest else plain
    return StateKey(name, _adapter(where, wanted), reducer, default, settable)


def _unwrapped(hint: Any) -> tuple[Any, list[Any]]:
    """Return an annotation without Required, NotRequired, ReadOnly and Annotated, and what Annotated held."""
    metadata: list[Any] = []
    while True:
        origin = get_origin(hint)
        if origin is Annotated:
            metadata = [*hint.__metadata__, *metadata]
            hint = hint.__origin__
        elif origin in _REQUIREMENTS:
            hint = get_args(hint)[0]
        else:
            return hint, metadata


def _is_reducer(item: object) -> bool:
    # Classes and pydantic's and msgspec's markers say something about the type; a plain callable reduces.
    return callable(item) and not isinstance(item, type)


def takes_two(function: Callable[..., Any]) -> bool:
    """Tell whether a function can be called with two positional arguments (True for builtins that do not say)."""
    try:
        inspect.signature(function).bind(None, None)
    except TypeError:
        return False
    except ValueError:
        return True
    return True


# --- annotations as pydantic understands them ---


def _adapter(where: str, annotation: Any) -> TypeAdapter[Any] | None:
    if annotation is Any or annotation is object:
        return None
    understood = _understood(annotation, {})
    try:
        return TypeAdapter(understood)
    except PydanticSchemaGenerationError:
        pass
    except PydanticUserError as error:
        message = f"the type of {where} cannot be checked: {error.message}"
        raise GraphError(message) from error
    try:
        # A class that pydantic knows nothing about: its instances fit.
        return TypeAdapter(understood, config=ConfigDict(arbitrary_types_allowed=True))
    except (PydanticSchemaGenerationError, PydanticUserError) as error:
        message = f"the type of {where} cannot be checked: {error.message}"
        raise GraphError(message) from error


def fitted(where: str, annotation: Any, value: object) -> Any:
    """Return a value that came as JSON as an annotation's type; raise `ValidationError` when it does not fit."""
    return StateKey("", _adapter(where, annotation), None, None).fit(value)


def value_of(where: str, annotation: Any) -> StateKey:
    """Return how values of an annotation's type are checked, made exactly of it, and fitted when they came as JSON.

    Raises `GraphError` naming `where` when the annotation cannot be checked.
    """
    return StateKey("", _adapter(where, annotation), None, None, normalises=True)


def understood(annotation: Any) -> Any:
    """Return an annotation in pydantic's words."""
    return _understood(annotation, {})


def _understood(annotation: Any, memo: dict[Any, Any]) -> Any:
    """Return an annotation with msgspec's types and typing's TypedDicts told in pydantic's words."""
    origin = get_origin(annotation)
    if origin is None:
        return _understood_class(annotation, memo) if isinstance(annotation, type) else annotation
    if origin is Annotated:
        metadata = [_understood_constraint(item) for item in annotation.__metadata__]
        return Annotated[(_understood(annotation.__origin__, memo), *metadata)]
    if origin is Literal or origin is Callable:
        return annotation
    before = get_args(annotation)
    after = tuple(_understood(item, memo) for item in before)
    if all(map(_is, before, after)):
        return annotation
    if origin in (Union, types.UnionType):
        return Union[after]  # noqa: UP007  the members are known at run time only
    if hasattr(annotation, "copy_with"):
        return annotation.copy_with(after)
    return origin[after]


def _is(one: object, other: object) -> bool:
    return one is other


def _understood_class(annotation: type, memo: dict[Any, Any]) -> Any:
    if issubclass(annotation, msgspec.Struct):
        return Annotated[annotation, GetPydanticSchema(_struct_schema)]
    if issubclass(annotation, BaseModel) or (issubclass(annotation, tuple) and hasattr(annotation, "_fields")):
        return Annotated[annotation, GetPydanticSchema(_exact_schema)]
    if typing_extensions.is_typeddict(annotation):
        # pydantic reads typing's own from Python 3.12 on, and what is in it must be understood as well.
        if annotation in memo:
            return memo[annotation]
        memo[annotation] = dict[str, Any]  # where it contains itself
        items = {}
        for name, hint in get_type_hints(annotation, include_extras=True).items():
            plain, metadata = _unwrapped(hint)
            item = _understood(Annotated[(plain, *metadata)] if metadata else plain, memo)
            items[name] = Required[item] if _is_required(annotation, name, hint) else NotRequired[item]
        memo[annotation] = typing_extensions.TypedDict(annotation.__name__, items)  # type: ignore[operator]
        return memo[annotation]
    return annotation


def _is_required(owner: Any, name: str, hint: Any) -> bool:
    while (origin := get_origin(hint)) is Annotated or origin in _REQUIREMENTS:
        if origin in (Required, NotRequired):
            return origin is Required
        hint = get_args(hint)[0]
    # Python 3.11 does not see the markers in annotations that are texts, so they come first.
    return name in owner.__required_keys__


def _understood_constraint(item: object) -> object:
    if not isinstance(item, msgspec.Meta):
        return item
    names = ("gt", "ge", "lt", "le", "multiple_of", "pattern", "min_length", "max_length")
    limits: Mapping[str, Any] = {name: value for name in names if (value := getattr(item, name)) is not None}
    return Field(**limits)


def _struct_schema(source: Any, _handler: object) -> CoreSchema:
    def convert(value: object) -> object:
        if isinstance(value, source):
            return value
        try:
            return msgspec.convert(value, source)
        except msgspec.ValidationError as error:
            raise ValueError(str(error)) from error

    lax = core_schema.no_info_plain_validator_function(convert)
    exact = core_schema.is_instance_schema(source)
    dump = core_schema.plain_serializer_function_ser_schema(msgspec.to_builtins, when_used="json")
    python = core_schema.lax_or_strict_schema(lax, exact)
    return core_schema.json_or_python_schema(lax, python, serialization=dump)


def _exact_schema(source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
    # By itself a model takes a dict, and a NamedTuple a tuple, even where values must be exact.
    model = handler(source)
    exact = core_schema.is_instance_schema(source)
    return core_schema.json_or_python_schema(model, core_schema.lax_or_strict_schema(model, exact))


def problems_of(error: ValidationError, path: str) -> Iterable[str]:
    """Yield each problem as "path: what is wrong", never with the value, which may be a secret."""
    for item in error.errors(include_url=False, include_context=False, include_input=False):
        place = ".".join([path, *map(str, item["loc"])])
        # pydantic's text for a class that it can only ask for its instances tells how to write validators.
        yield f"{place}: {'JSON cannot carry this type' if item['type'] == _NO_JSON else item['msg']}"
