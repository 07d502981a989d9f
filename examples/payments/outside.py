"""The world outside the agent: a bank and a mail server, each a process with a file of its own."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

from examples.deployment import ROOT, ShowFailed
from examples.payments.ledger import Ledger
from examples.payments.mailbox import Mailbox

CLOSED = "IT77-5001-0007"
"""The account of a customer that is closed: nothing can be held for it."""
FROZEN = "JO99-5001-0009"
"""The account of a customer that is frozen: something can be held for it, and not paid."""
POLICIES = ROOT / "examples" / "payments" / "policies"
_STOP_SECONDS = 10.0


class Server:
    """One of them. It says on its first line where it listens."""

    def __init__(self, name: str, options: list[str], environment: dict[str, str], log: Path) -> None:
        self.name = name
        with log.open("wb") as errors:
            # A group of its own: Ctrl+C is for the show alone, which then stops its servers in order.
            self.process = subprocess.Popen(
                [sys.executable, "-m", f"examples.payments.{name}", *options],
                env=environment,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                process_group=0,
            )
        line = self.process.stdout.readline() if self.process.stdout is not None else ""
        self.address = line.rpartition(" ")[2].strip()
        if not line.startswith("listening on "):
            self.stop()
            message = f"the {name} has not started: {log.read_text(encoding='utf-8', errors='replace')[-500:].strip()}"
            raise ShowFailed(message)

    def stop(self) -> None:
        """End it in order, and by force when that takes too long."""
        self.process.terminate()
        try:
            self.process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(_STOP_SECONDS)
        if self.process.stdout is not None:
            self.process.stdout.close()


class Outside:
    """Bank and mail server; leaving it ends both. Their files stay and say what happened."""

    def __init__(self, folder: Path, *, seed: int) -> None:
        self.ledger_path, self.mailbox_path = folder / "bank.db", folder / "mails.db"
        self.token = secrets.token_hex(16)
        self._folder = folder
        self._seed = seed
        self._servers: list[Server] = []

    def __enter__(self) -> Self:
        """Start both."""
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("KEEPSTEP_")}
        environment = {**inherited, "BANK_TOKEN": self.token}
        seed = ["--seed", str(self._seed)]
        bank = ["--ledger", str(self.ledger_path), "--closed", CLOSED, "--frozen", FROZEN, *seed]
        bank += ["--lost", "0.12", "--busy", "0.08", "--failing", "0.08", "--slow", "0.6"]
        mail = ["--mailbox", str(self.mailbox_path), *seed, "--lost", "0.12", "--slow", "0.4"]
        try:
            for name, options in (("bank", bank), ("mail", mail)):
                self._servers.append(Server(name, options, environment, self._folder / f"{name}.log"))
        except BaseException:
            self._stop()
            raise
        self.ledger, self.mailbox = Ledger(self.ledger_path), Mailbox(self.mailbox_path)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop both."""
        self.ledger.close()
        self.mailbox.close()
        self._stop()

    @property
    def environment(self) -> dict[str, str]:
        """What the agent must be told to reach them, and what it may do there."""
        bank, mail = (server.address for server in self._servers)
        reach = {"PAYMENTS_BANK": f"http://{bank}", "PAYMENTS_MAIL": mail, "BANK_TOKEN": self.token}
        return {**reach, "KEEPSTEP_POLICIES": str(POLICIES)}

    @property
    def pids(self) -> list[int]:
        """Their process ids."""
        return [server.process.pid for server in self._servers]

    def work(self) -> int:
        """Return how much both have been asked to do so far: requests taken in, and mails."""
        return len(self.ledger.requests()) + len(self.mailbox.mails())

    def _stop(self) -> None:
        for server in self._servers:
            server.stop()
