"""Tools as users declare them: a function that an agent may call through the gateway, and what is to be heeded then."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from types import MappingProxyType
from typing import Any, Final, Generic, ParamSpec, TypeVar, overload

from keepstep.errors import GraphError, InvalidInput
from keepstep.ids import checked_name
from keepstep.runtime import effects
from keepstep.runtime.effects import EffectDeclaration
from keepstep.runtime.policy import Retry, seconds
from keepstep.runtime.rates import Rate
from keepstep.runtime.toolarguments import Arguments, parameters_of

P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])

RISKS: Final = ("low", "medium", "high")
_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")
"""What the models' interfaces take."""
_KEY, _RESULT = "idempotency_key", "result"


class Phase:
    """One of the functions of a tool, as the journal knows it: an effect of its own."""

    def __init__(self, function: Callable[..., Any], tool: str, secrets: Mapping[str, str]) -> None:
        functools.update_wrapper(self, function)
        self.function = function
        self.takes = frozenset(parameters_of(tool, function))
        self.references = secrets
        """The tool's secrets, by parameter: it is given those that it takes, and so is its undo."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function itself."""
        return self.function(*args, **kwargs)

    @property
    def is_async(self) -> bool:
        """Whether it needs an event loop."""
        return inspect.iscoroutinefunction(self.function)

    @property
    def declared(self) -> EffectDeclaration:
        """What it says about itself as an effect."""
        return effects.declaration_of(self)


class Tool(Generic[P, R]):
    """A tool: call it by `ctx.call(tool, arguments)`, or directly, as the function that it is, in a unit test."""

    __keepstep_tool__ = True
    prepare_phase: Phase | None = None
    commit_phase: Phase | None = None
    cancel_phase: Phase | None = None

    def __init__(  # noqa: PLR0913  what a tool may declare
        self,
        function: Callable[P, R],
        name: str | None = None,
        *,
        version: str = "1",
        risk: str = "low",
        scopes: Sequence[str] = (),
        idempotent: bool = False,
        lookup: Callable[..., Any] | None = None,
        settling: float | timedelta = 0,
        undo: Callable[..., Any] | None = None,
        timeout: float | timedelta | None = None,
        rate: str | None = None,
        retry: Retry | None = None,
        schema: Any = None,
        secrets: Mapping[str, str] | None = None,
        approve: bool | str | Sequence[str] = False,
    ) -> None:
        """See `tool`."""
        functools.update_wrapper(self, function)
        self.name = _checked_name(function, name)
        self.version = _refused("the version of tool " + repr(self.name), version)
        self.risk = _checked_risk(self.name, risk)
        self.scopes = _texts(self.name, "scopes", scopes)
        self.timeout_seconds = None if timeout is None else seconds(f"timeout of tool {self.name!r}", timeout)
        self.rate = _checked_rate(self.name, rate)
        self.retry = _checked_retry(self.name, retry)
        self.asks = approve is not False
        """Whether every call needs approval, whatever policies say."""
        self.approvers = () if isinstance(approve, bool) else _texts(self.name, "approve", approve)
        """The roles that approve; empty: anybody."""
        self.secrets: Mapping[str, str] = MappingProxyType(dict(secrets or {}))
        """By parameter, the reference of the secret that it is given."""
        self._check_secrets(parameters_of(self.name, function))
        self.arguments = Arguments(self.name, function, {_KEY, *self.secrets}, schema)
        self.execution = self._phase(
            function, self.name, idempotent=idempotent, lookup=lookup, settling=settling, undo=undo
        )

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the function itself, past the gateway: in a unit test."""
        return self.execution.function(*args, **kwargs)  # type: ignore[no-any-return]  # what the function returned

    def __repr__(self) -> str:
        """Show name and version."""
        return f"Tool({self.name!r}, version={self.version!r})"

    @property
    def json_schema(self) -> dict[str, Any]:
        """The JSON schema of the arguments."""
        return self.arguments.json_schema

    @property
    def is_async(self) -> bool:
        """Whether one of its functions needs an event loop."""
        return any(phase.is_async for phase in self.phases)

    @property
    def phases(self) -> tuple[Phase, ...]:
        """Its functions."""
        every = (self.prepare_phase, self.execution, self.commit_phase, self.cancel_phase)
        return tuple(phase for phase in every if phase is not None)

    def definition(self) -> dict[str, Any]:
        """Return the tool as OpenAI-compatible models are told of it: name, description (the docstring), parameters."""
        function = {"name": self.name, "description": inspect.getdoc(self) or "", "parameters": self.json_schema}
        return {"type": "function", "function": function}

    # --- two-phase ---

    def prepare(self, function: F | None = None, /, **options: Any) -> Any:
        """Declare what is done first: it takes the tool's arguments and returns them as they are to be executed.

        That is a mapping of the tool's own arguments; None leaves them as they are. `@tool.prepare`, also with options
        `idempotent`, `lookup`, `settling`: it is an effect of its own, `<tool>.prepare`.
        """
        return self._declared("prepare", function, options)

    def commit(self, function: F | None = None, /, **options: Any) -> Any:
        """Declare what is done last: it takes the tool's arguments as they were executed, and `result`; see `prepare`.

        When it fails it is tried again, as `retry` of the tool says, or three times; nothing is cancelled any more.
        """
        return self._declared("commit", function, options)

    def cancel(self, function: F | None = None, /, **options: Any) -> Any:
        """Declare what takes back what was prepared: it takes the prepared arguments; see `prepare`.

        It is called, once, when the call is rejected, expires or is denied, and when the execution failed for good. Of
        an execution whose outcome nobody knows, or that a person gave up, nothing is cancelled.
        """
        return self._declared("cancel", function, options)

    def _declared(self, kind: str, function: Any, options: dict[str, Any]) -> Any:
        if function is None:
            return lambda decorated: self._declared(kind, decorated, options)
        unknown = options.keys() - {"idempotent", "lookup", "settling"}
        if unknown:
            message = f"tool {self.name!r}: {kind} takes idempotent, lookup and settling, not {min(unknown)!r}"
            raise GraphError(message)
        if kind != "prepare" and self.prepare_phase is None:
            message = f"tool {self.name!r}: declare its prepare before its {kind}"
            raise GraphError(message)
        if getattr(self, f"{kind}_phase") is not None:
            message = f"tool {self.name!r} has a {kind} already"
            raise GraphError(message)
        self._check_handler(kind, function)
        setattr(self, f"{kind}_phase", self._phase(function, f"{self.name}.{kind}", **options))
        executed = self.execution.declared
        if kind == "prepare" and executed.idempotent:
            # An intent tells what may have been executed from what may be cancelled.
            effects.redeclare(self.execution, dataclasses.replace(executed, idempotent=False, repeatable=True))
        return function

    def _check_handler(self, kind: str, function: Callable[..., Any]) -> None:
        own = {_KEY, *self.secrets, *((_RESULT,) if kind == "commit" else ())}
        parameters = parameters_of(self.name, function)
        for name in parameters:
            if name not in own and name not in self.arguments.names:
                message = (
                    f"tool {self.name!r}: its {kind} takes {name!r}, which is no argument of the tool: what prepare "
                    "makes is handed on in an argument of the tool's"
                )
                raise GraphError(message)
        for name in self.arguments.names:
            if name not in parameters:
                message = f"tool {self.name!r}: its {kind} must take the tool's arguments, and {name!r} is missing"
                raise GraphError(message)
        # The others get what was prepared, and that may be whole.
        for name in self.arguments.omitted if kind == "prepare" else ():
            if parameters[name].default is inspect.Parameter.empty:
                message = f"tool {self.name!r}: its {kind} needs a default of {name!r}, too: a call may leave it out"
                raise GraphError(message)

    def _phase(self, function: Callable[..., Any], name: str, **options: Any) -> Phase:
        phase = Phase(function, self.name, self.secrets)
        effects.effect(name=name, **options)(phase)
        timed = dataclasses.replace(phase.declared, timeout_seconds=self.timeout_seconds, counted=True)
        effects.redeclare(phase, timed)
        return phase

    def _check_secrets(self, parameters: Mapping[str, inspect.Parameter]) -> None:
        for name, ref in self.secrets.items():
            if name not in parameters:
                message = f"tool {self.name!r}: secrets names {name!r}, which is no parameter of the function"
                raise GraphError(message)
            if name == _KEY:
                message = f"tool {self.name!r}: {_KEY} is the call's key and no secret"
                raise GraphError(message)
            _refused(f"the secret {name!r} of tool {self.name!r}", ref)


@overload
def tool(function: Callable[P, R], /) -> Tool[P, R]: ...


@overload
def tool(
    name: str | None = None,
    *,
    version: str = ...,
    risk: str = ...,
    scopes: Sequence[str] = ...,
    idempotent: bool = ...,
    lookup: Callable[..., Any] | None = ...,
    settling: float | timedelta = ...,
    undo: Callable[..., Any] | None = ...,
    timeout: float | timedelta | None = ...,
    rate: str | None = ...,
    retry: Retry | None = ...,
    schema: Any = ...,
    secrets: Mapping[str, str] | None = ...,
    approve: bool | str | Sequence[str] = ...,
) -> Callable[[Callable[P, R]], Tool[P, R]]: ...


def tool(name: Any = None, **options: Any) -> Any:
    """Declare a tool: what `ctx.call(tool, arguments)` calls, and what models may ask for by its name.

    `name` (the function's own) is part of the idempotency key, and what a model calls it: letters, digits, _ and -.
    `version` stands in approvals, policies and the audit; `risk` (`low`, `medium`, `high`) and `scopes` are for
    policies. `idempotent`, `lookup`, `settling` and `undo` are as of `effect`.

    `timeout` (seconds or timedelta) bounds one call: a call that ran out of it has a lost answer, which is unknown
    unless `idempotent`. A coroutine is cancelled then, a plain function interrupted where the node's own time-out can
    (in a process's main thread); elsewhere it ends by itself, or with its node. `rate` (`10/s`, `20/m`) is per tenant:
    a call over it puts the node run off, which holds no worker. `retry`: how often a call that is known to have failed
    is made again, under the same key.

    Arguments are the function's parameters but `idempotency_key` and those in `secrets`, which maps parameters to the
    references of secrets (`env:NAME`). Their types are the annotations', or what `schema` says: a JSON schema, a
    pydantic model, a TypedDict. `approve=True`, or roles, asks people before every call, whatever policies say.

    Raises `GraphError` for what does not hold together.
    """
    if callable(name):
        return Tool(name)
    return lambda function: Tool(function, name, **options)


def by_name(where: str, tools: Iterable[Any]) -> dict[str, Tool[..., Any]]:
    """Return tools by their names; raise `GraphError` for what is no tool, or has the name of another."""
    found: dict[str, Tool[..., Any]] = {}
    for each in tools:
        if not isinstance(each, Tool):
            message = f"tools of {where} must be declared by @tool, unlike {each!r}"
            raise GraphError(message)
        if found.setdefault(each.name, each) is not each:
            message = f"{where} has two tools named {each.name!r}: a model could not tell them apart"
            raise GraphError(message)
    return found


def _checked_name(function: Callable[..., Any], name: str | None) -> str:
    found = getattr(function, "__name__", "") if name is None else name
    if not isinstance(found, str) or not _NAME.fullmatch(found):
        message = f"tool {found!r:.80}: models take names of 1 to 64 letters, digits, _ and -; give @tool(name)"
        raise GraphError(message)
    return found


def _checked_risk(name: str, risk: str) -> Any:
    if risk not in RISKS:
        message = f"tool {name!r}: risk must be one of {', '.join(RISKS)}, not {risk!r}"
        raise GraphError(message)
    return risk


def _checked_rate(name: str, rate: str | None) -> Rate | None:
    if rate is None:
        return None
    try:
        return Rate.parse(rate)
    except InvalidInput as error:
        message = f"tool {name!r}: {error.message}"
        raise GraphError(message) from None


def _checked_retry(name: str, retry: Any) -> Retry | None:
    if not isinstance(retry, Retry | None):
        message = f"tool {name!r}: retry must be a Retry, not {retry!r}"
        raise GraphError(message)
    return retry


def _texts(name: str, what: str, values: str | Sequence[str]) -> tuple[str, ...]:
    listed = (values,) if isinstance(values, str) else tuple(values)
    for each in listed:
        _refused(f"{what} of tool {name!r}", each)
    return listed


def _refused(what: str, value: object) -> str:
    try:
        return checked_name(what, value)
    except InvalidInput as error:
        raise GraphError(error.message) from None
