"""`make chaos`: real workers, PostgreSQL and Redis under a monkey; then what was lost, and what happened twice.

Exit code 1 when anything is lost, duplicated, divergent or stuck. The last line is JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.chaos.monkey import Monkey, Recovery, Servers
from tests.chaos.verdict import Verdict, judge
from tests.chaos.workload import Database, Workload, jobs
from tests.conftest import _migrate
from tests.crash.outside import Outside, outside_world
from tests.servers import PostgreSQLServer, Proxy, RedisServer, running
from tests.worker.deployment import deployed

_AGENTS = str(Path(__file__).with_name("agents.py"))
_WINDOW_SECONDS = 3.0
_IN_FLIGHT_MAX = 24
_AHEAD = 6
_FATES = ("done", "unknown", "lost", "duplicated", "divergent", "stuck")
_BAD = _FATES[2:]
_UNFINISHED = "SELECT count(*) FROM keepstep_thread WHERE status NOT IN ('done', 'blocked', 'failed', 'cancelled')"


@contextlib.contextmanager
def _servers(folder: Path, options: argparse.Namespace, outside: Outside) -> Iterator[Servers]:
    with contextlib.ExitStack() as stack:
        postgresql, redis = PostgreSQLServer(), RedisServer()
        to_database, to_broker = Proxy(postgresql.socket_path), Proxy(redis.port)
        for each in (postgresql, redis, to_database, to_broker):
            stack.enter_context(running(each))
        name = postgresql.create_database()
        _migrate(postgresql.url(name))
        through = f"postgresql+psycopg2://postgres@127.0.0.1:{to_database.port}/{name}?sslmode=disable"
        deployment = stack.enter_context(
            deployed(
                folder,
                through,
                f"redis://127.0.0.1:{to_broker.port}/0",
                postgresql.url(name),
                graphs=_AGENTS,
                renew_seconds=0.5,
                liveness_window_seconds=_WINDOW_SECONDS,
                sweep_seconds=0.5,
                # The monkey kills a node's process again and again; that is not the node's doing.
                deaths_max=1000,
            )
        )
        deployment.environment["KEEPSTEP_TEST_OUTSIDE"] = outside.address
        database = Database(postgresql.url(name))
        stack.callback(database.close)
        yield Servers(
            deployment,
            database,
            postgresql,
            redis,
            to_database,
            to_broker,
            _WINDOW_SECONDS,
            options.workers,
            options.concurrency,
        )


def _disturbed(options: argparse.Namespace, monkey: Monkey, workload: Workload) -> None:
    """Start all runs while the monkey does all its faults, both spread over the same time, or until time is up."""
    waiting = jobs(options.runs)
    ends = time.monotonic() + options.seconds
    next_fault = time.monotonic()
    while time.monotonic() < ends and (waiting or monkey.faults.total() < options.faults):
        monkey.relieve()
        share = monkey.faults.total() / options.faults if options.faults else 1.0
        [(unfinished,)] = monkey.servers.database.query(_UNFINISHED)
        room = _IN_FLIGHT_MAX - unfinished - workload.unanswered
        while waiting and room > 0 and len(workload.begun) <= share * options.runs + _AHEAD:
            workload.begin(waiting.pop(0))
            room -= 1
        if time.monotonic() >= next_fault and monkey.faults.total() < options.faults and monkey.strike():
            next_fault = time.monotonic() + monkey.random.expovariate(options.rate)
        time.sleep(0.02)


def _settled(options: argparse.Namespace, monkey: Monkey, workload: Workload) -> None:
    """Wait until nothing is under way any more, or until what is will not come."""
    ends = time.monotonic() + options.heal_seconds
    while time.monotonic() < ends:
        monkey.relieve()
        [(unfinished,)] = monkey.servers.database.query(_UNFINISHED)
        if not unfinished and not workload.unanswered:
            return
        time.sleep(0.1)


def _table(options: argparse.Namespace, monkey: Monkey, verdict: Verdict, summary: dict[str, int]) -> None:
    rows: list[tuple[str, object]] = [("runs", summary["runs"]), ("faults", summary["faults"])]
    rows += [(f"  {kind}", count) for kind, count in sorted(monkey.faults.items())]
    rows += [(fate, verdict.counts[fate]) for fate in _FATES]
    rows.append(("faults that hit something", len(monkey.recovery.seconds)))
    rows += [(f"recovery {name}", f"{summary[f'recovery_ms_{name}']} ms") for name in ("p50", "max")]
    longest: dict[str, float] = {}
    for kind, seconds in monkey.recovery.seconds:
        longest[kind] = max(seconds, longest.get(kind, 0.0))
    rows += [(f"  max, {kind}", f"{1000 * seconds:.0f} ms") for kind, seconds in sorted(longest.items())]
    print(f"seed {options.seed}, {options.workers} workers of {options.concurrency} processes")  # noqa: T201
    for name, value in rows:
        print(f"{name:<34}{value:>10}")  # noqa: T201


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--runs", type=int, default=500)
    parser.add_argument("--faults", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=1500.0, help="the monkey stops after that time at the latest")
    parser.add_argument("--heal-seconds", type=float, default=120.0, help="what is not done that much later is stuck")
    parser.add_argument("--rate", type=float, default=1.0, help="faults in a second, on average")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--concurrency", type=int, default=2)
    parser.add_argument("--seed", type=int, default=7)
    return parser.parse_args()


def main() -> int:
    """Run what the arguments say."""
    options = _options()
    folder = Path(tempfile.mkdtemp(prefix="keepstep-chaos-"))
    with outside_world() as outside, _servers(folder, options, outside) as servers:
        recovery = Recovery(servers.database)
        monkey = Monkey(servers, recovery, random.Random(options.seed))
        for worker in [servers.deployment.launch(concurrency=options.concurrency) for _ in range(options.workers)]:
            worker.ready()
        workload = Workload(servers.deployment.settings, servers.database)
        try:
            _disturbed(options, monkey, workload)
        finally:
            monkey.heal()
        _settled(options, monkey, workload)
        unanswered = workload.unanswered
        workload.stop()
        felt = recovery.stop()
        verdict = judge(workload.accepted, servers.database, outside)
    for reason in workload.refused:
        verdict.reasons.append(f"lost: refused: {reason}")
    verdict.counts["lost"] += len(workload.refused)
    verdict.counts["stuck"] += unanswered
    if felt:
        verdict.reasons.append(f"stuck: {felt} faults are still felt")
    times = [1000 * seconds for _, seconds in recovery.seconds]
    summary = {
        "runs": len(workload.begun),
        "faults": monkey.faults.total(),
        **{fate: verdict.counts[fate] for fate in ("lost", "duplicated", "divergent", "unknown", "stuck")},
        "recovery_ms_p50": round(statistics.median(times)) if times else 0,
        "recovery_ms_max": round(max(times, default=0)),
    }
    _table(options, monkey, verdict, summary)
    bad = any(verdict.counts[fate] for fate in _BAD)
    if bad:
        for reason in verdict.reasons:
            if not reason.startswith("unknown"):
                print(reason)  # noqa: T201
        print(f"logs of the workers: {folder}")  # noqa: T201
    else:
        shutil.rmtree(folder, ignore_errors=True)
    print(json.dumps(summary))  # noqa: T201
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
