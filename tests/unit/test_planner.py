"""The planner: super-steps, routing, joins, Sends, Gotos and subgraphs, each step through the codec and back."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from decimal import Decimal
from itertools import pairwise
from typing import Annotated, Any, TypedDict

import pytest

from keepstep import END, START, Goto, Graph, Send, append
from keepstep.errors import ConflictingWrites, GraphError, HistoryCorrupt, StateError, StepError
from keepstep.runtime import planner
from keepstep.runtime.codec import Codec
from keepstep.runtime.compiled import CompiledGraph
from keepstep.runtime.planner import MISSING, Cursor, NodeResult
from keepstep.runtime.state import add


class State(TypedDict):
    n: int
    item: int
    amount: Decimal
    log: Annotated[list[str], append]
    count: Annotated[int, add]


class Thread:
    """A thread in memory: what a store would hold between two super-steps is only ever held as bytes."""

    def __init__(self, graph: Graph, given: object) -> None:
        self.graph: CompiledGraph = graph.compile()
        self.codec = Codec(self.graph.types, value_bytes_max=1 << 24)
        self.seq = 1
        self.starts: Counter[str] = Counter()
        self.failures: list[tuple[str, list[str]]] = []
        channels = self.graph.schema.initial(given)
        self.save(planner.begin(self.graph, channels, key="t/b/1"), channels)

    def save(self, cursor: Cursor, channels: dict[str, Any]) -> None:
        self.stored = self.codec.encode(cursor.to_plain()), self.codec.encode(channels)

    def load(self) -> tuple[Cursor, dict[str, Any]]:
        cursor, channels = map(self.codec.decode, self.stored)
        return Cursor.from_plain(cursor), channels

    @property
    def due(self) -> list[str]:
        cursor, channels = self.load()
        return [run.id for run in planner.due(self.graph, cursor, channels)]

    @property
    def state(self) -> dict[str, Any]:
        return self.load()[1]

    def step(self, *, backwards: bool = False) -> None:
        cursor, channels = self.load()
        assert cursor.key == f"t/b/{self.seq}"
        runs = planner.due(self.graph, cursor, channels)
        results = {}
        for run in reversed(runs) if backwards else runs:
            result = self.run(cursor, channels, run)
            stored = self.codec.encode(result.to_plain())
            results[run.id] = NodeResult.from_plain(self.codec.decode(stored))
        self.seq += 1
        self.save(*planner.advance(self.graph, cursor, channels, results, key=f"t/b/{self.seq}"))

    def run(self, cursor: Cursor, channels: dict[str, Any], run: planner.DueRun) -> NodeResult:
        node = self.graph.node_at(run.node)
        given = planner.presented(self.graph, cursor, run, channels)
        self.starts[run.node] += 1
        if run.failures:
            self.failures.append((run.id, [failure["run"] for failure in run.failures]))
        assert node.function is not None
        try:
            returned = node.function(given, run.id)
        except Exception as error:
            if node.on_error == "continue":
                return NodeResult(error=planner.failure_of(run, error))
            raise
        seen = planner.state_for(self.graph, cursor, run, channels)
        return planner.result_of(self.graph, run, returned, seen, given)

    def finish(self, *, backwards: bool = False) -> list[list[str]]:
        """Return the ids of each super-step's node runs."""
        steps = []
        while due := self.due:
            steps.append(due)
            self.step(backwards=backwards)
            assert len(steps) < 100
        return steps


def graph_of(name: str = "g", **functions: Callable[..., Any]) -> Graph:
    graph = Graph(name, state=State)
    for node, function in functions.items():
        graph.node(function, name=node)
    return graph


def logs(state: Any, run: str) -> dict[str, Any]:
    """Write that this node run was there."""
    return {"log": run}


def nothing(state: Any, run: str) -> None:
    return None


def edges(graph: Graph, *pairs: tuple[str, str]) -> Graph:
    for source, target in pairs:
        graph.edge(source, target)
    return graph


# --- chains, loops, routes --------------------------------------------------------------------------------------------


def test_a_chain_runs_in_order_and_ends_where_nothing_follows():
    graph = edges(
        graph_of(a=lambda s, _: {"n": s["n"] + 1}, b=lambda s, _: {"n": s["n"] * 10}), (START, "a"), ("a", "b")
    )
    thread = Thread(graph, {"n": 1})

    assert thread.load()[0].to_plain() == {"key": "t/b/1", "due": ["a"]}
    assert thread.finish() == [["a"], ["b"]]
    assert thread.state == {"n": 20}
    cursor, channels = thread.load()
    assert cursor.finished
    assert cursor.to_plain() == {"key": "t/b/3", "due": []}
    assert planner.advance(thread.graph, cursor, channels, {}, key="k") == (Cursor("k", cursor.root), channels)


def test_the_cursor_of_a_chain_is_small():
    graph = edges(graph_of(assess=nothing), (START, "assess"))
    thread = Thread(graph, {})

    assert len(thread.stored[0]) - len("t/b/1") < 40


def test_a_loop_goes_round_until_its_route_ends_it():
    graph = edges(graph_of(a=lambda s, _: {"n": s["n"] + 1}), (START, "a"))
    graph.route("a", lambda state: "a" if state["n"] < 5 else END, to=["a", END])

    assert len(Thread(graph, {"n": 0}).finish()) == 5


def test_start_is_routed_like_any_node_and_may_lead_nowhere():
    graph = graph_of(a=logs, b=logs)
    graph.route(START, lambda state: ["b", "a"] if state["n"] else [], to=["a", "b"])

    assert Thread(graph, {"n": 1}).finish() == [["b", "a"]]
    assert Thread(graph, {"n": 0}).finish() == []


def test_edges_and_routes_of_a_node_add_up_and_joins_run_once():
    graph = edges(graph_of(a=logs, b=logs, c=logs, join=logs), (START, "a"), ("a", "b"), ("b", "join"), ("c", "join"))
    graph.route("a", lambda state: ["c", "b"], to=["b", "c"])
    thread = Thread(graph, {})

    assert thread.finish() == [["a"], ["b", "c"], ["join"]]
    assert thread.state["log"] == ["a", "b", "c", "join"]


def test_a_route_sees_the_state_after_the_super_step_and_cannot_change_it():
    seen = []

    def choose(state):
        seen.append(state["n"])
        state["log"].append("spoilt")
        return END

    graph = edges(graph_of(a=lambda s, _: {"n": 7, "log": "a"}), (START, "a"))
    graph.route("a", choose, to=[END])
    thread = Thread(graph, {"n": 1, "log": ["0"]})
    thread.finish()

    assert seen == [7]
    assert thread.state == {"n": 7, "log": ["0", "a"]}


def test_what_a_route_does_wrong_is_told_with_its_source():
    graph = edges(graph_of(a=nothing), (START, "a"))
    graph.route("a", lambda state: state["missing"], to=["a"])
    with pytest.raises(StepError, match=r"^the route from 'a' of graph 'g' failed: KeyError: 'missing'$"):
        Thread(graph, {}).finish()

    graph = graph_of(a=nothing)
    graph.route(START, lambda state: "b", to=["a"])
    with pytest.raises(GraphError, match=r"^the route from START of graph 'g' chose 'b', which is not one of its targ"):
        Thread(graph, {})


# --- parallel node runs -----------------------------------------------------------------------------------------------


def test_the_order_of_results_never_matters():
    graph = edges(
        graph_of(c=logs, a=logs, b=logs, join=nothing),
        *((START, name) for name in "cab"),
        *((name, "join") for name in "cab"),
    )
    forwards, backwards = Thread(graph, {}), Thread(graph, {})

    assert forwards.finish() == backwards.finish(backwards=True) == [["c", "a", "b"], ["join"]]
    assert forwards.state == backwards.state == {"log": ["c", "a", "b"]}
    assert forwards.stored == backwards.stored


def test_two_writes_without_a_reducer_conflict_and_a_passed_through_value_does_not():
    graph = edges(graph_of(a=lambda s, _: {"n": 1}, b=lambda s, _: {"n": 2}), (START, "a"), (START, "b"))
    with pytest.raises(ConflictingWrites, match=r"^key 'n' was written by node runs 'a' and 'b' in one super-step"):
        Thread(graph, {"n": 0}).finish()

    thread = Thread(graph, {"n": 1})
    thread.finish()
    assert thread.state == {"n": 2}


def test_a_missing_result_is_an_error():
    graph = edges(graph_of(a=nothing, b=nothing), (START, "a"), (START, "b"))
    thread = Thread(graph, {})
    cursor, channels = thread.load()
    with pytest.raises(StepError, match=r"^node run 'b' has no result"):
        planner.advance(thread.graph, cursor, channels, {"a": NodeResult()}, key="k")


def test_a_failure_to_continue_after_is_told_to_the_successors_only():
    def fails(state, run):
        message = "no stock"
        raise LookupError(message)

    graph = graph_of(a=logs, join=logs, after=logs)
    graph.node(fails, name="c", on_error="continue")
    edges(graph, (START, "a"), (START, "c"), ("a", "join"), ("c", "join"), ("join", "after"))
    thread = Thread(graph, {})
    thread.step()

    assert thread.load()[0].failures == [{"node": "c", "run": "c", "type": "LookupError", "message": "no stock"}]
    assert thread.finish() == [["join"], ["after"]]
    assert thread.failures == [("join", ["c"])]
    assert thread.state == {"log": ["a", "join", "after"]}


# --- Send and Goto ----------------------------------------------------------------------------------------------------


def fan_out_of(count: int) -> Graph:
    graph = graph_of(plan=nothing, audit=lambda item, run: {"log": f"{item['item']}", "count": 1}, join=logs)
    edges(graph, (START, "plan"), ("audit", "join"))
    graph.route("plan", lambda state: [Send("audit", {"item": i}) for i in range(count)], to=["audit"])
    return graph


def test_sends_are_node_runs_of_their_own_and_join_once_in_their_order():
    thread = Thread(fan_out_of(3), {"n": 1})
    thread.step()

    cursor, channels = thread.load()
    assert cursor.to_plain()["due"] == [["audit", {"item": 0}], ["audit", {"item": 1}], ["audit", {"item": 2}]]
    runs = planner.due(thread.graph, cursor, channels)
    assert [(run.id, run.node, run.input, run.frame) for run in runs] == [
        ("audit#0", "audit", {"item": 0}, ""),
        ("audit#1", "audit", {"item": 1}, ""),
        ("audit#2", "audit", {"item": 2}, ""),
    ]
    assert planner.state_for(thread.graph, cursor, runs[1], channels) == {"item": 1}
    assert planner.seen_by(thread.graph, cursor, runs[1], channels) == {"n": 1}
    assert thread.finish(backwards=True) == [["audit#0", "audit#1", "audit#2"], ["join"]]
    assert thread.state == {"n": 1, "log": ["0", "1", "2", "join"], "count": 3}


def test_no_sends_mean_no_successors():
    assert Thread(fan_out_of(0), {}).finish() == [["plan"]]

    graph = edges(fan_out_of(0), ("plan", "join"))
    assert Thread(graph, {}).finish() == [["plan"], ["join"]]


def test_a_thousand_sends_join_once_in_order():
    thread = Thread(fan_out_of(1000), {})
    steps = thread.finish(backwards=True)

    assert [len(step) for step in steps] == [1, 1000, 1]
    assert steps[1][999] == "audit#999"
    assert thread.state["log"] == [*map(str, range(1000)), "join"]
    assert thread.state["count"] == 1000
    assert thread.starts == {"plan": 1, "audit": 1000, "join": 1}


def test_the_route_behind_many_node_runs_is_asked_once():
    asked = []

    def choose(state):
        asked.append(len(state["log"]))
        return [Send("join", 1), Send("join", 2)]

    graph = graph_of(plan=nothing, audit=lambda item, _: {"log": str(item)}, join=lambda item, run: {"log": run})
    graph.edge(START, "plan")
    graph.route("plan", lambda state: [Send("audit", i) for i in range(4)], to=["audit"])
    graph.route("audit", choose, to=["join"])

    assert Thread(graph, {}).finish()[2] == ["join#0", "join#1"]
    assert asked == [4]


def test_one_node_due_by_name_and_by_send_is_two_node_runs():
    graph = graph_of(a=lambda state, run: {"log": f"{run}={state['n']}"})
    graph.route(START, lambda state: [Send("a", {"n": 5}), "a", Send("a", {"n": 6}), "a"], to=["a"])
    thread = Thread(graph, {"n": 1})

    assert thread.finish() == [["a#0", "a", "a#1"]]
    assert thread.state["log"] == ["a#0=5", "a=1", "a#1=6"]


def test_a_send_input_is_what_it_is_and_the_node_gets_a_copy():
    def spoils(item, run):
        item.append("spoilt")
        return {"log": str(len(item))}

    graph = graph_of(a=spoils)
    graph.route(START, lambda state: Send("a", [1, (2,), Decimal("1.50")]), to=["a"])
    thread = Thread(graph, {})
    cursor, channels = thread.load()
    (run,) = planner.due(thread.graph, cursor, channels)

    assert planner.presented(thread.graph, cursor, run, channels) == [1, (2,), Decimal("1.50")]
    thread.run(cursor, channels, run)
    assert run.input == [1, (2,), Decimal("1.50")]


def test_a_goto_replaces_the_edges_of_its_node_run_only():
    def chooses(state, run):
        return Goto("b", {"log": run}) if state["n"] else {"log": run}

    graph = edges(graph_of(a=chooses, b=logs, c=logs, d=logs), (START, "a"), ("a", "c"), ("c", "b"), ("b", "d"))
    assert Thread(graph, {"n": 1}).finish() == [["a"], ["b"], ["d"]]
    assert Thread(graph, {"n": 0}).finish() == [["a"], ["c"], ["b"], ["d"]]

    def one_goes(item, run):
        return Goto([END, Send("d", {"n": item["n"]})], {"log": run}) if item["n"] == 1 else {"log": run}

    graph = edges(graph_of(a=one_goes, c=logs, d=logs), ("a", "c"), ("c", "d"))
    graph.route(START, lambda state: [Send("a", {"n": n}) for n in range(3)], to=["a"])
    thread = Thread(graph, {})
    assert thread.finish() == [["a#0", "a#1", "a#2"], ["c", "d#0"], ["d"]]
    assert thread.state["log"] == ["a#0", "a#1", "a#2", "c", "d#0", "d"]


def test_a_goto_may_end_and_goes_nowhere_else_than_declared():
    graph = edges(graph_of(a=lambda s, _: Goto(END, {"n": 9}), b=nothing), (START, "a"), ("a", "b"))
    thread = Thread(graph, {"n": 0})
    assert thread.finish() == [["a"]]
    assert thread.state == {"n": 9}

    graph = edges(graph_of(a=lambda s, _: Goto("x")), (START, "a"))
    with pytest.raises(GraphError, match=r"^the Goto of node 'a' chose 'x', which is not one of its targets: 'a'$"):
        Thread(graph, {}).finish()

    graph = graph_of(b=nothing, c=nothing)
    graph.node(lambda s, _: Goto("c"), name="a", goto=["b"])
    edges(graph, (START, "a"), ("b", "c"))
    with pytest.raises(GraphError, match=r"^the Goto of node 'a' chose 'c', which is not one of its targets: 'b'$"):
        Thread(graph, {}).finish()

    graph = edges(graph_of(a=lambda s, _: Goto(END, {"x": 1})), (START, "a"))
    with pytest.raises(StateError, match=r"^what node 'a' returned does not fit State: \$\.x: State has no such key"):
        Thread(graph, {}).finish()


# --- subgraphs --------------------------------------------------------------------------------------------------------


class Inner(TypedDict):
    n: int
    log: Annotated[list[str], append]
    private: str


def inner_of(*names: str, name: str = "sub", **special: Callable[..., Any]) -> Graph:
    """Return a subgraph that runs these nodes one after the other."""
    graph = Graph(name, state=Inner)
    for node in names:
        graph.node(special.get(node, logs), name=node)
    return edges(graph, (START, names[0]), *pairwise(names))


def test_a_subgraph_sees_the_keys_it_shares_and_gives_back_what_changed():
    def works(state, run):
        assert state == {"n": 1, "log": ["0"]}
        return {"n": 5, "private": "p", "log": run}

    def goes_on(state, run):
        assert state == {"n": 5, "log": ["0", "sub/x"], "private": "p"}
        return {"log": run}

    graph = graph_of(a=nothing, b=logs)
    graph.node(inner_of("x", "y", x=works, y=goes_on))
    edges(graph, (START, "a"), ("a", "sub"), ("sub", "b"))
    thread = Thread(graph, {"n": 1, "item": 3, "log": ["0"]})

    thread.step()
    assert thread.due == ["sub/x"]
    thread.step()
    assert thread.state == {
        "n": 1,
        "item": 3,
        "log": ["0"],
        "sub\x1fn": 5,
        "sub\x1flog": ["0", "sub/x"],
        "sub\x1fprivate": "p",
    }
    thread.step()
    assert thread.state == {"n": 5, "item": 3, "log": ["0", "sub/x", "sub/y"]}
    assert thread.finish() == [["b"]]
    assert thread.state == {"n": 5, "item": 3, "log": ["0", "sub/x", "sub/y", "b"]}


def test_parallel_subgraphs_step_together_and_the_frame_waits_for_the_last():
    graph = graph_of(a=lambda s, run: {"log": run, "count": 2}, join=logs)
    graph.node(inner_of("x", name="one"))
    graph.node(inner_of("x", "y", "z", name="three"))
    for name in ("a", "one", "three"):
        edges(graph, (START, name), (name, "join"))
    forwards, backwards = Thread(graph, {"n": 1}), Thread(graph, {"n": 1})

    assert forwards.finish() == [["a", "one/x", "three/x"], ["three/y"], ["three/z"], ["join"]]
    assert forwards.state == {"n": 1, "log": ["a", "one/x", "three/x", "three/y", "three/z", "join"], "count": 2}
    backwards.finish(backwards=True)
    assert backwards.stored == forwards.stored


def test_one_subgraph_under_two_names_has_two_states():
    inner = inner_of("x", "y", x=lambda s, run: {"private": run}, y=lambda s, run: {"log": s["private"]})
    graph = graph_of()
    graph.node(inner, name="left")
    graph.node(inner, name="right")
    edges(graph, (START, "left"), (START, "right"))
    thread = Thread(graph, {})

    assert thread.finish() == [["left/x", "right/x"], ["left/y", "right/y"]]
    assert thread.state == {"log": ["left/x", "right/x"]}


def test_subgraphs_that_return_the_shared_state_unchanged_do_not_conflict():
    inner = inner_of("x", x=lambda state, _: state)
    graph = graph_of()
    for name in ("left", "right"):
        graph.node(inner, name=name)
        graph.edge(START, name)
    thread = Thread(graph, {"n": 1, "log": ["0"]})
    thread.finish()
    assert thread.state == {"n": 1, "log": ["0"]}

    inner = inner_of("x", x=lambda state, run: {"n": len(run)})
    graph = graph_of()
    for name in ("left", "right"):
        graph.node(inner, name=name)
        graph.edge(START, name)
    with pytest.raises(ConflictingWrites, match=r"^key 'n' was written by node runs 'left' and 'right'"):
        Thread(graph, {"n": 1}).finish()


def test_nested_subgraphs():
    innermost = inner_of("deep", name="innermost", deep=lambda s, run: {"n": s["n"] + 1, "log": run})
    inner = inner_of("x")
    inner.node(innermost)
    inner.edge("x", "innermost")
    inner.node(logs, name="y")
    inner.edge("innermost", "y")
    graph = graph_of(b=logs)
    graph.node(inner)
    edges(graph, (START, "sub"), ("sub", "b"))
    thread = Thread(graph, {"n": 1, "item": 3})

    assert thread.finish() == [["sub/x"], ["sub/innermost/deep"], ["sub/y"], ["b"]]
    assert thread.state == {"n": 2, "item": 3, "log": ["sub/x", "sub/innermost/deep", "sub/y", "b"]}


def test_a_loop_through_a_subgraph_starts_it_afresh():
    graph = graph_of()
    graph.node(inner_of("x", x=lambda s, _: {"n": s["n"] + 1, "private": s.get("private", "") + "x"}))
    graph.edge(START, "sub")
    graph.route("sub", lambda state: "sub" if state["n"] < 3 else END, to=["sub", END])
    thread = Thread(graph, {"n": 0})

    assert thread.finish() == [["sub/x"]] * 3
    assert thread.state == {"n": 3}


def test_sends_to_a_subgraph_are_frames_of_their_own():
    inner = inner_of("x", "y", x=lambda s, _: {"private": f"got {s['n']}"}, y=lambda s, _: {"log": s["private"]})
    graph = graph_of(plan=nothing, join=logs)
    graph.node(inner)
    edges(graph, (START, "plan"), ("sub", "join"))
    graph.route("plan", lambda state: [Send("sub", {"n": n}) for n in (7, 8)], to=["sub"])
    thread = Thread(graph, {"n": 1})
    thread.step()

    cursor, channels = thread.load()
    run = planner.due(thread.graph, cursor, channels)[1]
    assert (run.id, run.node, run.input, run.frame) == ("sub#1/x", "sub/x", MISSING, "sub#1")
    assert planner.state_for(thread.graph, cursor, run, channels) == {"n": 8}
    assert thread.finish(backwards=True) == [["sub#0/x", "sub#1/x"], ["sub#0/y", "sub#1/y"], ["join"]]
    # `n` came with the Send and was not changed: the graph around keeps its own.
    assert thread.state == {"n": 1, "log": ["got 7", "got 8", "join"]}


def test_a_subgraph_that_writes_the_value_it_was_sent_passes_it_through():
    graph = graph_of()
    graph.node(inner_of("x", "y", x=lambda s, _: {"n": s["n"]}, y=nothing))
    graph.route(START, lambda state: [Send("sub", {"n": 10**6 + n}) for n in range(2)], to=["sub"])
    thread = Thread(graph, {"n": 1})
    thread.finish()

    assert thread.state == {"n": 1}


def test_a_send_that_does_not_fit_the_subgraph_is_refused():
    graph = graph_of()
    graph.node(inner_of("x"))
    graph.route(START, lambda state: Send("sub", {"n": "seven"}), to=["sub"])
    with pytest.raises(
        StateError, match=r"^subgraph 'sub#0' cannot be entered: .*\$\.n: Input should be a valid integ"
    ):
        Thread(graph, {})


@dataclasses.dataclass
class Typed:
    n: int
    log: Annotated[list[str], append]
    private: list[int] = dataclasses.field(default_factory=lambda: [4])


def test_a_subgraph_of_a_dataclass_starts_with_its_defaults():
    def works(state, run):
        assert state == Typed(1, ["0"], [4])
        state.log.append(run)
        state.private.append(5)
        return state

    def goes_on(state, run):
        assert state == Typed(1, ["0", "sub/x"], [4, 5])

    inner = Graph("sub", state=Typed)
    inner.node(works, name="x")
    inner.node(goes_on, name="y")
    edges(inner, (START, "x"), ("x", "y"))
    graph = graph_of()
    graph.node(inner)
    graph.edge(START, "sub")
    thread = Thread(graph, {"n": 1, "log": ["0"]})

    assert thread.load()[0].to_plain() == {
        "key": "t/b/1",
        "due": [{"node": "sub", "due": ["x"], "base": {"private": [4]}}],
    }
    thread.finish()
    assert thread.state == {"n": 1, "log": ["0", "sub/x"]}
    with pytest.raises(StateError, match=r"^subgraph 'sub' cannot be entered: state type Typed needs key 'log'"):
        Thread(graph, {"n": 1})


def test_a_goto_beside_a_running_subgraph_waits_in_the_cursor():
    graph = graph_of(b=logs, c=logs)
    graph.node(lambda s, _: Goto(["b", Send("b", {"n": 2})], {"amount": Decimal("1.50")}), name="a", goto=["b"])
    graph.node(inner_of("x", "y"))
    edges(graph, (START, "a"), (START, "sub"), ("a", "c"), ("sub", "c"))
    thread = Thread(graph, {})
    thread.step()

    assert thread.load()[0].failures == []
    assert thread.load()[0].to_plain()["due"][0] == {
        "node": "a",
        "update": {"amount": Decimal("1.50")},
        "goto": ["b", ["b", {"n": 2}]],
    }
    assert thread.finish() == [["sub/y"], ["b", "b#0", "c"]]
    assert thread.state == {"amount": Decimal("1.50"), "log": ["sub/x", "sub/y", "b", "b#0", "c"]}


def test_failures_reach_the_join_behind_and_inside_subgraphs():
    def fails(state, run):
        raise LookupError(run)

    inner = Graph("sub", state=Inner)
    inner.node(logs, name="x")
    inner.node(fails, name="y", on_error="continue")
    edges(inner, (START, "x"), ("x", "y"))
    graph = graph_of(join=logs)
    graph.node(fails, name="c", on_error="continue")
    graph.node(inner)
    graph.node(inner_of("z", name="after"))
    edges(graph, (START, "c"), (START, "sub"), ("c", "join"), ("sub", "join"), ("sub", "after"))
    thread = Thread(graph, {})

    assert thread.finish() == [["c", "sub/x"], ["sub/y"], ["join", "after/z"]]
    assert thread.failures == [("join", ["c", "sub/y"]), ("after/z", ["c", "sub/y"])]


def test_a_subgraph_in_which_nothing_is_due_is_passed():
    inner = graph_of("sub", x=logs)
    inner.route(START, lambda state: [], to=["x"])
    graph = graph_of(b=logs)
    graph.node(inner, name="first")
    graph.node(inner, name="second")
    edges(graph, (START, "first"), ("first", "second"), ("second", "b"))
    assert Thread(graph, {}).finish() == [["b"]]

    graph = graph_of()
    graph.node(inner, name="first")
    edges(graph, (START, "first"), ("first", "first"))
    with pytest.raises(StepError, match=r"^graph 'g' goes round through 'first', a subgraph in which nothing is due"):
        Thread(graph, {})


def test_going_back_into_a_subgraph_runs_only_what_came_after():
    graph = graph_of(a=logs, b=logs)
    graph.node(inner_of("one", "two", "three", "four"))
    edges(graph, (START, "a"), ("a", "sub"), ("sub", "b"))
    thread = Thread(graph, {})
    for _ in range(3):
        thread.step()
    before_three = thread.stored, thread.seq
    thread.finish()
    ended = thread.stored
    first = Counter(thread.starts)
    thread.stored, thread.seq = before_three

    assert thread.finish() == [["sub/three"], ["sub/four"], ["b"]]
    assert thread.starts - first == {"sub/three": 1, "sub/four": 1, "b": 1}
    assert thread.stored == ended


def test_a_new_run_after_an_abandoned_subgraph_starts_it_afresh():
    graph = graph_of()
    graph.node(inner_of("x", "y", x=lambda s, _: {"n": s["n"] + 1, "log": "x"}))
    graph.edge(START, "sub")
    thread = Thread(graph, {"n": 1})
    thread.step()
    assert thread.state == {"n": 1, "sub\x1fn": 2, "sub\x1flog": ["x"]}

    channels = thread.graph.schema.merge(thread.state, {"n": 5})
    assert channels == {"n": 5}
    thread.seq = 1
    thread.save(planner.begin(thread.graph, channels, key="t/b/1"), channels)
    thread.finish()
    assert thread.state == {"n": 6, "log": ["x", "sub/y"]}


def test_channels_that_the_type_no_longer_has_are_kept():
    graph = graph_of()
    graph.node(inner_of("x", "y"))
    graph.edge(START, "sub")
    thread = Thread(graph, {"n": 1})
    thread.save(thread.load()[0], {"n": 1, "retired": [1]})
    thread.finish()

    assert thread.state == {"n": 1, "retired": [1], "log": ["sub/x", "sub/y"]}


def test_what_a_node_returns_of_a_send_input_it_was_given():
    def changes(item, run):
        if isinstance(item, dict):
            item["n"] += 1
        return item

    graph = graph_of(a=changes)
    graph.route(START, lambda state: Send("a", {"n": 1, "item": 4, "note": "not of the state"}), to=["a"])
    thread = Thread(graph, {"item": 3})
    thread.finish()
    assert thread.state == {"n": 2, "item": 3}

    graph = graph_of(a=changes)
    graph.route(START, lambda state: Send("a", 5), to=["a"])
    with pytest.raises(StateError, match=r"^node 'a' returned int; it must return None, a mapping of the keys"):
        Thread(graph, {}).finish()


# --- cursors ----------------------------------------------------------------------------------------------------------


def test_a_node_that_the_graph_no_longer_has_is_named():
    thread = Thread(edges(graph_of(a=nothing, b=nothing), (START, "a"), ("a", "b")), {})
    thread.step()
    cursor, channels = thread.load()
    other = edges(graph_of(a=nothing), (START, "a")).compile()

    with pytest.raises(GraphError, match=r"^graph 'g' version '1' has no node 'b', which is due as 'b': bring it back"):
        planner.due(other, cursor, channels)


@pytest.mark.parametrize(
    "plain",
    [{}, {"key": "k"}, {"key": "k", "due": [["a"]]}, {"key": "k", "due": [{"node": "a"}]}, {"key": "k", "due": [5]}],
)
def test_a_cursor_that_is_none_is_corrupt(plain):
    with pytest.raises(HistoryCorrupt, match="the cursor cannot be read"):
        Cursor.from_plain(plain)


def test_advance_changes_nothing_it_was_given():
    graph = edges(graph_of(a=logs, b=logs), (START, "a"), (START, "b"), ("a", "b"))
    graph.node(inner_of("x", "y"))
    graph.edge(START, "sub")
    thread = Thread(graph, {"log": ["0"]})
    cursor, channels = thread.load()
    results = {name: NodeResult(update={"log": name}) for name in ("a", "b", "sub/x")}
    once = planner.advance(thread.graph, cursor, channels, results, key="k")

    assert channels == {"log": ["0"]}
    assert planner.advance(thread.graph, cursor, channels, results, key="k") == once
    assert results == {name: NodeResult(update={"log": name}) for name in ("a", "b", "sub/x")}
