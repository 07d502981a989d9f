"""This worker's row: who it is and which graphs it carries."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable

import keepstep
from keepstep.crashpoints import reach
from keepstep.settings import Settings
from keepstep.store import workers
from keepstep.store.engine import Store
from keepstep.tasks.carried import Key


class Registration:
    """Registers this process as a worker, under one id for as long as it lives.

    A worker that was given up has lost its leases, but its children go on under the id they were born with: it
    registers again under the same one. That revives nothing that was taken over, because a lease is its nonce.
    """

    def __init__(self, settings: Settings, store: Store, carried: Iterable[Key], concurrency: int) -> None:
        self._window_seconds = settings.liveness_window_seconds
        self._carried = sorted(carried)
        self._concurrency = concurrency
        self.worker_id = ""
        self.register(store)

    def register(self, store: Store) -> None:
        """Write the row."""
        self.worker_id = workers.register(
            store,
            host=socket.gethostname(),
            pid=os.getpid(),
            concurrency=self._concurrency,
            graphs=self._carried,
            release=keepstep.__version__,
            window_seconds=self._window_seconds,
            worker_id=self.worker_id or None,
        )
        reach("after_register")
