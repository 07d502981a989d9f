"""`make chaos`: real workers, PostgreSQL and brokers under a monkey; then what was lost, and what happened twice.

Exit code 1 when anything is lost, duplicated, divergent or stuck, or when nothing was run. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path

from tests.chaos.round import Outcome, Size, play
from tests.rabbitmq import NO_RABBITMQ, NoRabbitMQ, rabbitmq_program

_FATES = ("done", "unknown", "lost", "duplicated", "divergent", "stuck")
_BAD = _FATES[2:]
_TOLD = ("lost", "duplicated", "divergent", "unknown", "stuck")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument(
        "--broker", choices=("redis", "rabbitmq", "both"), default="both", help="both: one after the other, half each"
    )
    parser.add_argument("--runs", type=int, default=500)
    parser.add_argument("--faults", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=1500.0, help="the monkey stops after that time at the latest")
    parser.add_argument("--heal-seconds", type=float, default=120.0, help="what is not done that much later is stuck")
    parser.add_argument("--rate", type=float, default=1.0, help="faults in a second, on average")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--concurrency", type=int, default=2)
    parser.add_argument("--seed", type=int, default=7)
    return parser.parse_args()


def _brokers(wanted: str) -> tuple[list[str], list[str]]:
    """Return the brokers that there are, and why the others are left out."""
    brokers, skipped = ["redis", "rabbitmq"] if wanted == "both" else [wanted], []
    if "rabbitmq" in brokers:
        try:
            rabbitmq_program()
        except NoRabbitMQ as error:
            brokers.remove("rabbitmq")
            skipped.append(f"{NO_RABBITMQ}: {error}")
    return brokers, skipped


def _sizes(options: argparse.Namespace, number: int) -> list[Size]:
    """Share everything among that many rounds."""
    return [
        Size(
            runs=options.runs * (index + 1) // number - options.runs * index // number,
            faults=options.faults * (index + 1) // number - options.faults * index // number,
            seconds=options.seconds / number,
            heal_seconds=options.heal_seconds,
            rate=options.rate,
            workers=options.workers,
            concurrency=options.concurrency,
            seed=options.seed + index,
        )
        for index in range(number)
    ]


def _rows(outcomes: list[Outcome]) -> list[tuple[str, list[str]]]:
    """Return the table's lines: a name, and a cell for each outcome."""

    def longest(outcome: Outcome, kind: str) -> str:
        times = [seconds for hit, seconds in outcome.recovery if hit == kind]
        return f"{1000 * max(times):.0f} ms" if times else ""

    kinds = sorted({kind for each in outcomes for kind in each.faults})
    rows = [("runs", [str(each.runs) for each in outcomes])]
    rows.append(("faults", [str(each.faults.total()) for each in outcomes]))
    rows += [(f"  {kind}", [str(each.faults[kind]) for each in outcomes]) for kind in kinds]
    rows += [(fate, [str(each.fates[fate]) for each in outcomes]) for fate in _FATES]
    rows.append(("faults that hit something", [str(len(each.recovery)) for each in outcomes]))
    rows.append(("recovery p50", [f"{each.recovery_ms()[0]} ms" for each in outcomes]))
    rows.append(("recovery max", [f"{each.recovery_ms()[1]} ms" for each in outcomes]))
    rows += [(f"  max, {kind}", [longest(each, kind) for each in outcomes]) for kind in kinds]
    return rows


def _tell(options: argparse.Namespace, outcomes: dict[str, Outcome], skipped: list[str]) -> None:
    columns = dict(outcomes)
    if len(outcomes) > 1:
        columns["both"] = sum(outcomes.values(), Outcome())
    head = f"seed {options.seed}, {options.workers} workers of {options.concurrency} processes"
    for name, cells in [(head, list(columns)), *_rows(list(columns.values()))]:
        print(f"{name:<36}{''.join(f'{cell:>12}' for cell in cells)}")  # noqa: T201
    for reason in skipped:
        print(f"skipped: {reason}")  # noqa: T201


def main() -> int:
    """Run what the arguments say."""
    options = _options()
    brokers, skipped = _brokers(options.broker)
    folder = Path(tempfile.mkdtemp(prefix="keepstep-chaos-"))
    outcomes: dict[str, Outcome] = {}
    for broker, size in zip(brokers, _sizes(options, len(brokers)), strict=True):
        (folder / broker).mkdir()
        outcomes[broker] = play(broker, size, folder / broker)
    total = sum(outcomes.values(), Outcome())
    _tell(options, outcomes, skipped)
    bad = not outcomes or any(total.fates[fate] for fate in _BAD)
    if bad:
        for reason in total.reasons:
            if ": unknown:" not in reason:
                print(reason)  # noqa: T201
        print(f"logs of the workers: {folder}")  # noqa: T201
    else:
        shutil.rmtree(folder, ignore_errors=True)
    median, longest = total.recovery_ms()
    summary = {
        "runs": total.runs,
        "faults": total.faults.total(),
        **{fate: total.fates[fate] for fate in _TOLD},
        "recovery_ms_p50": median,
        "recovery_ms_max": longest,
        "skipped": skipped,
    }
    print(json.dumps(summary))  # noqa: T201
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
