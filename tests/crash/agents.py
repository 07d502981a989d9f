"""The graphs that these tests' workers carry. What they do outside, and that they began, a server counts."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Annotated, TypedDict

from sqlalchemy import create_engine, text

from keepstep import END, START, CallRejected, Graph, Retry, Send, append, effect, tool
from tests.crash.outside import ask_outside


@effect(idempotent=True)
def look(thread: str, what: str, *, idempotency_key: str) -> str:
    """A read."""
    return ask_outside(what, thread, idempotency_key)


@effect
def pay(thread: str, what: str, *, idempotency_key: str) -> str:
    """A payment to somebody who does not look at the key."""
    return ask_outside(what, thread, idempotency_key)


class Log(TypedDict, total=False):
    seat: int
    seats: int
    log: Annotated[list[str], append]


def entered(ctx, name: str) -> None:
    """Tell that a node's body was entered."""
    ask_outside(f"enter-{name}", ctx.thread)


# --- one that passes every point of the protocol ----------------------------------------------------------------------

voyage = Graph("voyage", state=Log, fan_out=True)


@voyage.node
def price(state, ctx):
    entered(ctx, "price")
    return {"log": [ctx.effect(look, ctx.thread, "price", key="price")]}


@voyage.node
def fare(state, ctx):
    entered(ctx, "fare")
    paid = ctx.effect(pay, ctx.thread, "fare", key="fare")
    ctx.emit({"paid": "fare"})
    return {"log": [paid]}


@voyage.node
def seat(state, ctx):
    name = f"seat{state['seat']}"
    entered(ctx, name)
    return {"log": [ctx.effect(look, ctx.thread, name, key=name)]}


@voyage.node
def captain(state, ctx):
    entered(ctx, "captain")
    rules = ctx.effect(look, ctx.thread, "rules", key="rules")
    decision = ctx.approve("Sail?", arguments={"thread": ctx.thread})
    return {"log": [rules, decision.verdict, ctx.effect(pay, ctx.thread, "cabin", key="cabin")]}


@voyage.node
def tide(state, ctx):
    entered(ctx, "tide")
    signal = ctx.wait_signal("tide")
    return {"log": [signal.payload]}


@voyage.node
def night(state, ctx):
    entered(ctx, "night")
    ctx.sleep(0.1)
    return {"log": ["slept"]}


@voyage.node
def toll(state, ctx):
    entered(ctx, "toll")
    return {"log": [ctx.effect(look, ctx.thread, "toll", key="toll")]}


voyage.edge(START, "price")
voyage.edge("price", "fare")
voyage.route("fare", lambda state: [Send("seat", {"seat": number}) for number in range(3)], to=["seat"])
voyage.edge("seat", "captain")
voyage.edge("captain", "tide")
voyage.edge("tide", "night")
voyage.edge("night", "toll")
voyage.edge("toll", END)


# --- one that asks a model, which answers whole and in chunks ---------------------------------------------------------

oracle = Graph("oracle", state=Log)


def ask(request: dict[str, str]) -> dict[str, str]:
    """A model that answers whole."""
    return {"model": "m", "content": ask_outside(request["what"], request["thread"])}


def ask_for_chunks(request: dict[str, str]) -> Iterator[str]:
    """A model that answers in chunks."""
    yield from ask_outside(request["what"], request["thread"]).partition(" of ")


@oracle.node
def consult(state, ctx):
    entered(ctx, "consult")
    whole = ctx.model(ask, {"what": "oracle", "thread": ctx.thread}, key="oracle")
    streamed = ctx.model(ask_for_chunks, {"what": "sibyl", "thread": ctx.thread}, key="sibyl")
    return {"log": [whole.text, streamed.text]}


oracle.edge(START, "consult")
oracle.edge("consult", END)


# --- one whose node is held outside, between a read and a payment -----------------------------------------------------

errand = Graph("errand", state=Log)


@errand.node(timeout=60)
def go(state, ctx):
    entered(ctx, "go")
    seen = ctx.effect(look, ctx.thread, "shop", key="shop")
    ask_outside("walk", ctx.thread)
    return {"log": [seen, ctx.effect(pay, ctx.thread, "goods", key="goods")]}


@errand.node
def home(state, ctx):
    entered(ctx, "home")
    return {"log": ["home"]}


errand.edge(START, "go")
errand.edge("go", "home")
errand.edge("home", END)


# --- the same with little time; and one whose payment itself takes long -----------------------------------------------

hasty = Graph("hasty", state=Log)


@hasty.node(timeout=1.0, retry=Retry(attempts=2, delay=0.1, jitter=0.0))
def dash(state, ctx):
    entered(ctx, "dash")
    seen = ctx.effect(look, ctx.thread, "shop", key="shop")
    if ctx.attempt == 1:
        ask_outside("walk", ctx.thread)
    return {"log": [seen, ctx.effect(pay, ctx.thread, "goods", key="goods")]}


hasty.edge(START, "dash")
hasty.edge("dash", END)

slow_bank = Graph("slow_bank", state=Log)


@slow_bank.node(timeout=60)
def transfer(state, ctx):
    entered(ctx, "transfer")
    return {"log": [ctx.effect(pay, ctx.thread, "transfer", key="transfer")]}


slow_bank.edge(START, "transfer")
slow_bank.edge("transfer", END)


# --- one that waits in the same node in which it is held --------------------------------------------------------------

doubtful = Graph("doubtful", state=Log)


@doubtful.node(timeout=60)
def doubt(state, ctx):
    entered(ctx, "doubt")
    if ctx.attempt == 1:
        ask_outside("walk", ctx.thread)
    return {"log": [ctx.approve("Sure?").verdict]}


doubtful.edge(START, "doubt")
doubtful.edge("doubt", END)


# --- fan-outs of any size ---------------------------------------------------------------------------------------------

crowd = Graph("crowd", state=Log, fan_out=True)


@crowd.node
def invite(state, ctx):
    entered(ctx, "invite")
    if state["seats"] < 0:
        ask_outside("walk", ctx.thread)
    return {}


@crowd.node(retry=Retry(attempts=2, delay=0.01, jitter=0.0))
def guest(state, ctx):
    number = state["seat"]
    entered(ctx, f"guest{number}")
    came = ctx.effect(look, ctx.thread, f"guest{number}", key=f"guest{number}")
    if number % 100 == 50 and ctx.attempt == 1:
        message = "late"
        raise ConnectionError(message)
    if number == 1 and "held" in ctx.thread:
        ask_outside("walk", ctx.thread)
    return {"log": [came]}


@crowd.node
def toast(state, ctx):
    entered(ctx, "toast")
    return {"seats": len(state.get("log", []))}


def _guests(state):
    return [Send("guest", {"seat": number}) for number in range(abs(state["seats"]))]


crowd.edge(START, "invite")
crowd.route("invite", _guests, to=["guest"])
crowd.edge("guest", "toast")
crowd.edge("toast", END)


# --- parents and children ---------------------------------------------------------------------------------------------

boat = Graph("boat", state=Log)


@boat.node
def row(state, ctx):
    """Tow another boat, if there are seats for more than one; wait for a signal at the end, if it is to."""
    entered(ctx, "row")
    if state["seats"] > 1:
        towed = ctx.spawn(boat, {**state, "seats": state["seats"] - 1}, thread=f"{ctx.thread}.boat")
        return {"log": ctx.join(towed)[0]["log"]}
    if state["seat"]:
        ctx.wait_signal("ashore")
    return {"log": [ctx.effect(pay, ctx.thread, "oars", key="oars")]}


boat.edge(START, "row")
boat.edge("row", END)

fleet = Graph("fleet", state=Log)


@fleet.node
def launch(state, ctx):
    entered(ctx, "launch")
    launched = ctx.spawn(boat, {"seats": state["seats"], "seat": state["seat"]}, thread=f"{ctx.thread}.boat")
    return {"log": ctx.join(launched)[0]["log"]}


fleet.edge(START, "launch")
fleet.edge("launch", END)


# --- one that calls a two-phase tool ----------------------------------------------------------------------------------


@tool(risk="high", approve=("purser",))
def cargo(thread: str, *, idempotency_key: str) -> str:
    """Load the cargo: it cannot be done twice, and nobody looks at the key."""
    return ask_outside("load", thread, idempotency_key)


@cargo.prepare
def _(thread, *, idempotency_key):
    ask_outside("reserve", thread, idempotency_key)


@cargo.commit
def _(thread, result, *, idempotency_key):
    ask_outside("seal", thread, idempotency_key)


@cargo.cancel
def _(thread, *, idempotency_key):
    ask_outside("release", thread, idempotency_key)


freighter = Graph("freighter", state=Log, tools=[cargo])


@freighter.node
def load(state, ctx):
    entered(ctx, "load")
    try:
        return {"log": [ctx.call("cargo", {"thread": ctx.thread}, key="cargo")]}
    except CallRejected as error:
        return {"log": [error.verdict]}


freighter.edge(START, "load")
freighter.edge("load", END)


# --- one that fails when it has paid, and is undone -------------------------------------------------------------------


def refund(thread: str, what: str, *, idempotency_key: str) -> str:
    """Take a payment back, at somebody's who does not look at the key."""
    return ask_outside(f"refund-{what}", thread, idempotency_key)


@effect(undo=refund)
def charge(thread: str, what: str, *, idempotency_key: str) -> str:
    """A payment that can be taken back."""
    return ask_outside(what, thread, idempotency_key)


holiday = Graph("holiday", state=Log)


@holiday.node
def board(state, ctx):
    entered(ctx, "board")
    return {"log": [ctx.effect(charge, ctx.thread, "flight", key="flight")]}


@holiday.node
def lodge(state, ctx):
    entered(ctx, "lodge")
    ctx.effect(charge, ctx.thread, "hotel", key="hotel")
    ctx.effect(charge, ctx.thread, "car", key="car")
    message = "no passport"
    raise ValueError(message)


holiday.edge(START, "board")
holiday.edge("board", "lodge")
holiday.edge("lodge", END)
# --- transactions, on the store's database and on another one ---------------------------------------------------------

market = Graph("market", state=Log)
market.database("bank", lambda: create_engine(os.environ["KEEPSTEP_TEST_BANK"]))


def sold(conn, thread):
    """Write a sale, and return how many the thread has made."""
    conn.execute(text("INSERT INTO sale (thread) VALUES (:thread)"), {"thread": thread})
    return conn.execute(text("SELECT count(*) FROM sale WHERE thread = :thread"), {"thread": thread}).scalar_one()


@market.node
def sell(state, ctx):
    entered(ctx, "sell")
    with ctx.transaction(key="till") as conn:
        here = sold(conn, ctx.thread)
    with ctx.transaction("bank", key="bank") as conn:
        there = sold(conn, ctx.thread)
    return {"log": [f"sale {here} in the till", f"sale {there} at the bank"]}


market.edge(START, "sell")
market.edge("sell", END)
