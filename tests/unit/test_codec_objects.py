"""Typed objects: they come back as the types they were, in another process too, or fail closed."""

from __future__ import annotations

import enum
import math
import os
import subprocess
import sys
import textwrap
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, NamedTuple

import msgspec
import pytest
from pydantic import BaseModel, Field

from keepstep.errors import (
    NotStorable,
    UnknownType,
)
from keepstep.runtime.codec import Codec, TypeRegistry
from tests.unit.samples import (
    DECLARED,
    FORMATS,
    LIMIT,
    POST_INIT_CALLS,
    Color,
    Counter,
    Event,
    Invoice,
    Later,
    Open,
    Order,
    Page,
    Pair,
    Permission,
    Point,
    Priority,
    Row,
    Strict,
    assert_exact,
)


@pytest.fixture(params=FORMATS)
def codec(request):
    return Codec(DECLARED, format=request.param, value_bytes_max=LIMIT)


# --- typed ---


def test_enums_of_every_kind_come_back_as_the_members_they_were(codec):
    members = [
        Invoice.Stage.SENT,
        Priority.HIGH,
        Color.RED,
        Permission.READ,
        Permission.READ | Permission.WRITE,
        Permission(0),
        HTTPStatus.OK,
    ]
    back = codec.decode(codec.encode({"members": members, Priority.LOW: {Color.RED}}))
    assert all(a is b for a, b in zip(back["members"], members, strict=True))
    assert [type(key) for key in back] == [str, Priority]
    assert type(next(iter(back[Priority.LOW]))) is Color


def test_a_model_comes_back_with_what_was_set_extra_and_private(codec):
    model = Open(name="n", other=(1, 2))
    model._token.append(2**70)
    back = assert_exact(codec, {"model": model})["model"]
    assert type(back) is Open
    assert back == model
    assert back.other == (1, 2)
    assert back._token == [2**70]
    assert not hasattr(back, "_unset")
    assert back.model_fields_set == {"name", "other"}


def test_which_fields_were_set_is_kept(codec):
    draft = Invoice(stage=Invoice.Stage.DRAFT)
    back = codec.decode(
        codec.encode(
            [draft, Invoice.model_construct(amount=1), Invoice(stage=Invoice.Stage.SENT, amount=2, numbers=[])]
        )
    )
    assert [item.model_fields_set for item in back] == [{"stage"}, {"amount"}, {"stage", "amount", "numbers"}]
    assert back[0].model_dump(exclude_unset=True) == {"stage": Invoice.Stage.DRAFT}
    assert not hasattr(back[1], "stage")


def test_generic_models_come_back_as_the_parametrized_class(codec):
    page = Page[Row](items=[Row(id=1), Row(id=2)])
    back = assert_exact(codec, {"page": page, "bare": Page(items=[Row(id=3)])})
    assert type(back["page"]) is Page[Row]
    assert type(back["page"].items[1]) is Row
    assert type(back["bare"]) is Page


def test_validators_and_cached_properties_do_not_touch_stored_values(codec):
    odd = Strict.model_construct(even=3)
    assert odd.half == 1.5
    back = codec.decode(codec.encode(odd))
    assert back.__dict__ == {"even": 3}


def test_dataclasses_come_back_without_running_their_post_init(codec):
    order = Order("a", lines=["x"])
    order.total = 7
    back = codec.decode(codec.encode({"order": order, "point": Point(-0.0, (1, 2)), "later": Later(1)}))
    assert back["order"] == order
    assert back["order"].total == 7
    assert type(back["point"]) is Point
    assert math.copysign(1, back["point"].x) == -1
    assert back["point"].y == (1, 2)
    assert back["later"].__dict__ == {"known": 1}


def test_an_attribute_that_is_no_field_is_refused(codec):
    order = Order("a")
    order.note = "lost otherwise"
    with pytest.raises(NotStorable, match=r"^\$\.order: the attribute 'note' of Order is not one of its fields$"):
        codec.encode({"order": order})


def test_structs_and_named_tuples_come_back_as_their_types(codec):
    event = Event("paid", tags={"b", "a"})
    back = assert_exact(codec, {"event": event, "pair": Pair((1,), [2]), "counter": Counter(3)})
    assert type(back["event"]) is Event
    assert back["event"] == event
    assert back["event"].when is msgspec.UNSET
    assert type(back["pair"]) is Pair
    assert back["pair"].left == (1,)
    assert back["counter"].value == 3


def test_a_struct_comes_back_without_running_its_post_init(codec):
    data = codec.encode(Event("paid"))
    POST_INIT_CALLS.clear()
    back = codec.decode(data)
    assert POST_INIT_CALLS == []
    assert type(back) is Event
    with pytest.raises(AttributeError):
        back.event_name = "it is still frozen"
    assert Event("paid") == back
    assert POST_INIT_CALLS == ["paid"]


def test_types_survive_into_another_process(tmp_path):
    """A script writes its own classes as `__main__`; another process imports it as a module and reads them."""
    (tmp_path / "app.py").write_text(
        textwrap.dedent(
            """
            import enum, sys
            from dataclasses import dataclass, field
            from typing import Generic, TypeVar
            from pydantic import BaseModel
            from keepstep.runtime.codec import Codec, TypeRegistry

            T = TypeVar("T")

            class Invoice(BaseModel):
                class Stage(enum.Enum):
                    DRAFT = "draft"
                    SENT = "sent"
                stage: Stage

            class Row(BaseModel):
                id: int

            class Page(BaseModel, Generic[T]):
                items: list[T]

            class Level(enum.IntEnum):
                HIGH = 2

            @dataclass
            class Order:
                name: str
                total: int = field(init=False)

            class State(BaseModel):
                invoice: Invoice
                page: Page[Row]
                order: Order
                level: Level

            codec = Codec(TypeRegistry([State]), format=sys.argv[1], value_bytes_max=10_000)
            order = Order("o")
            order.total = 5
            page = Page[Row](items=[Row(id=2)])
            values = {"invoice": Invoice(stage="sent"), "page": page, "order": order, "level": Level.HIGH}

            if __name__ == "__main__":
                assert Invoice.__module__ == "__main__"
                sys.stdout.buffer.write(codec.encode(values))
            """
        )
    )
    (tmp_path / "read.py").write_text(
        textwrap.dedent(
            """
            import sys, app
            back = app.codec.decode(sys.stdin.buffer.read())
            assert isinstance(back["invoice"], app.Invoice) and back["invoice"].stage is app.Invoice.Stage.SENT
            assert type(back["page"]) is app.Page[app.Row] and type(back["page"].items[0]) is app.Row
            assert type(back["order"]) is app.Order and back["order"].total == 5
            assert back["level"] is app.Level.HIGH
            assert back == app.values
            print("equal")
            """
        )
    )
    for name in FORMATS:
        written = subprocess.run([sys.executable, "app.py", name], cwd=tmp_path, capture_output=True, check=True).stdout
        read = subprocess.run(
            [sys.executable, "read.py", name], cwd=tmp_path, input=written, capture_output=True, check=False
        )
        assert (read.stdout, read.stderr) == (b"equal\n", b"")


def test_one_value_has_one_digest_whatever_the_hash_seed():
    program = (
        "from pydantic import create_model\n"
        "from keepstep.runtime.codec import Codec, TypeRegistry, digest\n"
        "Model = create_model('Model', a=(int, 1), b=(int, 1), c=(int, 1), d=(int, 1))\n"
        "tags = {'a', 'b', 'c', 'dd', 'eee', ('x', 1), frozenset({'p', 'q', 'r'})}\n"
        "value = {'tags': tags, 'model': Model(a=1, b=2, c=3), 'n': {str(i) for i in range(50)}}\n"
        "for name in ('msgpack', 'json'):\n"
        "    print(digest(Codec(TypeRegistry([Model]), format=name, value_bytes_max=10_000).encode(value)).hex())\n"
    )
    seen = {
        subprocess.run(
            [sys.executable, "-c", program], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(seen) == 1
    assert len(set(seen.pop().split())) == 2


# --- a ---


def changed(cls: type, name: str) -> Codec:
    cls.__qualname__ = name
    return Codec(TypeRegistry([cls]), value_bytes_max=LIMIT)


def test_a_new_field_takes_its_default_and_one_without_is_refused(codec):
    @dataclass
    class Wider:
        x: float
        y: tuple[int, ...]
        unit: str = "m"
        notes: list[str] = field(default_factory=list)

    @dataclass
    class Needy:
        x: float
        y: tuple[int, ...]
        unit: str

    data = codec.encode({"p": Point(1.0)})
    assert changed(Wider, "Point").decode(data)["p"] == Wider(1.0, (), "m", [])
    with pytest.raises(
        UnknownType, match=r"^\$\.p: type not allowed: 'Point' was stored without the field 'unit', which"
    ):
        changed(Needy, "Point").decode(data)


def test_new_fields_of_models_structs_and_named_tuples_take_their_defaults(codec):
    class WiderRow(BaseModel):
        id: int
        tags: list[str] = Field(default_factory=list)

    class WiderCounter(msgspec.Struct):
        value: int
        step: int = 5

    class WiderPair(NamedTuple):
        left: Any
        right: Any
        third: str = "t"

    row = changed(WiderRow, "Row").decode(codec.encode(Row(id=1)))
    assert (row.id, row.tags, row.model_fields_set) == (1, [], {"id"})
    assert changed(WiderCounter, "Counter").decode(codec.encode(Counter(2))) == WiderCounter(2, 5)
    assert changed(WiderPair, "Pair").decode(codec.encode(Pair(1, 2))) == (1, 2, "t")


def test_a_field_or_a_member_that_is_gone_is_refused(codec):
    class Narrow(msgspec.Struct):
        pass

    class Fewer(enum.Enum):
        LOW = 1

    class NowAModel(BaseModel):
        x: float

    with pytest.raises(UnknownType, match=r"^\$: type not allowed: 'Counter' no longer has the fields \['value'\]"):
        changed(Narrow, "Counter").decode(codec.encode(Counter(2)))
    with pytest.raises(UnknownType, match=r"^\$\[0\]: type not allowed: 'Priority' has no member 'HIGH'"):
        changed(Fewer, "Priority").decode(codec.encode([Priority.HIGH]))
    with pytest.raises(UnknownType, match=r"'Priority' was another kind of class"):
        changed(NowAModel, "Priority").decode(codec.encode(Priority.HIGH))
    with pytest.raises(UnknownType, match=r"'Open' was another kind of class: it was stored with"):
        changed(dataclass(type("D", (), {"__annotations__": {"name": str}})), "Open").decode(
            codec.encode(Open(name="n"))
        )
