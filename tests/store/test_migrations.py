"""Migrations: together they make the tables of the schema, and what an earlier release stored stays."""

from __future__ import annotations

import contextlib
import multiprocessing

from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory

from keepstep.store import migrate, workers
from keepstep.store.engine import Store
from keepstep.store.schema import metadata


def test_the_migrations_make_the_tables_of_the_schema(store):
    with store.engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"version_table": migrate._VERSION_TABLE})
        assert compare_metadata(context, metadata) == []


def test_the_files_names_are_the_chain_of_revisions():
    chain = [script.revision for script in ScriptDirectory.from_config(migrate._config()).walk_revisions()]
    assert list(migrate.revisions()) == chain[::-1]


def test_databases_in_memory_are_each_a_new_one_with_the_schema():
    first, second = (Store.open("sqlite://", clock=lambda now=now: now) for now in (1.0, 2.0))
    for store, now in ((first, 1.0), (second, 2.0)):
        migrate.set_up_in_memory(store)
        assert migrate.state(store).is_current
        assert workers.live(store) == []
        workers.register(store, host="box", pid=7, concurrency=1, graphs=[], release="1", window_seconds=5.0)
        with store.engine.connect() as connection:
            assert connection.exec_driver_sql("SELECT alive_until FROM keepstep_worker").all() == [(now + 5.0,)]
            assert connection.exec_driver_sql("PRAGMA integrity_check").all() == [("ok",)]
    first.dispose()
    second.dispose()


def test_a_database_of_the_release_before_is_brought_up_to_date(empty_postgresql_url, tmp_path):
    for url in (empty_postgresql_url, f"sqlite:///{tmp_path}/old.db"):
        with contextlib.closing(Store.open(url).engine.connect()) as connection:
            command.upgrade(migrate._config(connection), "0001")
            connection.exec_driver_sql(
                "INSERT INTO keepstep_worker (id, host, pid, concurrency, carried, release, started_at, alive_until) "
                "VALUES ('w', 'box', 7, 1, '', '1', 0, 1e12)"
            )
            connection.commit()
        store = Store.open(url)
        assert migrate.upgrade(store).current == "0001"
        assert migrate.state(store).is_current
        [before] = workers.live(store)
        assert (before.host, before.clock_skew) == ("box", None)
        workers.renew(store, "w", window_seconds=1e12, clock_skew=-1.5)
        assert [worker.clock_skew for worker in workers.live(store)] == [-1.5]
        store.dispose()


def test_workers_that_find_an_empty_file_at_once_all_find_the_schema(tmp_path):
    url = f"sqlite:///{tmp_path}/new.db"
    context = multiprocessing.get_context("fork")
    started = context.Barrier(6)

    def prepare():
        started.wait(30)
        # Whoever comes a little later must not see what the first has done so far.
        for _ in range(20):
            store = Store.open(url)
            migrate.prepare(store)
            store.dispose()

    crowd = [context.Process(target=prepare) for _ in range(6)]
    for each in crowd:
        each.start()
    for each in crowd:
        each.join(60)

    assert [each.exitcode for each in crowd] == [0] * 6
    assert migrate.state(Store.open(url)).is_current
