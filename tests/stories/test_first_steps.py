"""First steps: a graph is nodes, edges and a state; `graph.run` runs it here and now."""

from __future__ import annotations

import dataclasses
from typing import Annotated, TypedDict

import msgspec
import pytest
from pydantic import BaseModel

from keepstep import END, START, Graph, Send, add, append
from keepstep.errors import GraphError, NodeFailed, StateError


class Greeting(TypedDict, total=False):
    name: str
    text: str


def test_a_node_takes_the_state_and_returns_what_changes():
    graph = Graph("greetings", state=Greeting)

    @graph.node
    def greet(state, ctx):
        return {"text": f"Hello {state['name']}"}

    graph.edge(START, "greet")
    graph.edge("greet", END)

    assert graph.run({"name": "Ada"}) == {"name": "Ada", "text": "Hello Ada"}


def test_a_node_may_be_async():
    graph = Graph("greetings", state=Greeting)

    @graph.node
    async def greet(state, ctx):
        return {"text": f"Hello {state['name']}"}

    graph.edge(START, "greet")
    graph.edge("greet", END)

    assert graph.run({"name": "Ada"})["text"] == "Hello Ada"


def test_the_state_is_any_of_four_kinds_of_type():
    @dataclasses.dataclass
    class Data:
        n: int
        doubled: int = 0

    class Model(BaseModel):
        n: int
        doubled: int = 0

    class Struct(msgspec.Struct):
        n: int
        doubled: int = 0

    for kind in (Data, Model, Struct):
        graph = Graph("doubles", state=kind)

        @graph.node
        def double(state, ctx):
            return {"doubled": state.n * 2}

        graph.edge(START, "double")
        graph.edge("double", END)
        assert graph.run(kind(n=21)) == kind(n=21, doubled=42)


def test_a_route_chooses_what_runs_next():
    class Number(TypedDict, total=False):
        n: int
        kind: str

    graph = Graph("numbers", state=Number)

    @graph.node
    def even(state, ctx):
        return {"kind": "even"}

    @graph.node
    def odd(state, ctx):
        return {"kind": "odd"}

    graph.route(START, lambda state: "odd" if state["n"] % 2 else "even", to=["odd", "even"])
    graph.edge("even", END)
    graph.edge("odd", END)

    assert graph.run({"n": 7})["kind"] == "odd"
    assert graph.run({"n": 8})["kind"] == "even"


def test_a_reducer_says_how_updates_of_one_key_become_one_value():
    class Tally(TypedDict, total=False):
        total: Annotated[int, add]
        log: Annotated[list[str], append]

    graph = Graph("tally", state=Tally)
    for name in ("left", "right"):

        @graph.node(name=name)
        def count(state, ctx, name=name):
            return {"total": 1, "log": [name]}

        graph.edge(START, name)
        graph.edge(name, END)

    assert graph.run({"total": 40, "log": []}) == {"total": 42, "log": ["left", "right"]}


def test_one_node_may_run_many_times_at_once_and_the_next_waits_for_all():
    class Squares(TypedDict, total=False):
        numbers: list[int]
        squares: Annotated[list[int], append]
        total: int

    graph = Graph("squares", state=Squares)

    @graph.node
    def square(number, ctx):
        return {"squares": [number * number]}

    @graph.node
    def join(state, ctx):
        return {"total": sum(state["squares"])}

    graph.route(START, lambda state: [Send("square", number) for number in state["numbers"]], to=["square"])
    graph.edge("square", "join")
    graph.edge("join", END)

    assert graph.run({"numbers": [1, 2, 3, 4, 5, 6]}) == {
        "numbers": [1, 2, 3, 4, 5, 6],
        "squares": [1, 4, 9, 16, 25, 36],
        "total": 91,
    }


def test_a_graph_is_a_node_of_another_graph():
    inner = Graph("polite", state=Greeting)

    @inner.node
    def title(state, ctx):
        return {"name": f"Dr {state['name']}"}

    inner.edge(START, "title")
    inner.edge("title", END)

    outer = Graph("greetings", state=Greeting)
    outer.node(inner)

    @outer.node
    def greet(state, ctx):
        return {"text": f"Hello {state['name']}"}

    outer.edge(START, "polite")
    outer.edge("polite", "greet")
    outer.edge("greet", END)

    assert outer.run({"name": "Ada"})["text"] == "Hello Dr Ada"


def test_a_graph_that_does_not_hold_together_says_so_before_it_runs():
    graph = Graph("greetings", state=Greeting)

    @graph.node
    def greet(state, ctx):
        return None

    graph.edge(START, "great")
    with pytest.raises(GraphError, match="'great'"):
        graph.run({})


def test_input_that_does_not_fit_is_refused():
    graph = Graph("greetings", state=Greeting)

    @graph.node
    def greet(state, ctx):
        return None

    graph.edge(START, "greet")
    graph.edge("greet", END)
    with pytest.raises(StateError, match=r"\$\.name"):
        graph.run({"name": 7})


def test_a_node_that_fails_fails_the_run():
    graph = Graph("greetings", state=Greeting)

    @graph.node
    def greet(state, ctx):
        return {"text": state["name"].upper()}

    graph.edge(START, "greet")
    graph.edge("greet", END)
    with pytest.raises(NodeFailed, match="node 'greet' failed: KeyError: 'name'"):
        graph.run({})
