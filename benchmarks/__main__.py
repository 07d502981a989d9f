"""`make bench`: Keepstep against Celery, in one run on one machine.

Only ratios mean anything: the rates depend on the machine and on what else it does, so the contestants take turns and
their medians are compared. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import sys
import tempfile
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks import backlog, measure
from benchmarks import waiting as waits
from benchmarks.backlog import Looks
from benchmarks.contestants import Contestant, Keepstep, Lean, Servers, Stock
from benchmarks.measure import Cost, Hops, Lone, Rate
from benchmarks.waiting import Waiting

_ROW = "{:<10}{:>9}{:>12}{:>10}{:>16}"


@dataclass(frozen=True)
class Plan:
    """How much is run."""

    rounds: int
    seconds: float
    """Of each measured window."""
    warm_up_seconds: float
    chains: int
    lone_steps: int
    waiting: int
    """Threads that wait for people."""
    decisions: int
    """At once."""


_FULL = Plan(rounds=3, seconds=8.0, warm_up_seconds=2.0, chains=64, lone_steps=600, waiting=10_000, decisions=1_000)
_QUICK = Plan(rounds=1, seconds=1.0, warm_up_seconds=0.3, chains=16, lone_steps=60, waiting=300, decisions=100)


@dataclass(frozen=True)
class Target:
    """A promise: of one figure, at least or at most that much."""

    figure: str
    at_least: float | None = None
    at_most: float | None = None

    def met(self, measured: float) -> bool:
        """Say whether it was kept."""
        enough = self.at_least is None or measured >= self.at_least
        return enough and (self.at_most is None or measured <= self.at_most)

    @property
    def shown(self) -> str:
        """The target in words."""
        return f"at least {self.at_least:g}" if self.at_least is not None else f"at most {self.at_most:g}"


TARGETS = (
    Target("sync_vs_stock_celery", at_least=1.25),
    Target("sync_vs_lean_celery_one_tx", at_least=0.8),
    # Two: claim and commit. What is over it is the worker's own: renewing its row, sweeping.
    Target("statements_per_step", at_most=2.1),
    Target("commits_per_step", at_most=1.1),
    Target("admission_100000_due_vs_100", at_most=2.0),
    Target("waiting_messages", at_most=0),
    Target("waiting_connections_delta", at_most=0),
    # Not 0: what an allocator keeps after ten thousand more steps, whatever became of their threads.
    Target("waiting_rss_delta_mib", at_most=8),
    Target("decision_to_running_ms_p50", at_most=25),
)


def main(arguments: list[str]) -> int:
    """Run the benchmark; return the exit code."""
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a short run that shows that everything works")
    parser.add_argument("--check", action="store_true", help="exit with 1 when a target is missed")
    parser.add_argument("--rounds", type=int, help="turns of each contestant")
    parser.add_argument("--seconds", type=float, help="length of each turn's measured window")
    given = parser.parse_args(arguments)
    plan = _QUICK if given.quick else _FULL
    plan = replace(plan, rounds=given.rounds or plan.rounds, seconds=given.seconds or plan.seconds)
    folder = Path(tempfile.mkdtemp(prefix="keepstep-bench-"))
    try:
        servers = Servers(folder)
        try:
            figures = _run(servers, plan)
        finally:
            servers.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return 0 if all(target["met"] for target in figures["targets"].values()) or not given.check else 1  # type: ignore[attr-defined]


def _run(servers: Servers, plan: Plan) -> dict[str, object]:
    version = str(servers.postgresql.execute("SHOW server_version")[0][0])
    print(
        f"PostgreSQL {version} (fsync on), Redis, prefork -c 2, {plan.chains} chains at once, Python "
        f"{platform.python_version()}; {plan.rounds} turns of {plan.seconds:g} s each\n"
    )
    cost = measure.cost(servers, chains=plan.chains, seconds=plan.seconds)
    lone = measure.lone(servers, steps=plan.lone_steps)
    looks = backlog.looks(servers)
    waiting = waits.waiting(servers, threads=plan.waiting, at_once=plan.decisions)
    rates, loaded = _take_turns(servers, plan)
    figures = _figures(rates, loaded, lone, cost, looks, waiting)
    _print_figures(figures, lone, cost, looks, waiting)
    print(json.dumps(figures))
    return figures


def _take_turns(servers: Servers, plan: Plan) -> tuple[dict[str, list[Rate]], list[Hops]]:
    rates: dict[str, list[Rate]] = defaultdict(list)
    loaded: list[Hops] = []
    print(_ROW.format("turn", "", "steps/s", "of stock", "worker CPU µs"))
    for turn in range(1, plan.rounds + 1):
        contestants: list[type[Stock | Lean | Keepstep]] = [Stock, Lean, Keepstep]
        for kind in contestants:
            contestant: Contestant = kind(servers)
            rate, hops = measure.rate(
                contestant, chains=plan.chains, warm_up_seconds=plan.warm_up_seconds, seconds=plan.seconds
            )
            rates[kind.name].append(rate)
            loaded += [hops] if hops else []
            ratio = rate.steps_per_second / rates["stock"][-1].steps_per_second
            shown = (f"{rate.steps_per_second:.0f}", f"{ratio:.2f}", f"{rate.processor_microseconds:.0f}")
            print(_ROW.format(kind.name, turn, *shown), flush=True)
    return rates, loaded


def _figures(
    rates: dict[str, list[Rate]], loaded: list[Hops], lone: Lone, cost: Cost, looks: Looks, waiting: Waiting
) -> dict[str, object]:
    speed = {name: measure.median([rate.steps_per_second for rate in turns]) for name, turns in rates.items()}
    used = {name: measure.median([rate.processor_microseconds for rate in turns]) for name, turns in rates.items()}
    figures: dict[str, float] = {
        "sync_vs_stock_celery": round(speed["keepstep"] / speed["stock"], 3),
        "sync_vs_lean_celery_one_tx": round(speed["keepstep"] / speed["lean"], 3),
        "hop_ms_p50": round(lone.hops.p50, 2),
        "hop_ms_p99": round(lone.hops.p99, 2),
        "hop_ms_p50_loaded": round(measure.median([hops.p50 for hops in loaded]), 2),
        "hop_ms_p99_loaded": round(measure.median([hops.p99 for hops in loaded]), 2),
        "statements_per_step": round(cost.statements, 3),
        "commits_per_step": round(lone.flushes, 3),
        "transactions_per_step": round(lone.transactions, 3),
        "messages_per_step": round(cost.messages, 3),
        "bytes_per_step": round(cost.stored_bytes),
        "payload_bytes_per_step": round(cost.payload_bytes),
        "worker_cpu_vs_stock_celery": round(used["keepstep"] / used["stock"], 3),
        "worker_cpu_vs_lean_celery_one_tx": round(used["keepstep"] / used["lean"], 3),
        "admission_ms_100_due": round(looks.of_few, 2),
        "admission_ms_100000_due": round(looks.of_many, 2),
        "admission_100000_due_vs_100": round(looks.of_many / looks.of_few, 2),
        "waiting_threads": waiting.threads,
        "waiting_messages": waiting.messages,
        "waiting_connections_delta": waiting.connections_delta,
        "waiting_rss_delta_mib": round(waiting.rss_delta_mib, 1),
        "decision_to_running_ms_p50": round(waiting.decision_to_running_ms_p50, 2),
        "decisions_at_once": waiting.at_once,
        "decisions_applied_once": waiting.applied_once,
        "decisions_at_once_seconds": round(waiting.at_once_seconds, 2),
    }
    targets = {
        target.figure: {
            "target": target.shown,
            "measured": figures[target.figure],
            "met": target.met(figures[target.figure]),
        }
        for target in TARGETS
    }
    return {**figures, "targets": targets}


def _print_figures(figures: dict[str, object], lone: Lone, cost: Cost, looks: Looks, waiting: Waiting) -> None:
    lines = {
        "hop, lone thread": f"p50 {lone.hops.p50:.1f} ms, p99 {lone.hops.p99:.1f} ms",
        "hop, all chains": f"p50 {figures['hop_ms_p50_loaded']} ms, p99 {figures['hop_ms_p99_loaded']} ms",
        "statements/step": f"{cost.statements:.2f} (the worker's renewals and sweeps included)",
        "commits/step": f"{lone.flushes:.2f} that wait for the disk, of {lone.transactions:.2f} transactions",
        "messages/step": f"{cost.messages:.2f}",
        "bytes/step": f"{cost.stored_bytes:.0f} of tables and indexes, {cost.payload_bytes:.0f} of them payload",
        "admission": f"{looks.of_few:.1f} ms for 16 of 100 due threads, {looks.of_many:.1f} ms for 16 of 100,000",
        "waiting": f"{waiting.threads:,} threads: {waiting.messages} messages, {waiting.connections_delta:+} "
        f"connections, {waiting.rss_delta_mib:+.1f} MiB in the worker's processes",
        "decision": f"{waiting.decision_to_running_ms_p50:.1f} ms to the node running on; {waiting.at_once:,} at once "
        f"in {waiting.at_once_seconds:.1f} s, {waiting.applied_once:,} applied once",
    }
    print()
    for name, text in lines.items():
        print(f"{name:<18}{text}")
    print()
    targets: dict[str, dict[str, object]] = figures["targets"]  # type: ignore[assignment]
    for name, target in targets.items():
        print(f"{name:<28}{target['measured']:<8} {target['target']:<15} {'met' if target['met'] else 'MISSED'}")
    print()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
