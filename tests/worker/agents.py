"""The graphs that the tests' workers carry. Nodes say what they did by lines in files, whole or not at all."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from pathlib import Path
from typing import Annotated, TypedDict

from keepstep import END, START, Graph, Retry, Send, append, effect

FOLDER = Path(os.environ.get("KEEPSTEP_TEST_FOLDER", "."))
SLEEP_SECONDS = 30.0


def note(kind: str, *words: object) -> None:
    line = " ".join(str(word) for word in (*words, os.getpid(), time.time())) + "\n"
    file = os.open(FOLDER / kind, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        os.write(file, line.encode())
    finally:
        os.close(file)


def wait_for(name: str) -> None:
    """Hold the node until the test lets it go."""
    deadline = time.monotonic() + 60
    while not (FOLDER / name).exists():
        if time.monotonic() > deadline:
            message = f"nobody made {name}"
            raise TimeoutError(message)
        time.sleep(0.005)


@effect(idempotent=True)
def pay(thread: str, what: str) -> str:
    note("paid", thread, what)
    return f"{what} of {thread}"


class Log(TypedDict, total=False):
    done: Annotated[list[str], append]


# --- a chain of three -------------------------------------------------------------------------------------------------

chain = Graph("chain", state=Log)


def _link(name: str, after: str) -> None:
    @chain.node(name=name)
    def run(state, ctx):
        note("starts", ctx.thread, name)
        return {"done": [ctx.effect(pay, ctx.thread, name)]}

    chain.edge(after, name)


for _name, _after in (("a", START), ("b", "a"), ("c", "b")):
    _link(_name, _after)
chain.edge("c", END)


# --- nodes that the test holds ----------------------------------------------------------------------------------------

held = Graph("held", state=Log)


@held.node
def before(state, ctx):
    note("starts", ctx.thread, "before")
    return {"done": [ctx.effect(pay, ctx.thread, "before")]}


@held.node
def hold(state, ctx):
    note("starts", ctx.thread, "hold")
    paid = ctx.effect(pay, ctx.thread, "hold")
    note("holding", ctx.thread)
    wait_for("release")
    return {"done": [paid]}


@held.node
def after(state, ctx):
    note("starts", ctx.thread, "after")
    return {"done": [ctx.effect(pay, ctx.thread, "after")]}


held.edge(START, "before")
held.edge("before", "hold")
held.edge("hold", "after")
held.edge("after", END)


# --- a node that kills its process ------------------------------------------------------------------------------------

poison = Graph("poison", state=Log)


@poison.node
def die(state, ctx):
    note("starts", ctx.thread, "die")
    if not (FOLDER / "cured").exists():
        os.kill(os.getpid(), signal.SIGKILL)
    return {"done": ["die"]}


poison.edge(START, "die")
poison.edge("die", END)


# --- a fan-out --------------------------------------------------------------------------------------------------------


class Items(TypedDict, total=False):
    count: int
    item: int
    seen: Annotated[list[int], append]
    joined: int


fan = Graph("fan", state=Items, fan_out=True)


@fan.node
def part(state, ctx):
    note("starts", ctx.thread, "part", state["item"])
    if state["item"] == 1 and (FOLDER / "hold-part").exists():
        wait_for("release")
    note("ends", ctx.thread, "part", state["item"])
    return {"seen": [state["item"]]}


@fan.node
def join(state, ctx):
    note("starts", ctx.thread, "join")
    return {"joined": len(state["seen"])}


fan.route(START, lambda state: [Send("part", {"item": number}) for number in range(state["count"])], to=["part"])
fan.edge("part", "join")
fan.edge("join", END)


# --- one that fails once and comes back later, and one that asks ------------------------------------------------------

flaky = Graph("flaky", state=Log)


@flaky.node(retry=Retry(attempts=2, delay=2.0, jitter=0.0))
def fail_once(state, ctx):
    note("starts", ctx.thread, "fail_once")
    if ctx.attempt == 1:
        message = "not yet"
        raise ConnectionError(message)
    return {"done": ["fail_once"]}


flaky.edge(START, "fail_once")
flaky.edge("fail_once", END)

asking = Graph("asking", state=Log)


@asking.node
def ask(state, ctx):
    note("starts", ctx.thread, "ask")
    decision = ctx.approve("Go on?", arguments={"thread": ctx.thread})
    return {"done": [decision.verdict]}


asking.edge(START, "ask")
asking.edge("ask", END)

asked = Graph("asked", state=Log)


@asked.node
def ask_some(state, ctx):
    decision = ctx.approve("Go on?", to=["finance", "anna"])
    return {"done": [decision.verdict]}


asked.edge(START, "ask_some")
asked.edge("ask_some", END)


# --- one short node; one that hangs where nothing is heard; one that will not hear ------------------------------------

quick = Graph("quick", state=Log)


@quick.node
def once(state, ctx):
    note("starts", ctx.thread, "once")
    return {"done": ["once"]}


quick.edge(START, "once")
quick.edge("once", END)


@effect
def charge(thread: str) -> str:
    note("charged", thread)
    return thread


stuck = Graph("stuck", state=Log)


@stuck.node(timeout=0.5)
def sleep_in_c(state, ctx):
    note("starts", ctx.thread, "sleep_in_c")
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
    ctypes.CDLL(None).usleep(int(SLEEP_SECONDS * 1_000_000))
    return {"done": [ctx.effect(charge, ctx.thread)]}


stuck.edge(START, "sleep_in_c")
stuck.edge("sleep_in_c", END)

deaf = Graph("deaf", state=Log)


@deaf.node(timeout=0.5, retry=Retry(attempts=2, delay=60.0, jitter=0.0))
def will_not_hear(state, ctx):
    note("starts", ctx.thread, "will_not_hear")
    try:
        time.sleep(SLEEP_SECONDS)
    except BaseException:  # noqa: BLE001  it is not meant to be heard
        note("told", ctx.thread)
    return {"done": [ctx.effect(charge, ctx.thread)]}


deaf.edge(START, "will_not_hear")
deaf.edge("will_not_hear", END)


# --- several things at once, one of which takes long and then pays; a subgraph that goes round beside them ------------

rounds = Graph("rounds", state=Log)


@rounds.node
def turn(state, ctx):
    note("starts", ctx.thread, "turn")
    return {"done": ["turn"]}


rounds.edge(START, "turn")
rounds.route("turn", lambda state: END if state["done"].count("turn") == 5 else "turn", to=["turn", END])

busy = Graph("busy", state=Log, fan_out=True)


@busy.node
def fetch(state, ctx):
    note("starts", ctx.thread, "fetch")
    return {"done": ["fetch"]}


@busy.node
def report(state, ctx):
    note("starts", ctx.thread, "report")
    wait_for(f"release-{ctx.thread}")
    ctx.effect(charge, ctx.thread)
    return {"done": ["report"]}


busy.node(rounds, name="rounds")
for _name in ("fetch", "report", "rounds"):
    busy.edge(START, _name)
    busy.edge(_name, END)

later = Graph("later", state=Log)


@later.node(retry=Retry(attempts=2, delay=6.0, jitter=0.0))
def fail_once_for_long(state, ctx):
    note("starts", ctx.thread, "fail_once")
    if ctx.attempt == 1:
        message = "not yet"
        raise ConnectionError(message)
    return {"done": ["fail_once"]}


later.edge(START, "fail_once_for_long")
later.edge("fail_once_for_long", END)

inline = Graph("inline", state=Items, fan_out=False)
inline.node(part, name="part")
inline.node(join, name="join")
inline.route(START, lambda state: [Send("part", {"item": number}) for number in range(state["count"])], to=["part"])
inline.edge("part", "join")
inline.edge("join", END)
