"""The graph of `make wasted`: each node asks a model, and every third one also pays, both at the stub on loopback."""

from __future__ import annotations

import http.client
import json
import os
import time
from typing import Any, TypedDict

from keepstep import END, START, Context, Graph, effect

PAYING = 3
"""Every how many nodes one pays."""
_SECONDS_MAX = 30.0
# Where it is noted that an answer reached the process that asked, whatever becomes of both.
_returned = os.open(os.environ["KEEPSTEP_BENCH_RETURNED"], os.O_APPEND | os.O_CREAT | os.O_WRONLY, 0o600)


class Journey(TypedDict):
    """How far it has come, and how far it shall go."""

    leg: int
    legs: int


def _post(path: str, key: str) -> dict[str, Any]:
    """Ask the stub, once: nothing here tries again."""
    link = http.client.HTTPConnection(os.environ["KEEPSTEP_BENCH_STUB"], timeout=_SECONDS_MAX)
    try:
        link.request("POST", path, headers={"Idempotency-Key": key, "Caller": str(os.getpid())})
        answer: dict[str, Any] = json.loads(link.getresponse().read())
        return answer
    finally:
        link.close()


def ask(request: dict[str, Any], *, idempotency_key: str) -> dict[str, Any]:
    """Ask the model."""
    thread, leg = request["thread"], request["leg"]
    answer = _post(f"/model/{thread}/{leg}", idempotency_key)
    os.write(_returned, f"{thread} {leg} {os.getpid()} {time.monotonic()}\n".encode())
    return answer


@effect
def pay(thread: str, leg: int, *, idempotency_key: str) -> dict[str, Any]:
    """Pay somebody who does not look at the key."""
    return _post(f"/payment/{thread}/{leg}", idempotency_key)


graph = Graph("journey", state=Journey)


@graph.node
def travel(state: Journey, ctx: Context) -> dict[str, int]:
    """Ask; at times, pay."""
    leg = state["leg"]
    ctx.model(ask, {"model": "stub", "thread": ctx.thread, "leg": leg}, key=str(leg))
    if leg % PAYING == PAYING - 1:
        ctx.effect(pay, ctx.thread, leg, key=str(leg))
    return {"leg": leg + 1}


def onwards(state: Journey) -> str:
    """Go on until the end."""
    return "travel" if state["leg"] < state["legs"] else END


graph.edge(START, "travel")
graph.route("travel", onwards, to=["travel", END])
