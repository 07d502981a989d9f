"""`keepstep effects`, `resolve`: what was done outside, and what a person says of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from keepstep.cli import values
from keepstep.cli.command import command
from keepstep.cli.control import By, GraphName, Reason, report
from keepstep.cli.session import Session
from keepstep.errors import InvalidInput, NotFound

if TYPE_CHECKING:
    from keepstep.client import Client
    from keepstep.runtime.reader import UnknownEffect
    from keepstep.store.views import EffectView

_ARGUMENTS_SHOWN_MAX = 2000


@command(
    "effects",
    panel="Look",
    reads=True,
    example="""\
keepstep effects
keepstep effects order-81""",
)
def effects(
    session: Session,
    *,
    thread: Annotated[
        str | None,
        typer.Argument(metavar="THREAD", help="A thread's name or id: its whole journal. Without it: see above."),
    ] = None,
    graph: GraphName = None,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=10_000, metavar="N", help="At most N.")] = 100,
) -> None:
    """List effects whose outcome nobody knows, the oldest first, with the commands that say it; or a thread's journal.

    An effect is unknown when it was begun, its worker is gone, and it left no result: a payment may have been made.
    """
    from keepstep.cli import records

    with session.reader() as reader:
        if thread is not None:
            journal = reader.effects(thread, graph=graph)[-limit:]
            if session.as_json:
                session.output.document({"effects": [records.effect(each) for each in journal]})
            else:
                _print_journal(session, journal)
            return
        unknown = [each for each in reader.unknown_effects(limit=limit) if graph in (None, each.graph)]
    if session.as_json:
        session.output.document({"effects": [_record(each) for each in unknown]})
        return
    if not unknown:
        session.output.line("of every effect that was begun the outcome is known")
    for number, found in enumerate(unknown):
        if number:
            session.output.line()
        _print(session, found)


def _record(found: UnknownEffect) -> dict[str, Any]:
    from keepstep.cli import records

    whose = {"graph": found.graph, "thread": found.thread, "thread_id": found.effect.thread_id}
    return {**records.effect(found.effect), **whose, "arguments": found.arguments}


def _print_journal(session: Session, journal: list[EffectView]) -> None:
    from keepstep.cli.output import local
    from keepstep.cli.show import effect_state

    asked = any(each.meta for each in journal)
    session.output.table(
        ("STATE", "CALLS", "BEGUN", "BY", *(("MODEL", "TOKENS") if asked else ()), "KEY"),
        [
            (
                *(effect_state(each), str(each.calls), local(each.started_at) or "", each.resolved_by or ""),
                *(_model_and_tokens(each.meta or {}) if asked else ()),
                each.key,
            )
            for each in journal
        ],
    )


def _model_and_tokens(meta: dict[str, Any]) -> tuple[str, str]:
    total = meta.get("tokens", {}).get("total")
    return str(meta.get("model") or ""), "" if total is None else str(total)


def _arguments(found: UnknownEffect) -> str | None:
    """Return what people are shown of a call's arguments, which may be megabytes."""
    from keepstep.cli.output import shown

    arguments, digest = found.arguments, found.effect.arguments_artifact
    if arguments is None:
        return None if digest is None else f"artifact {digest}, which cannot be read"
    text = shown(arguments)
    if len(text) <= _ARGUMENTS_SHOWN_MAX:
        return text
    return f"{text[:_ARGUMENTS_SHOWN_MAX]}… ({len(text)} characters in all; --json has them)"


def _print(session: Session, found: UnknownEffect) -> None:
    from rich.text import Text

    from keepstep.cli.output import relative, visible

    each = found.effect
    head = Text(visible(each.name), style="bold")
    head.append(
        visible(f"  {found.graph}/{found.thread}  begun {relative(each.started_at)} by {each.run}"), style="not bold"
    )
    session.output.line(head)
    happened, not_happened, give_up = (
        session.hint(f"resolve '{each.key}' {option}")
        for option in ("--happened RESULT", "--not-happened", "--give-up")
    )
    facts = {
        "  key": each.key,
        "  arguments": _arguments(found),
        "  resolve": f"{happened}\n{not_happened}\n{give_up}",
    }
    session.output.facts(facts)


@command(
    "resolve",
    panel="Steer threads",
    sends=True,
    example="""\
keepstep resolve '01jdz8k0b2c4d6e8f0g2h4j6km/0/2/pay/send_payment:81' --happened '{"receipt": "R-81"}'
keepstep resolve '01jdz8k0b2c4d6e8f0g2h4j6km/0/2/pay/send_payment:81' --not-happened --reason 'The bank says no'""",
)
def resolve(
    session: Session,
    *,
    effect: Annotated[str, typer.Argument(metavar="KEY", help="The effect's key, as `keepstep effects` shows it.")],
    happened: Annotated[
        str | None,
        typer.Option(
            "--happened",
            metavar="RESULT",
            help="It happened, and this is what the call returned: JSON, or a text when it is not JSON.",
        ),
    ] = None,
    not_happened: Annotated[
        bool, typer.Option("--not-happened", help="It did not happen: the node calls again, under the same key.")
    ] = False,
    give_up: Annotated[
        bool, typer.Option("--give-up", "--fail", help="Neither: the node gets an error, which it may handle.")
    ] = False,
    reason: Reason = None,
    by: By = None,
) -> None:
    """Say what became of an effect whose outcome is unknown. The thread that it blocks goes on."""
    said = {"happened": happened is not None, "not_happened": not_happened, "give_up": give_up}
    chosen = [outcome for outcome, given in said.items() if given]
    if len(chosen) != 1:
        message = "say one of --happened RESULT, --not-happened and --give-up"
        raise InvalidInput(message)
    result = None if happened is None else values.from_text(happened, "--happened")
    with _resolving(session) as client:
        receipt = client.resolve(effect, chosen[0], result=result, by=by or values.this_user(), reason=reason)  # type: ignore[arg-type]  # a key of `said`
        report(session, receipt, f"{effect}: {chosen[0].replace('_', ' ')}", outcome=chosen[0])


@contextmanager
def _resolving(session: Session) -> Iterator[Client]:
    try:
        with session.client() as client:
            yield client
    except NotFound as error:
        message = f"{error.message}: {session.hint('effects')} lists those that are unknown"
        raise NotFound(message) from None
