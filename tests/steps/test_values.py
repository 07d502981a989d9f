"""Values through everything they pass: state, questions, results, errors, another process, an operator's view."""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any, Generic, TypedDict, TypeVar

import pytest
from pydantic import BaseModel

from keepstep import END, START, Graph

ROOT = str(Path(__file__).parents[2])
T = TypeVar("T")


class Numbers(BaseModel):
    values: list[int]


class State(TypedDict, total=False):
    value: Any
    numbers: Numbers
    back: Any


NUL = {"note": "invoice\x00 2027", "ref\x00no": 1, "output": "O\x00K\x00"}
INTEGERS = [2**53 + 1, 2**63 - 1, 2**63, -(2**63) - 1, 2**64, int(hashlib.sha256(b"x").hexdigest(), 16)]
SURROGATES = {"files": ["caf\udce9.txt"], "cut": "\ud83d", "caf\udce9": 1}


def through(value):
    """A graph that carries a value through a question, an effect, an event and two checkpoints."""
    graph = Graph("through", state=State)
    starts = []

    def echo(given):
        return given

    @graph.node
    def node(state, ctx):
        starts.append("node")
        ctx.emit(state["value"])
        decision = ctx.approve("Is\x00 it?", arguments={"value": state["value"]}, context=value)
        assert decision.arguments == {"value": value}
        return {"back": ctx.effect(echo, state["value"])}

    @graph.node
    async def check(state, ctx):
        starts.append("check")
        assert state["back"] == value
        assert state["value"] == value
        ctx.log.info("seen", value=value)

    graph.edge(START, "node")
    graph.edge("node", "check")
    graph.edge("check", END)
    graph.starts = starts
    return graph


@pytest.mark.parametrize("codec", ["msgpack", "json"])
@pytest.mark.parametrize("value", [NUL, INTEGERS, SURROGATES], ids=["nul", "integers", "surrogates"])
def test_text_and_numbers_come_back_as_they_were(deploy, codec, value):
    graph = through(value)
    d = deploy(graph, codec=codec)
    d.start({"value": value})
    assert d.drain() == "waiting"
    (approval,) = d.approvals()
    assert approval.question == r"Is\x00 it?"
    d.decide()
    assert d.drain() == "done"
    assert d.values() == {"value": value, "back": value}
    assert repr(d.values()["back"]) == repr(value)
    assert graph.starts == ["node", "node", "check"]
    (emitted,) = d.reader.events("t", kind="node.emitted")
    shown = json.dumps(emitted.payload)  # for any reader of JSON: nothing rounded, nothing lost
    if value is INTEGERS:
        assert json.loads(shown) == [{"$": "int", "v": str(number)} for number in INTEGERS]
    elif value is NUL:
        assert r"invoice\\x00 2027" in shown
    else:
        assert r"caf\\udce9.txt" in shown


def test_a_question_that_is_no_valid_text_is_shown_escaped(deploy):
    graph = Graph("asks", state=State)

    @graph.node
    def node(state, ctx):
        return {"back": ctx.approve("Cut \ud83d?").verdict}

    graph.edge(START, "node")
    graph.edge("node", END)
    d = deploy(graph)
    d.start()
    assert d.drain() == "waiting"
    (approval,) = d.approvals()
    assert approval.question == r"Cut \ud83d?"
    d.decide()
    assert d.drain() == "done"


def test_large_numbers_in_a_model(deploy):
    graph = Graph("numbers", state=State)

    @graph.node
    def node(state, ctx):
        assert type(state["numbers"]) is Numbers
        return {"back": [type(number).__name__ for number in state["numbers"].values]}

    graph.edge(START, "node")
    graph.edge("node", END)
    d = deploy(graph)
    d.start({"numbers": Numbers(values=INTEGERS)})
    assert d.drain() == "done"
    assert d.values() == {"numbers": Numbers(values=INTEGERS), "back": ["int"] * 6}


@pytest.mark.parametrize("text", ["O\x00K\x00", "caf\udce9 \ud83d", 'a "quoted" \\ line\n'])
def test_an_errors_text_is_kept(deploy, text):
    graph = Graph("breaks", state=State)

    @graph.node
    def node(state, ctx):
        ctx.effect(fail)

    def fail():
        raise ValueError(text)

    graph.edge(START, "node")
    graph.edge("node", END)
    d = deploy(graph)
    d.start()
    assert d.drain() == "failed"
    assert d.error == ("node_failed", text)
    assert d.effects() == [("fail", "failed", 1)]


# --- types, in another process ---


class Invoice(BaseModel):
    class Stage(enum.Enum):
        DRAFT = "draft"
        SENT = "sent"

    stage: Stage
    number: int


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Row(BaseModel):
    name: str


class Page(BaseModel, Generic[T]):
    items: list[T]


@dataclasses.dataclass
class Total:
    parts: list[int]
    total: int = dataclasses.field(init=False)

    def __post_init__(self):
        self.total = sum(self.parts)


class Typed(TypedDict, total=False):
    invoice: Invoice
    page: Page[Row]
    total: Total
    level: Level
    decided: bool


def typed():
    graph = Graph("typed", state=Typed)

    @graph.node
    def make(state, ctx):
        return {
            "invoice": Invoice(stage=Invoice.Stage.SENT, number=7),
            "page": Page[Row](items=[Row(name="a")]),
            "total": Total([1, 2]),
            "level": Level.HIGH,
        }

    @graph.node
    def check(state, ctx):
        decision = ctx.approve("Go on?", arguments={"total": state["total"]})
        assert isinstance(state["invoice"], Invoice)
        assert state["invoice"].stage is Invoice.Stage.SENT
        assert type(state["page"]) is Page[Row]
        assert isinstance(state["page"].items[0], Row)
        assert (type(state["total"]), state["total"].total) == (Total, 3)
        assert state["level"] is Level.HIGH
        return {"decided": decision.approved}

    graph.edge(START, "make")
    graph.edge("make", "check")
    graph.edge("check", END)
    return graph


_RESUME = """
    import sys
    sys.path.insert(0, {root!r})
    __file__ = {file!r}
    source = open({file!r}).read().replace("from __future__ import annotations", "")
    exec(compile(source, "resumed", "exec"), globals())  # the classes are __main__'s here
    from tests.steps.driver import Deployment
    d = Deployment({url!r}, typed())
    d.decide()
    print(d.drain(), d.error)
    print(type(d.values()["invoice"]).__module__, d.values()["total"], d.values()["decided"])
"""


def test_types_survive_into_another_process_whose_main_module_defines_them(deploy, store_url):
    d = deploy(typed())
    d.start()
    assert d.drain() == "waiting"
    program = textwrap.dedent(_RESUME).format(root=ROOT, file=__file__, url=store_url)
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert ran.stdout.splitlines() == ["done ('', '')", "__main__ Total(parts=[1, 2], total=3) True"], ran.stderr
    assert d.values()["total"] == Total([1, 2])


def test_a_type_that_is_not_there_blocks(deploy):
    d = deploy(typed())
    d.start()
    assert d.drain() == "waiting"
    graph = Graph("typed", state=State)

    @graph.node
    def check(state, ctx):
        raise AssertionError

    @graph.node
    def make(state, ctx):
        raise AssertionError

    graph.edge(START, "make")
    graph.edge("make", "check")
    graph.edge("check", END)
    other = deploy(graph)
    other.decide()
    assert other.drain() == "blocked"
    assert other.error[0] == "unknown_type"
    assert "Invoice" in other.error[1]
    other.control("retry")
    d.queue += other.queue
    assert d.drain() == "done"
    assert d.values()["decided"] is True
