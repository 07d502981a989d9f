"""Graphs hold together or say what does not; they draw themselves."""

from __future__ import annotations

import functools
from datetime import timedelta
from typing import TypedDict

import pytest

from keepstep import END, START, Goto, Graph, Retry, Send
from keepstep.errors import GraphError
from keepstep.runtime.policy import NO_RETRY
from keepstep.runtime.routing import targets_of


class State(TypedDict):
    n: int


def step(state, ctx):
    return None


async def pause(state, ctx):
    return None


def either(state):
    return "a"


def graph_of(*names: str, name: str = "g") -> Graph:
    """Return a graph with these nodes and no edges."""
    graph = Graph(name, state=State)
    for node in names:
        graph.node(step, name=node)
    return graph


def chain_of(*names: str, name: str = "g") -> Graph:
    graph = graph_of(*names, name=name)
    for source, target in zip((START, *names), (*names, END), strict=True):
        graph.edge(source, target)
    return graph


def refusal(graph: Graph) -> str:
    with pytest.raises(GraphError) as caught:
        graph.compile()
    return caught.value.message


# --- declaring --------------------------------------------------------------------------------------------------------


def test_a_node_is_declared_with_and_without_arguments_and_given_back():
    graph = Graph("refunds", state=State, version="2", step_limit=25, fan_out=8)

    @graph.node
    def assess(state, ctx):
        return {"n": state["n"] + 1}

    @graph.node(retry=Retry(attempts=5), timeout=timedelta(minutes=2), on_error="continue", goto=["assess", END])
    async def pay(state, ctx):
        return None

    graph.edge(START, "assess")
    graph.edge("assess", "pay")
    compiled = graph.compile()

    assert assess({"n": 1}, None) == {"n": 2}
    assert (compiled.name, compiled.version, compiled.step_limit, compiled.fan_out) == ("refunds", "2", 25, 8)
    first, second = compiled.nodes.values()
    assert (first.name, first.function, first.is_async) == ("assess", assess, False)
    assert (first.retry, first.timeout, first.on_error, first.goto) == (NO_RETRY, None, "fail", ())
    assert first.retry.attempts == 1
    assert (second.name, second.function, second.is_async) == ("pay", pay, True)
    assert (second.retry, second.timeout, second.on_error) == (Retry(attempts=5), 120.0, "continue")
    assert second.goto == ("assess", END)


def test_partials_and_callable_objects_are_nodes_once_they_have_a_name():
    class Asynchronous:
        async def __call__(self, state, ctx):
            return None

    graph = graph_of()
    graph.node(functools.partial(pause), name="partial")
    graph.node(Asynchronous(), name="object")

    assert [(node.name, node.is_async) for node in graph.nodes.values()] == [("partial", True), ("object", True)]
    with pytest.raises(GraphError, match="a node of graph 'g' has no name of its own: give name="):
        graph.node(functools.partial(step))
    with pytest.raises(GraphError, match="has no name of its own"):
        graph.node(lambda state, ctx: None)


@pytest.mark.parametrize("name", ["", START, END, "a/b", "a#1", "a\x1fb", "x" * 201])
def test_names_that_would_not_work_are_refused(name):
    with pytest.raises(GraphError):
        graph_of(name)


def test_a_name_is_given_once():
    with pytest.raises(GraphError) as caught:
        graph_of("a", "b", "a")
    assert caught.value.message == "graph 'g' has a node 'a' already: give this one another name="


def generates(state, ctx):
    yield {}


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda state: None, "node 'x' of graph 'g' must take (state, ctx)"),
        (generates, "node 'x' of graph 'g' is a generator; a node returns its update once"),
        (5, "node 'x' of graph 'g' must be a function (state, ctx) or a Graph, not int"),
    ],
)
def test_what_cannot_be_called_as_a_node_is_refused(function, said):
    with pytest.raises(GraphError) as caught:
        graph_of().node(function, name="x")
    assert caught.value.message == said


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"timeout": 0}, "timeout of node 'x' of graph 'g' must be longer than zero"),
        (
            {"timeout": float("inf")},
            "timeout of node 'x' of graph 'g' must be a finite, positive number of seconds or ",
        ),
        ({"on_error": "ignore"}, """on_error of node 'x' of graph 'g' must be "fail" or "continue", not 'ignore'"""),
        ({"goto": "ab"}, "goto of node 'x' of graph 'g' must be a list of names: goto=['ab']"),
    ],
)
def test_wrong_options_of_a_node_are_refused(options, said):
    with pytest.raises(GraphError) as caught:
        graph_of().node(step, name="x", **options)
    assert caught.value.message.startswith(said)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"step_limit": 0}, "step_limit of graph 'g' must be an integer of at least 1, not 0"),
        ({"step_limit": True}, "step_limit of graph 'g' must be an integer of at least 1, not True"),
        ({"fan_out": 0}, "fan_out of graph 'g' must be an integer of at least 1, not 0"),
        ({"version": 2}, "the version of graph 'g' must be 1 to 200 printable characters, not 2"),
    ],
)
def test_wrong_options_of_a_graph_are_refused(options, said):
    with pytest.raises(GraphError) as caught:
        Graph("g", state=State, **options)
    assert caught.value.message == said


def test_routes_are_plain_functions_to_a_list_of_names():
    graph = graph_of("a")

    async def choose(state):
        return "a"

    with pytest.raises(GraphError, match=r"needs a plain function choose\(state\)"):
        graph.route("a", choose, to=["a"])
    with pytest.raises(GraphError, match=r"the route from 'a' of graph 'g' needs to=\[…\]"):
        graph.route("a", either, to=[])
    with pytest.raises(GraphError, match=r"needs to=\[…\]"):
        graph.route("a", either, to="a")
    with pytest.raises(GraphError, match="a node is named by its name in edges, routes and gotos, not by <function"):
        graph.edge(step, "a")


# --- compiling --------------------------------------------------------------------------------------------------------


def test_an_unknown_node_is_named_with_its_edge():
    graph = chain_of("a")
    graph.edge("a", "b")
    assert refusal(graph) == "graph 'g' has an edge from 'a' to unknown node 'b' (known nodes: a)"

    graph = chain_of("a")
    graph.edge("b", "a")
    assert refusal(graph) == "graph 'g' has an edge from unknown node 'b' to 'a' (known nodes: a)"

    graph = chain_of("a")
    graph.route("a", either, to=["a", "b"])
    assert refusal(graph) == "graph 'g' has an edge from 'a' to unknown node 'b' (known nodes: a)"

    graph = chain_of("a")
    graph.node(step, name="c", goto=["d"])
    assert refusal(graph) == "graph 'g' has an edge from 'c' to unknown node 'd' (known nodes: a, c)"


def test_the_ends_are_ends():
    graph = chain_of("a")
    graph.edge(END, "a")
    assert refusal(graph) == "graph 'g' has an edge from END to 'a': nothing comes after END"

    graph = chain_of("a")
    graph.edge("a", START)
    assert refusal(graph) == "graph 'g' has an edge from 'a' into START: go to the first node instead"

    graph = graph_of("a")
    graph.edge("a", END)
    assert refusal(graph) == "graph 'g' has no edge from START: add graph.edge(START, 'a')"


def test_an_unreachable_node_is_named():
    graph = chain_of("a")
    graph.node(step, name="b")
    graph.edge("b", "b")
    assert refusal(graph).startswith("node 'b' of graph 'g' cannot be reached from START: add an edge or a route to it")

    graph = graph_of("b")
    graph.node(step, name="a", goto=["b"])
    graph.edge(START, "a")
    assert list(graph.compile().nodes) == ["b", "a"]


def test_compiling_is_done_once_until_something_changes_inside_or_out():
    inner = chain_of("x", name="inner")
    graph = chain_of("a")
    graph.node(inner)
    graph.edge("a", "inner")
    first = graph.compile()
    assert graph.compile() is first

    inner.node(step, name="y")
    inner.edge("x", "y")
    second = graph.compile()
    assert second is not first
    assert second.node_at("inner/y").name == "y"
    assert graph.compile() is second

    graph.edge("inner", "a")
    assert graph.compile() is not second


# --- subgraphs --------------------------------------------------------------------------------------------------------


def test_paths_lead_through_subgraphs():
    innermost = chain_of("deep", name="innermost")
    inner = chain_of("x", name="inner")
    inner.node(innermost)
    inner.edge("x", "innermost")
    graph = chain_of("a")
    assert graph.node(inner, name="once") is inner
    graph.node(inner, name="twice")
    graph.edge("a", "once")
    graph.edge("once", "twice")
    compiled = graph.compile()

    assert compiled.node_at("a") is compiled.nodes["a"]
    assert compiled.node_at("twice/innermost/deep").function is step
    assert compiled.graph_at("twice/innermost/deep").name == "innermost"
    assert compiled.graph_at("once/x") is compiled.nodes["once"].subgraph
    assert compiled.graph_at("a") is compiled
    with pytest.raises(GraphError, match=r"graph 'g' version '1' has no node 'once/y', which is due: bring the node "):
        compiled.node_at("once/y")


def test_a_subgraph_leaves_options_to_its_nodes():
    with pytest.raises(GraphError, match="node 'inner' of graph 'g' is a subgraph: give retry, timeout, on_error and"):
        graph_of().node(chain_of("x", name="inner"), retry=Retry())


def test_a_graph_does_not_contain_itself():
    graph = chain_of("a")
    graph.node(graph, name="again")
    graph.edge("a", "again")
    assert refusal(graph) == "graph 'g' contains itself: 'g' > 'g'"

    outer, inner = chain_of("a", name="outer"), chain_of("b", name="inner")
    outer.node(inner)
    inner.node(outer)
    outer.edge("a", "inner")
    inner.edge("b", "outer")
    assert refusal(outer) == "graph 'outer' contains itself: 'outer' > 'inner' > 'outer'"


def test_types_of_subgraphs_are_declared_by_the_whole():
    class Special:
        pass

    class Inner(TypedDict):
        m: int

    inner = Graph("inner", state=Inner, types=[Special])
    inner.node(step, name="x")
    inner.edge(START, "x")
    graph = chain_of("a")
    graph.node(inner)
    graph.edge("a", "inner")

    assert graph.compile().declared == (State, Inner, Special)


# --- choices ----------------------------------------------------------------------------------------------------------


def test_a_choice_is_a_name_end_a_send_or_a_list_of_them():
    send = Send("b", {"n": 1})

    assert targets_of("a", allowed=("a", "b"), where="w") == ("a",)
    assert targets_of(END, allowed=("a",), where="w") == (END,)
    assert targets_of(send, allowed=("b",), where="w") == (send,)
    assert targets_of(["a", send, send, END], allowed=("a", "b"), where="w") == ("a", send, send, END)
    assert targets_of([], allowed=("a",), where="w") == ()


@pytest.mark.parametrize(
    ("chosen", "said"),
    [
        ("c", "the route chose 'c', which is not one of its targets: 'a', 'b'"),
        (["a", Send("c", 1)], "the route chose 'c', which is not one of its targets: 'a', 'b'"),
        (Send(END, 1), "the route chose '__end__', which is not one of its targets: 'a', 'b'"),
        (None, "the route chose None; it must give a node's name, END, Send(node, input) or a list of these"),
        ([5], "the route chose a value of type int; it must give a node's name, END, Send(node, input) or a list of"),
        ({"a", "b"}, "the route chose a value of type set; it must give a node's name, END, "),
        (Goto("a"), "the route chose a value of type Goto; it must give a node's name, END, "),
    ],
)
def test_another_choice_is_refused_by_name(chosen, said):
    with pytest.raises(GraphError) as caught:
        targets_of(chosen, allowed=("a", "b"), where="the route")
    assert caught.value.message.startswith(said)


# --- drawing ----------------------------------------------------------------------------------------------------------


def by_risk(state):
    return "pay"


def test_a_graph_draws_itself():
    inner = Graph("research", state=State)
    inner.node(step, name="plan")
    inner.edge(START, "plan")
    graph = Graph("refunds", state=State)
    graph.node(step, name="assess", goto=["pay"])
    graph.node(step, name="pay")
    graph.node(step, name="end")
    graph.node(step, name='say "hi" <b>')
    graph.node(inner)
    graph.edge(START, "assess")
    graph.route("assess", by_risk, to=["research", END])
    graph.route("research", lambda state: END, to=["end"])
    graph.edge("pay", END)
    graph.edge("pay", 'say "hi" <b>')
    graph.edge("end", END)

    assert graph.draw() == (
        "flowchart TD\n"
        "    __start__([START])\n"
        '    assess["assess"]\n'
        '    pay["pay"]\n'
        '    node_3["end"]\n'
        '    node_4["say #quot;hi#quot; #lt;b#gt;"]\n'
        '    subgraph research["research"]\n'
        "        research____start__([START])\n"
        '        research__plan["plan"]\n'
        "        research____end__([END])\n"
        "        research____start__ --> research__plan\n"
        "        research__plan --> research____end__\n"
        "    end\n"
        "    __end__([END])\n"
        "    __start__ --> assess\n"
        '    assess -.->|"by_risk"| research\n'
        '    assess -.->|"by_risk"| __end__\n'
        '    assess -.->|"goto"| pay\n'
        "    pay --> __end__\n"
        "    pay --> node_4\n"
        "    node_3 --> __end__\n"
        "    node_4 --> __end__\n"
        "    research -.-> node_3\n"
    )


def test_two_names_never_draw_as_one_node():
    inner = chain_of("a", name="sub")
    graph = chain_of("sub__a")
    graph.node(inner)
    graph.edge("sub__a", "sub")
    drawn = graph.draw()

    assert '    sub__a["sub__a"]\n' in drawn
    assert '        sub__a_["a"]\n' in drawn
