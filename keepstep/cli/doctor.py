"""`keepstep doctor`."""

from __future__ import annotations

import typer

from keepstep.cli.command import Broker, command
from keepstep.cli.session import Session

_STYLES = {"ok": "green", "warning": "yellow", "problem": "bold red"}


@command("doctor", panel="Operate", reads=True, example="keepstep doctor")
def doctor(session: Session, *, broker: Broker = None) -> None:
    """Check a deployment: settings, database, broker, workers, threads that nobody runs.

    Each line is ok, a warning or a problem, with the way out. Exit code 1 when there is a problem. It changes nothing
    and gives up on what does not answer within seconds.
    """
    from keepstep.cli.checks import examine

    session = session.refined(broker=broker)
    findings = examine(session)
    problems = [each for each in findings if each.level == "problem"]
    if session.as_json:
        session.output.document({"healthy": not problems, "checks": [each._asdict() for each in findings]})
    else:
        from rich.text import Text

        rows = []
        for each in findings:
            text = each.text if each.way_out is None else f"{each.text}\n→ {each.way_out}"
            rows.append((Text(each.level, style=_STYLES[each.level]), each.what, text))
        session.output.table(("", "CHECK", "FOUND"), rows)
    if problems:
        raise typer.Exit(1)
