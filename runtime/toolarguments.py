"""The arguments of a tool: what a model is told that it may give, and how what it gave becomes what the tool takes."""

from __future__ import annotations

import contextlib
import inspect
import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, NotRequired, Required, get_args, get_origin, get_type_hints

import typing_extensions
from pydantic import BaseModel, TypeAdapter, ValidationError

from keepstep.errors import GraphError, ToolArguments
from keepstep.runtime.fields import StateKey, attempt, problems_of, understood, value_of

_PROBLEMS_SHOWN_MAX = 5
_NAME_SHOWN_MAX = 80
"""Characters of a name that a model made up."""
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


@dataclass(frozen=True, slots=True)
class _Argument:
    key: StateKey
    is_required: bool


class Arguments:
    """What a tool takes, by name.

    `hidden` are the parameters that are not arguments: nobody is told of them, and nobody can give them. Without
    `schema` (a JSON schema, a pydantic model or a TypedDict) the annotations say what fits. Raises `GraphError`.
    """

    def __init__(self, tool: str, function: Callable[..., Any], hidden: Collection[str], schema: Any = None) -> None:
        self._tool = tool
        parameters = parameters_of(tool, function)
        hints = _hints(tool, function)
        shown = {name: each for name, each in parameters.items() if name not in hidden}
        annotations = {name: _plain(hints.get(name, Any)) for name in shown}
        self._arguments = {
            name: _Argument(
                value_of(f"argument {name!r} of tool {tool!r}", annotations[name]), each.default is each.empty
            )
            for name, each in shown.items()
        }
        self._adapter: TypeAdapter[Any] | None = None
        self._validator: Any = None
        if schema is None:
            self.json_schema = _schema_of(tool, shown, annotations)
        elif isinstance(schema, Mapping):
            self.json_schema = json.loads(json.dumps(schema))
            self._validator = _validator(tool, self.json_schema)
        else:
            self._adapter, self.json_schema = _of_type(tool, schema)
        _check_names(tool, self.json_schema, self._arguments, given=schema is not None)

    @property
    def names(self) -> tuple[str, ...]:
        """The arguments' names, in the order of the function's parameters."""
        return tuple(self._arguments)

    @property
    def omitted(self) -> tuple[str, ...]:
        """Those that a call may leave out."""
        required = self.json_schema.get("required", ())
        return tuple(name for name, each in self._arguments.items() if not each.is_required and name not in required)

    def checked(self, given: object) -> dict[str, Any]:
        """Return a call's arguments with the function's types, in one order whatever order they came in.

        `given` is a mapping as JSON carries it, or with those types already. Raises `ToolArguments` naming the path of
        everything that does not fit, and no value.
        """
        if not isinstance(given, Mapping):
            message = f"the arguments of tool {self._tool!r} must be a mapping, not {type(given).__name__}"
            raise ToolArguments(message)
        try:
            return self._fitted(given)
        except RecursionError:
            message = f"the arguments do not fit tool {self._tool!r}: they are nested too deep"
            raise ToolArguments(message) from None

    def _fitted(self, given: Mapping[Any, Any]) -> dict[str, Any]:
        known = ", ".join(self._arguments) or "none"
        problems = [
            f"$.{name!s:.{_NAME_SHOWN_MAX}}: unknown argument (known: {known})"
            for name in given
            if name not in self._arguments
        ]
        values = {name: given[name] for name in self._arguments if name in given}
        missing = [name for name, each in self._arguments.items() if each.is_required and name not in values]
        problems += [f"$.{name}: missing" for name in missing]
        if not problems and self._adapter is not None:
            values = self._by_type(values, problems)
        if not problems and self._validator is not None:
            problems += [_told(each) for each in self._validator.iter_errors(values)]
        if self._adapter is None or not problems:
            values = {
                name: attempt(self._arguments[name].key.fit, value, f"$.{name}", problems)
                for name, value in values.items()
            }
        if problems:
            more = len(problems) - _PROBLEMS_SHOWN_MAX
            shown = "; ".join(problems[:_PROBLEMS_SHOWN_MAX]) + (f"; and {more} more" if more > 0 else "")
            message = f"the arguments do not fit tool {self._tool!r}: {shown}"
            raise ToolArguments(message)
        return {name: _in_order(value) for name, value in values.items()}

    def _by_type(self, values: dict[str, Any], problems: list[str]) -> dict[str, Any]:
        try:
            fitted = self._adapter.validate_python(values) if self._adapter is not None else values
        except ValidationError as error:
            problems += problems_of(error, "$")
            return values
        parts = dict(fitted)  # a mapping, or a model's fields
        known = ", ".join(self.json_schema.get("properties", ())) or "none"
        problems += [f"$.{name}: unknown argument (known: {known})" for name in values if name not in parts]
        return {name: parts[name] for name in values if name in parts}


def parameters_of(tool: str, function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Return a function's parameters; raise `GraphError` when they cannot all be given by name."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError) as error:
        message = f"tool {tool!r}: its function does not say what it takes"
        raise GraphError(message) from error
    for each in parameters.values():
        if each.kind in _VARIADIC:
            stars = "*" if each.kind is each.VAR_POSITIONAL else "**"
            message = f"tool {tool!r}: parameter {stars}{each.name} takes anything; name every argument"
            raise GraphError(message)
        if each.kind is each.POSITIONAL_ONLY:
            message = f"tool {tool!r}: parameter {each.name!r} is positional-only; arguments are given by name"
            raise GraphError(message)
    return parameters


def _hints(tool: str, function: Callable[..., Any]) -> dict[str, Any]:
    try:
        return get_type_hints(inspect.unwrap(function), include_extras=True)
    except NameError as error:
        message = (
            f"tool {tool!r}: its annotations name {error.name!r}, which is not found in module {function.__module__}: "
            "define it there at the top level (not in a function, not under TYPE_CHECKING)"
        )
        raise GraphError(message) from error


def _plain(annotation: Any) -> Any:
    return get_args(annotation)[0] if get_origin(annotation) in (Required, NotRequired) else annotation


def _schema_of(tool: str, shown: Mapping[str, inspect.Parameter], annotations: Mapping[str, Any]) -> dict[str, Any]:
    fields = {
        name: Required[understood(annotations[name])]
        if each.default is each.empty
        else NotRequired[understood(annotations[name])]
        for name, each in shown.items()
    }
    _, schema = _of_type(tool, typing_extensions.TypedDict("Arguments", fields))  # type: ignore[operator]  # at run time
    properties = schema.setdefault("properties", {})
    for name, each in shown.items():
        properties[name].pop("title", None)
        if each.default is not each.empty:
            with contextlib.suppress(TypeError, ValueError):  # a default that JSON does not have is not shown
                properties[name]["default"] = json.loads(json.dumps(each.default))
    schema.pop("title", None)
    return {**schema, "additionalProperties": False}


def _of_type(tool: str, schema: Any) -> tuple[TypeAdapter[Any], dict[str, Any]]:
    is_model = isinstance(schema, type) and issubclass(schema, BaseModel)
    if not is_model and not typing_extensions.is_typeddict(schema):
        message = f"tool {tool!r}: schema must be a JSON schema, a pydantic model or a TypedDict, not {schema!r}"
        raise GraphError(message)
    try:
        adapter: TypeAdapter[Any] = TypeAdapter(schema if is_model else understood(schema))
        return adapter, adapter.json_schema()
    except Exception as error:
        message = f"tool {tool!r}: no JSON schema can be made of its arguments: {type(error).__name__}: {error}"
        raise GraphError(message) from error


def _validator(tool: str, schema: Any) -> Any:
    import jsonschema  # noqa: PLC0415  a tenth of a worker's start, and few tools bring a schema of their own

    kind = jsonschema.Draft202012Validator
    try:
        kind.check_schema(schema, format_checker=kind.FORMAT_CHECKER)
    except jsonschema.SchemaError as error:
        message = f"tool {tool!r}: its schema is no JSON schema: {error.json_path}: {error.message}"
        raise GraphError(message) from None
    return kind(schema, format_checker=kind.FORMAT_CHECKER)


def _check_names(tool: str, schema: Any, arguments: Mapping[str, _Argument], *, given: bool) -> None:
    if not given:
        return
    if not isinstance(schema, dict) or schema.get("type") != "object":
        message = f"tool {tool!r}: its schema must be of an object, whose properties are the arguments"
        raise GraphError(message)
    properties = schema.get("properties", {})
    strange = [name for name in properties if name not in arguments]
    missing = [name for name, each in arguments.items() if each.is_required and name not in properties]
    if strange or missing:
        what = f"names {strange[0]!r}, which is" if strange else f"does not name {missing[0]!r}, which is"
        message = f"tool {tool!r}: its schema {what} {'no' if strange else 'an'} argument of the function"
        raise GraphError(message)


def _told(problem: Any) -> str:
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in problem.absolute_path)
    return f"${path}: does not fit the schema ({problem.validator})"


def _in_order(value: Any) -> Any:
    """Return a value whose dicts are in one order: what a model writes in another order is the same call."""
    if type(value) is dict:
        names = sorted(value, key=repr)
        return {name: _in_order(value[name]) for name in names}
    return [_in_order(each) for each in value] if type(value) is list else value
