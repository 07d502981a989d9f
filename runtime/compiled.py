"""A graph that holds together, with everything a step asks of it looked up beforehand."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from keepstep.errors import GraphError
from keepstep.runtime.databases import Database
from keepstep.runtime.policy import NO_RETRY, Retry
from keepstep.runtime.reducers import add, append
from keepstep.runtime.routing import END, START, Choose

if TYPE_CHECKING:
    from keepstep.runtime.graph import Graph
    from keepstep.runtime.state import StateSchema
    from keepstep.runtime.tools import Tool
    from keepstep.runtime.types import TypeRegistry


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """A node as declared: either a function or a subgraph."""

    name: str
    function: Callable[..., Any] | None
    is_async: bool = False
    retry: Retry = NO_RETRY
    timeout: float | None = None
    """Seconds; None: the setting's."""
    on_error: str = "fail"
    goto: tuple[str, ...] = ()
    """Where the node may go by itself; empty: to any node of the graph."""
    subgraph: CompiledGraph | None = None


@dataclass(frozen=True, slots=True)
class Route:
    """A choice of successors: `choose(state)` gives some of `to`."""

    source: str
    choose: Choose
    to: tuple[str, ...]

    @property
    def label(self) -> str:
        """The name of the choosing function, empty when it has none."""
        name = getattr(self.choose, "__name__", "")
        return "" if name == "<lambda>" else name


@dataclass(frozen=True, slots=True)
class Exits:
    """What follows a node that does not choose itself: fixed successors, then what its routes choose."""

    fixed: tuple[str, ...] = ()
    """Names, and END where an edge to it is declared."""
    routes: tuple[Route, ...] = ()


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class CompiledGraph:
    """A checked graph."""

    name: str
    version: str
    step_limit: int | None
    fan_out: bool | int | None
    running_max: int | None
    nodes: dict[str, Node]
    exits: dict[str, Exits]
    """Of every node, and of START."""
    schema: StateSchema
    types: TypeRegistry
    declared: tuple[type, ...]
    """The state type and the further types stored data may name, those of subgraphs included."""
    decides: bool = False
    """Whether code of the user's says what follows or how writes are put together: routes, own reducers."""
    databases: dict[str, Database] = field(default_factory=dict)
    """What transactions may be had on, those of subgraphs included."""
    owners: dict[str, tuple[CompiledGraph, Node]] = field(default_factory=dict)
    """By node path: the node, and the graph it belongs to."""
    tools: Mapping[str, Tool[..., Any]] = field(default_factory=dict)
    """By name, what nodes may call by name."""

    def __repr__(self) -> str:
        return f"CompiledGraph({self.name!r}, version={self.version!r})"

    def node_at(self, path: str) -> Node:
        """Return the node at a path, "plan" or "research/plan" inside a subgraph; raise `GraphError` if none is."""
        return self._owned(path)[1]

    def graph_at(self, path: str) -> CompiledGraph:
        """Return the graph, this or a subgraph, whose node is at a path; its schema is the state that node sees."""
        return self._owned(path)[0]

    def tools_at(self, path: str) -> Mapping[str, Tool[..., Any]]:
        """Return the tools that the node at a path may call by name: of its own graph, and of this one."""
        own = self.graph_at(path).tools
        return own if own is self.tools else {**self.tools, **own}

    def _owned(self, path: str) -> tuple[CompiledGraph, Node]:
        found = self.owners.get(path)
        if found is None:
            message = (
                f"graph {self.name!r} version {self.version!r} has no node {path!r}, which is due: bring the node back "
                f"or run the thread with the graph's version that has it (nodes: {', '.join(self.owners)})"
            )
            raise GraphError(message)
        return found


def compiled(graph: Graph, inside: tuple[Graph, ...] = ()) -> CompiledGraph:
    """Return a graph compiled, its subgraphs first; raise `GraphError` naming what does not hold together."""
    from keepstep.runtime.types import TypeRegistry  # noqa: PLC0415  only a process that runs graphs needs it

    if graph in inside:
        circle = " > ".join(repr(one.name) for one in (*inside[inside.index(graph) :], graph))
        message = f"graph {graph.name!r} contains itself: {circle}"
        raise GraphError(message)
    _check_ends(graph)
    nodes: dict[str, Node] = {}
    declared = {graph.schema.type: None, **dict.fromkeys(graph.types)}
    owners: dict[str, tuple[CompiledGraph, Node]] = {}
    databases = dict(graph.databases)
    for name, node in graph.nodes.items():
        subgraph = graph.subgraphs.get(name)
        if subgraph is None:
            nodes[name] = node
            continue
        inner = compiled(subgraph, (*inside, graph))
        nodes[name] = Node(name, None, subgraph=inner)
        declared |= dict.fromkeys(inner.declared)
        _add_databases(graph, databases, inner)
        owners |= {f"{name}/{path}": owned for path, owned in inner.owners.items()}
    exits = _exits(graph)
    _check_reachable(graph, nodes, exits)
    whole = CompiledGraph(
        name=graph.name,
        version=graph.version,
        step_limit=graph.step_limit,
        fan_out=graph.fan_out,
        running_max=graph.running_max,
        nodes=nodes,
        exits=exits,
        schema=graph.schema,
        types=TypeRegistry(declared),
        declared=tuple(declared),
        decides=bool(graph.routes)
        or any(key.reducer not in (None, add, append) for key in graph.schema.keys.values())
        or any(node.subgraph.decides for node in nodes.values() if node.subgraph is not None),
        databases=databases,
        owners=owners,
        tools=graph.tools,
    )
    owners.update({name: (whole, node) for name, node in nodes.items()})
    return whole


def _add_databases(graph: Graph, databases: dict[str, Database], inner: CompiledGraph) -> None:
    for name, database in inner.databases.items():
        known = databases.setdefault(name, database)
        if not known.is_same(database):
            message = f"graph {graph.name!r} and its subgraph {inner.name!r} mean different databases by {name!r}"
            raise GraphError(message)


def _exits(graph: Graph) -> dict[str, Exits]:
    fixed: dict[str, dict[str, None]] = {name: {} for name in (START, *graph.nodes)}
    routes: dict[str, list[Route]] = {name: [] for name in fixed}
    for source, target in graph.edges:
        fixed[source][target] = None
    for route in graph.routes:
        routes[route.source].append(route)
    return {name: Exits(tuple(fixed[name]), tuple(routes[name])) for name in fixed}


def _check_ends(graph: Graph) -> None:
    known = f"known nodes: {', '.join(graph.nodes) or 'none'}"
    for source, target in _declared_ways(graph):
        if source == END:
            message = f"graph {graph.name!r} has an edge from END to {target!r}: nothing comes after END"
        elif target == START:
            message = f"graph {graph.name!r} has an edge from {source!r} into START: go to the first node instead"
        elif source != START and source not in graph.nodes:
            message = f"graph {graph.name!r} has an edge from unknown node {source!r} to {target!r} ({known})"
        elif target != END and target not in graph.nodes:
            message = f"graph {graph.name!r} has an edge from {source!r} to unknown node {target!r} ({known})"
        else:
            continue
        raise GraphError(message)
    if not any(source == START for source, _ in _declared_ways(graph)):
        first = next(iter(graph.nodes), "first_node")
        message = f"graph {graph.name!r} has no edge from START: add graph.edge(START, {first!r})"
        raise GraphError(message)


def _declared_ways(graph: Graph) -> Iterator[tuple[str, str]]:
    yield from graph.edges
    for route in graph.routes:
        yield from ((route.source, target) for target in route.to)
    for node in graph.nodes.values():
        yield from ((node.name, target) for target in node.goto)


def _check_reachable(graph: Graph, nodes: dict[str, Node], exits: dict[str, Exits]) -> None:
    reached: set[str] = set()
    todo: list[str] = [START]
    while todo:
        name = todo.pop()
        ways: Iterable[str] = (*exits[name].fixed, *(target for route in exits[name].routes for target in route.to))
        if name != START:
            ways = (*ways, *nodes[name].goto)
        for target in ways:
            if target != END and target not in reached:
                reached.add(target)
                todo.append(target)
    for name in nodes:
        if name not in reached:
            message = (
                f"node {name!r} of graph {graph.name!r} cannot be reached from START: add an edge or a route to it, or "
                f"name it in the goto=[…] of the node that goes there by Goto"
            )
            raise GraphError(message)
