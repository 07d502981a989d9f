"""The people beside the agent: who approves, and who finds out what nobody knows.

They see what any person of a deployment sees, the open approvals and the blocked threads, and say what they have to say
by messages. The operator looks into the bank's and the mail server's own records, as operators do.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from examples.deployment import ShowFailed
from examples.payments import money
from examples.payments.ledger import Ledger
from examples.payments.mailbox import Mailbox
from examples.payments.outside import Outside
from examples.payments.tools import CALL_SECONDS, SETTLING_SECONDS, message_id
from keepstep import Client, Reader
from keepstep.errors import Conflict, NotConfirmed
from keepstep.runtime.reader import Approval, Thread
from keepstep.settings import Settings
from keepstep.store.views import EffectView

APPROVER, OPERATOR = "dana@finance", "olga@operations"
_ROLE = "finance"
"""The approver's. Nobody here is of the board."""
_MASKED = "(masked)"
_LOOK_SECONDS = 0.1
_CONFIRM_SECONDS = 20.0


@dataclass(frozen=True)
class Verdict:
    """What the approver says to a refund that is over the limit."""

    verdict: str
    amount: Decimal | None = None
    """What she approves in place of what was asked for."""
    comment: str | None = None


VERDICTS = {
    "R-1005": Verdict("reject", comment="The parcel was signed for."),
    "R-1008": Verdict("approve", Decimal("900.00"), "Less the postage."),
}
"""Everything else that finance is asked is approved as it is."""


def verdict_on(refund: str) -> Verdict:
    """Return what the approver says to a refund."""
    return VERDICTS.get(refund, Verdict("approve"))


class People(threading.Thread):
    """Approver and operator, at work until they are told to go home."""

    def __init__(self, settings: Settings, outside: Outside, say: Callable[[str], None]) -> None:
        super().__init__(name="people", daemon=True)
        self._settings = settings
        self._outside = outside
        self._say = say
        self._home = threading.Event()
        self.failure: BaseException | None = None
        self.resolved: list[str] = []
        """Effects of which the operator has said what became of them, and what."""
        self.retried = 0
        self.accounts_shown: set[str] = set()
        """The questions that showed an account."""

    def go_home(self) -> None:
        """Let them finish what they are at; raise what went wrong with them."""
        self._home.set()
        self.join(2 * _CONFIRM_SECONDS)
        self.check()

    def check(self) -> None:
        """Raise what went wrong with them."""
        if self.failure is not None:
            raise self.failure

    def run(self) -> None:
        """Look, and say what there is to say."""
        ledger, mailbox = Ledger(self._outside.ledger_path), Mailbox(self._outside.mailbox_path)
        try:
            with (
                Client(settings=self._settings, confirm=True, timeout=_CONFIRM_SECONDS) as client,
                Reader(settings=self._settings) as reader,
            ):
                while not self._home.wait(_LOOK_SECONDS):
                    for approval in reader.approvals():
                        self._sent(functools.partial(self._decide, client, approval))
                    for thread in reader.threads(status="blocked", limit=1000):
                        self._unblock(client, reader, thread, ledger, mailbox)
        except BaseException as error:  # noqa: BLE001  the show raises it
            self.failure = error
        finally:
            ledger.close()
            mailbox.close()

    def _sent(self, send: Callable[[], object]) -> bool:
        """Say something; False when it was said before, or nobody has confirmed it yet: then there is another look."""
        try:
            send()
        except (Conflict, NotConfirmed):
            return False
        return True

    def _decide(self, client: Client, approval: Approval) -> None:
        if approval.arguments["account"] != _MASKED:
            self.accounts_shown.add(approval.id)
        if _ROLE not in approval.to:
            return
        refund, asked = approval.arguments["refund"], approval.arguments["amount"]["v"]
        said = verdict_on(refund)
        edited = None if said.amount is None else {**approval.arguments, "amount": str(said.amount)}
        client.decide(approval.id, said.verdict, by=APPROVER, arguments=edited, comment=said.comment)  # type: ignore[arg-type]
        as_what = f", {said.amount} in place of {asked}" if said.amount is not None else f" ({asked})"
        self._say(f"{APPROVER} says {said.verdict} to {refund}{as_what}")

    # --- what nobody knows --------------------------------------------------------------------------------------------

    def _unblock(self, client: Client, reader: Reader, thread: Thread, ledger: Ledger, mailbox: Mailbox) -> None:
        code = (thread.error or {}).get("code")
        if code == "worker_lost":
            if self._sent(functools.partial(client.retry, thread.name, graph=thread.graph, by=OPERATOR)):
                self.retried += 1
                self._say(f"{thread.name} lost its worker too often; {OPERATOR} lets it go on")
            return
        if code != "effect_unknown":
            message = f"{thread.name} is blocked: {thread.error}"
            raise ShowFailed(message)
        for effect in reader.effects(thread.name, graph=thread.graph):
            if effect.state != "intent" or not effect.at_risk:
                continue
            found = _looked_up(effect, ledger, mailbox)
            if found is None and time.time() < effect.started_at + CALL_SECONDS + SETTLING_SECONDS:
                continue  # it may still happen
            outcome, result = ("not_happened", None) if found is None else ("happened", found)
            if self._sent(functools.partial(self._resolve, client, effect, outcome, result)):
                self.resolved.append(f"{effect.name} {outcome}")
                where = "the bank's ledger" if effect.name == "send_payment" else "the mail server's box"
                told = "it has happened" if found is not None else "it has not happened"
                self._say(f"unknown: {effect.name} of {thread.name}; {OPERATOR} finds in {where}: {told}")

    @staticmethod
    def _resolve(client: Client, effect: EffectView, outcome: Any, result: Any) -> None:
        client.resolve(effect.key, outcome, by=OPERATOR, result=result, reason="looked it up outside")


def _looked_up(effect: EffectView, ledger: Ledger, mailbox: Mailbox) -> Any:
    """Return what a call has come to by the records outside, as it would have returned it; None: nothing."""
    if effect.name == "send_payment":
        paid = ledger.payments(effect.key)
        if not paid:
            return None
        amount = str(money.of_cents(paid[0].cents))
        return {"payment": str(paid[0].number), "hold": str(paid[0].hold), "amount": amount}
    mails = mailbox.mails(message_id(effect.key))
    return mails[0].message_id if mails else None
