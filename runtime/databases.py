"""The databases of the user's that a graph's nodes may have transactions on."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from keepstep.errors import GraphError

if TYPE_CHECKING:
    from sqlalchemy import Engine

    from keepstep.store.foreign_journal import ForeignDatabase


class Database:
    """A database under its name: an engine, or a function that makes one when it is first needed in a process."""

    def __init__(self, name: str, given: Engine | Callable[[], Engine]) -> None:
        if not callable(given) and not _is_engine(given):
            message = (
                f"database {name!r} must be a SQLAlchemy engine, or a function that returns one, not "
                f"{type(given).__name__}"
            )
            raise GraphError(message)
        self.name = name
        self._given: Any = given
        self._opened: ForeignDatabase | None = None
        self._process = os.getpid()
        self._lock = threading.Lock()

    def is_same(self, other: Database) -> bool:
        """Tell whether both were registered with the same engine or function."""
        return self._given is other._given

    def opened(self) -> ForeignDatabase:
        """Return the database as this process reaches it.

        Raises `InvalidInput` for one that transactions cannot be had on, and whatever the user's function raises.
        """
        from keepstep.store.foreign_journal import ForeignDatabase  # noqa: PLC0415  who defines graphs needs no database

        with self._lock:
            if self._process != os.getpid():
                self._process = os.getpid()
                if self._opened is not None or _is_engine(self._given):
                    # What connections there are belong to the process that this one was forked from.
                    (self._opened.engine if self._opened is not None else self._given).dispose(close=False)
                if callable(self._given):
                    self._opened = None
            if self._opened is None:
                engine = self._given() if callable(self._given) else self._given
                if not _is_engine(engine):
                    message = f"the function of database {self.name!r} returned no engine but {type(engine).__name__}"
                    raise GraphError(message)
                self._opened = ForeignDatabase(engine, self.name)
            return self._opened


def _is_engine(value: object) -> bool:
    return all(hasattr(value, name) for name in ("dialect", "raw_connection", "dispose"))
