"""`python -m tests.crash.page > docs/crash-points.md`: what each crash point is, and what a death there costs."""

from __future__ import annotations

import sys

from keepstep.crashpoints import POINTS
from tests.crash.matrix import DEATHS, Death

_HEAD = """\
# Crash points

<!-- Made by `python -m tests.crash.page` from keepstep/crashpoints.py and tests/crash/matrix.py. Do not edit. -->

The protocol has a name for each of its boundaries. In production a name does nothing. In tests it is where a process
dies by SIGKILL, when the environment of a worker says so:

| variable | meaning |
|---|---|
| `KEEPSTEP_CRASH_MARK` | a file that the first process at the point makes before it kills itself; later ones live |
| `KEEPSTEP_CRASH_AT` | the point; `POINT@TEXT`: only where its detail (step, node run, effect) contains the text |

Without the second variable the point is read from the file `MARK.next` each time, so that a running worker can be
armed.

`tests/crash/test_points.py` kills a real worker's process at every point, on PostgreSQL and Redis, and on RabbitMQ at
those where the broker matters. It does so under a thread that reads `price` (step 1), pays the `fare` (2), fans out
three seats (3), asks the `captain` and, with its state edited meanwhile (checkpoint 4), pays the cabin (5), waits for
the `tide`'s signal (6), sleeps a `night` (7) and reads the `toll` (8). It then compares with an undisturbed run: the
history is one line whose digests are right, and the starts of each node run, the bodies entered, the calls that a
server outside has counted, the commands applied, the events and the final state differ by nothing but what stands here.
`tests/crash/test_families.py` does the same to a fleet that spawns a `.boat` and joins it, and to one that is cancelled
while its boat tows another; `tests/crash/test_undos.py` to a holiday that charges a `flight`, a `hotel` and a `car`,
fails, and is undone; `tests/crash/test_transactions.py` to a node that writes a sale into the `till`, a table in
Keepstep's database, and one at the `bank`, in another database, so that there is one of each afterwards;
`tests/crash/test_models.py` to a node that asks two models, an `oracle` and a `sibyl` who answers in chunks;
`tests/crash/test_tools.py` to a `load` that calls the two-phase tool `cargo`, whose approval is given or, at
`cargo.cancel`, refused; `tests/crash/test_schedules.py` to a schedule with a tick that is due.

| point | what has happened there | killed at | what it costs |
|---|---|---|---|
"""


def page() -> str:
    """Return the page."""
    return _HEAD + "".join(f"{line}\n" for point, what in POINTS.items() for line in _lines(point, what))


def _lines(point: str, what: str) -> list[str]:
    deaths = [death for death in DEATHS if death.point == point]
    return [
        f"| {f'`{point}`' if first else ''} | {what if first else ''} | {_where(death)} | {death.costs} |"
        for first, death in ((death is deaths[0], death) for death in deaths)
    ]


def _where(death: Death) -> str:
    if not death.at:
        return "its first"
    kind, _, seq = death.at.rpartition("/")
    if seq.isdigit():
        return f"{kind} {seq}".strip() if kind else f"step {seq}"
    return f"`{death.at}`"


if __name__ == "__main__":
    sys.stdout.write(page())
