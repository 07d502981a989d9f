"""Somebody at a prompt, for the stories of the command line."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from keepstep.cli.program import run

AGENTS = Path(__file__).with_name("cli_agents.py")


class Terminal:
    """Somebody at a prompt in one folder."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder = folder
        self._capsys = capsys
        self.running: list[subprocess.Popen[str]] = []

    def begin(self, *arguments: str) -> subprocess.Popen[str]:
        """Type a command and leave it running."""
        command = [sys.executable, "-m", "keepstep", *arguments]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.running.append(process)
        return process

    def rest(self, process: subprocess.Popen[str]) -> tuple[str, str]:
        """Wait for a command's end; return what it printed since it was last read, on standard output and error."""
        # `communicate` would pass over what `readline` has read ahead.
        with ThreadPoolExecutor(2) as pool:
            out, err = pool.map(lambda stream: stream.read(), (process.stdout, process.stderr))
        process.wait(60)
        return out, err

    def type(self, *arguments: str, code: int = 0) -> str:
        """Type a command; return what it prints on standard output, or on standard error when it fails."""
        # In this process: the same program, without an interpreter's start for each of many commands.
        ended = run(arguments)
        out, err = self._capsys.readouterr()
        assert ended == code, out + err
        return err if code else out

    def ask(self, *arguments: str, code: int = 0) -> dict:
        """Type a command with --json; return its document."""
        ended = run([*arguments, "--json"])
        out, err = self._capsys.readouterr()
        assert ended == code, out + err
        return json.loads(out)

    def worker(self, agents: Path = AGENTS) -> subprocess.Popen[str]:
        """Start a worker, with its log in a file."""
        with (self.folder / "worker.log").open("a") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "keepstep", "worker", str(agents), "--concurrency", "2"],
                stdout=log,
                stderr=log,
                text=True,
            )
        self.running.append(process)
        return process

    def approval(self, thread: str) -> dict:
        """Wait for a thread's next question."""
        deadline = time.monotonic() + 60
        while True:
            found = self.ask("approvals", "--thread", thread)["approvals"]
            if found:
                return found[0]
            assert time.monotonic() < deadline, (self.folder / "worker.log").read_text()[-3000:]
            time.sleep(0.02)

    def status(self, thread: str, wanted: str) -> dict:
        """Wait for a thread's status."""
        deadline = time.monotonic() + 60
        while True:
            found = self.ask("show", thread)
            if found["thread"]["status"] == wanted:
                return found
            assert time.monotonic() < deadline, found
            time.sleep(0.02)

    def close(self) -> None:
        """End what still runs."""
        for process in self.running:
            if process.poll() is None:
                process.terminate()
        for process in self.running:
            try:
                process.communicate(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()
