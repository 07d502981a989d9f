"""The killer: takes whole workers down, and single processes of their pools, while they are at work."""

from __future__ import annotations

import os
import random
import signal
import time
from contextlib import suppress
from dataclasses import dataclass

from examples.deployment import Deployment, WorkerProcess
from examples.payments.outside import Outside
from examples.screen import Screen
from keepstep import Reader
from keepstep.runtime.reader import Thread
from keepstep.store.views import ThreadView

WORKER, CHILD = "worker", "pool child"
_LATER_SECONDS_MAX = 0.3
_FIRST_WORK = 2


@dataclass(frozen=True)
class Moment:
    """When to kill what: after how much work outside, and how many seconds later."""

    work: int
    seconds_later: float
    what: str


def moments(seed: int, kills: int, work: int) -> list[Moment]:
    """Return the moments of a seed: workers and pool children in turn, spread over so much work outside."""
    rolled = random.Random(f"{seed}/kills")  # noqa: S311  seeded on purpose
    width = max(1, (3 * work // 4 - _FIRST_WORK) // max(1, kills))
    first = rolled.randrange(2)
    return [
        Moment(
            _FIRST_WORK + number * width + rolled.randrange(width),
            rolled.random() * _LATER_SECONDS_MAX,
            (WORKER, CHILD)[(first + number) % 2],
        )
        for number in range(kills)
    ]


@dataclass(frozen=True)
class _Held:
    """What somebody held when it was killed."""

    victim: str
    threads: list[Thread]
    killed_at: float

    def is_free(self, reader: Reader) -> bool:
        """Tell whether none of it is held any more by those who are gone."""
        now = [reader.get(each.name, graph=each.graph).row for each in self.threads]
        return all(_holder(row) != _holder(each.row) for row, each in zip(now, self.threads, strict=True))


class Killer:
    """Kills at each of some moments; a worker that is gone gets a successor, a pool gets its own."""

    def __init__(
        self,
        screen: Screen,
        deployment: Deployment,
        outside: Outside,
        planned: list[Moment],
        *,
        graph: str,
        concurrency: int,
    ) -> None:
        """`graph`: whose threads those that are killed must be running."""
        self._screen = screen
        self._deployment = deployment
        self._outside = outside
        self._planned = list(planned)
        self._graph = graph
        self._concurrency = concurrency
        self._at: float | None = None
        self._held: list[_Held] = []
        self.workers: list[WorkerProcess] = []
        """Those that it has killed."""
        self.children: list[int] = []
        """The pids of the pool children that it has killed."""

    def look(self, reader: Reader) -> None:
        """Kill, if the moment has come and somebody is at work; tell when what the victims held is free again."""
        for held in [each for each in self._held if each.is_free(reader)]:
            self._held.remove(held)
            names = " and ".join(each.name for each in held.threads)
            seconds = time.monotonic() - held.killed_at
            self._screen.say(f"free to go on, {seconds:.1f} s after {held.victim} was killed at it: {names}")
        if not self._planned:
            return
        moment = self._planned[0]
        now = time.monotonic()
        if self._at is None and self._outside.work() >= moment.work:
            self._at = now + moment.seconds_later
        if self._at is None or now < self._at:
            return
        if self._kill_worker(reader) if moment.what == WORKER else self._kill_child(reader):
            self._at = None

    def _kill_worker(self, reader: Reader) -> bool:
        """Kill a worker that is at work; False when none is."""
        for victim, held in self._at_work(reader):
            victim.kill()
            self.workers.append(victim)
            successor = self._deployment.start_worker(concurrency=self._concurrency)
            self._killed(victim.name, held, f"and its pool; {successor.name} is started")
            return True
        return False

    def _kill_child(self, reader: Reader) -> bool:
        """Kill a pool child that is at work, and nothing beside it; False when none is."""
        for worker, held in self._at_work(reader):
            pid = held[0].row.lease_child
            # One that was killed may be named for a moment longer.
            if not pid or pid in self.children:
                continue
            with suppress(ProcessLookupError):  # replaced since the look: there is another look
                os.kill(pid, signal.SIGKILL)
                self.children.append(pid)
                self._killed(f"pool child {pid}", held[:1], f"of {worker.name}, alone")
                return True
        return False

    def _at_work(self, reader: Reader) -> list[tuple[WorkerProcess, list[Thread]]]:
        """Return the workers that hold threads, and these."""
        alive = [each for each in self._deployment.workers if each not in self.workers and each.started()]
        running = reader.threads(graph=self._graph, status="ready", limit=1000)
        held = [(worker, [each for each in running if each.running_on == worker.id]) for worker in alive]
        return [(worker, threads) for worker, threads in held if threads]

    def _killed(self, victim: str, held: list[Thread], more: str) -> None:
        self._planned.pop(0)
        self._held.append(_Held(victim, held, time.monotonic()))
        done = len(self.workers) + len(self.children)
        self._screen.say(
            f"SIGKILL to {victim} {more} ({done} of {done + len(self._planned)}, "
            f"after {self._outside.work()} requests and mails)",
            style="red",
        )


def _holder(row: ThreadView) -> tuple[str | None, int | None]:
    return row.lease_worker, row.lease_child
