"""The agent that the producer in JavaScript talks to: it asks somebody before it says that a refund is to be paid."""

from __future__ import annotations

from typing import Any, TypedDict

from keepstep import END, START, Context, Graph


class Refund(TypedDict, total=False):
    """One refund."""

    order: str
    amount: str
    status: str


graph = Graph("refunds", state=Refund)


@graph.node
def ask(state: Refund, ctx: Context) -> dict[str, Any]:
    """Ask whether the refund is to be paid; what was approved counts, edits included."""
    decision = ctx.approve("Pay the refund?", arguments={"order": state["order"], "amount": state["amount"]})
    if not decision.approved:
        return {"status": f"{decision.verdict} by {decision.by}: {decision.comment}"}
    return {"status": f"pay {decision.arguments['amount']} for {decision.arguments['order']}, says {decision.by}"}


graph.edge(START, "ask")
graph.edge("ask", END)
