"""Open transaction blocks: while one is open, nothing else may be asked of the context inside it.

An effect cannot be undone with the transaction, a node cannot park in the middle of one, and on SQLite the journal
would wait for a lock that the block itself holds.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Protocol

from keepstep.errors import TransactionRefused


class OpenBlock(Protocol):
    """A block as this module knows it."""

    what: str

    @property
    def is_open(self) -> bool:
        """Whether the block has not ended."""
        ...


_inside: ContextVar[OpenBlock | None] = ContextVar("keepstep_transaction", default=None)


def entered(block: OpenBlock) -> None:
    """Say that what follows, in this thread or task and in the tasks it starts, stands inside a block."""
    _inside.set(block)


def refuse_inside(asked: str) -> None:
    """Raise `TransactionRefused` inside a block that is open."""
    block = _inside.get()
    if block is not None and block.is_open:
        message = (
            f"{asked} inside {block.what}: nothing else is asked of ctx while a transaction is open; ask before the "
            "block, or after it"
        )
        raise TransactionRefused(message)
