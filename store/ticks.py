"""Ticks: the times that a cron expression stands for in a time zone, and which of them start a run. Pure.

A tick is an instant, in seconds since 1970. What the expression says is said of the clocks of its time zone:

- Where they are set forward, times that they leave out come at the moment at which they are set, once however many
  those are; one that is said of every hour or minute (`*`) does not come.
- Where they are set back, times that they show twice come the first time; said of every hour or minute, both times.

That is how Debian's cron has it. It holds where clocks are set by whole hours, so everywhere but on Lord Howe Island.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import NamedTuple
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from cronsim import CronSim, CronSimError

from keepstep.errors import InvalidSchedule

MISSED = ("skip", "last", "all")
"""What may become of ticks that are missed: none starts a run, the last one does, all do."""
CAUGHT_UP_MAX = 100
"""With `all`: so many of the latest ticks start a run; those before are skipped."""
ON_TIME_SECONDS = 60.0
"""A tick that nobody has come to for as long is missed. No expression has two ticks in less."""
IN_NAME = "{tick}"
"""Stands for the tick's time in the name of a thread."""

_ALIASES = {
    "@hourly": "0 * * * *",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@weekly": "0 0 * * 0",
    "@monthly": "0 0 1 * *",
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
}
_FIELDS = ("minute", "hour", "day-of-month", "month", "day-of-week")
_LENGTH_MAX = 200
_WINDOWS = 8


class Due(NamedTuple):
    """What is to be done about the ticks of a schedule that are due."""

    tick: float | None
    """The one that starts a run; None: all were missed and are skipped."""
    then: float | None
    """The one after it, which may be due as well; None: there is none."""
    skipped: float | None
    """The latest one before it that starts none; None: there is none."""


def check(cron: str, timezone: str, now: float) -> None:
    """Raise `InvalidSchedule`, naming what is wrong and how it is written right, unless a tick comes after `now`."""
    try:
        _zone(timezone)
    except (ZoneInfoNotFoundError, OSError, ValueError):
        message = f"$.timezone: {timezone[:80]!r} is no time zone: use a name of IANA's, as in 'Europe/Berlin' or 'UTC'"
        raise InvalidSchedule(message) from None
    problem = _problem(cron)
    if problem is not None:
        message = (
            f"$.cron: {problem}; five fields are needed, {' '.join(_FIELDS)}, as in '30 8 * * mon-fri', "
            "or one of @hourly, @daily, @weekly, @monthly, @yearly"
        )
        raise InvalidSchedule(message)
    if after(cron, timezone, now) is None:
        message = f"$.cron: {cron!r} never comes: no day in 50 years fits both its days and its months"
        raise InvalidSchedule(message)


def after(cron: str, timezone: str, at: float) -> float | None:
    """Return the first tick later than `at`; None when none comes in 50 years."""
    return next(_later(cron, timezone, at), None)


def due(cron: str, timezone: str, missed: str, *, first: float, now: float) -> Due:
    """Return what is to be done about the ticks from `first`, which has come, up to `now`."""
    most = CAUGHT_UP_MAX if missed == "all" else 1
    latest = _latest(cron, timezone, first, now, most + 1)
    if missed == "skip" and now - latest[-1] >= ON_TIME_SECONDS:
        return Due(None, after(cron, timezone, now), latest[-1])
    skipped = latest.pop(0) if len(latest) > most else None
    return Due(latest[0], after(cron, timezone, latest[0]), skipped)


def text(tick: float) -> str:
    """Return a tick as it stands in names: `2027-03-28T01:00Z`."""
    return datetime.fromtimestamp(tick, UTC).strftime("%Y-%m-%dT%H:%MZ")


def thread_name(template: str, tick: float) -> str:
    """Return the name of the thread that a tick's run belongs to."""
    return template.replace(IN_NAME, text(tick))


def _problem(cron: str) -> str | None:
    """Return what is wrong with an expression by itself."""
    shown = repr(cron[:80])
    if len(cron) > _LENGTH_MAX:
        return f"it has more than {_LENGTH_MAX} characters"
    fields = _ALIASES.get(cron, cron).split()
    if len(fields) != len(_FIELDS):
        return f"{shown} has {len(fields)} field{'' if len(fields) == 1 else 's'}"
    for place, name in enumerate(_FIELDS):
        alone = ["*"] * len(_FIELDS)
        alone[place] = fields[place]
        try:
            CronSim(" ".join(alone), datetime.now(UTC))
        except CronSimError:
            return f"{fields[place][:80]!r} is no {name}"
    return None


def _zone(timezone: str) -> ZoneInfo:
    if timezone in {"localtime", "posixrules", "Factory"}:  # whatever the machine says
        raise ZoneInfoNotFoundError
    return ZoneInfo(timezone)


def _later(cron: str, timezone: str, at: float) -> Iterator[float]:
    """Yield the ticks later than `at`, each later than the one before."""
    zone = UTC if timezone == "UTC" else _zone(timezone)
    try:
        found = CronSim(_ALIASES.get(cron, cron), datetime.fromtimestamp(at, zone))
    except CronSimError:  # one that never comes
        return
    for moment in found:
        tick = moment.timestamp()
        # Times that the clocks leave out all come at one moment, and of those that they show twice one is over.
        if tick > at:
            yield tick
            at = tick


def _latest(cron: str, timezone: str, first: float, until: float, count: int) -> list[float]:
    """Return the latest ticks from `first`, which is one, up to `until`: at most `count`, of however many."""
    seconds = 60.0 * count
    while True:
        begin = max(first - 1, until - seconds)
        found = [first] if begin < first else []
        for tick in _later(cron, timezone, begin):
            if tick > until:
                break
            if tick > first:
                found.append(tick)
        if len(found) >= count or begin < first:
            return found[-count:]
        seconds *= _WINDOWS
