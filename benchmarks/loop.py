"""The graph of the benchmark: one node that does nothing but count, round and round."""

from __future__ import annotations

from typing import TypedDict

from keepstep import END, START, Context, Graph


class Count(TypedDict):
    """How far it has come, and how far it shall go."""

    n: int
    until: int


graph = Graph("loop", state=Count)


@graph.node
def count(state: Count, _ctx: Context) -> dict[str, int]:
    """Do nothing."""
    return {"n": state["n"] + 1}


def again(state: Count) -> str:
    """Go round until the end."""
    return "count" if state["n"] < state["until"] else END


graph.edge(START, "count")
graph.route("count", again, to=["count", END])
