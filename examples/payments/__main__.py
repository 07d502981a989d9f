"""The show: refunds are paid by workers that are killed, at a bank that is none too reliable.

    python -m examples.payments --seed 7

Everything is real: the bank and the mail server are processes with files of their own, the workers are processes over
SQLite and a broker in a folder, the kills are SIGKILL to workers and to single processes of their pools, the decisions
are messages. The seed decides which requests the bank and the mail server spoil and when the kills come. At the end the
bank's ledger is asked what was paid; exit code 1 when anything is not as it must be.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from sqlalchemy import create_engine

from examples.check import Check
from examples.deployment import ROOT, Deployment, ShowFailed
from examples.payments import killer, money, outcomes, proof, requests
from examples.payments.killer import Killer
from examples.payments.outcomes import Outcome
from examples.payments.outside import POLICIES, Outside
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
_CHILD_GRAPH = "refund"
_CONCURRENCY = 2
_SHOW_SECONDS = 240.0
_LOOK_SECONDS = 0.03


def main() -> int:
    """Run the show; return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m examples.payments", description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, help="decides the faults and the kills (one at random)")
    parser.add_argument("--kills", type=int, default=6, help="workers and pool children killed in turn (%(default)s)")
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
    screen.say(f"keepstep policy test {POLICIES.relative_to(ROOT)}: {_policies_tried()}")
    with Outside(folder, seed=seed) as outside:
        screen.say("a bank and a mail server are up: slow, busy at times, and some of their answers get lost")
        screen.detail(f"pids {' and '.join(map(str, outside.pids))}; all files are in {folder.relative_to(ROOT)}")
        with Deployment(folder, _MODULE, outside.environment) as deployment:
            screen.say(f"starting two of: keepstep worker {_MODULE}")
            for worker in deployment.start_workers(2, concurrency=_CONCURRENCY):
                screen.detail(f"{worker.name}: pid {worker.pid}, {_CONCURRENCY} steps at once")
            planned = killer.moments(seed, kills, _work(asked))
            at_work = Killer(screen, deployment, outside, planned, graph=_CHILD_GRAPH, concurrency=_CONCURRENCY)
            ours = _paid(screen, deployment, outside, at_work, asked, lines_max)
        screen.say("the workers are stopped; what follows is what the bank and the mail server have on record")
        records = Records.of(outside.ledger, outside.mailbox)
    rows = proof.rows(asked.requests, records)
    leaks = sum(outside.token.encode() in file.read_bytes() for file in folder.rglob("*") if file.is_file())
    kinds = Counter(moment.what for moment in planned)
    checks = [
        Check("workers killed", str(kinds[killer.WORKER]), str(len(at_work.workers))),
        Check("pool children killed", str(kinds[killer.CHILD]), str(len(at_work.children))),
        Check("effects whose outcome is still unknown", "0", str(ours.unknown)),
        Check("files with the bank's token in them", "0", str(leaks)),
        Check("questions that showed an account", "0", str(ours.accounts_shown)),
        Check(
            "denials in the audit", str(sum(row.expected.outcome == proof.DENIED for row in rows)), str(ours.denials)
        ),
        Check("edits in the audit: asked for, and run", _edits(rows), ", ".join(ours.edits) or "none"),
    ]
    _judge(screen, rows, records, ours, checks)


def _policies_tried() -> str:
    """Try the policies; return the last line of what `keepstep policy test` says."""
    command = [sys.executable, "-m", "keepstep", "policy", "test", str(POLICIES)]
    tried = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    if tried.returncode != 0:
        message = f"the policies do not decide as they must: {tried.stdout}{tried.stderr}"
        raise ShowFailed(message)
    return tried.stdout.splitlines()[-1]


def _work(asked: Requests) -> int:
    """Return the least that bank and mail server will be asked for."""
    calls = {"": 0, "captured": 2, "released": 2}
    return sum(1 + calls[expected(each).hold] for each in asked.requests)


def _edits(rows: list[Row]) -> str:
    """Return what the audit must say of the approver's edits."""
    edited = [row.expected for row in rows if row.expected.is_edited]
    told = [f"{each.request.id} {each.request.amount}, {money.of_cents(each.cents)}" for each in edited]
    return ", ".join(told) or "none"


@dataclass(frozen=True)
class Ours:
    """What our own side says of it."""

    outcomes: list[Outcome]
    """The agent's own table."""
    edits: list[str]
    """What the audit says of edited calls: what was asked for, and what ran."""
    denials: int
    """How many denied calls the audit has."""
    denied: list[str]
    """What the agent made of them."""
    accounts_shown: int
    """Questions in which an approver could see an account."""
    unknown: int
    """Effects that are still without an outcome."""
    resolved: list[str]
    """What the operator had to say."""
    retried: int
    """How many threads that had lost their worker too often she let go on."""


def _paid(
    screen: Screen, deployment: Deployment, outside: Outside, at_work: Killer, asked: Requests, lines_max: int | None
) -> Ours:
    """Let the agent pay, with people beside it and a killer behind it."""
    people = People(deployment.settings, outside, screen.say)
    with Client(settings=deployment.settings) as client, Reader(settings=deployment.settings) as reader:
        state = {"file": str(_FILE), "lines_max": lines_max}
        client.start(_GRAPH, _THREAD, state, request_id=deployment.folder.name).accepted(20)
        screen.say(f"run of {_GRAPH} accepted: {len(asked.requests)} refunds, {len(asked.repeated)} line came twice")
        people.start()
        try:
            _watch(screen, reader, at_work, people, outside, len(asked.requests))
        finally:
            people.go_home()
        people.check()
        for child in reader.children(_THREAD, graph=_GRAPH):
            if child.status != "done":
                screen.say(f"{child.thread} has {child.status}: {child.error}", style="red")
        edits, denials = _audited(reader, asked)
        return Ours(
            outcomes=_written(deployment),
            edits=edits,
            denials=denials,
            denied=_denied(reader, asked),
            accounts_shown=len(people.accounts_shown),
            unknown=len(reader.unknown_effects()),
            resolved=people.resolved,
            retried=people.retried,
        )


def _denied(reader: Reader, asked: Requests) -> list[str]:
    """Return why refunds were denied, as their threads know it."""
    states = {request.id: reader.state(f"{_THREAD}-{request.id}", graph=_CHILD_GRAPH) for request in asked.requests}
    return [f"{id_} ({state['reason']})" for id_, state in states.items() if state.get("status") == proof.DENIED]


def _audited(reader: Reader, asked: Requests) -> tuple[list[str], int]:
    """Return what the audit says of edited payments, and how many calls were denied."""
    edits: list[str] = []
    denials = 0
    for request in asked.requests:
        for entry in reader.audit(f"{_THREAD}-{request.id}", graph=_CHILD_GRAPH):
            detail = json.loads(entry.detail or "{}")
            denials += entry.action == "call_denied"
            if entry.action == "call" and detail["edited"]:
                edits.append(f"{request.id} {detail['asked']['amount']}, {detail['ran']['amount']}")
    return edits, denials


def _written(deployment: Deployment) -> list[Outcome]:
    """Return the batch's own table."""
    engine = create_engine(deployment.settings.database)
    try:
        with engine.connect() as connection:
            return outcomes.of(connection, _THREAD)
    finally:
        engine.dispose()


def _watch(screen: Screen, reader: Reader, at_work: Killer, people: People, outside: Outside, refunds: int) -> None:
    """Look on until the batch has ended, killing at the moments that were drawn, and tell how far it is."""
    told = 0
    deadline = time.monotonic() + _SHOW_SECONDS
    while (status := reader.get(_THREAD, graph=_GRAPH).status) not in ENDED:
        if time.monotonic() > deadline:
            message = f"the batch is still {status} after {_SHOW_SECONDS:g} s"
            raise ShowFailed(message)
        at_work.look(reader)
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


# --- the verdict ------------------------------------------------------------------------------------------------------


def _judge(screen: Screen, rows: list[Row], records: Records, ours: Ours, more: list[Check]) -> None:
    """Print what is on record and compare it with what must be; raise `ShowFailed` naming what differs."""
    head = ("the bank was asked", "times", "answer lost", "429", "500")
    screen.table("Requests, by the bank's count", head, proof.asked(records))
    checks = [*more, *proof.checks(rows, records, ours.outcomes)]
    lines = [(check.what, check.expected, check.found, "yes" if check.holds else "NO") for check in checks]
    screen.table("What must be true", ("what", "expected", "found", ""), lines)
    screen.table("The bank's ledger, and the mail server's box", proof.HEAD, proof.table(rows))
    screen.console.print(_on_unknown(records, ours), soft_wrap=True)
    denied = ", ".join(ours.denied) or "none"
    screen.console.print(f"Denied by a policy, and the agent went on: {denied}.", soft_wrap=True)
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
