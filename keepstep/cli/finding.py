"""What one check of `keepstep doctor` found."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple


class Finding(NamedTuple):
    """What one check found."""

    level: str
    """`ok`, `warning` or `problem`."""
    what: str
    text: str
    way_out: str | None = None


def guarded(what: str, check: Callable[[], Iterable[Finding]]) -> list[Finding]:
    """Run a check; an error of what it asks is a finding, too."""
    try:
        return list(check())
    except Exception as error:  # noqa: BLE001  a doctor that falls over helps nobody
        reason = str(error).strip().splitlines()
        return [Finding("problem", what, f"the check failed: {reason[0][:200] if reason else type(error).__name__}")]


def ago(seconds: float) -> str:
    """Return a time span in few words: `0.4 s`, `12 s`, `5 min`, `3 h`, `2 d`."""
    for limit, unit, name in ((10.0, 1.0, ""), (120.0, 1.0, "s"), (7200.0, 60.0, "min"), (172_800.0, 3600.0, "h")):
        if seconds < limit:
            return f"{seconds / unit:.0f} {name}" if name else f"{max(seconds, 0.0):.1f} s"
    return f"{seconds / 86_400:.0f} d"


def named(names: Iterable[str], shown_max: int = 3) -> str:
    """Return the first few of some names, and how many more there are."""
    found = list(names)
    more = len(found) - shown_max
    return ", ".join(found[:shown_max]) + (f" and {more} more" if more > 0 else "")
