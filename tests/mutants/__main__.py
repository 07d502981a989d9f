"""`make mutants`: break one line of the protocol at a time, in a copy of the tree, and see that a test fails.

Exit code 1 when a mutant survives, or when the tests fail without any. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.mutants.catalogue import MUTANTS, ROOT, Mutant

_FOLDERS = ("store", "runtime", "tasks")
_SECONDS_MAX = 150
# What broke must be the protocol's promise, not the program's grammar.
_NO_PROMISE = re.compile(r"^E\s+(ImportError|ModuleNotFoundError|SyntaxError|IndentationError|NameError)", re.MULTILINE)


class Copy:
    """A copy of the tree whose `keepstep` is one plain package, so that it is imported instead of the installed one."""

    def __init__(self, folder: Path) -> None:
        self.package = folder / "package"
        self.root = folder / "root"
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / "keepstep", self.package / "keepstep", ignore=ignored)
        for name in _FOLDERS:
            shutil.copytree(ROOT / name, self.package / "keepstep" / name, ignore=ignored)
        shutil.copytree(ROOT / "tests", self.root / "tests", ignore=ignored)
        shutil.copy(ROOT / "pyproject.toml", self.root)
        self._environment = {
            **os.environ,
            "PYTHONPATH": str(self.package),
            "PYTHONDONTWRITEBYTECODE": "1",
            "COLUMNS": "200",
        }
        for name in [name for name in self._environment if name.startswith(("KEEPSTEP_", "PYTEST_"))]:
            del self._environment[name]

    def exchange(self, file: str, text: str) -> str:
        """Give a file of the package another text; return the one it had."""
        place = (self.package if file.startswith("keepstep/") else self.package / "keepstep") / file
        before = place.read_text(encoding="utf-8")
        place.write_text(text, encoding="utf-8")
        return before

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a Python module in the copy."""
        command = [sys.executable, "-m", *arguments]
        try:
            return subprocess.run(
                command,
                cwd=self.root,
                env=self._environment,
                capture_output=True,
                text=True,
                timeout=_SECONDS_MAX,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return subprocess.CompletedProcess(command, -1, "", f"no end within {_SECONDS_MAX} s")

    def tests(self, tests: Sequence[str]) -> subprocess.CompletedProcess[str]:
        """Run tests up to the first that fails."""
        return self.run("pytest", "-q", "-x", "--tb=short", "-p", "no:cacheprovider", *tests)

    def seeds(self, count: int) -> subprocess.CompletedProcess[str]:
        """Run the simulation."""
        return self.run("tests.simulation", "--seeds", str(count))


def _verdict(copy: Copy, mutant: Mutant) -> tuple[str, str]:
    """Return `caught`, `survived` or `unclear`, and what tells so."""
    ran = copy.seeds(mutant.seeds) if mutant.seeds else copy.tests(mutant.tests)
    lines = ran.stdout.splitlines() or [""]
    if ran.returncode == 0:
        return "survived", lines[-1]
    unclear = f"{ran.stdout[-3000:]}\n{ran.stderr[-3000:]}"
    if mutant.seeds:
        found = [line.split("FAILED: ", 1)[1] for line in lines if "FAILED: " in line]
        return ("caught", found[0]) if ran.returncode == 1 and found else ("unclear", unclear)
    failed = [line for line in lines if line.startswith("FAILED ")]
    errors = [line for line in lines if line.startswith("ERROR ")]
    if ran.returncode != 1 or not failed or errors or _NO_PROMISE.search(ran.stdout):
        return "unclear", unclear
    return "caught", failed[0].split("::", 1)[1].partition(" - ")[0]


def _must_pass(copy: Copy, mutants: Sequence[Mutant]) -> None:
    """Raise `SystemExit` when a test that is to notice something fails although nothing was broken."""
    tests: dict[str, None] = {}
    for mutant in mutants:
        tests |= dict.fromkeys(test for test in mutant.tests if test.startswith("tests/"))
    runs = [copy.tests(list(tests))] if tests else []
    seeds = max(mutant.seeds for mutant in mutants)
    if seeds:
        runs.append(copy.seeds(seeds))
    for ran in runs:
        if ran.returncode != 0:
            message = f"nothing is broken and this fails:\n{ran.stdout[-5000:]}\n{ran.stderr[-3000:]}"
            raise SystemExit(message)


def _chosen(words: Sequence[str]) -> list[tuple[Mutant, str]]:
    """Return the mutants whose rule or name has one of the words, with their texts; all without words."""
    chosen = [each for each in MUTANTS if not words or any(word in f"{each.guard}: {each.name}" for word in words)]
    try:
        return [(each, each.text()) for each in chosen]
    except ValueError as error:
        raise SystemExit(str(error)) from None


def main() -> int:
    """Run what the arguments name."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("words", nargs="*", help="only mutants whose rule or name has one of these words")
    chosen = _chosen(parser.parse_args().words)
    if not chosen:
        message = "no mutant has such a name"
        raise SystemExit(message)
    survived = []
    with tempfile.TemporaryDirectory(prefix="keepstep-mutants-") as folder:
        copy = Copy(Path(folder))
        _must_pass(copy, [mutant for mutant, _ in chosen])
        for mutant, text in chosen:
            started = time.monotonic()
            whole = copy.exchange(mutant.file, text)
            verdict, told = _verdict(copy, mutant)
            copy.exchange(mutant.file, whole)
            seconds = time.monotonic() - started
            print(f"{verdict:<9}{seconds:5.1f} s  {mutant.guard}: {mutant.name}", flush=True)  # noqa: T201  a program
            print(f"{'':<18}{told if verdict == 'unclear' else told[:100]}", flush=True)  # noqa: T201  a program
            if verdict != "caught":
                survived.append(f"{mutant.guard}: {mutant.name}")
    summary = {"mutants": len(chosen), "caught": len(chosen) - len(survived), "survived": survived}
    print(json.dumps(summary))  # noqa: T201  a program
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())
