"""`python -m tests.simulation`: run seeds, or show one. The last line is JSON; exit code 1 when a seed failed."""

from __future__ import annotations

import argparse
import os
import sys

from tests.simulation import runner
from tests.simulation.scenario import simulate


def main() -> int:
    """Run what the arguments name."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=2000, help="how many (those that found something come first)")
    parser.add_argument("--first", type=int, default=0, help="the first of the others")
    parser.add_argument("--seed", type=int, help="run only this one and print its schedule")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    if options.seed is not None:
        report = simulate(options.seed)
        print(runner.told(report))  # noqa: T201  a program's output
        counts, failed = report.counts, [report] if report.violation else []
    else:
        counts, failed = runner.run(runner.chosen(options.seeds, options.first), options.processes)
        runner.show(failed)
    print(runner.summary(counts, failed))  # noqa: T201  a program's output
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
