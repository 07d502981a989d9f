"""`keepstep db`: the database's schema."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from keepstep.cli.command import app, command
from keepstep.cli.session import Session
from keepstep.errors import DatabaseUnavailable, InvalidInput, InvalidSettings

group = typer.Typer(
    name="db", no_args_is_help=True, rich_markup_mode="rich", help="Bring the database's schema up to date."
)
app.add_typer(group, name="db", rich_help_panel="Operate")


@command("upgrade", panel="Operate", group=group, reads=True, has_tenant=False, example="keepstep db upgrade")
def upgrade(session: Session) -> None:
    """Bring the schema to this release's revision. Running it again, or from two machines at once, is harmless."""
    from keepstep.store import migrate

    with session.store() as store:
        before = migrate.upgrade(store)
        shown = store.shown
    changed = not before.is_current
    if session.as_json:
        session.output.document({"before": before.current, "now": before.needed, "changed": changed})
    elif changed:
        session.output.line(f"{shown}: upgraded from {before.current or 'no schema'} to {before.needed}")
    else:
        session.output.line(f"{shown}: has schema {before.needed} already")


@command("status", panel="Operate", group=group, reads=True, has_tenant=False, example="keepstep db status --json")
def status(session: Session) -> None:
    """Say which schema the database has and which one this release needs; exit code 1 when they differ."""
    from keepstep.store import migrate

    missing = session.missing_file()
    if missing is not None:
        message = f"there is no database yet at {missing}: a worker makes it, or: {session.hint('db upgrade')}"
        raise DatabaseUnavailable(message)
    with session.store() as store:
        found = migrate.state(store)
        shown = store.shown
    if session.as_json:
        session.output.document({"current": found.current, "needed": found.needed, "is_current": found.is_current})
    else:
        has = found.current or "none"
        way_out = "" if found.is_current else f": run {session.hint('db upgrade')}"
        session.output.line(f"{shown}: schema {has}, this release needs {found.needed}{way_out}")
    if not found.is_current:
        raise typer.Exit(1)


@command(
    "install-outbox",
    panel="Operate",
    group=group,
    has_tenant=False,
    example="""\
keepstep db install-outbox postgresql+psycopg2://shop@db/shop
keepstep db install-outbox --sql postgresql+psycopg2://shop@db/shop""",
)
def install_outbox(
    session: Session,
    *,
    urls: Annotated[
        list[str] | None,
        typer.Argument(metavar="URL", help="SQLAlchemy URLs of producers' databases. Without any: KEEPSTEP_OUTBOXES."),
    ] = None,
    sql: Annotated[bool, typer.Option("--sql", help="Print the statements; change nothing.")] = False,
) -> None:
    """Make the table keepstep_outbox in a producer's own database, for `Client.start(connection=…)`."""
    from keepstep.store.outbox import Outbox

    given = tuple(urls or session.settings.outboxes)
    if not given:
        message = "no outbox: name the producers' databases, here or in KEEPSTEP_OUTBOXES"
        raise InvalidSettings(message)
    made = []
    for url in given:
        outbox = Outbox.open(url)
        try:
            if sql:
                session.output.line(outbox.definition())
                continue
            made.append({"outbox": outbox.shown, "made": outbox.install()})
        finally:
            outbox.dispose()
    if session.as_json:
        session.output.document({"outboxes": made})
        return
    for each in made:
        session.output.line(f"{each['outbox']}: {'made keepstep_outbox' if each['made'] else 'has keepstep_outbox'}")


@command(
    "install-journal",
    panel="Operate",
    group=group,
    has_tenant=False,
    example="""\
keepstep db install-journal --environment SHOP_DATABASE
keepstep db install-journal postgresql://shop@db/shop --sql""",
)
def install_journal(
    session: Session,
    *,
    url: Annotated[
        str | None,
        typer.Argument(metavar="URL", help="SQLAlchemy URL of the database that nodes have transactions on."),
    ] = None,
    environment: Annotated[
        str | None,
        typer.Option(
            "--environment",
            metavar="NAME",
            help="The environment variable that holds the URL, so that no password stands on a command line.",
        ),
    ] = None,
    sql: Annotated[bool, typer.Option("--sql", help="Print the statement instead of running it.")] = False,
) -> None:
    """Make the table `keepstep_journal` in a database of yours, for `ctx.transaction(NAME)`.

    It stands beside your data and records which transactions of which nodes were committed there. Running it again is
    harmless. The store's own database needs none.
    """
    from sqlalchemy import create_engine
    from sqlalchemy.exc import SQLAlchemyError

    from keepstep.store import foreign_journal

    where = foreign_journal.checked_url(_given(url, environment))
    engine = create_engine(where)
    shown = where.render_as_string(hide_password=True)
    ddl = foreign_journal.ddl(engine)
    if sql:
        session.output.document({"sql": ddl}) if session.as_json else session.output.line(ddl)
        return
    try:
        made = foreign_journal.install(engine)
    except SQLAlchemyError as error:
        reason = str(getattr(error, "orig", None) or error).strip().splitlines()[0][:200]
        message = f"database {shown}: {reason}"
        raise DatabaseUnavailable(message) from error
    finally:
        engine.dispose()
    if session.as_json:
        session.output.document({"table": foreign_journal.journal.name, "made": made})
    else:
        told = "made table" if made else "has table"
        session.output.line(f"{shown}: {told} {foreign_journal.journal.name}{'' if made else ' already'}")


def _given(url: str | None, environment: str | None) -> str:
    if (url is None) == (environment is None):
        message = "say which database: URL, or --environment NAME of the variable that holds it"
        raise InvalidInput(message)
    if url is not None:
        return url
    found = os.environ.get(environment or "")
    if not found:
        message = f"the environment variable {environment} is not set"
        raise InvalidInput(message)
    return found
