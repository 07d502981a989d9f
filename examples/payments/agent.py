"""An agent that pays refunds: it reads the requests, pays each after whoever must be asked was asked, and reports.

Each refund is a thread of its own: held at the bank, approved by people when it is over the limit, paid, and the
customer told. The batch is their parent and holds no worker while it waits for them.

    export PAYMENTS_BANK=http://127.0.0.1:8000 PAYMENTS_MAIL=127.0.0.1:8025 BANK_TOKEN=…
    keepstep worker examples/payments/agent.py
    keepstep start refund-batch monday file=examples/payments/refunds.csv
"""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any, TypedDict

from examples.payments import requests
from examples.payments.banking import BankRefused
from examples.payments.requests import RefundRequest, Requests
from examples.payments.tools import Receipt, place_hold, release_hold, send_mail, send_payment
from keepstep import END, START, Context, Graph, Retry, effect

LIMIT = Decimal("500.00")
"""Above it people are asked."""
CALL_SECONDS = 6.0
"""How long a node may take, and so how long a call may be under way."""
PATIENT = Retry(attempts=30, delay=0.3, factor=1.5, delay_max=2, never=(BankRefused,))
_SUBJECTS = {"paid": "Your refund is on its way", "rejected": "About your refund", "refused": "Your refund came back"}


class Refund(TypedDict, total=False):
    """The state of one refund. `request` is given."""

    request: RefundRequest
    status: str
    """`paid`, `rejected` (by people) or `refused` (by the bank)."""
    receipt: Receipt | None
    reason: str
    mail: str
    """The Message-ID of the mail to the customer."""


@dataclass(frozen=True)
class Totals:
    """What a batch came to."""

    requests: int
    repeated: int
    paid: int
    rejected: int
    refused: int
    failed: int
    amount: Decimal
    """What was paid."""


class Batch(TypedDict, total=False):
    """The state of a batch. `file` is given, and `lines_max` when not all of it is meant."""

    file: str
    lines_max: int | None
    found: Requests
    refunds: list[Refund]
    failed: list[str]
    totals: Totals


refund = Graph("refund", state=Refund)


@refund.node(retry=PATIENT, timeout=CALL_SECONDS)
def pay(state: Refund, ctx: Context) -> dict[str, Any]:
    """Hold the amount, ask people when it is over the limit, and pay."""
    request = state["request"]
    try:
        hold = ctx.effect(place_hold, request.id, request.account, request.amount)
    except BankRefused as refusal:
        return {"status": "refused", "reason": str(refusal)}
    amount = request.amount
    if amount > LIMIT:
        decision = ctx.approve(
            f"Refund {request.id} over the limit of {LIMIT}: pay it?",
            arguments={"amount": amount},
            context={"refund": request.id, "customer": request.customer, "reason": request.reason},
            to="finance",
        )
        if not decision.approved:
            ctx.effect(release_hold, hold.hold)
            return {"status": "rejected", "reason": decision.comment or ""}
        amount = Decimal(decision.arguments["amount"])
    try:
        receipt = ctx.effect(send_payment, hold.hold, amount)
    except BankRefused as refusal:
        ctx.effect(release_hold, hold.hold)
        return {"status": "refused", "reason": str(refusal)}
    return {"status": "paid", "receipt": receipt}


@refund.node(retry=PATIENT, timeout=CALL_SECONDS)
def notify(state: Refund, ctx: Context) -> dict[str, Any]:
    """Tell the customer what became of the refund."""
    request, status, receipt = state["request"], state["status"], state.get("receipt")
    text = {
        "paid": f"we have refunded {receipt.amount if receipt else ''} for order {request.order}.",
        "rejected": f"we could not grant the refund for order {request.order}: {state.get('reason', '')}",
        "refused": f"your bank did not take the refund for order {request.order}. Please write to us.",
    }[status]
    letter = f"Dear {request.customer},\n\n{text}\n"
    return {"mail": ctx.effect(send_mail, request.mail, request.id, _SUBJECTS[status], letter)}


refund.edge(START, "pay")
refund.edge("pay", "notify")
refund.edge("notify", END)


batch = Graph("refund-batch", state=Batch)


@effect(idempotent=True)
def read_requests(file: str, lines_max: int | None) -> Requests:
    """Read the requests."""
    return requests.read(Path(file), lines_max)


@batch.node
def read(state: Batch, ctx: Context) -> dict[str, Any]:
    """Find out what is asked for."""
    return {"found": ctx.effect(read_requests, state["file"], state.get("lines_max"))}


@batch.node
def settle(state: Batch, ctx: Context) -> dict[str, Any]:
    """Give each request a thread of its own, and wait until all have ended."""
    asked = state["found"].requests
    children = [
        ctx.spawn(refund, {"request": request}, thread=f"{ctx.thread}-{request.id}", key=request.id)
        for request in asked
    ]
    results = ctx.join(*children, on_failure="return")
    return {
        "refunds": [each.state for each in results if each.status == "done"],
        "failed": [request.id for request, each in zip(asked, results, strict=True) if each.status != "done"],
    }


@batch.node
def report(state: Batch, ctx: Context) -> dict[str, Any]:
    """Add up what came of it."""
    refunds = state["refunds"]
    statuses = [each["status"] for each in refunds]
    receipts = [receipt for each in refunds if (receipt := each.get("receipt")) is not None]
    totals = Totals(
        requests=len(state["found"].requests),
        repeated=len(state["found"].repeated),
        paid=statuses.count("paid"),
        rejected=statuses.count("rejected"),
        refused=statuses.count("refused"),
        failed=len(state["failed"]),
        amount=sum((receipt.amount for receipt in receipts), Decimal("0.00")),
    )
    ctx.log.info("batch_reported", paid=totals.paid, amount=str(totals.amount))
    return {"totals": totals}


batch.edge(START, "read")
batch.edge("read", "settle")
batch.edge("settle", "report")
batch.edge("report", END)
