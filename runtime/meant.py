"""Which thread a command means."""

from __future__ import annotations

from typing import Protocol

from keepstep.errors import Ambiguous, NotFound
from keepstep.store import threads
from keepstep.store.engine import Transaction
from keepstep.store.threads import ThreadState


class OfThread(Protocol):
    """A command about one thread."""

    @property
    def tenant(self) -> str:
        """The thread's tenant."""

    @property
    def application(self) -> str:
        """Its application."""

    @property
    def graph(self) -> str | None:
        """Its graph; None: whichever has a thread of that name."""

    @property
    def thread(self) -> str | None:
        """Its name, or its id."""


def one_thread(transaction: Transaction, message: OfThread) -> ThreadState:
    """Return the one thread that a command means, by name or id, locked; raise `Ambiguous` or `NotFound`."""
    graph, name = message.graph, message.thread or ""
    found = [
        thread_id
        for thread_id, application, agent in threads.named(transaction, message.tenant, name)
        if thread_id == name or (application == message.application and graph in (None, agent))
    ]
    if len(found) > 1:
        text = f"several graphs have a thread {name!r}: name the graph"
        raise Ambiguous(text)
    state = threads.by_id(transaction, found[0]) if found else None
    if state is None:
        of_graph = f" of graph {graph!r}" if graph is not None else ""
        text = f"there is no thread {name!r}{of_graph} in application {message.application!r}"
        raise NotFound(text)
    return state
