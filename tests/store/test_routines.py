"""Claim and commit as functions of a PostgreSQL database: created on upgrade, done without where they are missing."""

from __future__ import annotations

import re

import pytest

from keepstep.store import checkpoints, claims, migrate
from keepstep.store.checkpoints import commit
from keepstep.store.engine import Store
from keepstep.store.routines import Routine
from tests.store.records import checkpoint, claimed, created, row

ROUTINES = (*claims.ROUTINES, *checkpoints.ROUTINES)


@pytest.fixture
def postgresql(postgresql_url):
    store = Store.open(postgresql_url)
    yield store
    store.dispose()


def functions(store):
    with store.engine.connect() as connection:
        found = connection.exec_driver_sql("SELECT proname FROM pg_proc WHERE proname LIKE 'keepstep%%'")
        return {name for (name,) in found}


def drop(store, name):
    with store.engine.connect() as connection:
        connection.exec_driver_sql(f"DROP FUNCTION {name}")


def sent(store, monkeypatch):
    """Return a list that fills with the texts that routines send."""
    texts = []

    class Cursor:
        def __init__(self, cursor):
            self._cursor = cursor

        def execute(self, text, values):
            texts.append(text)
            self._cursor.execute(text, values)

        def fetchone(self):
            return self._cursor.fetchone()

    execute = Routine.execute
    monkeypatch.setattr(
        Routine, "execute", lambda self, cursor, dialect, params: execute(self, Cursor(cursor), dialect, params)
    )
    return texts


def test_an_upgrade_creates_each_once(postgresql):
    names = {routine.definition(postgresql.engine.dialect).name for routine in ROUTINES}
    assert functions(postgresql) == names
    assert len(names) == 3
    assert all(re.fullmatch(r"keepstep_(claim_thread|claim_node|commit)_[0-9a-f]{12}", name) for name in names)

    migrate.upgrade(postgresql)
    assert functions(postgresql) == names


def test_an_upgrade_of_a_current_schema_creates_what_is_missing(postgresql):
    name = claims.ROUTINES[0].definition(postgresql.engine.dialect).name
    drop(postgresql, name)

    migrate.upgrade(postgresql)

    assert name in functions(postgresql)


@pytest.mark.parametrize("missing", [True, False])
def test_a_step_is_the_same_with_and_without(postgresql_url, monkeypatch, missing):
    store = Store.open(postgresql_url)
    if missing:
        for name in functions(store):
            drop(store, name)
    texts = sent(store, monkeypatch)
    thread_id = created(store)

    claim = claimed(store, thread_id)
    committed = commit(store, claim.fence, checkpoint(claim.fence), patience_seconds=1)

    assert (claim.thread.version, claim.attempt.starts, claim.checkpoints) == (1, 1, [])
    assert (committed.version, committed.status) == (2, "ready")
    found = row(store, thread_id)
    assert (found["seq"], found["lease_nonce"]) == (0, None)
    # Whether the function is there is asked once for each.
    assert [text.split(maxsplit=1)[0] for text in texts] == ["SELECT", "WITH" if missing else "SELECT"] * 2
    again = claimed(store, thread_id, 2)
    assert len(again.checkpoints) == 1
    assert len(texts) == 5
    store.dispose()


def test_another_statement_is_another_function(postgresql):
    first = claims.ROUTINES[0]
    other = Routine(
        "claim_thread",
        lambda dialect: first._build(dialect).limit(1),
        first._parameters,
    )
    dialect = postgresql.engine.dialect
    assert other.definition(dialect).name != first.definition(dialect).name
