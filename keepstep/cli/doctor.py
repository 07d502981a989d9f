"""`keepstep doctor`."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from keepstep.cli.command import Broker, command
from keepstep.cli.session import Session

if TYPE_CHECKING:
    from keepstep.cli.finding import Finding

_STYLES = {"ok": "green", "warning": "yellow", "problem": "bold red"}


class Probe(StrEnum):
    """What a container asks."""

    LIVENESS = "liveness"
    READINESS = "readiness"


@command("doctor", panel="Operate", reads=True, example="keepstep doctor\nkeepstep doctor --probe readiness")
def doctor(
    session: Session,
    *,
    probe: Annotated[
        Probe | None,
        typer.Option(
            "--probe",
            metavar="|".join(Probe),
            help="Only what a worker's container is asked, quickly: is a worker of this host alive; can it work, too.",
        ),
    ] = None,
    broker: Broker = None,
) -> None:
    """Check a deployment: settings, database, broker, workers, threads that nobody runs.

    Each line is ok, a warning or a problem, with the way out. Exit code 1 when there is a problem. It changes nothing
    and gives up on what does not answer within seconds.
    """
    session = session.refined(broker=broker)
    if probe is None:
        from keepstep.cli.checks import examine

        findings = examine(session)
    else:
        from keepstep.cli import probes

        findings = probes.liveness(session) if probe is Probe.LIVENESS else probes.readiness(session)
    problems = [each for each in findings if each.level == "problem"]
    if session.as_json:
        session.output.document({"healthy": not problems, "checks": [each._asdict() for each in findings]})
    else:
        _show(session, findings)
    if problems:
        raise typer.Exit(1)


def _show(session: Session, findings: list[Finding]) -> None:
    from rich.text import Text

    rows = []
    for each in findings:
        text = each.text if each.way_out is None else f"{each.text}\n→ {each.way_out}"
        rows.append((Text(each.level, style=_STYLES[each.level]), each.what, text))
    session.output.table(("", "CHECK", "FOUND"), rows)
