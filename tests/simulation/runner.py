"""Running many seeds, over the machine's processors, and telling what came of them."""

from __future__ import annotations

import contextlib
import itertools
import json
import multiprocessing
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from tests.simulation.scenario import Report, simulate

_CHUNK_SEEDS = 25
_SHOWN_MAX = 5
_TOLD = (
    "events",
    "deliveries",
    "commands",
    "crashes",
    "zombies",
    "fenced off",
    "workers lost",
    "database failures",
    "edits",
)
KNOWN = Path(__file__).with_name("seeds.txt")


def known() -> list[int]:
    """Return the seeds that found something once."""
    lines = (line.split("#")[0].split() for line in KNOWN.read_text().splitlines())
    return [int(words[0]) for words in lines if words]


def chosen(count: int, first: int = 0) -> list[int]:
    """Return `count` seeds: those that found something, then all from `first` on."""
    found = known()[:count]
    others = (seed for seed in itertools.count(first) if seed not in found)
    return [*found, *itertools.islice(others, count - len(found))]


def run(seeds: Sequence[int], processes: int) -> tuple[Counter[str], list[Report]]:
    """Run seeds; return what was counted, and the reports of those that failed."""
    chunks = [list(seeds[start : start + _CHUNK_SEEDS]) for start in range(0, len(seeds), _CHUNK_SEEDS)]
    counts: Counter[str] = Counter()
    failed: list[Report] = []
    for counted, reports in _each(chunks, processes):
        counts += counted
        failed += reports
    return counts, failed


def _each(chunks: Sequence[Sequence[int]], processes: int) -> Iterator[tuple[Counter[str], list[Report]]]:
    if processes == 1 or len(chunks) == 1:
        yield from map(_chunk, chunks)
        return
    context = multiprocessing.get_context("spawn")
    number = context.Value("i", 0)
    with ProcessPoolExecutor(processes, mp_context=context, initializer=_settle, initargs=(number,)) as pool:
        yield from pool.map(_chunk, chunks)


def _settle(number: object) -> None:
    """Stay on one processor: the fibers of a world take turns, and a turn is handed over fastest there."""
    with number.get_lock():  # type: ignore[attr-defined]
        mine = number.value  # type: ignore[attr-defined]
        number.value += 1  # type: ignore[attr-defined]
    with contextlib.suppress(AttributeError, OSError):
        allowed = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {allowed[mine % len(allowed)]})


def _chunk(seeds: Sequence[int]) -> tuple[Counter[str], list[Report]]:
    counts: Counter[str] = Counter()
    failed = []
    for seed in seeds:
        report = simulate(seed)
        counts += report.counts
        if report.violation is not None:
            failed.append(report)
    return counts, failed


def told(report: Report) -> str:
    """Return what a person needs of a seed: the schedule, what became of it, how to see it again."""
    outcome = "holds" if report.violation is None else f"FAILED: {report.violation}"
    lines = [*report.schedule, f"seed {report.seed} (schedule {report.digest}) {outcome}"]
    return "\n".join([*lines, f"again: make simulate SEED={report.seed}"])


def summary(counts: Counter[str], failed: Sequence[Report]) -> str:
    """Return the last line of a run, as JSON."""
    named = {name.replace(" ", "_"): counts[name] for name in _TOLD}
    seeds = [report.seed for report in failed]
    return json.dumps({"seeds": counts["seeds"], "failed": len(failed), **named, "failed_seeds": seeds})


def show(failed: Sequence[Report]) -> None:
    """Print the failed seeds: a few in full, the others by their number."""
    for report in failed[:_SHOWN_MAX]:
        print(told(report), end="\n\n")  # noqa: T201  a program's output
    for report in failed[_SHOWN_MAX:]:
        print(f"seed {report.seed} FAILED: {report.violation}")  # noqa: T201  a program's output
