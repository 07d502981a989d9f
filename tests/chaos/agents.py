"""The graphs under the monkey: what they do outside, a server counts."""

from __future__ import annotations

import random
import time
from typing import Annotated, TypedDict

from keepstep import END, START, Graph, Retry, Send, append, effect
from tests.crash.outside import ask_outside

AGAIN = Retry(attempts=10, delay=0.2, jitter=0.5)


def ask_slowly(name: str, thread: str, key: str) -> str:
    """Ask the outside world, slowly enough to be caught before, during and after."""
    time.sleep(random.uniform(0.0, 0.3))
    answer = ask_outside(name, thread, key)
    time.sleep(random.uniform(0.0, 0.1))
    return answer


@effect(idempotent=True)
def look(thread: str, what: str, *, idempotency_key: str) -> str:
    """A read."""
    return ask_slowly(what, thread, idempotency_key)


@effect
def pay(thread: str, what: str, *, idempotency_key: str) -> str:
    """A payment to somebody who does not look at the key."""
    return ask_slowly(what, thread, idempotency_key)


class Log(TypedDict, total=False):
    seat: int
    log: Annotated[list[str], append]


# --- a chain ----------------------------------------------------------------------------------------------------------

order = Graph("order", state=Log)


@order.node(retry=AGAIN)
def price(state, ctx):
    return {"log": [ctx.effect(look, ctx.thread, "price")]}


@order.node(retry=AGAIN)
def payment(state, ctx):
    return {"log": [ctx.effect(pay, ctx.thread, "payment")]}


@order.node(retry=AGAIN)
def ship(state, ctx):
    return {"log": [ctx.effect(look, ctx.thread, "ship")]}


order.edge(START, "price")
order.edge("price", "payment")
order.edge("payment", "ship")
order.edge("ship", END)

# --- a fan-out --------------------------------------------------------------------------------------------------------

tour = Graph("tour", state=Log, fan_out=True)


@tour.node(retry=AGAIN)
def seat(state, ctx):
    return {"log": [ctx.effect(pay, ctx.thread, f"seat{state['seat']}")]}


@tour.node(retry=AGAIN)
def toast(state, ctx):
    return {"log": [ctx.effect(look, ctx.thread, "toast")]}


tour.route(START, lambda _state: [Send("seat", {"seat": number}) for number in range(3)], to=["seat"])
tour.edge("seat", "toast")
tour.edge("toast", END)

# --- a person's decision between two effects --------------------------------------------------------------------------

permit = Graph("permit", state=Log)


@permit.node(retry=AGAIN)
def office(state, ctx):
    rules = ctx.effect(look, ctx.thread, "rules")
    decision = ctx.approve("Permit?", arguments={"thread": ctx.thread})
    return {"log": [rules, decision.verdict, ctx.effect(pay, ctx.thread, "fee")]}


permit.edge(START, "office")
permit.edge("office", END)

# --- a signal, which may come early, and a sleep ----------------------------------------------------------------------

parcel = Graph("parcel", state=Log)


@parcel.node(retry=AGAIN)
def depot(state, ctx):
    return {"log": [ctx.wait_signal("arrived").payload]}


@parcel.node(retry=AGAIN)
def customs(state, ctx):
    ctx.sleep(0.2)
    return {"log": [ctx.effect(pay, ctx.thread, "duty")]}


parcel.edge(START, "depot")
parcel.edge("depot", "customs")
parcel.edge("customs", END)
