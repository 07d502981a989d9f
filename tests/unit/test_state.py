"""State types: inputs fit, updates are checked, reducers reduce, copies are copies."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Mapping
from datetime import UTC, datetime
from decimal import Decimal
from enum import Enum
from typing import Annotated, Any, NamedTuple, NotRequired, Optional, TypedDict

import msgspec
import pytest
from pydantic import BaseModel, Field, field_validator, model_validator
from pydantic.dataclasses import dataclass as pydantic_dataclass

from keepstep.errors import ConflictingWrites, GraphError, StateError
from keepstep.runtime.reducers import difference, same
from keepstep.runtime.state import StateSchema, add, append


class Stage(Enum):
    NEW = "new"
    PAID = "paid"


@dataclasses.dataclass
class Line:
    sku: str
    price: Decimal


class Client(BaseModel):
    name: str
    age: int = 0
    mail: str = Field("", alias="eMail")


class Parcel(msgspec.Struct):
    weight: int
    tags: list[str] = []


class Point(NamedTuple):
    x: int
    y: int


class Row(TypedDict):
    id: int
    note: NotRequired[str]


class Opaque:
    def __init__(self, inside: int) -> None:
        self.inside = inside


class Order(TypedDict):
    id: str
    amount: Decimal
    at: datetime
    size: tuple[int, int]
    lines: list[Line]
    client: Optional[Client]  # noqa: UP045  the older spelling is what is tested
    stage: Stage
    parcel: Parcel
    rows: list[Row]
    anything: Any
    count: Annotated[int, add]
    log: Annotated[list[str], append]
    limited: NotRequired[Annotated[int, Field(gt=0)]]
    later: Annotated[NotRequired[list[int]], operator.add]
    opaque: Opaque
    node: Node
    by_number: dict[int, str]
    ratio: float
    flags: set[str]
    points: dict[str, Point]
    prices: Annotated[list[Decimal], append]


class Budget(TypedDict):
    spent: Annotated[int, add, Field(le=10)]


class Node(TypedDict):
    children: list[Node]


def newest(old: Mapping[str, int], new: Mapping[str, int]) -> dict[str, int]:
    """Reduce in place, as careless reducers do."""
    old |= new
    return old


def oldest(old: Mapping[str, int], new: dict[str, int]) -> dict[str, int]:
    """Reduce in place of the other argument."""
    new.update(old)
    return new


class Merged(TypedDict):
    seen: Annotated[dict[str, int], newest]
    kept: Annotated[dict[str, int], oldest]


ORDER = StateSchema(Order)


# --- inputs -----------------------------------------------------------------------------------------------------------


def test_an_input_from_json_becomes_the_types_it_stands_for():
    channels = ORDER.initial(
        {
            "amount": "12.50",
            "at": "2024-05-01T10:00:00+00:00",
            "size": [2, 3],
            "lines": [{"sku": "a", "price": "1.10"}],
            "client": {"name": "Ann"},
            "stage": "paid",
            "parcel": {"weight": 3},
            "rows": [{"id": 1}],
            "by_number": {"7": "seven"},
            "flags": ["x"],
            "points": {"a": [1, 2]},
        }
    )

    assert channels == {
        "amount": Decimal("12.50"),
        "at": datetime(2024, 5, 1, 10, tzinfo=UTC),
        "size": (2, 3),
        "lines": [Line("a", Decimal("1.10"))],
        "client": Client(name="Ann"),
        "stage": Stage.PAID,
        "parcel": Parcel(3, []),
        "rows": [{"id": 1}],
        "by_number": {7: "seven"},
        "flags": {"x"},
        "points": {"a": Point(1, 2)},
    }
    assert str(channels["amount"]) == "12.50"
    assert type(channels["size"]) is tuple
    assert type(channels["points"]["a"]) is Point


def test_exact_values_pass_untouched_and_keys_not_given_stay_absent():
    opaque = Opaque(4)
    channels = ORDER.initial({"amount": Decimal("1.0"), "ratio": 1, "client": None, "opaque": opaque, "anything": {1}})

    assert list(channels) == ["amount", "ratio", "client", "opaque", "anything"]
    assert type(channels["ratio"]) is int
    assert channels["opaque"].inside == 4
    assert channels["anything"] == {1}
    assert ORDER.initial(None) == {}


def test_an_input_of_exact_values_in_json_shapes_fits_too():
    channels = ORDER.initial({"lines": [{"sku": "a", "price": Decimal("1.10")}]})

    assert channels == {"lines": [Line("a", Decimal("1.10"))]}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"id": 5}, "$.id: Input should be a valid string"),
        ({"count": "five"}, "$.count: Input should be a valid integer"),
        ({"count": True}, "$.count: Input should be a valid integer"),
        ({"lines": [{"sku": "a", "price": "1"}, {"sku": "b"}]}, "$.lines.1.price: Field required"),
        ({"client": {"name": "Ann", "age": "old"}}, "$.client.age: Input should be a valid integer"),
        ({"limited": 0}, "$.limited: Input should be greater than 0"),
        ({"rows": [{"id": 1, "note": 2}]}, "$.rows.0.note: Input should be a valid string"),
        ({"parcel": {"weight": "heavy"}}, "$.parcel: Value error, Expected `int`, got `str` - at `$.weight`"),
        ({"amuont": "12.50"}, "$.amuont: unknown key (known: id, amount, at, "),
        ({"opaque": 1}, "$.opaque: JSON cannot carry this type"),
    ],
)
def test_an_input_that_does_not_fit_is_refused_by_path(given, said):
    with pytest.raises(StateError) as caught:
        ORDER.initial(given)
    assert caught.value.message.startswith(f"the input does not fit Order: {said}")
    with pytest.raises(StateError) as caught:
        ORDER.merge({"id": "o-1"}, given)
    assert said in caught.value.message


def test_every_problem_of_an_input_is_told_and_no_value_is():
    with pytest.raises(StateError) as caught:
        ORDER.initial({"id": 4711, "amount": "s3cret", "count": 1})

    assert "$.id: " in caught.value.message
    assert "$.amount: " in caught.value.message
    assert "$.count" not in caught.value.message
    assert "s3cret" not in caught.value.message
    assert "4711" not in caught.value.message


@pytest.mark.parametrize("given", [[("id", "x")], "id", 3])
def test_an_input_that_is_no_mapping_is_refused(given):
    with pytest.raises(StateError, match=f"the input must be a mapping or Order, not {type(given).__name__}"):
        ORDER.initial(given)


def test_an_input_of_a_reducer_key_is_an_update_on_a_new_thread_too():
    assert ORDER.initial({"log": "a", "count": 2, "later": [1]}) == {"log": ["a"], "count": 2, "later": [1]}
    assert StateSchema(Merged).initial({"seen": {"a": 1}}) == {"seen": {"a": 1}}
    with pytest.raises(StateError, match=r"\$\.seen\.a: Input should be a valid integer"):
        StateSchema(Merged).initial({"seen": {"a": "1"}})


def test_the_channels_share_nothing_with_the_input():
    given = {"log": ["a"], "lines": [Line("a", Decimal(1))]}
    channels = ORDER.initial(given)
    given["log"].append("b")
    given["lines"][0].sku = "changed"

    assert channels == {"log": ["a"], "lines": [Line("a", Decimal(1))]}


def test_a_later_input_goes_through_the_reducers():
    before = {"id": "o-1", "count": 2, "log": ["a"]}
    after = ORDER.merge(before, {"id": "o-2", "count": 3, "log": "b", "amount": "9"})

    assert after == {"id": "o-2", "count": 5, "log": ["a", "b"], "amount": Decimal(9)}
    assert before == {"id": "o-1", "count": 2, "log": ["a"]}


# --- the four kinds of types ----------------------------------------------------------------------------------------


@dataclasses.dataclass
class Basket:
    owner: str
    items: Annotated[list[str], append] = dataclasses.field(default_factory=list)
    limit: Annotated[int, add] = 10
    total: int = dataclasses.field(init=False, default=0)

    def __post_init__(self) -> None:
        if not self.owner:
            message = "owner must not be empty"
            raise ValueError(message)
        self.total = len(self.items)


@pydantic_dataclass
class Checked:
    owner: str
    size: int = Field(default=3, gt=0)


class Account(BaseModel):
    owner: str = Field(alias="accountOwner")
    low: int = 0
    high: int = 9
    notes: Annotated[list[str], append] = Field(default_factory=list)

    @field_validator("owner")
    @classmethod
    def _trimmed(cls, value: str) -> str:
        return value.strip()

    @model_validator(mode="after")
    def _ordered(self) -> Account:
        if self.low > self.high:
            message = "low must not be over high"
            raise ValueError(message)
        return self


@dataclasses.dataclass(frozen=True, slots=True)
class Fixed:
    owner: str
    notes: Annotated[tuple[str, ...], add] = ()


class Shipment(msgspec.Struct):
    parcel: Parcel
    cost: Annotated[int, msgspec.Meta(ge=1)] = 1
    stops: Annotated[list[str], append] = msgspec.field(default_factory=list)


def test_a_dataclass_input_goes_through_the_class():
    schema = StateSchema(Basket)

    assert schema.initial({"owner": "ann", "items": "apple", "limit": 5}) == {
        "owner": "ann",
        "items": ["apple"],
        "limit": 15,
        "total": 1,
    }
    assert schema.initial(Basket("ann", ["x"], 5)) == {"owner": "ann", "items": ["x"], "limit": 5, "total": 1}
    with pytest.raises(StateError, match=r"^the input does not fit Basket: \$\.owner: missing$"):
        schema.initial({"items": ["apple"]})
    with pytest.raises(StateError, match=r"^the input does not fit Basket: owner must not be empty$"):
        schema.initial({"owner": ""})
    with pytest.raises(StateError, match=r"\$\.total: the type computes this key itself"):
        schema.initial({"owner": "ann", "total": 4})
    with pytest.raises(StateError, match=r"\$\.items\.0: Input should be a valid string"):
        schema.initial(Basket("ann", [1]))  # type: ignore[list-item]  # what is tested


def test_defaults_of_two_threads_are_two_objects():
    schema = StateSchema(Basket)
    one = schema.initial({"owner": "ann"})
    one["items"].append("x")

    assert schema.initial({"owner": "bob"})["items"] == []


def test_a_pydantic_dataclass_has_its_constraints_and_defaults():
    schema = StateSchema(Checked)

    assert schema.initial({"owner": "ann"}) == {"owner": "ann", "size": 3}
    with pytest.raises(StateError, match=r"\$\.size: Input should be greater than 0"):
        schema.initial({"owner": "ann", "size": 0})


def test_a_model_input_goes_through_the_model():
    schema = StateSchema(Account)
    expected = {"owner": "ann", "low": 4, "high": 9, "notes": ["a"]}

    assert schema.initial({"accountOwner": " ann ", "low": "4", "notes": ["a"]}) == expected
    assert schema.initial({"owner": "ann", "low": 4, "notes": "a"}) == expected
    with pytest.raises(StateError, match="Value error, low must not be over high"):
        schema.initial({"owner": "ann", "low": 10})
    with pytest.raises(StateError, match=r"\$\.owner: missing"):
        schema.initial({})
    assert schema.merge(expected, {"accountOwner": "bob ", "notes": "b"}) == {
        "owner": "bob",
        "low": 4,
        "high": 9,
        "notes": ["a", "b"],
    }


def test_a_models_field_validators_hold_for_nodes_too():
    schema = StateSchema(Account)

    assert schema.update({"owner": "  bob"}, {}, "rename") == {"owner": "bob"}
    with pytest.raises(StateError, match=r"\$\.low: Input should be a valid integer"):
        schema.update({"low": "4"}, {}, "rename")


def test_a_struct_input_has_its_types_limits_and_defaults():
    schema = StateSchema(Shipment)

    assert schema.initial({"parcel": {"weight": 2, "tags": ["t"]}}) == {
        "parcel": Parcel(2, ["t"]),
        "cost": 1,
        "stops": [],
    }
    with pytest.raises(StateError, match=r"\$\.cost: Input should be greater than or equal to 1"):
        schema.initial({"parcel": {"weight": 2}, "cost": 0})


@pytest.mark.parametrize(
    ("state", "channels"),
    [
        (Basket, {"owner": "", "items": ["x"], "limit": 1, "total": 7}),
        (Checked, {"owner": "ann", "size": 3}),
        (Fixed, {"owner": "ann", "notes": ("x",)}),
        (Account, {"owner": "ann", "low": 4, "high": 3, "notes": []}),
        (Shipment, {"parcel": Parcel(2), "cost": 1, "stops": ["x"]}),
    ],
)
def test_a_node_gets_an_instance_of_the_type_with_exactly_the_channels(state, channels):
    presented = StateSchema(state).present(channels | {"sub\x1fhidden": 1})

    assert type(presented) is state
    assert {name: getattr(presented, name) for name in channels} == channels


def test_a_node_may_do_with_its_state_what_it_likes():
    channels = {"log": ["a"], "lines": [Line("a", Decimal(1))], "sub\x1flog": ["b"]}
    presented = ORDER.present(channels)
    presented["log"].append("b")
    presented["lines"][0].sku = "changed"

    assert type(presented) is dict
    assert list(presented) == ["log", "lines"]
    assert channels["log"] == ["a"]
    assert channels["lines"][0].sku == "a"


def test_a_key_that_the_type_got_later_is_presented_with_its_default():
    assert StateSchema(Checked).present({"owner": "ann"}).size == 3


@pytest.mark.parametrize("state", [dict, int, "Order", list[int]])
def test_other_types_are_no_states(state):
    with pytest.raises(GraphError, match="a state is a TypedDict, a dataclass, a pydantic model or a msgspec Struct"):
        StateSchema(state)


def test_what_cannot_be_resolved_or_reduced_is_told_with_the_way_out():
    class Local(TypedDict):
        x: list[NotThere]  # type: ignore[name-defined]  # noqa: F821  what is tested

    class Two(TypedDict):
        x: Annotated[int, add, max]

    class One(TypedDict):
        x: Annotated[int, lambda old: old]

    with pytest.raises(
        GraphError, match=r"name 'NotThere', which is not found in module .*: define it there at the top"
    ):
        StateSchema(Local)
    with pytest.raises(GraphError, match=r"key 'x' of state type .*Two has 2 reducers; a key has one"):
        StateSchema(Two)
    with pytest.raises(GraphError, match=r"the reducer of key 'x' of state type .*One must take \(old, new\)"):
        StateSchema(One)


# --- updates ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("update", "said"),
    [
        ({"status": 1}, "$.status: Order has no such key (known: id, amount, "),
        ({3: 1}, "$.3: Order has no such key"),
        ({"amount": "12.50"}, "$.amount: Input should be an instance of Decimal"),
        ({"size": [1, 2]}, "$.size: Input should be a valid tuple"),
        ({"lines": [Line("a", Decimal(1)), {"sku": "b", "price": Decimal(1)}]}, "$.lines.1: Input should be an inst"),
        ({"log": 5}, "$.log.0: Input should be a valid string"),
        ({"count": "five"}, "$.count: Input should be a valid integer"),
        ({"limited": -1}, "$.limited: Input should be greater than 0"),
        ({"client": {"name": "Ann"}}, "$.client: Input should be an instance of Client"),
        ({"points": {"a": (1, 2)}}, "$.points.a: Input should be an instance of Point"),
        ({"parcel": {"weight": 1}}, "$.parcel: Input should be an instance of Parcel"),
    ],
)
def test_an_update_that_does_not_fit_is_refused_by_node_and_path(update, said):
    with pytest.raises(StateError) as caught:
        ORDER.update(update, {}, "assess")
    assert caught.value.message.startswith(f"what node 'assess' returned does not fit Order: {said}")


def test_an_update_keeps_exact_values_and_shares_nothing():
    lines = [Line("a", Decimal("1.10"))]
    update = ORDER.update({"ratio": 1, "lines": lines, "log": "x", "amount": Decimal("1.0")}, {}, "assess")
    lines[0].sku = "changed"

    assert update == {"ratio": 1, "lines": [Line("a", Decimal("1.10"))], "log": "x", "amount": Decimal("1.0")}
    assert type(update["ratio"]) is int
    assert ORDER.update(None, {}, "assess") == {}


@pytest.mark.parametrize("returned", [5, "x", [("id", "x")], Line("a", Decimal(1))])
def test_a_node_returns_a_mapping_or_an_instance(returned):
    kind = type(returned).__name__
    with pytest.raises(StateError) as caught:
        ORDER.update(returned, {}, "assess")
    assert caught.value.message == (
        f"node 'assess' returned {kind}; it must return None, a mapping of the keys that change, Order or Goto"
    )


def test_of_an_instance_the_keys_that_differ_count():
    schema = StateSchema(Basket)
    seen = {"owner": "ann", "items": ["a"], "limit": 10, "total": 1}
    basket = schema.present(seen)
    basket.items.append("b")
    basket.limit = 7

    assert schema.update(basket, seen, "fill") == {"items": ["b"], "limit": -3}
    assert schema.apply(seen, [("fill", {"items": ["b"], "limit": -3})], seen) == seen | {
        "items": ["a", "b"],
        "limit": 7,
    }
    assert schema.update(schema.present(seen), seen, "fill") == {}
    # A Send's input may be an instance as well.
    assert schema.update(basket, schema.present(seen), "fill") == {"items": ["b"], "limit": -3}


def test_of_the_very_mapping_that_the_node_was_given_the_keys_that_differ_count():
    seen = {"id": "o", "log": ["a"], "count": 1}
    state = ORDER.present(seen)
    state["log"].append("b")
    state["amount"] = Decimal(1)

    assert ORDER.update(state, seen, "assess", given=state) == {"log": ["b"], "amount": Decimal(1)}
    # Any other mapping is an update as it stands.
    assert ORDER.update(dict(state), seen, "assess", given=state)["log"] == ["a", "b"]


# --- reducers ---------------------------------------------------------------------------------------------------------


def test_updates_are_reduced_in_the_order_given():
    writes = [("a", {"log": "1", "count": 1}), ("b", {"log": ["2", "3"]}), ("c", {"log": "4", "count": 5})]

    assert ORDER.apply({"id": "o"}, writes, {}) == {"id": "o", "log": ["1", "2", "3", "4"], "count": 6}
    assert ORDER.apply({"log": ["0"]}, writes[::-1], {}) == {"log": ["0", "4", "2", "3", "1"], "count": 6}
    assert ORDER.apply({}, [("a", {"later": [1]}), ("b", {"later": [2]})], {}) == {"later": [1, 2]}


def test_add_and_append_take_what_is_not_there_yet():
    assert add(None, 3) == 3
    assert add(Decimal("0.1"), Decimal("0.2")) == Decimal("0.3")
    assert append(None, 1) == [1]
    assert append([1], [2, 3]) == [1, 2, 3]
    assert append([1], [[2]]) == [1, [2]]
    old = [1]
    append(old, 2)
    assert old == [1]


def test_two_writes_of_a_key_without_a_reducer_conflict():
    seen = {"id": "o", "ratio": 1.0}
    writes = [("a", {"id": "p"}), ("b", {"ratio": 2.0}), ("sub/c#2", {"id": "q"})]

    with pytest.raises(ConflictingWrites) as caught:
        ORDER.apply(seen, writes, seen)
    assert caught.value.message.startswith(
        "key 'id' was written by node runs 'a' and 'sub/c#2' in one super-step: give the key a reducer"
    )
    # Equal values conflict as well: the next time they may differ.
    with pytest.raises(ConflictingWrites):
        ORDER.apply(seen, [("a", {"id": "p"}), ("b", {"id": "p"})], seen)


def test_a_value_that_only_passes_through_is_no_conflict():
    seen = {"id": "o", "ratio": 1.0}

    assert ORDER.apply(seen, [("a", {"id": "o"}), ("b", {"id": "p"}), ("c", {"id": "o"})], seen)["id"] == "p"
    assert ORDER.apply(seen, [("a", {"id": "o"}), ("b", {"id": "o"})], seen) == seen
    # 1 is not 1.0: that is a write.
    with pytest.raises(ConflictingWrites):
        ORDER.apply(seen, [("a", {"ratio": 1}), ("b", {"ratio": 2.0})], seen)


def test_a_reducer_that_changes_its_arguments_changes_no_channel_and_no_update():
    schema = StateSchema(Merged)
    channels = {"seen": {"a": 1}}
    writes = [("x", {"seen": {"b": 2}}), ("y", {"seen": {"c": 3}})]

    assert schema.apply(channels, writes, channels) == {"seen": {"a": 1, "b": 2, "c": 3}}
    assert channels == {"seen": {"a": 1}}
    assert schema.apply({}, writes, {}) == {"seen": {"b": 2, "c": 3}}
    assert writes == [("x", {"seen": {"b": 2}}), ("y", {"seen": {"c": 3}})]
    writes = [("x", {"kept": {"a": 2}}), ("y", {"kept": {"b": 3}})]
    assert schema.apply({"kept": {"a": 1}}, writes, {}) == {"kept": {"a": 1, "b": 3}}
    assert writes == [("x", {"kept": {"a": 2}}), ("y", {"kept": {"b": 3}})]


def test_a_reducer_that_fails_or_gives_what_does_not_fit_is_named():
    schema = StateSchema(Merged)

    with pytest.raises(StateError, match=r"^reducer 'newest' of key 'seen' failed on the update of 'x': TypeError"):
        schema.apply({"seen": {}}, [("x", {"seen": 5})], {})
    with pytest.raises(StateError, match=r"reducer of key 'seen' made of the update of 'x'.*\$\.seen\.b: Input should"):
        schema.apply({"seen": {}}, [("x", {"seen": {"b": "2"}})], {})


def test_a_keys_limits_hold_for_the_sum():
    schema = StateSchema(Budget)
    writes = [("x", {"spent": 4}), ("y", {"spent": 7})]

    assert schema.apply({}, writes[:1], {}) == {"spent": 4}
    with pytest.raises(StateError, match=r"key 'spent' made of the update of 'x'; 'y' .*less than or equal to 10"):
        schema.apply({}, writes, {})


def test_apply_changes_nothing_it_was_given():
    channels = {"log": ["a"], "count": 1}
    ORDER.apply(channels, [("a", {"log": "b", "count": 1, "id": "x"})], channels)

    assert channels == {"log": ["a"], "count": 1}


@pytest.mark.parametrize(
    ("reducer", "old", "new", "update"),
    [
        (append, [1], [1, 2, 3], [2, 3]),
        (append, [1, 2], [2], [2]),
        (append, [1], [True, 2], [True, 2]),
        (add, 5, 3, -2),
        (operator.add, (1,), (1, 2), (2,)),
        (add, "ab", "abc", "c"),
        (add, "ab", "b", "b"),
        (newest, {"a": 1}, {"a": 1, "b": 2}, {"a": 1, "b": 2}),
        (newest, [1], [1, 2], [2]),
    ],
)
def test_what_is_new_in_a_whole_value(reducer, old, new, update):
    assert same(difference(reducer, old, new), update)


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (1, True, False),
        (1, 1.0, False),
        (0.0, -0.0, False),
        (float("nan"), float("nan"), True),
        (Decimal("1.0"), Decimal("1.00"), False),
        ([1, {"a": (2,)}], [1, {"a": (2,)}], True),
        ([1, {"a": (2,)}], [1, {"a": (2.0,)}], False),
        ([1], [1, 2], False),
        ({1}, {True}, False),
        ({"a": 1}, {"a": 1, "b": 2}, False),
        ({1: "x"}, {True: "x"}, False),
        (Line("a", Decimal(1)), Line("a", Decimal(1)), True),
        (Line("a", Decimal(1)), Line("a", Decimal("1.0")), False),
        (Client(name="a"), Client(name="a"), True),
        (Client(name="a"), Client(name="b"), False),
        (Parcel(1), Parcel(1), True),
        (Parcel(1), Parcel(2), False),
        (Stage.NEW, Stage.NEW, True),
        (datetime(2024, 1, 1, tzinfo=UTC), datetime(2024, 1, 1, tzinfo=UTC), True),
        (datetime(2024, 1, 1, tzinfo=UTC), datetime(2024, 1, 1, fold=1, tzinfo=UTC), False),
    ],
)
def test_same_is_exact(one, other, expected):
    assert same(one, other) is expected


@pytest.mark.parametrize(("text", "value"), [("5", 5), ("-7", -7)])
def test_a_command_line_has_nothing_but_texts(text, value):
    assert ORDER.initial({"count": text})["count"] == value
    assert type(ORDER.fitted({"count": text})["count"]) is int


# --- edits ------------------------------------------------------------------------------------------------------------


def test_an_edit_replaces_whole_values_past_the_reducers_and_leaves_the_others():
    schema = StateSchema(Basket)
    before = {"owner": "ann", "items": ["a"], "limit": 5, "total": 1, "sub\x1fitems": ["z"]}
    kept = dict(before)
    assert schema.edited(before, {"items": ["x", "y"], "limit": "7"}) == {**kept, "items": ["x", "y"], "limit": 7}
    assert before == kept
    with pytest.raises(StateError, match=r"^the edit does not fit Basket: \$\.items: "):
        schema.edited(before, {"items": "x"})


def test_an_edit_is_what_json_carries_for_the_keys_types():
    edited = ORDER.edited({"id": "o-1"}, {"amount": "12.50", "client": {"name": "Ann", "age": 3}})
    assert edited["amount"] == Decimal("12.50")
    assert isinstance(edited["client"], Client)
    kept = ORDER.edited({"id": "o-1"}, {"rows": [{"id": 1}]})
    assert kept["id"] == "o-1"
    with pytest.raises(StateError, match=r"^the edit does not fit Order: \$\.count: "):
        ORDER.edited({}, {"count": [1]})


def test_an_edit_knows_aliases_and_not_what_the_type_computes():
    assert StateSchema(Account).edited({"owner": "a"}, {"accountOwner": "b"})["owner"] == "b"
    with pytest.raises(StateError, match=r"\$\.total: the type computes this key itself"):
        StateSchema(Basket).edited({}, {"total": 1})
    with pytest.raises(StateError, match=r"\$\.onwer: unknown key .*; did you mean 'owner'"):
        StateSchema(Account).edited({}, {"onwer": "b"})
