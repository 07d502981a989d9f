"""The payments example: the agent in process, with a real bank and a real mail server, and the show."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from decimal import Decimal
from pathlib import Path

import psutil
import pytest

from examples.payments import agent, mail, proof, requests, tools
from examples.payments.agent import Totals, batch
from examples.payments.bank import Bank, Fault, Faults
from examples.payments.ledger import Ledger
from examples.payments.mailbox import Mailbox
from examples.payments.outside import CLOSED, FROZEN, POLICIES
from examples.payments.people import verdict_on
from examples.payments.proof import Records
from examples.payments.tools import find_payment
from keepstep import tool
from keepstep.cli.program import run as keepstep

ROOT = Path(__file__).parents[2]
FILE = ROOT / "examples" / "payments" / "refunds.csv"
LINES = 12


# --- the agent --------------------------------------------------------------------------------------------------------


class World:
    """A bank and a mail server in threads of this process."""

    def __init__(self, folder):
        self.ledger = Ledger(folder / "bank.db", closed=frozenset({CLOSED}), frozen=frozenset({FROZEN}))
        self.bank = Bank(self.ledger, token="a-token-of-the-bank", faults=Faults())
        self._banking = threading.Thread(target=self.bank.serve_forever, kwargs={"poll_interval": 0.01})
        self._loop = asyncio.new_event_loop()
        self._mailbox_path = folder / "mails.db"
        self._up = threading.Event()
        self._mailing = threading.Thread(target=self._serve_mail)
        self._banking.start()
        self._mailing.start()
        self._up.wait(10)

    def _serve_mail(self):
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(mail.serve(mail.Receiver(Mailbox(self._mailbox_path))))
        self.mail_port = server.sockets[0].getsockname()[1]
        self._up.set()
        self._loop.run_forever()
        server.close()
        self._loop.run_until_complete(server.wait_closed())
        self._loop.close()

    def records(self):
        return Records.of(self.ledger, Mailbox(self._mailbox_path))

    def close(self):
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._mailing.join(10)
        self.bank.shutdown()
        self._banking.join(10)
        self.bank.server_close()
        self.ledger.close()


@pytest.fixture
def world(tmp_path, monkeypatch):
    made = World(tmp_path)
    monkeypatch.setenv("PAYMENTS_BANK", f"http://127.0.0.1:{made.bank.port}")
    monkeypatch.setenv("PAYMENTS_MAIL", f"127.0.0.1:{made.mail_port}")
    monkeypatch.setenv("BANK_TOKEN", made.bank.token)
    monkeypatch.setenv("KEEPSTEP_POLICIES", str(POLICIES))
    yield made
    made.close()


def decide(approval):
    if approval.to != ["finance"]:
        return None
    assert (approval.arguments["account"], approval.arguments["hold"]) == ("(masked)", "(masked)")
    said = verdict_on(approval.arguments["refund"])
    arguments = {} if said.amount is None else {"arguments": {**approval.arguments, "amount": str(said.amount)}}
    return {"verdict": said.verdict, "by": "dana", "comment": said.comment, **arguments}


def run():
    return batch.run({"file": str(FILE), "lines_max": LINES}, decisions=decide)


def wrong(world):
    rows = proof.rows(requests.read(FILE, LINES).requests, world.records())
    return {row.expected.request.id for row in rows if not row.is_right}


def test_the_policies_decide_as_their_cases_say():
    assert keepstep(shlex.split(f"policy test {POLICIES}")) == 0


def test_each_refund_comes_to_what_it_must(world):
    totals = run()["totals"]

    assert totals == Totals(
        requests=11,
        repeated=1,
        paid=5,
        denied=2,
        rejected=1,
        expired=1,
        refused=2,
        failed=0,
        amount=Decimal("2320.75"),
    )
    assert wrong(world) == set()
    records = world.records()
    assert sum(each.cents for each in records.payments) == 232_075
    assert {each.reference for each in records.requests}.isdisjoint({"R-1004", "R-1011"})  # denied
    assert [each.text for each in records.mails if each.reference == "R-1005"] == [
        "Dear Ines Moreau,\n\nwe could not grant the refund for order 81-2063: The parcel was signed for."
    ]


def test_what_the_approver_makes_of_a_payment_is_what_is_paid(world):
    run()

    [hold] = [each for each in world.ledger.holds() if each.reference == "R-1008"]
    [paid] = [each for each in world.ledger.payments() if each.reference == "R-1008"]
    assert (hold.cents, paid.cents, paid.hold) == (98_000, 90_000, hold.number)


def lose_captures(world, monkeypatch, times):
    """Let the bank book the next captures and not answer."""
    left = [times]

    def of(_faults, number):
        [request] = [each for each in world.ledger.requests() if each.number == number]
        lost = request.endpoint == "POST /holds/ID/capture" and left[0] > 0
        left[0] -= lost
        return Fault("lost" if lost else "none", 0.0, 0.0)

    monkeypatch.setattr(Faults, "of", of)


def test_a_payment_whose_answer_is_lost_is_found_at_the_bank_and_not_made_again(world, monkeypatch):
    lose_captures(world, monkeypatch, 3)

    assert run()["totals"].amount == Decimal("2320.75")

    assert wrong(world) == set()
    asked = [each.endpoint for each in world.records().requests]
    assert (asked.count("POST /holds/ID/capture"), asked.count("GET /payments")) == (6, 3)  # one is refused


def declared(**options):
    """Return the payment tool anew, with other declarations."""
    honest = tools.send_payment

    def send_payment(
        refund: str, account: str, amount: Decimal, hold: str | None = None, *, token: str, idempotency_key: str
    ):
        return honest(refund, account, amount, hold, token=token, idempotency_key=idempotency_key)

    made = tool(retry=honest.retry, secrets=dict(honest.secrets), **options)(send_payment)
    made.prepare(idempotent=True)(tools.place_hold)
    return made


def test_the_ledger_convicts_a_tool_that_calls_itself_safe_to_repeat_and_is_not(world, monkeypatch):
    monkeypatch.setattr(agent, "send_payment", declared(idempotent=True))
    lose_captures(world, monkeypatch, 1)

    run()

    paid = Counter(each.reference for each in world.records().payments)
    assert sorted(paid.values()) == [1, 1, 1, 1, 2]
    assert {refund for refund, times in paid.items() if times > 1} < wrong(world)


def test_the_ledger_convicts_a_tool_that_does_not_cancel_what_it_has_prepared(world, monkeypatch):
    monkeypatch.setattr(agent, "send_payment", declared(lookup=tools.find_payment))

    run()

    assert wrong(world) == {"R-1005", "R-1009", "R-1010"}  # rejected, refused, expired
    assert {each.reference for each in world.ledger.holds() if each.status == "open"} == wrong(world)


def test_a_bank_is_asked_under_the_key_of_the_payment(world):
    hold = world.ledger.place("k", reference="R-1", account="DE11", cents=100)
    world.ledger.capture(hold.number, "another", 100)
    paid = world.ledger.capture(hold.number, "k-pay", 100)

    found = find_payment("R-1", "DE11", Decimal("1.00"), "1", token=world.bank.token, idempotency_key="k-pay")

    assert (found.payment, found.hold, found.amount) == (str(paid.number), "1", Decimal("1.00"))


# --- the show ---------------------------------------------------------------------------------------------------------


def show(*options):
    command = [sys.executable, "-m", "examples.payments", *options]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KEEPSTEP_")}
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def ledger_of(output):
    """Return the bank's ledger of a show, from its own file."""
    [folder] = re.findall(r"all files are in (\S+)", output)
    return Ledger(ROOT / folder / "bank.db")


@pytest.mark.kill
@pytest.mark.slow
def test_a_show_with_a_kill_of_each_kind_ends_with_each_refund_paid_once():
    running = show("--seed", "3", "--kills", "2", "--lines", "9")
    output, _ = running.communicate(timeout=100)

    assert running.returncode == 0, output
    assert "SIGKILL to worker" in output
    assert "SIGKILL to pool child" in output
    paid = [(each.reference, each.cents) for each in ledger_of(output).payments()]
    assert sorted(paid) == [
        ("R-1001", 3_990),
        ("R-1002", 125_000),
        ("R-1003", 1_850),
        ("R-1006", 11_235),
        ("R-1008", 90_000),
    ]
    assert "Denied by a policy, and the agent went on: R-1004 (forbidden by maximum)." in output
    assert output.splitlines()[-1].startswith("5 refunds paid once each, 2,320.75 in all")


@pytest.mark.kill
@pytest.mark.slow
def test_a_show_that_is_interrupted_stops_what_it_started():
    running = show("--seed", "3")
    output = ""
    for line in running.stdout:
        output += line
        if "run of refund-batch accepted" in line:
            break
    children = psutil.Process(running.pid).children(recursive=True)
    told = {int(pid) for pid in re.findall(r"pids? (\d+)", output)}
    assert {child.pid for child in children} >= told
    assert len(told) == 3

    running.send_signal(signal.SIGINT)
    rest, _ = running.communicate(timeout=60)

    assert running.returncode == 130, output + rest
    deadline = time.monotonic() + 5
    while (left := [child for child in children if child.is_running()]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left == []
