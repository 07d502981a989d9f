"""What runs next: pure functions from a graph, a cursor and the channels to node runs, and on to the next cursor.

A cursor is a tree. Its root is the graph's frame, the node runs that are due together; a subgraph that is running is an
entry with a frame of its own, whose node runs are due in the same super-steps. A frame moves on when all its entries
have ended: then their updates are applied in the order of the entries, whoever was first, and the successors are due.
An entry that has ended waits in the cursor, with its update, for those beside it.

A subgraph's state is a view: the keys it shares with the graph around it, the frame's `base` (a Send's input, defaults)
over them, and over both what its nodes have written, kept in hidden channels of the thread (frame, `HIDDEN`, key). The
state around it cannot change meanwhile, as its frame waits; so entering costs nothing, and what was written is what the
subgraph's end hands to the graph around it, for the keys that one has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from keepstep.errors import GraphError, KeepstepError, StateError, StepError
from keepstep.runtime.codec import private_copy
from keepstep.runtime.cursor import MISSING, Cursor, Done, DueRun, Entry, Frame, NodeResult, goto_targets
from keepstep.runtime.faults import text_of
from keepstep.runtime.reducers import same
from keepstep.runtime.routing import END, START, Goto, Send, Target, targets_of
from keepstep.runtime.state import HIDDEN, Channels

if TYPE_CHECKING:
    from keepstep.runtime.compiled import CompiledGraph, Route

__all__ = [
    "HIDDEN",
    "MISSING",
    "Cursor",
    "DueRun",
    "NodeResult",
    "advance",
    "begin",
    "due",
    "failure_of",
    "presented",
    "result_of",
    "seen_by",
    "state_for",
]


# --- the four steps ---


def begin(graph: CompiledGraph, channels: Channels, *, key: str) -> Cursor:
    """Return the cursor of a run's first super-step; `key` is that super-step's key."""
    return Cursor(key, _opened(graph, _exit_targets(graph, START, channels), "", channels))


def due(graph: CompiledGraph, cursor: Cursor, channels: Channels) -> list[DueRun]:  # noqa: ARG001  one contract
    """Return the node runs that are due, in the order in which their updates will be applied; none: finished.

    Raises `GraphError` when the graph does not have one of their nodes (any more).
    """
    runs: list[DueRun] = []
    _collect(graph, cursor.root, "", "", (), runs)
    return runs


def state_for(graph: CompiledGraph, cursor: Cursor, run: DueRun, channels: Channels) -> Any:
    """Return what a node run sees: the channels of its frame, or its Send's input as that was given.

    Not a copy. `presented` gives what the node may be handed.
    """
    return seen_by(graph, cursor, run, channels) if run.input is MISSING else run.input


def seen_by(graph: CompiledGraph, cursor: Cursor, run: DueRun, channels: Channels) -> Channels:
    """Return the channels of a node run's frame, also for a Send."""
    seen = channels
    if any(entry.frame is not None for entry in cursor.root.entries):
        # By the type's keys: there may be a thousand subgraphs' hidden channels, and as many node runs to look.
        seen = {name: channels[name] for name in graph.schema.keys if name in channels}
    path = ""
    for entry in run.within:
        subgraph = _subgraph(graph, entry.node)
        path = f"{path}/{entry.id}" if path else entry.id
        frame = entry.frame or Frame()
        seen = _entering(subgraph, entry, frame.base, seen) | _overlay(subgraph, path, channels)
        graph = subgraph
    return seen


def presented(graph: CompiledGraph, cursor: Cursor, run: DueRun, channels: Channels) -> Any:
    """Return the state to hand to the node: an instance of its graph's state type, or the Send's input; a copy."""
    if run.input is not MISSING:
        return private_copy(run.input)
    return graph.graph_at(run.node).schema.present(seen_by(graph, cursor, run, channels))


def result_of(graph: CompiledGraph, run: DueRun, returned: object, seen: object, given: object = None) -> NodeResult:
    """Return what a node returned, checked: an update, None, an instance of the state type, or a `Goto`.

    `seen` is what `state_for` gave for the run and `given` the very object the node was called with. Raises
    `StateError` for an update that does not fit and `GraphError` for a `Goto` to what is not there, naming the node.
    """
    owner = graph.graph_at(run.node)
    if not isinstance(returned, Goto):
        return NodeResult(update=owner.schema.update(returned, seen, run.node, given=given))
    allowed = graph.node_at(run.node).goto or tuple(owner.nodes)
    targets = targets_of(returned.node, allowed=allowed, where=f"the Goto of node {run.node!r}")
    update = owner.schema.update(returned.update, seen, run.node, given=given)
    return NodeResult(update=update, goto=Goto(private_copy(targets)))


def failure_of(run: DueRun, error: BaseException, mask: Callable[[str], str] = str) -> dict[str, Any]:
    """Return the failure that the successors of a node with `on_error="continue"` are told; see `text_of`."""
    return {"node": run.node, "run": run.id, "type": type(error).__qualname__, "message": text_of(error, mask)}


def advance(
    graph: CompiledGraph, cursor: Cursor, channels: Channels, results: Mapping[str, NodeResult], *, key: str
) -> tuple[Cursor, Channels]:
    """Return the cursor and the channels after a super-step whose node runs gave `results`, by their ids.

    `key` is the next super-step's key. The order of `results` does not matter. Raises `ConflictingWrites`, `StateError`
    or `GraphError` naming what node runs or routes did wrong, `StepError` when a route's function fails or a result is
    missing.
    """
    hidden: Channels = {}
    seen = channels
    if any(entry.frame is not None for entry in cursor.root.entries):
        seen = {name: value for name, value in channels.items() if HIDDEN not in name}
    frame, values = _moved(_Move(channels, results, hidden), graph, cursor.root, "", seen)
    return Cursor(key, frame), (values | hidden if hidden else values)


class _Move(msgspec.Struct, frozen=True):
    """One call of `advance`: what is known, and the hidden channels that go on."""

    channels: Channels
    results: Mapping[str, NodeResult]
    hidden: Channels


# --- moving on ---


def _moved(move: _Move, graph: CompiledGraph, frame: Frame, path: str, seen: Channels) -> tuple[Frame, Channels]:
    """Return a frame and its values after the super-step."""
    entries = tuple(e if e.done is not None else _moved_entry(move, graph, e, path, seen) for e in frame.entries)
    if any(entry.done is None for entry in entries):
        return Frame(entries, base=frame.base), seen
    prefix = f"{path}/" if path else ""
    writes = [(prefix + entry.id, entry.done.update) for entry in entries if entry.done and entry.done.update]
    values = graph.schema.apply(seen, writes, seen) if writes else seen
    failures = tuple(failure for entry in entries if entry.done for failure in entry.done.failures)
    return _opened(graph, _successors(graph, entries, values), path, values, failures, frame.base), values


def _moved_entry(move: _Move, graph: CompiledGraph, entry: Entry, path: str, seen: Channels) -> Entry:
    run = f"{path}/{entry.id}" if path else entry.id
    if entry.frame is not None:
        return _moved_subgraph(move, graph, entry, run, seen)
    result = move.results.get(run)
    if result is None:
        message = f"node run {run!r} has no result, but the super-step was to be joined"
        raise StepError(message)
    return Entry(
        entry.node,
        entry.index,
        done=Done(
            result.update or {},
            None if result.goto is None else goto_targets(result.goto),
            () if result.error is None else (result.error,),
        ),
    )


def _moved_subgraph(move: _Move, graph: CompiledGraph, entry: Entry, path: str, seen: Channels) -> Entry:
    subgraph = _subgraph(graph, entry.node)
    before = entry.frame or Frame()
    entering = _entering(subgraph, entry, before.base, seen)
    written = _overlay(subgraph, path, move.channels)
    frame, values = _moved(move, subgraph, before, path, entering | written)
    written |= {name: value for name, value in values.items() if value is not entering.get(name, MISSING)}
    if frame.entries:
        for name in written:
            move.hidden[f"{path}{HIDDEN}{name}"] = values[name]
        return Entry(entry.node, entry.index, frame=frame)
    changes = {
        name: graph.schema.change(name, entering.get(name), values[name], absent=name not in entering)
        for name in written
        if name in graph.schema.keys and not same(values[name], entering.get(name, MISSING))
    }
    update = graph.schema.update(changes, seen, path)
    return Entry(entry.node, entry.index, done=Done(update, None, frame.failures))


def _successors(graph: CompiledGraph, entries: Iterable[Entry], values: Channels) -> list[Target]:
    targets: list[Target] = []
    asked: set[str] = set()
    for entry in entries:
        if entry.done is not None and entry.done.goto is not None:
            targets.extend(entry.done.goto)
        elif entry.node not in asked:
            # The node runs of one node meet the same state at its exits: these are gone through once.
            asked.add(entry.node)
            targets.extend(_exit_targets(graph, entry.node, values))
    return targets


def _exit_targets(graph: CompiledGraph, source: str, values: Channels) -> Sequence[Target]:
    exits = graph.exits[source]
    if not exits.routes:
        return exits.fixed
    return [*exits.fixed, *(target for route in exits.routes for target in _chosen(graph, route, values))]


def _chosen(graph: CompiledGraph, route: Route, values: Channels) -> tuple[Target, ...]:
    where = f"the route from {'START' if route.source == START else repr(route.source)} of graph {graph.name!r}"
    try:
        chosen = route.choose(graph.schema.present(values))
        return targets_of(chosen, allowed=route.to, where=where)
    except KeepstepError:
        raise
    except Exception as error:
        message = f"{where} failed: {type(error).__name__}: {error}"
        raise StepError(message) from error


def _opened(
    graph: CompiledGraph,
    targets: Sequence[Target],
    path: str,
    values: Channels,
    failures: tuple[dict[str, Any], ...] = (),
    base: Channels | None = None,
) -> Frame:
    """Return the frame in which the targets are due; what they enter has ended at once if nothing is due in it."""
    rounds = 0
    while True:
        entries = _entries(graph, targets, path, values, failures)
        if not entries or any(entry.done is None for entry in entries):
            return Frame(entries, failures, base or {})
        # Subgraphs that end at once write nothing, so a second round through the same node would go on for ever.
        rounds += 1
        if rounds > len(graph.nodes):
            message = f"graph {graph.name!r} goes round through {entries[0].node!r}, a subgraph in which nothing is due"
            raise StepError(message)
        targets = _successors(graph, entries, values)


def _entries(
    graph: CompiledGraph, targets: Sequence[Target], path: str, values: Channels, failures: tuple[dict[str, Any], ...]
) -> tuple[Entry, ...]:
    entries: list[Entry] = []
    named: set[str] = set()
    sent: dict[str, int] = {}
    for target in targets:
        if isinstance(target, Send):
            index = sent.get(target.node, 0)
            sent[target.node] = index + 1
            entry = Entry(target.node, index, target.input)
        elif target == END or target in named:
            continue
        else:
            named.add(target)
            entry = Entry(target)
        subgraph = graph.nodes[entry.node].subgraph
        entries.append(entry if subgraph is None else _entered(subgraph, entry, path, values, failures))
    return tuple(entries)


# --- subgraphs ---


def _entered(
    subgraph: CompiledGraph, entry: Entry, path: str, values: Channels, failures: tuple[dict[str, Any], ...]
) -> Entry:
    path = f"{path}/{entry.id}" if path else entry.id
    try:
        base = subgraph.schema.defaults(values) if entry.input is MISSING else subgraph.schema.initial(entry.input)
    except StateError as error:
        message = f"subgraph {path!r} cannot be entered: {error.message}"
        raise StateError(message) from error
    inner = _entering(subgraph, entry, base, values)
    frame = _opened(subgraph, _exit_targets(subgraph, START, inner), path, inner, failures, base)
    if not frame.entries:
        return Entry(entry.node, entry.index, done=Done())
    return Entry(entry.node, entry.index, frame=frame)


def _entering(subgraph: CompiledGraph, entry: Entry, base: Channels, around: Channels) -> Channels:
    """Return the values a subgraph starts with."""
    if entry.index >= 0:
        return base
    return {name: around[name] for name in subgraph.schema.keys if name in around} | base


def _overlay(subgraph: CompiledGraph, path: str, channels: Channels) -> Channels:
    """Return what the nodes of a running subgraph have written so far."""
    hidden = ((name, f"{path}{HIDDEN}{name}") for name in subgraph.schema.keys)
    return {name: channels[channel] for name, channel in hidden if channel in channels}


def _subgraph(graph: CompiledGraph, name: str) -> CompiledGraph:
    node = graph.nodes.get(name)
    if node is None or node.subgraph is None:
        message = (
            f"graph {graph.name!r} version {graph.version!r} has no subgraph {name!r}, in which the thread is: bring "
            f"it back or run the thread with the graph's version that has it"
        )
        raise GraphError(message)
    return node.subgraph


def _collect(
    graph: CompiledGraph, frame: Frame, path: str, prefix: str, within: tuple[Entry, ...], runs: list[DueRun]
) -> None:
    for entry in frame.entries:
        if entry.done is not None:
            continue
        run = f"{path}/{entry.id}" if path else entry.id
        if entry.frame is not None:
            subgraph = _subgraph(graph, entry.node)
            _collect(subgraph, entry.frame, run, f"{prefix}{entry.node}/", (*within, entry), runs)
            continue
        node = graph.nodes.get(entry.node)
        if node is None or node.subgraph is not None:
            message = (
                f"graph {graph.name!r} version {graph.version!r} has no node {entry.node!r}, which is due as {run!r}: "
                f"bring it back or run the thread with the graph's version that has it"
            )
            raise GraphError(message)
        runs.append(DueRun(run, prefix + entry.node, entry.input, path, frame.failures, within))
