"""The database fixtures give each test a migrated database of its own, on each kind."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import sqlalchemy


def tables(url: str) -> set[str]:
    engine = sqlalchemy.create_engine(url)
    try:
        return set(sqlalchemy.inspect(engine).get_table_names())
    finally:
        engine.dispose()


def leave_a_table(url: str) -> None:
    engine = sqlalchemy.create_engine(url)
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE left_behind (value integer)")
    engine.dispose()


@pytest.mark.parametrize("_again", [1, 2])
def test_databases_are_migrated_and_not_shared(store_url, _again):
    found = tables(store_url)
    assert {"keepstep_thread", "keepstep_checkpoint", "keepstep_worker"} <= found
    assert "left_behind" not in found
    leave_a_table(store_url)


def test_store_is_open(store, store_url):
    assert store.dialect == store_url.split(":")[0].split("+")[0]


def test_proxied_database_is_the_same(postgresql_url, proxied_url):
    leave_a_table(proxied_url)
    assert "left_behind" in tables(postgresql_url)


def test_empty_database_has_no_tables(empty_postgresql_url):
    assert tables(empty_postgresql_url) == set()


def test_a_developers_settings_do_not_reach_tests(tmp_path):
    assert [name for name in os.environ if name.startswith("KEEPSTEP_")] == []
    assert Path.cwd().samefile(tmp_path)
