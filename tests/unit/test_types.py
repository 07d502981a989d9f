"""Which classes stored data may name, and private copies of values."""

from __future__ import annotations

import collections
import dataclasses
import datetime as dt
import enum
import functools
import sys
import threading
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import (
    Annotated,
    Any,
    ClassVar,
    Generic,
    Literal,
    NamedTuple,
    NewType,
    NotRequired,
    Optional,
    TypedDict,
    TypeVar,
)

import msgspec
import pytest
from pydantic import BaseModel, ConfigDict, PrivateAttr
from typing_extensions import TypeAliasType

from keepstep.errors import GraphError, NotStorable, UnknownType
from keepstep.runtime.types import TypeRegistry, private_copy

T = TypeVar("T")


class Stage(enum.Enum):
    DRAFT = "draft"
    SENT = "sent"


class Level(enum.IntEnum):
    LOW = 1


class Row(BaseModel):
    id: int


class Page(BaseModel, Generic[T]):
    items: list[T]


class Order(BaseModel):
    class Kind(enum.Enum):
        NEW = "new"

    kind: Order.Kind
    page: Page[Row]
    _stage: Stage = PrivateAttr(Stage.DRAFT)


@dataclass
class Tree:
    label: str
    children: list[Tree]
    level: Level | None = None


@dataclass
class Box(Generic[T]):
    content: T


@dataclass
class Rows(Box[Row]):
    """A dataclass by its base, whose field's type is only in its base's argument."""


class Pair(NamedTuple):
    left: Stage
    right: int


class Event(msgspec.Struct):
    level: Level


class Base(TypedDict):
    tree: NotRequired[Tree]


class State(Base, total=False):
    orders: Annotated[list[Order], "with metadata"]
    count: int


OrderId = NewType("OrderId", Stage)
Json = TypeAliasType("Json", "dict[str, Json] | list[Row]")
Bound = TypeVar("Bound", bound=Event)


@pytest.mark.parametrize(
    ("annotation", "names"),
    [
        (int, []),
        (Any, []),
        (None, []),
        (Row, ["Row"]),
        (list[Row], ["Row"]),
        (dict[str, tuple[Row, ...]], ["Row"]),
        (Row | None, ["Row"]),
        (Optional[Row], ["Row"]),  # noqa: UP045  the older spelling has another origin
        (Annotated[Row, "metadata", []], ["Row"]),
        (Mapping[Stage, Row], ["Row", "Stage"]),
        (Callable[[Row], Stage], ["Row", "Stage"]),
        (Literal[Stage.SENT, "x", 1], ["Stage"]),
        (OrderId, ["Stage"]),
        (Json, ["Row"]),
        (list[Bound], ["Event", "Level"]),
        (type[Row], ["Row"]),
        (Page[Row], ["Page", "Page[Row]", "Row"]),
        (Order, ["Order", "Order.Kind", "Page", "Page[Row]", "Row", "Stage"]),
        (Tree, ["Level", "Tree"]),
        (Box[Row], ["Box", "Row"]),
        (Rows, ["Box", "Row", "Rows"]),
        (Pair, ["Pair", "Stage"]),
        (Event, ["Event", "Level"]),
        (State, ["Level", "Order", "Order.Kind", "Page", "Page[Row]", "Row", "Stage", "Tree"]),
    ],
    ids=str,
)
def test_every_class_that_an_annotation_reaches_is_declared(annotation, names):
    assert TypeRegistry([annotation]).names() == names


def test_a_class_is_found_by_its_qualified_name_only():
    registry = TypeRegistry([Order])
    assert registry.named("Order.Kind").cls is Order.Kind
    for name in ("Kind", "order.kind", f"{__name__}.Order", "Tree", "os.system", ""):
        with pytest.raises(UnknownType, match="the graph does not declare"):
            registry.named(name)


def test_subclasses_and_other_classes_are_not_declared():
    class Special(Row):
        pass

    registry = TypeRegistry([Row, threading.Thread, collections.OrderedDict, dict[str, Decimal]])
    assert registry.names() == ["Row"]
    assert registry.shape(Special) is None
    assert registry.shape(Row).cls is Row


def test_two_classes_of_one_name_are_refused_naming_both_modules():
    other = types.new_class("Row", (BaseModel,), exec_body=lambda space: space.update(__module__="shop.models"))
    other.__qualname__ = "Row"
    with pytest.raises(GraphError) as refused:
        TypeRegistry([Page[Row], other])
    assert (
        refused.value.message
        == f"two types are called 'Row' in stored data: {__name__}.Row and shop.models.Row; rename one"
    )


def test_a_class_named_like_a_stored_builtin_is_refused():
    named_like_a_kind = enum.Enum("decimal", "A B", module="shop")
    with pytest.raises(GraphError, match=r"^shop\.decimal: stored data calls a builtin type that; rename the class$"):
        TypeRegistry([named_like_a_kind])


def test_local_classes_are_found_when_they_are_declared():
    @dataclass
    class Client:
        name: str

    @dataclass
    class Account:
        client: Client

    class Holder(BaseModel):
        account: Account
        later: list[Later]

    class Later(BaseModel):
        client: Client

    with pytest.raises(GraphError, match=r"Account: an annotation cannot be resolved .*'Client'.*types="):
        TypeRegistry([Account])
    local = "test_local_classes_are_found_when_they_are_declared.<locals>."
    names = [local + name for name in ("Account", "Client", "Holder", "Later")]
    assert TypeRegistry([Holder, Account, Client, Later]).names() == names


def test_a_model_that_never_became_complete_is_refused_naming_the_annotation():
    class Waiting(BaseModel):
        missing: list[Missing]  # noqa: F821  the name is nowhere

    with pytest.raises(GraphError, match=r"'(list\[)?Missing\]?' cannot be resolved"):
        TypeRegistry([Waiting])


def test_a_wider_registry_leaves_the_narrower_one_alone():
    narrow = TypeRegistry([Row])
    wide = narrow.including(Page[Row], Stage | None)
    assert wide.names() == ["Page", "Page[Row]", "Row", "Stage"]
    assert narrow.names() == ["Row"]
    assert narrow.including() is narrow.including(int, list[Row] | None, Annotated[Row, []]) is narrow
    assert wide.named("Row") is narrow.named("Row")
    assert narrow.including(list[Stage]) is narrow.including(list[Stage])
    other = enum.Enum("Row", "A", module="shop")
    with pytest.raises(GraphError, match="two types are called 'Row'"):
        narrow.including(other)


def test_exceptions_and_abstract_classes_are_not_stored():
    @dataclass
    class Failure(Exception):
        reason: str

    @dataclass
    class Bag(dict):
        reason: str

    assert TypeRegistry([Failure, Bag]).names() == []


# --- private copies ---


class Open(BaseModel):
    model_config = ConfigDict(extra="allow")
    rows: list[int]
    _token: list[int] = PrivateAttr(default_factory=list)


@dataclass(frozen=True)
class Frozen:
    items: list[int]
    copies: ClassVar[int] = 0
    made: list[int] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self.made.append(1)

    @functools.cached_property
    def size(self) -> int:
        return len(self.items)


class Record(msgspec.Struct, frozen=True):
    items: list[int]


def test_a_private_copy_is_equal_and_shares_nothing_mutable():
    model = Open(rows=[1], extra=[2])
    model._token.append(3)
    original = {
        "list": [[1], {"a": [2]}],
        "tuple": ([1],),
        "set": {1, (2, 3)},
        "bytes": bytearray(b"x"),
        "model": model,
        "frozen": Frozen([1]),
        "struct": Record([1]),
        "pair": Pair(Stage.DRAFT, 1),
        "deque": collections.deque([[1]]),
        "scalars": [None, True, 1, 1.5, "x", b"x", Decimal(1), dt.datetime(2027, 1, 1, tzinfo=dt.UTC), Stage.SENT],
        1: [1],
    }
    copied = private_copy(original)
    assert copied == original
    assert list(copied) == list(original)
    assert [type(item) for item in copied.values()] == [type(item) for item in original.values()]
    copied["list"][0].append("new")
    copied["list"][1]["a"].append("new")
    copied["tuple"][0].append("new")
    copied["set"].add("new")
    copied["bytes"].extend(b"new")
    copied["model"].rows.append(99)
    copied["model"].extra.append(99)
    copied["model"]._token.append(99)
    copied["frozen"].items.append(99)
    copied["struct"].items.append(99)
    copied["deque"][0].append(99)
    copied[1].append(99)
    assert original["list"] == [[1], {"a": [2]}]
    assert original["tuple"] == ([1],)
    assert original["set"] == {1, (2, 3)}
    assert original["bytes"] == bytearray(b"x")
    assert (model.rows, model.extra, model._token) == ([1], [2], [3])
    assert original["frozen"].items == [1]
    assert original["frozen"].made == copied["frozen"].made == [1]
    assert original["struct"].items == [1]
    assert original["deque"] == collections.deque([[1]])
    assert original[1] == [1]


def test_a_private_copy_keeps_which_fields_were_set():
    assert private_copy(Open.model_construct(rows=[], _fields_set=set())).model_fields_set == set()
    assert private_copy(Open(rows=[])).model_fields_set == {"rows"}


def test_a_private_copy_of_an_object_keeps_attributes_that_are_no_fields():
    tree = Tree("a", [])
    tree.note = [1]
    copied = private_copy(tree)
    copied.note.append(2)
    assert tree.note == [1]
    assert copied.note == [1, 2]
    assert dataclasses.asdict(copied) == {"label": "a", "children": [], "level": None}


def test_data_that_holds_itself_is_copied():
    ring: list[Any] = [1]
    ring.append(ring)
    copied = private_copy(ring)
    assert copied is not ring
    assert copied[1] is copied


def test_what_cannot_be_copied_is_refused():
    with pytest.raises(NotStorable, match=r"^a lock cannot be copied: "):
        private_copy({"lock": threading.Lock()})
    deep: list[Any] = []
    for _ in range(sys.getrecursionlimit() * 2):
        deep = [deep]
    with pytest.raises(NotStorable, match=r"^a list cannot be copied: maximum recursion depth"):
        private_copy(deep)
