"""The graphs of the command line's stories."""

from __future__ import annotations

import time
from decimal import Decimal
from pathlib import Path
from typing import Annotated, TypedDict

from keepstep import END, START, Graph, Send, append


class Order(TypedDict, total=False):
    order_id: str
    amount: Decimal
    parts: int
    part: int
    checked: Annotated[list[int], append]
    big: list[int]
    status: str
    days: int
    parcel: str


refunds = Graph("refunds", state=Order, fan_out=True)


@refunds.node
def plan(state, ctx):
    ctx.emit({"planned": state["parts"]})
    return {"big": [2**53 + 1, 2**63 - 1, 2**63, -(2**63) - 1, 2**64, int("7" * 80)]}


@refunds.node
def check(state, ctx):
    return {"checked": [state["part"]]}


@refunds.node
def pay(state, ctx):
    decision = ctx.approve("Pay the refund?", arguments={"amount": state["amount"]}, to=["money"])
    if not decision.approved:
        return {"status": f"rejected: {decision.comment}"}
    answer = ctx.ask("How many days?", schema=int)
    signal = ctx.wait_signal("goods_returned")
    paid = f"paid {decision.arguments['amount']} as {decision.by} said"
    return {"status": paid, "days": answer.answer, "parcel": signal.payload["parcel"]}


refunds.edge(START, "plan")
refunds.route("plan", lambda state: [Send("check", {"part": number}) for number in range(state["parts"])], to=["check"])
refunds.edge("check", "pay")
refunds.edge("pay", END)


class Counter(TypedDict, total=False):
    count: int
    enough: int


counting = Graph("counting", state=Counter, step_limit=25)


@counting.node
def add_one(state, ctx):
    return {"count": state.get("count", 0) + 1}


counting.edge(START, "add_one")
counting.route(
    "add_one", lambda state: END if state["count"] >= state.get("enough", 10**9) else "add_one", to=["add_one"]
)

held = Graph("held", state=Counter)


@held.node
def hold(state, ctx):
    deadline = time.monotonic() + 60
    while not Path("release").exists():
        if time.monotonic() > deadline:
            message = "nobody released it"
            raise TimeoutError(message)
        time.sleep(0.01)
    return {"count": 1}


held.edge(START, "hold")
held.edge("hold", END)

broken = Graph("broken", state=Counter)


@broken.node
def fail(state, ctx):
    message = "the shop is closed"
    raise RuntimeError(message)


broken.edge(START, "fail")
broken.edge("fail", END)

asleep = Graph("asleep", state=Counter)


@asleep.node
def nap(state, ctx):
    ctx.sleep(3600)


asleep.edge(START, "nap")
asleep.edge("nap", END)
