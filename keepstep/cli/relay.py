"""`keepstep relay`: send what producers have written to an outbox in their own database."""

from __future__ import annotations

import signal
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from keepstep.cli.command import Broker, command
from keepstep.cli.session import Session
from keepstep.errors import InvalidSettings

if TYPE_CHECKING:
    from collections.abc import Iterator

    from keepstep.store.outbox import Outbox
    from keepstep.tasks.relay import Relay

_LISTED_MAX = 1000


@command(
    "relay",
    panel="Run",
    has_tenant=False,
    example="""\
keepstep relay postgresql+psycopg2://shop@db/shop
keepstep relay --once
keepstep relay --refused
keepstep relay --again""",
)
def relay(
    session: Session,
    *,
    urls: Annotated[
        list[str] | None,
        typer.Argument(metavar="URL", help="SQLAlchemy URLs of producers' databases. Without any: KEEPSTEP_OUTBOXES."),
    ] = None,
    once: Annotated[
        bool, typer.Option("--once", help="Relay what there is and end; exit code 1 when some is left.")
    ] = False,
    refused: Annotated[bool, typer.Option("--refused", help="List the starts that workers refused, and why.")] = False,
    again: Annotated[
        bool,
        typer.Option("--again", help="Have those that were refused sent again, when what was in their way is gone."),
    ] = False,
    broker: Broker = None,
) -> None:
    """Send the starts that producers have written to the table keepstep_outbox of their own database.

    `Client.start(connection=…)` writes them in the producer's transaction. They are sent when that has committed, and
    removed when a worker has accepted them; what is refused stays, with the reason. A worker does the same when
    KEEPSTEP_OUTBOXES names the database. It runs until SIGTERM or Ctrl+C.
    """
    import logging

    from keepstep.tasks import logs
    from keepstep.tasks.relay import Relay

    session = session.refined(broker=broker)
    given = tuple(urls or session.settings.outboxes)
    if not given:
        message = "no outbox: name the producers' databases, here or in KEEPSTEP_OUTBOXES"
        raise InvalidSettings(message)
    logs.configure(logging.WARNING if once or refused or again else logging.INFO)
    relays = [Relay(session.settings, url) for url in given]
    try:
        if again:
            _again(session, [each.outbox for each in relays])
        elif refused:
            _list(session, [each.outbox for each in relays])
        elif once:
            _once(session, relays)
        else:
            _run(session, relays)
    finally:
        for each in relays:
            each.finish()


def _once(session: Session, relays: list[Relay]) -> None:
    for each in relays:
        while each.relay():
            pass
    left = {each.outbox.shown: dict(each.outbox.counts()) for each in relays}
    if session.as_json:
        session.output.document({"outboxes": [{"outbox": shown, **counts} for shown, counts in left.items()]})
    else:
        for shown, counts in left.items():
            session.output.line(f"{shown}: {counts['waiting']} waiting, {counts['refused']} refused")
    if any(counts["waiting"] for counts in left.values()):
        raise typer.Exit(1)


def _again(session: Session, outboxes: list[Outbox]) -> None:
    done = [{"outbox": each.shown, "sent_again": each.again()} for each in outboxes]
    if session.as_json:
        session.output.document({"outboxes": done})
        return
    for each in done:
        session.output.line(f"{each['outbox']}: {each['sent_again']} will be sent again")


def _list(session: Session, outboxes: list[Outbox]) -> None:
    import json

    found = [(each.shown, refused) for each in outboxes for refused in each.refused(_LISTED_MAX)]
    if session.as_json:
        records = [
            {"outbox": shown, "id": each.id, "error": json.loads(each.error), "message": json.loads(each.body)}
            for shown, each in found
        ]
        session.output.document({"refused": records})
        return
    if not found:
        session.output.line("nothing was refused")
        return
    rows = []
    for shown, each in found:
        error, body = json.loads(each.error), command_of(json.loads(each.body))
        rows.append((each.id, f"{body.get('graph')}/{body.get('thread')}", error["code"], error["message"], shown))
    session.output.table(("ID", "THREAD", "CODE", "WHY", "OUTBOX"), rows)


def command_of(message: dict[str, Any]) -> dict[str, Any]:
    """Return the command that a message is, or carries when it is signed; for people, so nothing is verified."""
    import base64
    import json

    if not isinstance(message.get("jwt"), str):
        return message
    try:
        claims = message["jwt"].split(".")[1]
        command = json.loads(base64.urlsafe_b64decode(claims + "=" * (-len(claims) % 4)))["command"]
    except (ValueError, LookupError, TypeError):
        return {}
    return command if isinstance(command, dict) else {}


def _run(session: Session, relays: list[Relay]) -> None:
    from keepstep.tasks.service import stop

    for each in relays:
        each.outbox.counts()  # a wrong URL or a missing table is told now, and not again and again in the log
    with _until_told() as told:
        for each in relays:
            each.start()
            session.output.line(f"relaying {each.outbox.shown}")
        told.wait()
        stop(relays)


@contextmanager
def _until_told() -> Iterator[threading.Event]:
    told = threading.Event()
    before = {number: signal.signal(number, lambda *_: told.set()) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield told
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
