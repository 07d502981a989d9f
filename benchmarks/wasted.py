"""`make wasted`: what crashes cost at the model: calls that were paid for and whose answer was lost; effects doubled.

Real workers run journeys of 20 to 30 nodes, each of which asks a model, every third one also pays. While they do, one
or two seeded SIGKILLs hit each: the process that last called for it, at times its whole worker. A stub of the model on
loopback counts the calls; what the database has recorded is compared with it. The last line is one JSON object. Exit
code 1: an effect was doubled or is missing, or an answer that had arrived was paid for again.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from benchmarks.contestants import Servers
from benchmarks.modelstub import Stub, StubCall, stub_of
from keepstep.errors import KeepstepError
from keepstep.runtime.reader import Reader
from tests.worker.deployment import Deployment, Worker, deployed

_AGENTS = str(Path(__file__).with_name("journeys.py"))
_WORKERS, _CONCURRENCY, _AT_ONCE = 2, 2, 4
_RUN_SECONDS_MAX, _SECONDS_MAX = 120.0, 900.0
_POLL_SECONDS = 0.01
_WORKER_SHARE = 0.1
"""Of the kills, those that hit a whole worker."""
ON_ITS_WAY_SECONDS = 0.01
"""An answer that returned to its caller less than this before the caller's death had come that very moment."""


@dataclass(frozen=True)
class Plan:
    """How much is run."""

    runs: int
    seed: int
    latency_seconds: float
    spool: bool


@dataclass(frozen=True)
class Journey:
    """One run: its length, and the moments at which it is hit: 3.4 is 0.4 of a leg's time after it came to leg 3."""

    thread: str
    legs: int
    hits: tuple[float, ...]


class Fleet:
    """The workers; whoever is killed is followed by another."""

    def __init__(self, deployment: Deployment, rng: random.Random) -> None:
        self._deployment = deployment
        self._rng = rng
        self._lock = threading.Lock()
        self._hiring: list[threading.Thread] = []
        self.killed_at: dict[int, float] = {}
        self.workers_killed = 0
        for worker in [self._hire() for _ in range(_WORKERS)]:
            worker.ready()

    def kill(self, pid: int) -> bool:
        """Kill a pool's process, or its whole worker; False: it is gone already."""
        with self._lock:
            victims = [worker for worker in self._deployment.workers if _has_child(worker, pid)]
            if not victims or pid in self.killed_at:
                return False
            if self._rng.random() < _WORKER_SHARE:
                self.workers_killed += 1
                for each in victims[0].children():
                    self.killed_at[each] = time.monotonic()
                victims[0].kill()
                self._hire()
            else:
                self.killed_at[pid] = time.monotonic()
                os.kill(pid, signal.SIGKILL)
            return True

    def _hire(self) -> Worker:
        return self._deployment.launch(concurrency=_CONCURRENCY)


def _drawn(thread: str, rng: random.Random) -> Journey:
    legs = rng.randint(20, 30)
    return Journey(thread, legs, tuple(sorted(rng.uniform(0, legs) for _ in range(rng.choice((1, 2))))))


def _has_child(worker: Worker, pid: int) -> bool:
    if worker.process.poll() is not None:
        return False
    with contextlib.suppress(Exception):  # it ends at this moment
        return pid in worker.children()
    return False


class Measurement:
    """Runs of one plan, and what they came to."""

    def __init__(self, plan: Plan, deployment: Deployment, stub: Stub) -> None:
        self._plan = plan
        self._deployment = deployment
        self._stub = stub
        rng = random.Random(plan.seed)  # noqa: S311  seeded on purpose
        self._fleet = Fleet(deployment, rng)
        self._client = threading.Lock()
        self._journeys = [_drawn(f"run-{number}", rng) for number in range(1, plan.runs + 1)]
        self._leg_seconds = 0.0
        self._ends_at = time.monotonic() + _SECONDS_MAX
        self._ended = 0
        self._lock = threading.Lock()
        self.kills = 0
        self.unknown = 0

    def run(self) -> dict[str, object]:
        """Run all; return the figures."""
        quiet = [Journey(f"quiet-{number}", 25, ()) for number in range(_AT_ONCE)]
        seconds = self._together(quiet)
        self._leg_seconds = sum(seconds) / sum(journey.legs for journey in quiet)
        print(f"a node takes {1000 * self._leg_seconds:.0f} ms undisturbed", file=sys.stderr)
        began = time.monotonic()
        self._ends_at = began + _SECONDS_MAX
        self._together(self._journeys)
        return {**self._figures(), "seconds": round(time.monotonic() - began, 1)}

    def _together(self, journeys: Sequence[Journey]) -> list[float]:
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            return list(pool.map(self._travel, journeys))

    def _travel(self, journey: Journey) -> float:
        """Run one to its end; return the seconds it took."""
        began = time.monotonic()
        with self._client:
            self._deployment.client.start("journey", journey.thread, {"leg": 0, "legs": journey.legs})
        hitting = threading.Thread(target=self._hit, args=(journey,))
        hitting.start()
        while (status := self._status(journey.thread)) != "done":
            now = time.monotonic()
            if now > min(began + _RUN_SECONDS_MAX, self._ends_at):
                message = f"{journey.thread} is {status} after {now - began:.0f} s; see {self._deployment.folder}"
                raise TimeoutError(message)
            if status in {"failed", "cancelled"}:
                message = f"{journey.thread} is {status}; see {self._deployment.folder}"
                raise RuntimeError(message)
            if status == "blocked":
                self._resolve(journey.thread)
            time.sleep(_POLL_SECONDS)
        hitting.join()
        with self._lock:
            self._ended += 1
            if self._ended % 20 == 0:
                print(f"{self._ended} runs ended, {self.kills} kills", file=sys.stderr)
        return time.monotonic() - began

    def _hit(self, journey: Journey) -> None:
        """Kill who works for a run at its moments, or who worked for it last."""
        for moment in journey.hits:
            leg, part = int(moment), moment % 1.0
            self._stub.reached(journey.thread, leg, _RUN_SECONDS_MAX)
            time.sleep(part * self._leg_seconds)
            pid = self._stub.last_caller(journey.thread)
            if pid is not None and self._fleet.kill(pid):
                with self._lock:
                    self.kills += 1

    def _status(self, thread: str) -> str:
        rows = self._deployment.query("SELECT status FROM keepstep_thread WHERE name = :name", name=thread)
        return str(rows[0][0]) if rows else ""

    def _resolve(self, thread: str) -> None:
        """Say of an effect whose outcome is unknown what the stub's ledger says of it, as a person would."""
        with contextlib.closing(Reader(settings=self._deployment.settings)) as reader:
            keys = [each.effect.key for each in reader.unknown_effects() if each.thread == thread]
        for key in keys:
            outcome = "happened" if self._stub.has_paid(key) else "not_happened"
            with self._client, contextlib.suppress(KeepstepError):  # it went on meanwhile
                self._deployment.client.resolve(
                    key, outcome, by="the ledger", result={} if outcome == "happened" else None
                )  # type: ignore[arg-type]  # one of two
                with self._lock:
                    self.unknown += 1

    def _figures(self) -> dict[str, object]:
        ours = {journey.thread: journey.legs for journey in self._journeys}
        calls = [call for call in self._stub.calls() if call.thread in ours]
        asked, paid = _by_leg(calls, "model"), _by_leg(calls, "payment")
        [(recorded,)] = self._deployment.query(
            "SELECT count(*) FROM keepstep_effect e JOIN keepstep_thread t ON t.id = e.thread_id "
            "WHERE e.name = 'ask' AND e.state = 'done' AND t.name LIKE 'run-%'"
        )
        wasted = [call for each in asked.values() for call in each[:-1]]
        returned = self._returned()
        fates = [self._fate(call, returned.get((call.thread, call.leg, call.caller))) for call in wasted]
        for call, fate in zip(wasted, fates, strict=True):
            if fate == "answered":
                print(
                    f"answered, and paid for again: {call}; {self._fleet.killed_at.get(call.caller)}", file=sys.stderr
                )
        due = {(thread, leg) for thread, legs in ours.items() for leg in range(2, legs, 3)}
        model_calls = sum(map(len, asked.values()))
        return {
            "runs": len(ours),
            "nodes": sum(ours.values()),
            "kills": self.kills,
            "workers_killed": self._fleet.workers_killed,
            "model_calls_paid": model_calls,
            "model_calls_recorded": recorded,
            "model_calls_wasted": model_calls - int(recorded),
            "wasted_in_flight": fates.count("in flight"),
            "wasted_on_their_way": fates.count("on its way"),
            "wasted_answered": fates.count("answered"),
            "effects": len(due),
            "effects_doubled": sum(len(each) > 1 for each in paid.values()),
            "effects_missing": len(due - paid.keys()),
            "effects_unknown": self.unknown,
            "latency_ms": round(1000 * self._plan.latency_seconds, 1),
            "node_ms": round(1000 * self._leg_seconds, 1),
            "spool": self._plan.spool,
            "seed": self._plan.seed,
        }

    def _returned(self) -> dict[tuple[str, int, int], float]:
        """Return when each call returned to who made it, by thread, leg and pid."""
        words = map(str.split, (self._deployment.folder / "returned").read_text(encoding="utf-8").splitlines())
        return {(thread, int(leg), int(pid)): float(at) for thread, leg, pid, at in words}

    def _fate(self, call: StubCall, returned_at: float | None) -> str:
        """Return how far a call had come when its caller was killed."""
        killed_at = self._fleet.killed_at.get(call.caller)
        if killed_at is None:
            return "answered"  # its caller lived, and asked again all the same
        if call.answered_at is None or call.answered_at >= killed_at:
            return "in flight"
        has_come = returned_at is not None and killed_at - returned_at >= ON_ITS_WAY_SECONDS
        return "answered" if has_come else "on its way"


def _by_leg(calls: Sequence[StubCall], kind: str) -> dict[tuple[str, int], list[StubCall]]:
    found: dict[tuple[str, int], list[StubCall]] = defaultdict(list)
    for call in calls:
        if call.kind == kind:
            found[call.thread, call.leg].append(call)
    return found


def measured(plan: Plan, folder: Path) -> dict[str, object]:
    """Run a plan on servers of its own; return the figures."""
    servers = Servers(folder)
    try:
        settings = {
            "graphs": _AGENTS,
            "renew_seconds": 0.3,
            "liveness_window_seconds": 3.0,
            "sweep_seconds": 0.3,
            # A node that is hit again and again is what is measured here, not a node that takes its worker down.
            "deaths_max": 100,
            "response_spool": str(folder / "responses") if plan.spool else "off",
        }
        database = servers.postgresql.url(servers.migrated_database())
        with (
            stub_of(plan.latency_seconds) as stub,
            deployed(folder, database, servers.redis.url, **settings) as deployment,
        ):
            deployment.environment["KEEPSTEP_BENCH_STUB"] = stub.address
            deployment.environment["KEEPSTEP_BENCH_RETURNED"] = str(folder / "returned")
            return Measurement(plan, deployment, stub).run()
    finally:
        servers.stop()


def main(arguments: list[str], show: Callable[[str], object] = print) -> int:
    """Measure; return the exit code."""
    parser = argparse.ArgumentParser(prog="make wasted", description=__doc__)
    parser.add_argument("--runs", type=int, default=100, help="journeys of 20 to 30 nodes")
    parser.add_argument("--seed", type=int, default=1, help="of the lengths and the kills")
    parser.add_argument("--latency-ms", type=float, default=5.0, help="how long the model thinks")
    parser.add_argument("--no-spool", action="store_true", help="without the response spool")
    given = parser.parse_args(arguments)
    with _folder() as folder:
        figures = measured(Plan(given.runs, given.seed, given.latency_ms / 1000, not given.no_spool), folder)
    for name, value in figures.items():
        show(f"{name.replace('_', ' '):<24}{value}")
    show(json.dumps(figures))
    return 1 if figures["effects_doubled"] or figures["effects_missing"] or figures["wasted_answered"] else 0


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    """Give a folder; what is in it stays when something goes wrong."""
    folder = Path(tempfile.mkdtemp(prefix="keepstep-wasted-"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
