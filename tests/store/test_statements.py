"""Every statement of the store, built and compiled for each database before anything needs it."""

from __future__ import annotations

import importlib
import itertools
import pkgutil

import pytest
import sqlalchemy as sa
from sqlalchemy import make_url

import keepstep.store
from keepstep.store import admission, migrate
from keepstep.store.engine import Store
from keepstep.store.statements import Statement, param


def _statements():
    for module in pkgutil.iter_modules(keepstep.store.__path__):
        loaded = importlib.import_module(f"keepstep.store.{module.name}")
        for name, value in vars(loaded).items():
            yield from ((f"{module.name}.{name}", each) for each in _flat(value) if isinstance(each, Statement))


def _flat(value):
    values = value.values() if isinstance(value, dict) else value if type(value) in {list, tuple} else None
    return [value] if values is None else itertools.chain.from_iterable(map(_flat, values))


@pytest.mark.parametrize("url", ["sqlite://", "postgresql+psycopg2://"])
def test_each_compiles(url):
    dialect = make_url(url).get_dialect()()
    verbs = {name: statement.prepared(dialect)[0].split()[0] for name, statement in _statements()}
    assert len(verbs) > 80
    assert set(verbs.values()) == {"SELECT", "INSERT", "UPDATE", "DELETE", "WITH"}


@pytest.mark.parametrize("name", ["_WALK", "_ANYBODY", "_ANY_OF_TENANT", "_OF_TENANT"])
def test_sqlite_finds_what_is_due_by_its_index(name):
    """It would not for a constant that is bound: it has planned before it is told."""
    store = Store.open("sqlite://")
    migrate.set_up_in_memory(store)
    text, order, constants = getattr(admission, name).prepared(store.engine.dialect)
    values = {"queue": "a@1", "tenant": "t", "priority": 1, "after": "", **constants}
    with store.engine.connect() as connection:
        plan = connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {text}", tuple(values[each] for each in order))
        steps = [step for *_, step in plan if "keepstep_" in step]
    store.dispose()
    assert steps
    assert [step for step in steps if "_due (queue=? AND priority" not in step] == []


def test_constants_are_spelled_out_on_sqlite_and_quoted():
    wanted = sa.select(sa.literal("it's ?"), sa.literal(7), sa.literal(1.5), sa.literal(b"\x00"))
    statement = Statement(lambda _dialect: wanted.add_columns(param("given")))
    store = Store.open("sqlite://")
    with store.transaction() as transaction:
        assert transaction.rows(statement, {"given": "own"}) == [("it's ?", 7, 1.5, b"\x00", "own")]
    text, _, constants = statement.prepared(store.engine.dialect)
    store.dispose()
    assert "'it''s ?'" in text
    assert b"\x00" in constants.values()
