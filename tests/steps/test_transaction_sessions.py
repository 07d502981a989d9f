"""What a transaction's block does to its connection, which serves the next thread's, too."""

from __future__ import annotations

import pytest

from tests.steps.agents import acts

ASKED = (
    "SELECT current_setting('search_path'), current_setting('app.tenant', true), current_user, "
    "(SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'), to_regclass('pg_temp.notes') IS NULL"
)


@pytest.mark.parametrize("ends_well", [True, False])
def test_no_setting_role_lock_or_temporary_table_is_left_to_the_next_block(served, ends_well):
    def changes(ctx):
        with ctx.transaction() as conn:
            conn.exec_driver_sql("SET search_path TO public, pg_catalog")
            conn.exec_driver_sql("SELECT set_config('app.tenant', 'acme', false)")
            conn.exec_driver_sql("SELECT pg_advisory_lock(7)")
            conn.exec_driver_sql("CREATE TEMPORARY TABLE notes (text text)")
            if not ends_well:
                raise ValueError
            conn.exec_driver_sql("SELECT 1")

    def body(ctx):
        try:
            changes(ctx)
        except ValueError:
            assert not ends_well
        with ctx.transaction() as conn:
            return list(conn.exec_driver_sql(ASKED).one())

    d = served(acts(body))
    d.start()
    assert d.drain() == "done"
    ((path, tenant, user, locks, has_no_notes),) = d.values()["log"]
    assert (path, tenant or "", user, locks, has_no_notes) == ('"$user", public', "", "postgres", 0, True)


def test_on_sqlite_nothing_that_was_attached_or_temporary_is_left_to_the_next_block(timed, tmp_path):
    def body(ctx):
        with ctx.transaction() as conn:
            conn.exec_driver_sql("CREATE TEMPORARY TABLE notes (text text)")
            conn.exec_driver_sql(f"ATTACH '{tmp_path / 'other.db'}' AS other")
        with ctx.transaction() as conn:
            attached = conn.exec_driver_sql("SELECT name FROM pragma_database_list ORDER BY seq").scalars().all()
            return [*attached, conn.exec_driver_sql("SELECT count(*) FROM sqlite_temp_master").scalar()]

    d = timed(acts(body))
    d.start()
    assert d.drain() == "done"
    assert d.values()["log"] == [["main", 0]]
    assert d.worker.store.connections_in_use == 0


@pytest.mark.parametrize(
    "statement",
    [
        "INSERT INTO sale VALUES (1); COMMIT; BEGIN",
        "INSERT INTO sale VALUES (1); COMMIT AND CHAIN",
        "INSERT INTO sale VALUES (1); /* ' */ COMMIT -- ;\n; BEGIN",
        "INSERT INTO sale VALUES (1);END;BEGIN",
        "SELECT E'a\\'b'; COMMIT; BEGIN --'",
    ],
)
def test_a_block_cannot_commit_in_the_middle_and_go_on(served, statement):
    def body(ctx):
        with ctx.transaction() as conn:
            conn.exec_driver_sql(statement)

    d = served(acts(body))
    d.execute("CREATE TABLE sale (id integer)")
    d.start()
    assert d.drain() == "failed"
    assert d.error[0] == "transaction_refused"
    d.execute("DO $$ BEGIN ASSERT (SELECT count(*) FROM sale) = 0; END $$")


@pytest.mark.parametrize(
    "statement",
    [
        "INSERT INTO sale VALUES ('1; COMMIT; BEGIN'); SELECT 1",
        "INSERT INTO sale VALUES ($a$; COMMIT$a$); -- ; COMMIT",
        "DO $$ BEGIN INSERT INTO sale VALUES ('1'); END $$",
        "INSERT INTO sale VALUES ('1'); SAVEPOINT a; INSERT INTO sale VALUES ('2'); ROLLBACK TO SAVEPOINT a",
    ],
)
def test_what_only_looks_like_the_end_of_a_transaction_is_run(served, statement):
    def body(ctx):
        with ctx.transaction() as conn:
            conn.exec_driver_sql(statement)

    d = served(acts(body))
    d.execute("CREATE TABLE sale (id text)")
    d.start()
    assert d.drain() == "done"
    d.execute("DO $$ BEGIN ASSERT (SELECT count(*) FROM sale) = 1; END $$")
