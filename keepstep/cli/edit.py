"""`keepstep state --set`: a person's edit of a thread's state."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from keepstep.cli import values
from keepstep.cli.control import report
from keepstep.cli.session import Session
from keepstep.errors import StaleEdit, StepRunning

if TYPE_CHECKING:
    from keepstep.client import Client
    from keepstep.runtime.reader import Reader

_ABSENT = "(absent)"


class _Seen(NamedTuple):
    """What the person is shown to have changed."""

    checkpoint: str | None
    state: dict[str, Any]


def edit(
    session: Session,
    thread: str,
    graph: str | None,
    pairs: Sequence[str],
    *,
    expect: str | None,
    reason: str | None,
    by: str | None,
) -> None:
    """Send the edit, of the checkpoint that the old values are shown from, and say what it replaced."""
    given = values.from_pairs(pairs, "an edit is written --set key=value")
    who = by or values.this_user()
    seen = session.glance(lambda reader: _look(reader, thread, graph))
    expected = _checkpoint(expect) if expect is not None else seen.checkpoint if seen else None
    with _editing(session, thread) as client:
        receipt = client.edit(thread, given, graph=graph, by=who, reason=reason, expect=expected)
        done = f"{thread} edited by {who}: {_changes(given, seen)}"
        report(session, receipt, done, by=who, values=given, expect=expected)


def _look(reader: Reader, thread: str, graph: str | None) -> _Seen:
    found = reader.get(thread, graph=graph)
    return _Seen(found.checkpoint, reader.state(found.id, at=found.seq) if found.seq >= 0 else {})


def _checkpoint(written: str) -> int | str:
    return int(written) if written.isascii() and written.isdigit() else written


def _changes(given: dict[str, Any], seen: _Seen | None) -> str:
    from keepstep.cli.output import short

    if seen is None:
        return ", ".join(f"{key} = {short(value)}" for key, value in given.items())
    before = {key: short(seen.state[key]) if key in seen.state else _ABSENT for key in given}
    return ", ".join(f"{key} {before[key]} → {short(value)}" for key, value in given.items())


@contextmanager
def _editing(session: Session, thread: str) -> Iterator[Client]:
    """Give a client; what it is refused tells the commands of the way out."""
    try:
        with session.client() as client:
            yield client
    except StepRunning as error:
        pause, resume = session.hint(f"pause {thread}"), session.hint(f"resume {thread}")
        message = f"{error.message}: {pause}, then this again, then {resume}"
        raise StepRunning(message) from None
    except StaleEdit as error:
        message = f"{error.message}: {session.hint(f'state {thread}')}"
        raise StaleEdit(message) from None
