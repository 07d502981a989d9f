"""An agent that pays refunds: it reads the requests, pays each after whoever must be asked was asked, and reports.

Each refund is a thread of its own: held at the bank, approved by people when policies ask for it, paid, and the
customer told. The batch is their parent and holds no worker while it waits for them.

    export PAYMENTS_BANK=http://127.0.0.1:8000 PAYMENTS_MAIL=127.0.0.1:8025 BANK_TOKEN=…
    export KEEPSTEP_POLICIES=examples/payments/policies
    keepstep worker examples/payments/agent.py
    keepstep start refund-batch monday file=examples/payments/refunds.csv
"""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any, TypedDict

from examples.payments import money, outcomes, requests
from examples.payments.banking import BankRefused
from examples.payments.outcomes import Outcome
from examples.payments.requests import RefundRequest, Requests
from examples.payments.tools import Receipt, notify, send_payment
from keepstep import END, START, CallCancelled, CallDenied, CallRejected, Context, Graph, Retry, effect

_NODE_SECONDS = 15.0
_PATIENT = Retry(attempts=30, delay=0.3, factor=1.5, delay_max=2)
_SUBJECTS = {"paid": "Your refund is on its way", "refused": "Your refund came back"}


class Refund(TypedDict, total=False):
    """The state of one refund. `request` is given."""

    request: RefundRequest
    status: str
    """`paid`, `denied` (by a policy), `rejected` or `expired` (by people), or `refused` (by the bank)."""
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
    denied: int
    rejected: int
    expired: int
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


refund = Graph("refund", state=Refund, tools=[send_payment, notify])


@refund.node(retry=_PATIENT, timeout=_NODE_SECONDS)
def pay(state: Refund, ctx: Context) -> dict[str, Any]:
    """Pay, or say why not."""
    request = state["request"]
    wanted = {"refund": request.id, "account": request.account, "amount": request.amount}
    try:
        return {"status": "paid", "receipt": ctx.call(send_payment, wanted)}
    except CallDenied as denied:
        return {"status": "denied", "reason": denied.reason}
    except CallRejected as rejected:
        status = "expired" if rejected.verdict == "expired" else "rejected"
        return {"status": status, "reason": rejected.comment or ""}
    except (BankRefused, CallCancelled) as refused:  # before anything was held, and after it
        return {"status": "refused", "reason": str(refused)}


@refund.node(retry=_PATIENT, timeout=_NODE_SECONDS)
def tell(state: Refund, ctx: Context) -> dict[str, Any]:
    """Tell the customer what became of the refund."""
    request, status, receipt = state["request"], state["status"], state.get("receipt")
    text = {
        "paid": f"we have refunded {receipt.amount if receipt else ''} for order {request.order}.",
        "denied": f"the refund for order {request.order} needs a closer look. Somebody will write to you.",
        "rejected": f"we could not grant the refund for order {request.order}: {state.get('reason', '')}",
        "expired": f"the refund for order {request.order} takes longer than usual. Somebody will write to you.",
        "refused": f"your bank did not take the refund for order {request.order}. Please write to us.",
    }[status]
    letter = {
        "recipient": request.mail,
        "refund": request.id,
        "subject": _SUBJECTS.get(status, "About your refund"),
        "text": f"Dear {request.customer},\n\n{text}\n",
    }
    return {"mail": ctx.call(notify, letter)}


refund.edge(START, "pay")
refund.edge("pay", "tell")
refund.edge("tell", END)


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
    """Write down what became of each refund, and add it up."""
    refunds = state["refunds"]
    rows = [_outcome(each) for each in refunds] + [Outcome(each, "failed", 0) for each in state["failed"]]
    # The rows are there once, wherever this is killed: they are committed together with the record that they are.
    with ctx.transaction() as connection:
        outcomes.add(connection, ctx.thread, rows)
    statuses = [each.status for each in rows]
    totals = Totals(
        requests=len(state["found"].requests),
        repeated=len(state["found"].repeated),
        paid=statuses.count("paid"),
        denied=statuses.count("denied"),
        rejected=statuses.count("rejected"),
        expired=statuses.count("expired"),
        refused=statuses.count("refused"),
        failed=statuses.count("failed"),
        amount=money.of_cents(sum(each.cents for each in rows)),
    )
    ctx.log.info("batch_reported", paid=totals.paid, amount=str(totals.amount))
    return {"totals": totals}


def _outcome(refund: Refund) -> Outcome:
    receipt = refund.get("receipt")
    return Outcome(refund["request"].id, refund["status"], 0 if receipt is None else money.cents(receipt.amount))


batch.edge(START, "read")
batch.edge("read", "settle")
batch.edge("settle", "report")
batch.edge("report", END)
