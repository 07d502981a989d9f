"""The graph as users write it: nodes, edges, routes, a state type, a name and a version."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar, overload

from keepstep.errors import GraphError, InvalidInput
from keepstep.ids import checked_name
from keepstep.runtime import drawing
from keepstep.runtime.compiled import CompiledGraph, Node, Route, compiled
from keepstep.runtime.databases import Database
from keepstep.runtime.fields import takes_two
from keepstep.runtime.policy import NO_RETRY, Retry, seconds
from keepstep.runtime.routing import END, START, Choose, Goto, Send
from keepstep.runtime.state import StateSchema
from keepstep.runtime.tools import Tool
from keepstep.runtime.tools import by_name as tools_by_name

if TYPE_CHECKING:
    from sqlalchemy import Engine

__all__ = ["END", "START", "CompiledGraph", "Goto", "Graph", "Node", "Send"]

_F = TypeVar("_F", bound=Callable[..., Any])
# They separate the parts of node paths and of node run ids.
_RESERVED_IN_NAMES = "/#"


class Graph:
    """An agent: what it does (nodes), in which order (edges and routes), on what (the state type).

    `name` and `version` are what threads are started by. `step_limit` bounds the super-steps of one run, `fan_out` says
    when node runs of one super-step become tasks of their own: True always, False never, a number: when there are more
    than that; None leaves both to the settings. `running_max` bounds how many steps and node runs of it run at once,
    over all workers; what an operator sets (`keepstep limit`) stands over it. `types` are classes that stored values
    may have although the state type does not name them (those of Send inputs, of values under `Any`). `tools` are those
    that `ctx.call` finds by name, as models ask for them; `graph.tools` has them by name. Raises `GraphError`.
    """

    def __init__(
        self,
        name: str,
        *,
        state: type,
        version: str = "1",
        step_limit: int | None = None,
        fan_out: bool | int | None = None,
        running_max: int | None = None,
        types: Iterable[type] = (),
        tools: Iterable[Tool[..., Any]] = (),
    ) -> None:
        self.name = _checked("a graph's name", name)
        self.version = _checked(f"the version of graph {name!r}", version)
        self.step_limit = None if step_limit is None else _count(f"step_limit of graph {name!r}", step_limit)
        self.fan_out = (
            fan_out if fan_out is None or isinstance(fan_out, bool) else _count(f"fan_out of graph {name!r}", fan_out)
        )
        self.running_max = None if running_max is None else _count(f"running_max of graph {name!r}", running_max)
        self.schema = StateSchema(state)
        self.types = tuple(types)
        self.tools = tools_by_name(f"graph {name!r}", tools)
        self.nodes: dict[str, Node] = {}
        self.subgraphs: dict[str, Graph] = {}
        self.edges: list[tuple[str, str]] = []
        self.routes: list[Route] = []
        self.databases: dict[str, Database] = {}
        self._compiled: CompiledGraph | None = None
        self._compiled_of: tuple[int, ...] = ()

    def __repr__(self) -> str:
        """Show name and version."""
        return f"Graph({self.name!r}, version={self.version!r})"

    @overload
    def node(self, function: Graph, /, *, name: str | None = None) -> Graph: ...

    @overload
    def node(
        self,
        function: None = None,
        /,
        *,
        name: str | None = None,
        retry: Retry | None = None,
        timeout: float | timedelta | None = None,
        on_error: str = "fail",
        goto: Sequence[str] = (),
    ) -> Callable[[_F], _F]: ...

    @overload
    def node(
        self,
        function: _F,
        /,
        *,
        name: str | None = None,
        retry: Retry | None = None,
        timeout: float | timedelta | None = None,
        on_error: str = "fail",
        goto: Sequence[str] = (),
    ) -> _F: ...

    def node(
        self,
        function: Callable[..., Any] | Graph | None = None,
        /,
        *,
        name: str | None = None,
        retry: Retry | None = None,
        timeout: float | timedelta | None = None,
        on_error: str = "fail",
        goto: Sequence[str] = (),
    ) -> Any:
        """Add a node: a function `(state, ctx) -> update`, sync or async, or a whole graph as a subgraph.

        Works as a decorator, with and without arguments, and gives the function back. `name` is the function's own (a
        subgraph's: the graph's) unless given. `retry`: one attempt unless given. `timeout`: seconds or a timedelta.
        `on_error="continue"`: when the node has failed for good, its successors run all the same and the failure is
        told to them. `goto` lists the nodes that the node may go to by returning `Goto`. Raises `GraphError`.
        """
        options: dict[str, Any] = {"retry": retry, "timeout": timeout, "on_error": on_error, "goto": goto}
        if function is None:
            return lambda decorated: self._added(decorated, name, **options)
        return self._added(function, name, **options)

    def edge(self, source: str, target: str) -> None:
        """Let `target` run after `source`; START and END are valid ends, checked with the names at `compile`."""
        self.edges.append((_name_of(source), _name_of(target)))
        self._compiled = None

    def route(self, source: str, choose: Choose, *, to: Sequence[str]) -> None:
        """Let `choose(state)` say what runs after `source`: a name of `to`, END, a `Send` to one, or a list of these.

        It is asked once in a super-step, however many node runs of `source` there were, with the state after all of
        them; an empty list chooses nothing. A choice outside `to` is a `GraphError` when it happens.
        """
        where = f"the route from {source!r} of graph {self.name!r}"
        if not callable(choose) or inspect.iscoroutinefunction(choose):
            message = f"{where} needs a plain function choose(state); what waits or has effects belongs into a node"
            raise GraphError(message)
        if isinstance(to, str) or not to:
            message = f"{where} needs to=[…], the names it may choose"
            raise GraphError(message)
        self.routes.append(Route(_name_of(source), choose, tuple(map(_name_of, to))))
        self._compiled = None

    def database(self, name: str, engine: Engine | Callable[[], Engine], /) -> None:
        """Register a database for `ctx.transaction(name)`: a SQLAlchemy engine, or a function that returns one.

        The function is called once in each process that needs it, so it may read its URL from the environment there.
        Once, beside the data: `keepstep db install-journal URL`. Raises `GraphError`.
        """
        _checked(f"the name of a database of graph {self.name!r}", name)
        if name in self.databases:
            message = f"graph {self.name!r} has a database {name!r} already"
            raise GraphError(message)
        self.databases[name] = Database(name, engine)
        self._compiled = None

    def compile(self) -> CompiledGraph:
        """Return the graph checked and ready to run; kept until the graph or a subgraph is changed.

        Raises `GraphError` naming what does not hold together: an unknown or unreachable node, no edge from START, an
        edge from END or into START, a graph that contains itself.
        """
        stamp = self._stamp(())
        if self._compiled is None or self._compiled_of != stamp:
            self._compiled = compiled(self)
            self._compiled_of = stamp
        return self._compiled

    def draw(self) -> str:
        """Return the graph as a Mermaid flowchart: edges solid, routes and gotos dashed, subgraphs as blocks."""
        return drawing.mermaid(self.compile())

    def run(
        self,
        given: object = None,
        /,
        *,
        decisions: Any = None,
        signals: Any = None,
        step_limit: int | None = None,
    ) -> Any:
        """Run the graph in this process, in memory: for tests and notebooks. Same semantics, no broker, no database."""
        from keepstep.runtime.inprocess import run_in_process  # noqa: PLC0415  it imports this module

        return run_in_process(self.compile(), given, decisions=decisions, signals=signals, step_limit=step_limit)

    def _added(
        self,
        function: Callable[..., Any] | Graph,
        name: str | None,
        *,
        retry: Retry | None,
        timeout: float | timedelta | None,
        on_error: str,
        goto: Sequence[str],
    ) -> Any:
        name = self._free_name(function, name)
        where = f"node {name!r} of graph {self.name!r}"
        if on_error not in ("fail", "continue"):
            message = f'on_error of {where} must be "fail" or "continue", not {on_error!r}'
            raise GraphError(message)
        if isinstance(goto, str):
            message = f"goto of {where} must be a list of names: goto=[{goto!r}]"
            raise GraphError(message)
        if isinstance(function, Graph):
            if retry is not None or timeout is not None or on_error != "fail" or goto:
                message = f"{where} is a subgraph: give retry, timeout, on_error and goto to the nodes in it"
                raise GraphError(message)
            self.subgraphs[name] = function
            self.nodes[name] = Node(name, None)
        else:
            self.nodes[name] = Node(
                name,
                _checked_function(where, function),
                is_async=_is_async(function),
                retry=NO_RETRY if retry is None else retry,
                timeout=None if timeout is None else seconds(f"timeout of {where}", timeout),
                on_error=on_error,
                goto=tuple(map(_name_of, goto)),
            )
        self._compiled = None
        return function

    def _free_name(self, function: Callable[..., Any] | Graph, name: str | None) -> str:
        if name is None:
            name = function.name if isinstance(function, Graph) else getattr(function, "__name__", None)
        if name is None or name == "<lambda>":
            message = f"a node of graph {self.name!r} has no name of its own: give name="
            raise GraphError(message)
        _checked(f"the name of a node of graph {self.name!r}", name)
        if name in (START, END) or any(sign in name for sign in _RESERVED_IN_NAMES):
            message = f"a node of graph {self.name!r} cannot be called {name!r}: not START, END, nor with / or #"
            raise GraphError(message)
        if name in self.nodes:
            message = f"graph {self.name!r} has a node {name!r} already: give this one another name="
            raise GraphError(message)
        return name

    def _stamp(self, inside: tuple[Graph, ...]) -> tuple[int, ...]:
        """Return what changes when this graph or one inside it does: everything declared is only ever added to."""
        if self in inside:
            return ()
        own = (len(self.nodes), len(self.edges), len(self.routes), len(self.databases))
        inner = (sub._stamp((*inside, self)) for sub in self.subgraphs.values())  # noqa: SLF001  of this class
        return sum(inner, own)


def _checked(what: str, name: object) -> str:
    try:
        return checked_name(what, name)
    except InvalidInput as error:
        raise GraphError(error.message) from None


def _count(what: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        message = f"{what} must be an integer of at least 1, not {value!r}"
        raise GraphError(message)
    return value


def _name_of(node: object) -> str:
    if not isinstance(node, str):
        message = f"a node is named by its name in edges, routes and gotos, not by {node!r}"
        raise GraphError(message)
    return node


def _checked_function(where: str, function: object) -> Callable[..., Any]:
    if not callable(function):
        message = f"{where} must be a function (state, ctx) or a Graph, not {type(function).__name__}"
        raise GraphError(message)
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        message = f"{where} is a generator; a node returns its update once"
        raise GraphError(message)
    if not takes_two(function):
        message = f"{where} must take (state, ctx)"
        raise GraphError(message)
    return function


def _is_async(function: Callable[..., Any]) -> bool:
    called = getattr(function, "__call__", None)  # noqa: B004  the method itself is looked at
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(called)
