"""Tools as they are declared: what they take, what models are told of them, what is refused."""

from __future__ import annotations

import dataclasses
import enum
from datetime import UTC, datetime
from decimal import Decimal
from typing import Annotated, Any, Literal, TypedDict

import pytest
from pydantic import BaseModel, Field

from keepstep import Graph, Retry, Tool, ToolArguments, tool
from keepstep.errors import GraphError


class State(TypedDict, total=False):
    log: list[Any]


class Level(enum.Enum):
    LOW = "low"
    HIGH = "high"


class Address(BaseModel):
    city: str
    zip: int = 0


@dataclasses.dataclass
class Line:
    article: str
    count: int


class Named(TypedDict):
    order: str
    amount: Annotated[int, Field(ge=1)]


# --- what a tool is ---


def test_a_tool_is_its_function_in_a_unit_test():
    @tool(version="2", risk="high", scopes=["payments"])
    def pay(order: str, amount: Decimal = Decimal(1), *, idempotency_key: str = "none") -> str:
        """Pay an order."""
        return f"{order} {amount} {idempotency_key}"

    assert isinstance(pay, Tool)
    assert pay("7", amount=Decimal(2), idempotency_key="k") == "7 2 k"
    assert (pay.name, pay.version, pay.risk, pay.scopes) == ("pay", "2", "high", ("payments",))
    assert (pay.__name__, pay.__doc__) == ("pay", "Pay an order.")
    assert repr(pay) == "Tool('pay', version='2')"


def test_a_tool_without_options():
    @tool
    def read(order: str) -> str:
        return order

    assert (read.name, read.version, read.risk, read.scopes, read.rate) == ("read", "1", "low", (), None)
    assert not read.asks
    assert not read.execution.declared.idempotent


def test_a_tools_declaration_is_that_of_its_effect():
    def found(order: str) -> str:
        return order

    @tool("pay_it", lookup=found, settling=5, timeout=3)
    def pay(order: str) -> str:
        return order

    declared = pay.execution.declared
    assert (declared.name, declared.idempotent, declared.lookup) == ("pay_it", False, found)
    assert (declared.settling_seconds, declared.timeout_seconds, declared.counted) == (5, 3, True)


def test_one_function_may_be_two_tools():
    def pay(order: str) -> str:
        return order

    first, second = tool("first")(pay), tool("second", idempotent=True)(pay)
    assert (first.execution.declared.name, second.execution.declared.name) == ("first", "second")
    assert not first.execution.declared.idempotent


# --- what a model is told ---


def test_the_definition_that_models_take():
    @tool(secrets={"api_key": "env:KEY"})
    def pay(
        order: str,
        amount: Annotated[Decimal, Field(description="in euros")],
        level: Literal["low", "high"] = "low",
        *,
        api_key: str,
        idempotency_key: str,
    ) -> None:
        """Pay an order.

        At once.
        """

    definition = pay.definition()
    assert definition["type"] == "function"
    function = definition["function"]
    assert (function["name"], function["description"]) == ("pay", "Pay an order.\n\nAt once.")
    parameters = function["parameters"]
    assert parameters["required"] == ["order", "amount"]
    assert list(parameters["properties"]) == ["order", "amount", "level"]
    assert parameters["additionalProperties"] is False
    assert parameters["properties"]["order"] == {"type": "string"}
    assert parameters["properties"]["amount"]["description"] == "in euros"
    assert parameters["properties"]["level"] == {"type": "string", "enum": ["low", "high"], "default": "low"}


def test_a_tool_without_arguments():
    @tool
    def ping() -> str:
        return "pong"

    assert ping.json_schema == {"type": "object", "properties": {}, "additionalProperties": False}
    assert ping.arguments.checked({}) == {}


def test_classes_in_the_schema():
    @tool
    def ship(address: Address, lines: list[Line]) -> None:
        """Ship."""

    assert ship.json_schema["properties"]["address"] == {"$ref": "#/$defs/Address"}
    assert set(ship.json_schema["$defs"]) == {"Address", "Line"}


# --- what a model gives ---


@tool
def everything(
    text: str = "",
    number: int = 0,
    amount: Decimal = Decimal(0),
    rate: float = 0.0,
    flag: bool = False,
    at: datetime | None = None,
    level: Level = Level.LOW,
    kind: Literal["a", "b"] = "a",
    address: Address | None = None,
    lines: list[Line] | None = None,
    anything: Any = None,
) -> None:
    """Take one of each."""


@pytest.mark.parametrize(
    ("name", "given", "taken"),
    [
        ("text", "7", "7"),
        ("number", 7, 7),
        ("number", "7", 7),
        ("amount", "12.50", Decimal("12.50")),
        ("amount", 12.5, Decimal("12.5")),
        ("amount", 0.1, Decimal("0.1")),
        ("amount", 12, Decimal(12)),
        ("amount", Decimal("12.50"), Decimal("12.50")),
        ("rate", 1, 1.0),
        ("flag", True, True),
        ("at", "2030-01-02T03:04:05Z", datetime(2030, 1, 2, 3, 4, 5, tzinfo=UTC)),
        ("level", "high", Level.HIGH),
        ("level", Level.HIGH, Level.HIGH),
        ("kind", "b", "b"),
        ("address", {"city": "Rom"}, Address(city="Rom")),
        ("lines", [{"article": "x", "count": 2}], [Line("x", 2)]),
        ("anything", {"b": 1, "a": [1]}, {"a": [1], "b": 1}),
    ],
)
def test_what_json_carries_becomes_what_the_tool_takes(name, given, taken):
    found = everything.arguments.checked({name: given})
    assert found == {name: taken}
    assert type(found[name]) is type(taken)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"text": 7}, "$.text: Input should be a valid string"),
        ({"number": 7.5}, "$.number: Input should be a valid integer"),
        ({"number": True}, "$.number: Input should be a valid integer"),
        ({"amount": "many"}, "$.amount: Input should be a valid decimal"),
        ({"kind": "c"}, "$.kind: Input should be 'a' or 'b'"),
        ({"address": {"city": 1}}, "$.address.city: Input should be a valid string"),
        ({"lines": [{"article": "x"}]}, "$.lines.0.count: Field required"),
        ({"level": "middle"}, "$.level: Input should be 'low' or 'high'"),
        ({"nothing": 1}, "$.nothing: unknown argument"),
    ],
)
def test_what_does_not_fit_is_named_by_its_path(given, said):
    with pytest.raises(ToolArguments) as refused:
        everything.arguments.checked(given)
    assert said in refused.value.message


def test_an_error_shows_no_value():
    with pytest.raises(ToolArguments) as refused:
        everything.arguments.checked({"number": "tr0ub4dor", "kind": "tr0ub4dor", "at": "tr0ub4dor"})
    assert "tr0ub4dor" not in refused.value.message


def test_arguments_come_in_one_order():
    one = everything.arguments.checked({"number": 1, "text": "x", "anything": {"b": 1, "a": {"d": 1, "c": 2}}})
    assert repr(one) == "{'text': 'x', 'number': 1, 'anything': {'a': {'c': 2, 'd': 1}, 'b': 1}}"


# --- schemas of one's own ---

OWN = {
    "type": "object",
    "properties": {"order": {"type": "string", "pattern": "^[0-9]+$"}, "amount": {"type": "integer"}},
    "required": ["order", "amount"],
}


@pytest.mark.parametrize("schema", [OWN, Named], ids=["json", "typeddict"])
def test_a_schema_of_ones_own(schema):
    @tool(schema=schema)
    def pay(order: str, amount: Decimal) -> None:
        """Pay."""

    assert pay.json_schema["required"] == ["order", "amount"]
    assert pay.arguments.checked({"amount": 5, "order": "7"}) == {"order": "7", "amount": Decimal(5)}


def test_a_json_schema_is_held_to():
    @tool(schema=OWN)
    def pay(order: str, amount: int) -> None:
        """Pay."""

    with pytest.raises(ToolArguments, match=r"\$\.order: does not fit the schema \(pattern\)"):
        pay.arguments.checked({"amount": 5, "order": "x"})


def test_a_type_is_held_to():
    class Wanted(BaseModel):
        order: str
        amount: Annotated[int, Field(ge=1)]

    @tool(schema=Wanted)
    def pay(order: str, amount: int) -> None:
        """Pay."""

    with pytest.raises(ToolArguments, match=r"\$\.amount: Input should be greater than or equal to 1"):
        pay.arguments.checked({"amount": 0, "order": "x"})
    assert pay.arguments.checked({"amount": 1, "order": "x"}) == {"order": "x", "amount": 1}


class Fields(BaseModel):
    order: str


class Keys(TypedDict):
    order: str


@pytest.mark.parametrize("schema", [Fields, Keys], ids=["model", "typeddict"])
def test_a_parameter_that_the_schema_leaves_out_cannot_be_given(schema):
    @tool(schema=schema)
    def pay(order: str, hold: str = "") -> None:
        """Pay."""

    with pytest.raises(ToolArguments, match=r": \$\.hold: unknown argument \(known: order\)$"):
        pay.arguments.checked({"order": "x", "hold": "h"})
    assert pay.arguments.checked({"order": "x"}) == {"order": "x"}


# --- what is refused ---


def plain(order: str) -> str:
    return order


def keyed(order: str, *, idempotency_key: str) -> str:
    return order


def variadic(*orders: str) -> None:
    """Take any."""


def open_ended(**orders: str) -> None:
    """Take any."""


def positional(order: str, /) -> None:
    """Take one."""


@pytest.mark.parametrize(
    ("function", "options", "said"),
    [
        (plain, {"risk": "huge"}, "tool 'plain': risk must be one of low, medium, high, not 'huge'"),
        (plain, {"secrets": {"api_key": "env:K"}}, "secrets names 'api_key', which is no parameter of the function"),
        (keyed, {"secrets": {"idempotency_key": "env:K"}}, "idempotency_key is the call's key and no secret"),
        (plain, {"secrets": {"order": ""}}, "the secret 'order' of tool 'plain' must be 1 to 200"),
        (plain, {"idempotent": True, "lookup": plain}, "an effect is idempotent or has a lookup"),
        (plain, {"name": "pay it"}, "models take names of 1 to 64 letters, digits, _ and -"),
        (plain, {"name": "a.b"}, "models take names"),
        (plain, {"name": "x" * 65}, "models take names"),
        (plain, {"version": ""}, "the version of tool 'plain' must be 1 to 200"),
        (plain, {"scopes": [7]}, "scopes of tool 'plain' must be 1 to 200"),
        (plain, {"rate": "often"}, "tool 'plain': rate 'often'"),
        (plain, {"retry": 3}, "tool 'plain': retry must be a Retry, not 3"),
        (plain, {"timeout": 0}, "timeout of tool 'plain' must be longer than zero"),
        (plain, {"settling": -1}, "settling must be a finite, positive number"),
        (plain, {"schema": int}, "schema must be a JSON schema, a pydantic model or a TypedDict"),
        (plain, {"schema": {"type": "strange"}}, "its schema is no JSON schema"),
        (plain, {"schema": {"type": "array"}}, "its schema must be of an object"),
        (plain, {"schema": {"type": "object", "properties": {"x": {}}}}, "its schema names 'x', which is no argument"),
        (plain, {"schema": {"type": "object"}}, "its schema does not name 'order'"),
        (variadic, {}, "parameter *orders takes anything; name every argument"),
        (open_ended, {}, "parameter **orders takes anything"),
        (positional, {}, "parameter 'order' is positional-only"),
        (lambda order: order, {}, "models take names"),
    ],
)
def test_a_declaration_that_does_not_hold_together(function, options, said):
    with pytest.raises(GraphError) as refused:
        tool(**options)(function)
    assert said in refused.value.message


def test_an_annotation_that_is_not_there():
    def pay(order: Missing) -> None:  # noqa: F821  that is the mistake
        """Pay."""

    with pytest.raises(GraphError, match="its annotations name 'Missing', which is not found in module"):
        tool(pay)


# --- two-phase ---


def test_phases_are_effects_of_their_own():
    @tool
    def pay(order: str, *, idempotency_key: str) -> str:
        return order

    @pay.prepare
    def prepared(order, *, idempotency_key):
        return None

    @pay.commit(idempotent=True)
    def _(order, result):
        return None

    @pay.cancel(lookup=plain, settling=2)
    async def _(order):
        return None

    assert prepared("7", idempotency_key="k") is None
    assert [phase.declared.name for phase in pay.phases] == ["pay.prepare", "pay", "pay.commit", "pay.cancel"]
    assert [phase.declared.idempotent for phase in pay.phases] == [False, False, True, False]
    assert pay.cancel_phase.declared.settling_seconds == 2
    assert pay.is_async


def no_arguments() -> None:
    """Take nothing."""


def with_another(order: str, hold: str) -> None:
    """Take one too many."""


def with_result(order: str, result: str) -> None:
    """Take the result."""


def test_a_handler_needs_the_defaults_of_its_tool():
    @tool
    def pay(order: str, hold: str = "") -> str:
        return order + hold

    with pytest.raises(GraphError) as refused:
        pay.prepare(with_another)
    assert refused.value.message == "tool 'pay': its prepare needs a default of 'hold', too: a call may leave it out"
    assert pay.prepare_phase is None

    @pay.prepare
    def _(order: str, hold: str = "") -> dict[str, str]:
        return {"order": order, "hold": hold or "h"}

    pay.cancel(with_another)  # gets what was prepared
    assert pay.cancel_phase is not None


@pytest.mark.parametrize(
    ("kind", "function", "options", "said"),
    [
        ("prepare", with_another, {}, "its prepare takes 'hold', which is no argument of the tool"),
        ("prepare", no_arguments, {}, "its prepare must take the tool's arguments, and 'order' is missing"),
        ("prepare", with_result, {}, "its prepare takes 'result'"),
        ("cancel", with_result, {}, "its cancel takes 'result'"),
        ("prepare", plain, {"retry": Retry()}, "prepare takes idempotent, lookup and settling, not 'retry'"),
        ("prepare", plain, {"idempotent": True, "lookup": plain}, "an effect is idempotent or has a lookup"),
    ],
)
def test_handlers_that_do_not_hold_together(kind, function, options, said):
    def pay(order: str) -> str:
        return order

    made = tool(pay)
    if kind != "prepare":
        made.prepare(plain)
    with pytest.raises(GraphError) as refused:
        getattr(made, kind)(**options)(function)
    assert said in refused.value.message


def test_handlers_have_an_order_and_there_is_one_of_each():
    made = tool(plain)
    with pytest.raises(GraphError, match="declare its prepare before its commit"):
        made.commit(plain)
    made.prepare(plain)
    with pytest.raises(GraphError, match="tool 'plain' has a prepare already"):
        made.prepare(plain)


# --- graphs ---


def test_a_graph_knows_its_tools_by_name():
    pay = tool(plain)
    graph = Graph("agent", state=State, tools=[pay, pay])
    assert graph.tools == {"plain": pay}


def test_a_graph_refuses_what_is_no_tool_and_two_of_one_name():
    with pytest.raises(GraphError, match="tools of graph 'agent' must be declared by @tool"):
        Graph("agent", state=State, tools=[plain])
    with pytest.raises(GraphError, match="graph 'agent' has two tools named 'plain'"):
        Graph("agent", state=State, tools=[tool(plain), tool(plain)])
