"""Finding the graphs that a worker was told to carry."""

from __future__ import annotations

import sys
import textwrap

import pytest

from keepstep.errors import GraphError
from keepstep.tasks import carried


@pytest.fixture(autouse=True)
def _imports_undone():
    path, modules = list(sys.path), set(sys.modules)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        del sys.modules[name]


def graph_file(folder, name, source):
    path = folder / name
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_text(
        textwrap.dedent("""
            from typing import TypedDict
            from keepstep import END, START, Graph

            class State(TypedDict, total=False):
                n: int

            def one(name, version="1"):
                graph = Graph(name, state=State, version=version)
                graph.node(lambda state, ctx: {}, name="only")
                graph.edge(START, "only")
                graph.edge("only", END)
                return graph
        """)
        + textwrap.dedent(source)
    )
    return path


def test_graphs_of_modules_and_files(tmp_path):
    graph_file(tmp_path, "shop/__init__.py", "")
    graph_file(tmp_path, "shop/orders.py", "first = one('orders')\nsecond = one('orders', '2')")
    graph_file(tmp_path, "elsewhere/agent.py", "import neighbour\ngraph = one('agent')")
    graph_file(tmp_path, "elsewhere/neighbour.py", "")

    found = carried.load(["shop.orders", "elsewhere/agent.py"])

    assert list(found) == [("orders", "1"), ("orders", "2"), ("agent", "1")]
    assert found["agent", "1"].name == "agent"


def test_one_graph_under_several_names_is_one(tmp_path):
    graph_file(tmp_path, "base.py", "graph = one('g')\nagain = graph")
    graph_file(tmp_path, "face.py", "from base import graph")

    assert list(carried.load(["base", "face", str(tmp_path / "base.py")])) == [("g", "1")]


def test_a_file_whose_name_is_taken_is_not_taken_for_the_other_module(tmp_path):
    graph_file(tmp_path, "json.py", "graph = one('mine')")

    assert list(carried.load(["json.py"])) == [("mine", "1")]
    assert sys.modules["json"].__file__ != str(tmp_path / "json.py")


def test_two_graphs_of_one_name_and_version(tmp_path):
    graph_file(tmp_path, "left.py", "graph = one('g')")
    graph_file(tmp_path, "right.py", "graph = one('g')")

    with pytest.raises(GraphError, match=r"graph 'g' version '1' is defined in left and again in right\.py"):
        carried.load(["left", "right.py"])


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        ([], r"no graphs: .*KEEPSTEP_GRAPHS"),
        (["nowhere.at.all"], r"^nowhere\.at\.all: there is no module of that name"),
        (["missing.py"], r"^missing\.py: there is no such file$"),
        (["json"], r"^json: there is no Graph at module level$"),
    ],
)
def test_sources_that_give_no_graph(sources, message):
    with pytest.raises(GraphError, match=message):
        carried.load(sources)


def test_every_graph_that_does_not_hold_together_is_named(tmp_path):
    graph_file(
        tmp_path,
        "broken.py",
        """
        first = Graph("first", state=State)
        first.edge(START, "nowhere")
        second = Graph("second", state=State)
        second.node(lambda state, ctx: {}, name="alone")
        """,
    )

    with pytest.raises(GraphError) as raised:
        carried.load(["broken.py"])

    first, second = raised.value.message.split("; ", 1)
    assert first.startswith("broken.py: ")
    assert "'nowhere'" in first
    assert second.startswith("broken.py: ")
    assert "'second'" in second


@pytest.mark.parametrize("source", ["needs", "needs.py"])
def test_an_error_in_a_sources_own_code_is_told_with_the_places_in_it_alone(tmp_path, source):
    (tmp_path / "helper.py").write_text('import json\n\n\ndef read():\n    return json.loads("{")\n')
    (tmp_path / "needs.py").write_text("from helper import read\n\nread()\n")

    with pytest.raises(carried.CannotImport) as raised:
        carried.load([source])

    assert raised.value.message.startswith(f"{source} cannot be imported: JSONDecodeError: Expecting property name")
    assert raised.value.frames == ("needs.py:3 in <module>: read()", 'helper.py:5 in read: return json.loads("{")')


def test_a_file_that_is_no_python_is_told_in_one_line(tmp_path):
    (tmp_path / "syn.py").write_text("def (\n")

    with pytest.raises(carried.CannotImport) as raised:
        carried.load(["syn.py"])

    assert raised.value.message == "syn.py cannot be imported: SyntaxError: invalid syntax (syn.py, line 1)"
    assert raised.value.frames == ()


def test_a_module_that_leaves_at_import_does_not_end_the_worker_in_silence(tmp_path):
    (tmp_path / "leaves.py").write_text("import sys\nsys.exit('go away')\n")

    with pytest.raises(carried.CannotImport, match=r"^leaves cannot be imported: SystemExit: go away$"):
        carried.load(["leaves"])
