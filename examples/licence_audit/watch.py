"""The fan-out as it goes on, seen from the database."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from keepstep import Reader
from keepstep.store.views import NodeRunView

_ENDED = ("done", "failed", "blocked", "cancelled")


@dataclass
class FanOut:
    """Which worker holds and which has done how many of a thread's node runs.

    A finished node run's row does not tell who did it any more, so this remembers who was last seen holding it.
    """

    thread: str
    rows: list[NodeRunView] = field(default_factory=list)
    fresh: set[str] = field(default_factory=set)
    """Node runs that somebody holds and nobody held at the look before."""
    _holders: dict[str, str] = field(default_factory=dict)

    def look(self, reader: Reader) -> None:
        """Look again."""
        held_before = {row.run for row in self.rows if row.lease_worker}
        self.rows = reader.node_runs(self.thread)
        self.fresh = {row.run for row in self.rows if row.lease_worker} - held_before
        self._holders.update({row.run: row.lease_worker for row in self.rows if row.lease_worker})

    @property
    def total(self) -> int:
        """The number of node runs."""
        return len(self.rows)

    @property
    def done(self) -> int:
        """The number of those that have ended."""
        return sum(row.status in _ENDED for row in self.rows)

    @property
    def is_over(self) -> bool:
        """Whether all of them have ended."""
        return bool(self.rows) and self.done == self.total

    def done_by(self) -> Counter[str]:
        """Return how many each worker has done; those that were too quick to be seen count for "" ."""
        return Counter(self._holders.get(row.run, "") for row in self.rows if row.status in _ENDED)

    def held_by(self, worker_id: str) -> list[str]:
        """Return the node runs that a worker holds."""
        return [row.run for row in self.rows if row.lease_worker == worker_id]

    def taken_over(self, runs: list[str], lost: str) -> bool:
        """Tell whether node runs that a lost worker held have all gone on elsewhere."""
        rows = [row for row in self.rows if row.run in runs]
        return all(row.status in _ENDED or row.lease_worker not in {None, lost} for row in rows)
