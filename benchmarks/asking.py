"""The graph of waiting threads: it asks a person, then notes when it ran on."""

from __future__ import annotations

import time
from typing import TypedDict

from keepstep import END, START, Context, Graph


class Asked(TypedDict, total=False):
    """What was said, and when the node knew (seconds since 1970)."""

    verdict: str
    ran_at: float


graph = Graph("asking", state=Asked)


@graph.node
def ask(_state: Asked, ctx: Context) -> Asked:
    """Ask, and go on."""
    decision = ctx.approve("Go on?")
    return {"verdict": decision.verdict, "ran_at": time.time()}


graph.edge(START, "ask")
graph.edge("ask", END)
