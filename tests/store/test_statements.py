"""Every statement of the store, built and compiled for each database before anything needs it."""

from __future__ import annotations

import importlib
import itertools
import pkgutil

import pytest
from sqlalchemy import make_url

import keepstep.store
from keepstep.store.statements import Statement


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
