"""What may undo an effect is checked when it is declared; what an undo is called with; how a worker finds it."""

from __future__ import annotations

import functools

import pytest

from keepstep import effect
from keepstep.errors import GraphError, UndoUnavailable
from keepstep.runtime import undos
from keepstep.runtime.effects import declaration_of


def book(seat, price=0, *, note=""):
    return seat


def cancel(seat, result, *, idempotency_key):
    return result


def needs_more(seat, colour):
    return seat, colour


def by_position(seat, /):
    return seat


@pytest.fixture(autouse=True)
def declared(monkeypatch):
    """A process in which nothing is declared yet."""
    known = {}
    monkeypatch.setattr(undos, "_declared", known)
    yield known
    for function in (book, cancel, needs_more, by_position):
        vars(function).clear()


def test_an_effect_without_an_undo_declares_none(declared):
    assert declaration_of(effect(book)).undo_name is None
    assert declared == {}


def test_a_declared_undo_is_found_by_the_name_of_its_effect():
    function = effect(undo=cancel, name="seats")(book)
    name = declaration_of(function).undo_name
    assert name == f"{__name__}.cancel"
    assert undos.find("seats", name) == (book, cancel)
    assert undos.find("seats", "where.it.was") == (book, cancel)  # moved since, and the only one


def test_of_several_effects_of_one_name_each_has_its_own_undo():
    def release(seat):
        return seat

    effect(undo=cancel, name="seats")(book)
    effect(undo=release, name="seats")(lambda seat: seat)
    assert undos.find("seats", f"{__name__}.cancel").undo is cancel
    with pytest.raises(
        UndoUnavailable, match=r"undone by where\.it\.was, and this worker declares .*cancel, .*release"
    ):
        undos.find("seats", "where.it.was")


def test_one_that_nobody_declares_is_named_with_the_way_out():
    with pytest.raises(UndoUnavailable) as caught:
        undos.find("seats", "shop.cancel")
    assert caught.value.message == (
        "effect 'seats' is to be undone by shop.cancel, and this worker declares no such effect: declare it by "
        "@effect(undo=…) at the top of a module that the worker loads, then retry"
    )


def test_an_effect_with_an_undo_may_have_a_lookup():
    declared = declaration_of(effect(undo=cancel, lookup=book)(book))
    assert (declared.lookup, declared.undo_name) == (book, f"{__name__}.cancel")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"undo": cancel, "idempotent": True}, "effect 'book' is idempotent and has an undo"),
        ({"undo": "cancel"}, "undo must be a function with a name, by which a worker finds it; not 'cancel'"),
        ({"undo": lambda seat: seat}, "undo must be a function with a name"),
        ({"undo": needs_more}, "its undo needs 'colour', which is neither an argument of the effect nor its result"),
        ({"undo": by_position}, "its undo takes 'seat' by position; it is called by name"),
    ],
)
def test_what_cannot_be_undone_is_refused(declared, options, text):
    before = dict(declared)
    with pytest.raises(GraphError, match=text):
        effect(**options)(book)
    assert declared == before


def test_an_undo_has_no_undo_itself():
    again = effect(undo=book)(cancel)
    with pytest.raises(GraphError, match="its undo has an undo itself"):
        effect(undo=again)(book)


def test_an_effect_that_takes_anything_by_name_may_be_undone_by_what_needs_anything():
    def anything(**given):
        return given

    assert declaration_of(effect(undo=needs_more)(anything)).undo_name == f"{__name__}.needs_more"


@pytest.mark.parametrize(
    ("undo", "named"),
    [
        (cancel, {"seat": 4, "result": "R", "idempotency_key": "K/undo"}),
        (functools.partial(cancel, result="mine"), {"seat": 4, "result": "R", "idempotency_key": "K/undo"}),
        (lambda: None, {}),
        (lambda price, seat=9: None, {"price": 7, "seat": 4}),
        (lambda note="": None, {}),
        (lambda **given: None, {"seat": 4, "price": 7, "result": "R", "idempotency_key": "K/undo"}),
    ],
)
def test_an_undo_is_called_with_what_it_takes(undo, named):
    assert undos.arguments_of(undo, {"seat": 4, "price": 7}, "R", "K/undo") == named


def test_a_star_of_arguments_has_no_name_to_be_given_under():
    assert undos.arguments_of(lambda **given: None, {"*": [1], "seat": 4}, None, "K") == {
        "seat": 4,
        "result": None,
        "idempotency_key": "K",
    }
