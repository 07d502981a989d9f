"""Graphs of one node, and an outside world that counts, for tests of what nodes do outside."""

from __future__ import annotations

from collections import Counter
from typing import Annotated, Any, TypedDict

import pytest

from keepstep import END, START, Graph, Retry, append
from keepstep.crashpoints import Died
from keepstep.store import workers

AGAIN = Retry(attempts=3, delay=0)


class State(TypedDict, total=False):
    log: Annotated[list[Any], append]


class Outside:
    """The world: what was done to it, in order, and under which keys."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.keys: list[str] = []

    @property
    def counts(self) -> Counter[Any]:
        return Counter(self.calls)


class Killed(Died):
    """Takes the attempt out of the node's hands, as a kill does."""


def acts(body, *, retry=None, asynchronous=False, timeout=None, tools=(), name="acts"):
    """A graph of one node; `body(ctx)` gives what is logged."""
    graph = Graph(name, state=State, tools=tools)
    if asynchronous:

        @graph.node(name="node", retry=retry, timeout=timeout)
        async def node_async(state, ctx):
            return {"log": [await body(ctx)]}

    else:

        @graph.node(retry=retry, timeout=timeout)
        def node(state, ctx):
            return {"log": [body(ctx)]}

    graph.edge(START, "node")
    graph.edge("node", END)
    return graph


def call_of(tool, arguments, asynchronous, *, then=lambda _ctx, result: result, **options):
    """A body that calls a tool; `then(ctx, result)` gives what it returns."""
    if asynchronous:

        async def body_async(ctx):
            return then(ctx, await ctx.call(tool, arguments, **options))

        return body_async
    return lambda ctx: then(ctx, ctx.call(tool, arguments, **options))


def killed(d, *, start=True):
    """Let the worker die in the next thing that it does."""
    if start:
        d.start()
    nudge = d.queue.pop(0)
    with pytest.raises(Killed):
        d.work(nudge)


def released(d):
    """Let everybody notice that the worker's child has died."""
    d.queue += workers.release_child(d.store, d.worker.owner.worker, 1, reason="signal 9 (SIGKILL)")
