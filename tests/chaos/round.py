"""One round: real workers and servers with one broker, the monkey, the work, and what became of it."""

from __future__ import annotations

import contextlib
import random
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.chaos.monkey import Monkey, Recovery, Servers
from tests.chaos.verdict import judge
from tests.chaos.workload import Database, Workload, jobs
from tests.conftest import _migrate
from tests.crash.outside import Outside, outside_world
from tests.rabbitmq import RabbitMQServer
from tests.servers import PostgreSQLServer, Proxy, RedisServer, running
from tests.worker.deployment import deployed

_AGENTS = str(Path(__file__).with_name("agents.py"))
_WINDOW_SECONDS = 3.0
_IN_FLIGHT_MAX = 24
_AHEAD = 6
_UNFINISHED = "SELECT count(*) FROM keepstep_thread WHERE status NOT IN ('done', 'blocked', 'failed', 'cancelled')"


@dataclass(frozen=True)
class Size:
    """How much is run and broken, and for how long at most."""

    runs: int
    faults: int
    seconds: float
    heal_seconds: float
    rate: float
    workers: int
    concurrency: int
    seed: int


@dataclass
class Outcome:
    """What became of rounds; they can be added up."""

    runs: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    fates: Counter[str] = field(default_factory=Counter)
    reasons: list[str] = field(default_factory=list)
    recovery: list[tuple[str, float]] = field(default_factory=list)
    """The kind of each fault that hit something, and the seconds until all of that had gone on."""

    def __add__(self, other: Outcome) -> Outcome:
        """Return both together."""
        return Outcome(
            self.runs + other.runs,
            self.faults + other.faults,
            self.fates + other.fates,
            self.reasons + other.reasons,
            self.recovery + other.recovery,
        )

    def recovery_ms(self) -> tuple[int, int]:
        """Return the median and the longest recovery, in milliseconds."""
        times = [1000 * seconds for _, seconds in self.recovery]
        return (round(statistics.median(times)) if times else 0, round(max(times, default=0)))


def play(broker: str, size: Size, folder: Path) -> Outcome:
    """Run a round on `redis` or `rabbitmq`; the workers' logs are left in `folder`."""
    with outside_world() as outside, _servers(broker, size, folder, outside) as servers:
        recovery = Recovery(servers.database)
        monkey = Monkey(servers, recovery, random.Random(size.seed))
        for worker in [servers.deployment.launch(concurrency=size.concurrency) for _ in range(size.workers)]:
            worker.ready()
        workload = Workload(servers.deployment.settings, servers.database)
        try:
            _disturbed(size, monkey, workload)
        finally:
            monkey.heal()
        _settled(size, monkey, workload)
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
    reasons = [f"{broker}: {reason}" for reason in verdict.reasons]
    return Outcome(len(workload.begun), monkey.faults, verdict.counts, reasons, recovery.seconds)


@contextlib.contextmanager
def _servers(broker: str, size: Size, folder: Path, outside: Outside) -> Iterator[Servers]:
    with contextlib.ExitStack() as stack:
        postgresql = PostgreSQLServer()
        stack.enter_context(running(postgresql))
        server = RedisServer() if broker == "redis" else RabbitMQServer()
        stack.enter_context(running(server))
        to_database, to_broker = Proxy(postgresql.socket_path), Proxy(server.port)
        for each in (to_database, to_broker):
            stack.enter_context(running(each))
        name = postgresql.create_database()
        _migrate(postgresql.url(name))
        through = f"postgresql+psycopg2://postgres@127.0.0.1:{to_database.port}/{name}?sslmode=disable"
        deployment = stack.enter_context(
            deployed(
                folder,
                through,
                server.url.replace(f":{server.port}/", f":{to_broker.port}/"),
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
            server,
            to_database,
            to_broker,
            _WINDOW_SECONDS,
            size.workers,
            size.concurrency,
        )


def _disturbed(size: Size, monkey: Monkey, workload: Workload) -> None:
    """Start all runs while the monkey does all its faults, both spread over the same time, or until time is up."""
    waiting = jobs(size.runs)
    ends = time.monotonic() + size.seconds
    next_fault = time.monotonic()
    while time.monotonic() < ends and (waiting or monkey.faults.total() < size.faults):
        monkey.relieve()
        share = monkey.faults.total() / size.faults if size.faults else 1.0
        [(unfinished,)] = monkey.servers.database.query(_UNFINISHED)
        room = _IN_FLIGHT_MAX - unfinished - workload.unanswered
        while waiting and room > 0 and len(workload.begun) <= share * size.runs + _AHEAD:
            workload.begin(waiting.pop(0))
            room -= 1
        if time.monotonic() >= next_fault and monkey.faults.total() < size.faults and monkey.strike():
            next_fault = time.monotonic() + monkey.random.expovariate(size.rate)
        time.sleep(0.02)


def _settled(size: Size, monkey: Monkey, workload: Workload) -> None:
    """Wait until nothing is under way any more, or until what is will not come."""
    ends = time.monotonic() + size.heal_seconds
    while time.monotonic() < ends:
        monkey.relieve()
        [(unfinished,)] = monkey.servers.database.query(_UNFINISHED)
        if not unfinished and not workload.unanswered:
            return
        time.sleep(0.1)
