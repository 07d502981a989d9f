"""The limits on what runs at once, as one process knows them: its graphs' own, and those that operators set."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping

import structlog

from keepstep.errors import DatabaseUnavailable
from keepstep.runtime.compiled import CompiledGraph
from keepstep.store import limits
from keepstep.store.engine import Store

log = structlog.get_logger("keepstep.step")

_READ_AGAIN_SECONDS = 1.0


class RunningMax:
    """How many steps and node runs may run at once, by `limits.of_graph` and `limits.of_tenant`.

    What an operator sets stands over what a graph's code says; it is read again once a second.
    """

    def __init__(
        self, store: Store, graphs: Iterable[CompiledGraph], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._store = store
        self._of_code = {
            limits.of_graph(graph.name): graph.running_max for graph in graphs if graph.running_max is not None
        }
        self._clock = clock
        self._known: Mapping[str, int] = self._of_code
        self._read_at: float | None = None

    def __call__(self) -> Mapping[str, int]:
        """Return the limits."""
        now = self._clock()
        if self._read_at is None or now - self._read_at >= _READ_AGAIN_SECONDS:
            self._read_at = now
            try:
                found = {f"{each.kind} {each.name}": each.running_max for each in limits.all_limits(self._store)}
            except DatabaseUnavailable as error:  # what comes next will say so as well
                log.debug("limits_not_read", reason=error.message)
            else:
                self._known = {**self._of_code, **found}
        return self._known
