"""The graphs of a simulation, and what each must have written when its run is done.

Every node run leaves an entry in the state's log, headed by the tag of the run it belongs to, so that what any faults
made of a run can be held against what it makes without them. Entries depend on the input and on what people and
producers were accepted to have said, never on who ran what how often.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, TypedDict

from keepstep.errors import ChildFailed
from keepstep.runtime.context import Context
from keepstep.runtime.effects import effect
from keepstep.runtime.graph import END, START, Graph, Send
from keepstep.runtime.policy import Retry
from keepstep.runtime.reducers import append
from tests.simulation.seams import current


class Work(TypedDict, total=False):
    """The state of every graph."""

    tag: str
    size: int
    count: int
    edited: str
    """Written by edits only."""
    log: Annotated[list[str], append]


class Piece(TypedDict):
    """What a fanned-out node run is sent."""

    tag: str
    number: int


IN_PLACE = Retry(attempts=3, delay=0.2, jitter=0.0)
DURABLE = Retry(attempts=3, delay=5.0, jitter=0.0)


@effect(idempotent=True)
def read(tag: str, what: str, *, idempotency_key: str) -> str:
    return current().outside.read(idempotency_key)


@effect
def pay(tag: str, what: str, *, idempotency_key: str) -> str:
    return current().outside.pay(idempotency_key, tag)


def release(tag: str, what: str, result: str, *, idempotency_key: str) -> str:
    return current().outside.pay(idempotency_key, tag)


@effect(undo=release)
def reserve(tag: str, what: str, *, idempotency_key: str) -> str:
    return current().outside.pay(idempotency_key, tag)


def _enter(ctx: Context, tag: str) -> None:
    """The beginning of every node's body: may be stopped, may be slow, may kill its process, may fail."""
    world = current()
    world.check_entered()
    world.point("in body", f"{tag} {ctx.node} {ctx.attempt}")
    if world.outside.makes_trouble(f"slow {tag}"):
        world.sleep(45.0)
    if world.outside.makes_trouble(f"poison {tag}"):
        world.crash("poison")
    if world.outside.makes_trouble(f"fail {tag}"):
        message = "trouble"
        raise ValueError(message)


def _entry(state: Work, text: str, **others: Any) -> dict[str, Any]:
    return {"log": [f"{state['tag']}:{text}"], **others}


# --- chain --------------------------------------------------------------------------------------------------------

chain = Graph("chain", state=Work)


@chain.node(retry=IN_PLACE)
def look(state: Work, ctx: Context) -> dict[str, Any]:
    found = ctx.effect(read, state["tag"], "look")
    _enter(ctx, state["tag"])
    return _entry(state, f"look {found}")


@chain.node(retry=DURABLE)
def charge(state: Work, ctx: Context) -> dict[str, Any]:
    ctx.emit(f"{state['tag']}:charging")
    first = ctx.effect(read, state["tag"], "price")
    _enter(ctx, state["tag"])
    return _entry(state, f"charge {first} {ctx.effect(pay, state['tag'], 'charge')}")


@chain.node
def close(state: Work, ctx: Context) -> dict[str, Any]:
    _enter(ctx, state["tag"])
    ctx.emit(f"{state['tag']}:closed")
    return _entry(state, "close")


for _pair in ((START, "look"), ("look", "charge"), ("charge", "close"), ("close", END)):
    chain.edge(*_pair)


# --- loop, with a step limit that long runs reach -----------------------------------------------------------------

loop = Graph("loop", state=Work, step_limit=6)


@loop.node(retry=IN_PLACE)
def turn(state: Work, ctx: Context) -> dict[str, Any]:
    count = state.get("count", 0)
    _enter(ctx, state["tag"])
    seen = [ctx.effect(read, state["tag"], "turn") for _ in range(2)]
    return _entry(state, f"turn {count} {' '.join(seen)}", count=count + 1)


loop.edge(START, "turn")
loop.route("turn", lambda state: "turn" if state["count"] < state["size"] else END, to=["turn", END])


# --- fan-out over everybody ---------------------------------------------------------------------------------------

fan = Graph("fan", state=Work, fan_out=True, types=[Piece])


@fan.node
def split(state: Work, ctx: Context) -> dict[str, Any]:
    _enter(ctx, state["tag"])
    return _entry(state, "split")


@fan.node(retry=DURABLE)
def piece(state: Piece, ctx: Context) -> dict[str, Any]:
    tag, number = state["tag"], state["number"]
    _enter(ctx, tag)
    if number % 3 == 0:
        done = ctx.effect(pay, tag, f"piece {number}")
    elif number % 3 == 1:
        done = ctx.effect(read, tag, f"piece {number}")
        ctx.sleep(8.0)
    else:
        ctx.emit(f"{tag}:asking {number}")
        done = ctx.approve(f"{tag} piece {number}?").verdict
    return {"log": [f"{tag}:piece {number} {done}"]}


@fan.node
def gathered(state: Work, ctx: Context) -> dict[str, Any]:
    _enter(ctx, state["tag"])
    return _entry(state, "gathered")


fan.edge(START, "split")
fan.route(
    "split",
    lambda state: (
        [Send("piece", {"tag": state["tag"], "number": number}) for number in range(state["size"])] or "gathered"
    ),
    to=["piece", "gathered"],
)
fan.edge("piece", "gathered")
fan.edge("gathered", END)


# --- parallel nodes in one worker, one of which waits -------------------------------------------------------------

parallel = Graph("parallel", state=Work, fan_out=False)


def _side(name: str) -> Callable[[Work, Context], dict[str, Any]]:
    def side(state: Work, ctx: Context) -> dict[str, Any]:
        if name == "west":
            ctx.sleep(4.0)
        done = ctx.effect(pay if name == "north" else read, state["tag"], name)
        _enter(ctx, state["tag"])
        return _entry(state, f"{name} {done}")

    side.__name__ = name
    return side


_SIDES = ("north", "west", "south")
for _name in _SIDES:
    parallel.node(_side(_name), retry=IN_PLACE)
    parallel.edge(START, _name)
    parallel.edge(_name, "meet")


@parallel.node
def meet(state: Work, ctx: Context) -> dict[str, Any]:
    _enter(ctx, state["tag"])
    return _entry(state, "meet")


parallel.edge("meet", END)


# --- every kind of wait, in one node ------------------------------------------------------------------------------

waiting = Graph("waiting", state=Work)


@waiting.node(retry=DURABLE)
def converse(state: Work, ctx: Context) -> dict[str, Any]:
    tag = state["tag"]
    paid = ctx.effect(pay, tag, "before")
    ctx.emit(f"{tag}:conversing")
    first = ctx.approve(f"{tag} go?", arguments={"amount": 3}, quorum=2)
    second = ctx.ask(f"{tag} how many?", schema=int)
    _enter(ctx, tag)
    ctx.sleep(6.0)
    signal = ctx.wait_signal("news")
    third, more = ctx.gather(
        lambda: ctx.approve(f"{tag} more?", expires=90.0), lambda: ctx.wait_signal("more", key="k")
    )
    paid_again = ctx.effect(pay, tag, "after")
    ctx.emit(f"{tag}:conversed")
    said = f"{first.verdict} {second.verdict} {second.answer} {third.verdict}"
    return _entry(state, f"converse {paid} {said} [{signal.payload}] [{more.payload}] {paid_again}")


waiting.edge(START, "converse")
waiting.edge("converse", END)


# --- a question with a deadline, and a signal with one ------------------------------------------------------------

deadline = Graph("deadline", state=Work)


@deadline.node
def hurry(state: Work, ctx: Context) -> dict[str, Any]:
    _enter(ctx, state["tag"])
    decision = ctx.approve(f"{state['tag']} in time?", expires=40.0)
    signal = ctx.wait_signal("hint", timeout=30.0)
    return _entry(state, f"hurry {decision.verdict} [{'none' if signal is None else signal.payload}]")


deadline.edge(START, "hurry")
deadline.edge("hurry", END)


# --- a failure that is gone on after, in a subgraph ---------------------------------------------------------------

inner = Graph("inner", state=Work)


@inner.node(on_error="continue")
def stumble(state: Work, ctx: Context) -> dict[str, Any]:
    ctx.effect(read, state["tag"], "stumble")
    message = "always"
    raise ValueError(message)


@inner.node(retry=IN_PLACE)
def recover(state: Work, ctx: Context) -> dict[str, Any]:
    _enter(ctx, state["tag"])
    named = ",".join(failure["node"] for failure in ctx.failures)
    return _entry(state, f"recover {named} {ctx.effect(pay, state['tag'], 'recover')}")


inner.edge(START, "stumble")
inner.edge("stumble", "recover")
inner.edge("recover", END)

nested = Graph("nested", state=Work, fan_out=2)


@nested.node
def before(state: Work, ctx: Context) -> dict[str, Any]:
    _enter(ctx, state["tag"])
    return _entry(state, "before")


nested.node(inner, name="sub")


@nested.node
def after(state: Work, ctx: Context) -> dict[str, Any]:
    _enter(ctx, state["tag"])
    decision = ctx.approve(f"{state['tag']} after?")
    return _entry(state, f"after {decision.verdict}")


for _pair in ((START, "before"), ("before", "sub"), ("sub", "after"), ("after", END)):
    nested.edge(*_pair)


# --- a supervisor and two specialists, one of which may fail -------------------------------------------------------

aide = Graph("aide", state=Work)


@aide.node(retry=IN_PLACE)
def assist(state: Work, ctx: Context) -> dict[str, Any]:
    _enter(ctx, state["tag"])
    return _entry(state, f"assist {ctx.effect(read, state['tag'], 'assist')}")


@aide.node
def rest(state: Work, ctx: Context) -> dict[str, Any]:
    ctx.sleep(5.0)
    return _entry(state, "rest")


for _pair in ((START, "assist"), ("assist", "rest"), ("rest", END)):
    aide.edge(*_pair)

expert = Graph("expert", state=Work)


@expert.node
def judge(state: Work, ctx: Context) -> dict[str, Any]:
    paid = ctx.effect(pay, state["tag"], "judge")
    _enter(ctx, state["tag"])
    helper = ctx.spawn(aide, {"tag": f"{state['tag']}.c"})
    decision = ctx.approve(f"{state['tag']} right?")
    (told,) = ctx.join(helper, on_failure="return")
    return _entry(state, f"judge {paid} {decision.verdict} {told.status}")


expert.edge(START, "judge")
expert.edge("judge", END)

lead = Graph("lead", state=Work)


@lead.node(retry=DURABLE)
def supervise(state: Work, ctx: Context) -> dict[str, Any]:
    tag = state["tag"]
    first = ctx.spawn(aide, {"tag": f"{tag}.a"})
    _enter(ctx, tag)
    second = ctx.spawn(expert, {"tag": f"{tag}.b"}, key="expert")
    paid = ctx.effect(pay, tag, "supervise")
    told = ctx.join(first, second, on_failure="return")
    try:
        said = ctx.join(second)[0]["log"][-1].partition(":")[2]
    except ChildFailed as error:
        said = f"{error.status}, {error.error['code']}"
    return _entry(state, f"supervise {paid} {' '.join(each.status for each in told)}", size=len(said))


@lead.node
def conclude(state: Work, ctx: Context) -> dict[str, Any]:
    _enter(ctx, state["tag"])
    return _entry(state, "conclude")


for _pair in ((START, "supervise"), ("supervise", "conclude"), ("conclude", END)):
    lead.edge(*_pair)


# --- one that is undone when it fails ------------------------------------------------------------------------------

trip = Graph("trip", state=Work, step_limit=5)


@trip.node
def hold(state: Work, ctx: Context) -> dict[str, Any]:
    held = ctx.effect(reserve, state["tag"], "hold")
    _enter(ctx, state["tag"])
    return _entry(state, f"hold {held}", count=state.get("count", 0) + 1)


@trip.node(retry=IN_PLACE)
def confirm(state: Work, ctx: Context) -> dict[str, Any]:
    first = ctx.effect(reserve, state["tag"], "first")
    _enter(ctx, state["tag"])
    return _entry(state, f"confirm {first} {ctx.effect(reserve, state['tag'], 'second')}")


trip.edge(START, "hold")
trip.route("hold", lambda state: "hold" if state["count"] < state["size"] else "confirm", to=["hold", "confirm"])
trip.edge("confirm", END)


# --- what the clock starts ----------------------------------------------------------------------------------------

clocked = Graph("clocked", state=Work)


@clocked.node
def strike(state: Work, ctx: Context) -> dict[str, Any]:
    _enter(ctx, state["tag"])
    return _entry(state, "strike")


clocked.edge(START, "strike")
clocked.edge("strike", END)
CLOCK = "clock"
"""The name of the schedule, and the tag of its runs."""


LIMITS = {"graph fan": 2, "graph aide": 1}
"""How much of a graph may run at once."""

GRAPHS = {graph.name: graph for graph in (chain, loop, fan, parallel, waiting, deadline, nested, lead, trip)}
"""What people start."""
SPECIALISTS = {graph.name: graph for graph in (aide, expert)}
"""What nodes start."""
CLOCKED = {clocked.name: clocked}
"""What a schedule starts."""


# --- what they must write -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Planned:
    """A run as its producer asked for it."""

    thread: str
    graph: str
    tag: str
    size: int


SIGNAL = "[signal]"
"""Stands in an entry for what a signal carried."""

CHILD = "child "
"""Before the tag of a child: asks how it ended, as its parent was told."""

Verdict = Callable[[str], str]


def expected(run: Planned, verdict: Verdict) -> list[str]:
    """Return a run's entries, in order; `verdict` tells what was decided on a question, and how a child ended."""
    return [f"{run.tag}:{text}" for text in _TEXTS[run.graph](run, verdict)]


def expected_events(run: Planned) -> list[str]:
    """Return what a run that is done must have told the world, each once."""
    numbers = [number for number in range(run.size) if number % 3 == 2]
    texts = {
        "chain": ["charging", "closed"],
        "fan": [f"asking {number}" for number in numbers],
        "waiting": ["conversing", "conversed"],
    }
    return [f"{run.tag}:{text}" for text in texts.get(run.graph, [])]


def _fan(run: Planned, verdict: Verdict) -> list[str]:
    kinds = ["paid 1", "read", None]
    done = [kinds[number % 3] or verdict(f"{run.tag} piece {number}?") for number in range(run.size)]
    return ["split", *(f"piece {number} {text}" for number, text in enumerate(done)), "gathered"]


def _waiting(run: Planned, verdict: Verdict) -> list[str]:
    said = [verdict(f"{run.tag} {question}") for question in ("go?", "how many?", "more?")]
    answer = "7" if said[1] == "answer" else "None"
    return [f"converse paid 1 {said[0]} {said[1]} {answer} {said[2]} {SIGNAL} {SIGNAL} paid 1"]


_TEXTS: dict[str, Callable[[Planned, Verdict], list[str]]] = {
    "chain": lambda _run, _verdict: ["look read", "charge read paid 1", "close"],
    "loop": lambda run, _verdict: [f"turn {number} read read" for number in range(max(run.size, 1))],
    "fan": _fan,
    "parallel": lambda _run, _verdict: ["north paid 1", "west read", "south read", "meet"],
    "waiting": _waiting,
    "deadline": lambda run, verdict: [f"hurry {verdict(f'{run.tag} in time?')} {SIGNAL}"],
    "lead": lambda run, verdict: [
        f"supervise paid 1 {verdict(f'{CHILD}{run.tag}.a')} {verdict(f'{CHILD}{run.tag}.b')}",
        "conclude",
    ],
    "trip": lambda run, _verdict: [*["hold paid 1"] * max(run.size, 1), "confirm paid 1 paid 1"],
    "aide": lambda _run, _verdict: ["assist read", "rest"],
    "expert": lambda run, verdict: [
        f"judge paid 1 {verdict(f'{run.tag} right?')} {verdict(f'{CHILD}{run.tag}.c')}",
    ],
    "nested": lambda run, verdict: ["before", "recover sub/stumble paid 1", f"after {verdict(f'{run.tag} after?')}"],
}
