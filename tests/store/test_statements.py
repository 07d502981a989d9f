"""Every statement of the store, built and compiled for each database before anything needs it."""

from __future__ import annotations

import importlib
import pkgutil

import pytest
from sqlalchemy import make_url

import keepstep.store
from keepstep.store.statements import Statement


def _statements():
    for module in pkgutil.iter_modules(keepstep.store.__path__):
        loaded = importlib.import_module(f"keepstep.store.{module.name}")
        for name, value in vars(loaded).items():
            values = value.values() if isinstance(value, dict) else value if isinstance(value, list) else [value]
            for number, each in enumerate(values):
                if isinstance(each, Statement):
                    yield pytest.param(each, id=f"{module.name}.{name}[{number}]")


@pytest.mark.parametrize("url", ["sqlite://", "postgresql+psycopg2://"])
@pytest.mark.parametrize("statement", list(_statements()))
def test_compiles(statement, url):
    text, _, _ = statement.prepared(make_url(url).get_dialect()())
    assert text.split()[0] in {"SELECT", "INSERT", "UPDATE", "DELETE", "WITH"}


def test_there_are_many():
    assert len(list(_statements())) > 100
