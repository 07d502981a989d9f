"""The show: refunds are paid by workers that are killed, at a bank that is none too reliable.

    python -m examples.payments --seed 7

Everything is real: the bank and the mail server are processes with files of their own, the workers are processes over
SQLite and a broker in a folder, the kills are SIGKILL, the decisions are messages. The seed decides which requests the
bank and the mail server spoil and when the kills come. At the end the bank's ledger is asked what was paid; exit code 1
when anything is not as it must be.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import NoReturn

from examples.check import Check
from examples.deployment import ROOT, Deployment, ShowFailed, WorkerProcess
from examples.payments import money, proof, requests
from examples.payments.outside import Outside
from examples.payments.people import People
from examples.payments.proof import Records, Row, expected
from examples.payments.requests import Requests
from examples.screen import Screen
from keepstep import Client, Reader
from keepstep.errors import KeepstepError
from keepstep.store.schema import ENDED

_MODULE = "examples/payments/agent.py"
_FILE = ROOT / "examples" / "payments" / "refunds.csv"
_GRAPH, _THREAD = "refund-batch", "refunds"
_CONCURRENCY = 2
_SHOW_SECONDS = 240.0
_LOOK_SECONDS = 0.03


def main() -> int:
    """Run the show; return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m examples.payments", description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, help="decides the faults and the kills (one at random)")
    parser.add_argument("--kills", type=int, default=4, help="how often a worker is killed (%(default)s)")
    parser.add_argument("--lines", type=int, metavar="COUNT", help="pay the first lines of the file only")
    chosen = parser.parse_args()
    seed = random.randrange(10_000) if chosen.seed is None else chosen.seed  # noqa: S311  no secret
    screen = Screen()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _terminated)
    try:
        _show(screen, seed, chosen.kills, chosen.lines)
    except (ShowFailed, KeepstepError) as error:
        screen.say(f"FAILED (seed {seed}): {error}", style="bold red")
        return 1
    except KeyboardInterrupt:
        screen.say("stopped; so are the workers, the bank and the mail server")
        return 130
    return 0


def _terminated(_number: int, _frame: object) -> NoReturn:
    raise KeyboardInterrupt


def _show(screen: Screen, seed: int, kills: int, lines_max: int | None) -> None:
    (ROOT / "build").mkdir(exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="payments-", dir=ROOT / "build"))
    asked = requests.read(_FILE, lines_max)
    screen.title(f"Refunds paid by workers that are killed (seed {seed})")
    with Outside(folder, seed=seed) as outside:
        screen.say("a bank and a mail server are up: slow, busy at times, and some of their answers get lost")
        screen.detail(f"pids {' and '.join(map(str, outside.pids))}; all files are in {folder.relative_to(ROOT)}")
        with Deployment(folder, _MODULE, outside.environment) as deployment:
            screen.say(f"starting two of: keepstep worker {_MODULE}")
            for worker in deployment.start_workers(2, concurrency=_CONCURRENCY):
                screen.detail(f"{worker.name}: pid {worker.pid}, {_CONCURRENCY} steps at once")
            killer = Killer(screen, deployment, outside, _moments(asked, seed, kills))
            ours = _paid(screen, deployment, outside, killer, asked, lines_max)
        screen.say("the workers are stopped; what follows is what the bank and the mail server have on record")
        records = Records.of(outside.ledger, outside.mailbox)
    leaks = sum(outside.token.encode() in file.read_bytes() for file in folder.rglob("*") if file.is_file())
    checks = [
        Check("workers killed", str(kills), str(len(killer.killed))),
        Check("effects whose outcome is still unknown", "0", str(ours.unknown)),
        Check("files with the bank's token in them", "0", str(leaks)),
    ]
    _judge(screen, proof.rows(asked.requests, records), records, ours, checks)


@dataclass(frozen=True)
class Ours:
    """What our own side says of it."""

    amount: str
    """The sum in the agent's report."""
    unknown: int
    """Effects that are still without an outcome."""
    resolved: list[str]
    """What the operator had to say."""
    retried: int
    """How many threads that had lost their worker too often she let go on."""


def _paid(
    screen: Screen, deployment: Deployment, outside: Outside, killer: Killer, asked: Requests, lines_max: int | None
) -> Ours:
    """Let the agent pay, with people beside it and a killer behind it."""
    people = People(deployment.settings, outside, screen.say)
    with Client(settings=deployment.settings) as client, Reader(settings=deployment.settings) as reader:
        state = {"file": str(_FILE), "lines_max": lines_max}
        client.start(_GRAPH, _THREAD, state, request_id=deployment.folder.name).accepted(20)
        screen.say(f"run of {_GRAPH} accepted: {len(asked.requests)} refunds, {len(asked.repeated)} line came twice")
        people.start()
        try:
            _watch(screen, reader, killer, people, outside, len(asked.requests))
        finally:
            people.go_home()
        people.check()
        for child in reader.children(_THREAD, graph=_GRAPH):
            if child.status != "done":
                screen.say(f"{child.thread} has {child.status}: {child.error}", style="red")
        totals = reader.state(_THREAD, graph=_GRAPH)["totals"]["v"]
        amount = money.written(money.cents(Decimal(totals["amount"]["v"])))
        return Ours(amount, len(reader.unknown_effects()), people.resolved, people.retried)


def _watch(screen: Screen, reader: Reader, killer: Killer, people: People, outside: Outside, refunds: int) -> None:
    """Look on until the batch has ended, killing at the moments that were drawn, and tell how far it is."""
    told = 0
    deadline = time.monotonic() + _SHOW_SECONDS
    while (status := reader.get(_THREAD, graph=_GRAPH).status) not in ENDED:
        if time.monotonic() > deadline:
            message = f"the batch is still {status} after {_SHOW_SECONDS:g} s"
            raise ShowFailed(message)
        killer.look()
        people.check()
        mails = len(outside.mailbox.mails())
        if mails * 4 // refunds > told:
            told = mails * 4 // refunds
            screen.say(f"{mails} of {refunds} customers written to, {len(outside.ledger.payments())} payments booked")
        time.sleep(_LOOK_SECONDS)
    screen.say(f"the batch is {status}")
    if status != "done":
        message = f"the batch has {status}: {reader.get(_THREAD, graph=_GRAPH).error}"
        raise ShowFailed(message)


# --- the kills --------------------------------------------------------------------------------------------------------


def _moments(asked: Requests, seed: int, kills: int) -> list[tuple[int, float]]:
    """Return when to kill: after how much work outside, and how many seconds later."""
    rolled = random.Random(f"{seed}/kills")  # noqa: S311  seeded on purpose
    least = sum(2 + (expected(each).outcome == proof.PAID) for each in asked.requests)
    amounts = sorted(rolled.sample(range(2, max(3 * least // 4, kills + 3)), kills))
    return [(amount, rolled.random() * 0.3) for amount in amounts]


class Killer:
    """Kills a worker at each of some moments, and starts another in its place."""

    def __init__(
        self, screen: Screen, deployment: Deployment, outside: Outside, moments: list[tuple[int, float]]
    ) -> None:
        self._screen = screen
        self._deployment = deployment
        self._outside = outside
        self._moments = moments
        self._kills = len(moments)
        self._at: float | None = None
        self.killed: list[WorkerProcess] = []

    def look(self) -> None:
        """Kill, if the moment has come and a worker is at work."""
        if not self._moments:
            return
        amount, later = self._moments[0]
        now = time.monotonic()
        if self._at is None and self._outside.work() >= amount:
            self._at = now + later
        if self._at is None or now < self._at:
            return
        alive = [worker for worker in self._deployment.workers if worker not in self.killed]
        working = [worker for worker in alive if worker.started()]
        if not working:
            return
        self._at = None
        self._moments.pop(0)
        victim = working[0]
        victim.kill()
        self.killed.append(victim)
        successor = self._deployment.start_worker(concurrency=_CONCURRENCY)
        self._screen.say(
            f"SIGKILL to {victim.name} and its pool ({len(self.killed)} of {self._kills}), "
            f"after {self._outside.work()} requests and mails; {successor.name} is started",
            style="red",
        )


# --- the verdict ------------------------------------------------------------------------------------------------------


def _judge(screen: Screen, rows: list[Row], records: Records, ours: Ours, more: list[Check]) -> None:
    """Print what is on record and compare it with what must be; raise `ShowFailed` naming what differs."""
    head = ("the bank was asked", "times", "answer lost", "429", "500")
    screen.table("Requests, by the bank's count", head, proof.asked(records))
    checks = [*more, *proof.checks(rows, records, reported=ours.amount)]
    lines = [(check.what, check.expected, check.found, "yes" if check.holds else "NO") for check in checks]
    screen.table("What must be true", ("what", "expected", "found", ""), lines)
    screen.table("The bank's ledger, and the mail server's box", proof.HEAD, proof.table(rows))
    screen.console.print(_on_unknown(records, ours), soft_wrap=True)
    wrong = [check.what for check in checks if not check.holds]
    wrong += [row.expected.request.id for row in rows if not row.is_right]
    if wrong:
        message = f"not as it must be: {'; '.join(wrong)}"
        raise ShowFailed(message)
    booked = money.written(sum(each.cents for each in records.payments))
    paid = sum(row.paid_times == 1 for row in rows)
    screen.console.print(
        f"[bold green]{paid} refunds paid once each, {booked} in all; none twice, none that was not to be paid.[/]"
    )


def _on_unknown(records: Records, ours: Ours) -> str:
    asked = sum(each.endpoint == "GET /payments" for each in records.requests)
    said = ", ".join(f"{what} {times} x" for what, times in sorted(Counter(ours.resolved).items())) or "nothing"
    more = f" {ours.retried} x she let a refund go on that had lost its worker too often." if ours.retried else ""
    return f"\nNot known at first: the bank was asked {asked} x what it had paid; an operator had to say: {said}.{more}"


if __name__ == "__main__":
    sys.exit(main())
