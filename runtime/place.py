"""Which attempt this is."""

from __future__ import annotations

import msgspec


class Place(msgspec.Struct, frozen=True):
    """Which attempt of which node run this is."""

    tenant: str
    application: str
    agent: str
    thread: str
    thread_id: str
    run: str
    """The run's id."""
    checkpoint: str
    """The id of the checkpoint the step runs from."""
    step: str
    """The step key."""
    node: str
    node_run: str
    attempt: int
    """1 for the first time the node's body is entered in this super-step."""
