"""The relay: sends what producers have written to an outbox in their own database, once it is committed there.

A command is removed from the outbox when a worker has accepted it, which may be after it was sent more than once: its
id makes that one command. One that is refused stays there with the reason, since nobody waits for the answer.
"""

from __future__ import annotations

import json
import time
from contextlib import ExitStack

import structlog

from keepstep.client import Client, Receipt
from keepstep.errors import BrokerUnavailable, KeepstepError, NotConfirmed
from keepstep.settings import Settings
from keepstep.store.outbox import Batch, Outbox, Written
from keepstep.tasks.service import Service

log = structlog.get_logger("keepstep.relay")

_BATCH = 200
_CONFIRM_SECONDS = 5.0
_POLL_SECONDS = 0.5
# While no worker answers, what was sent lies in the queue: a few are sent again, and ever more seldom.
_BATCH_UNANSWERED = 10
_POLL_SECONDS_MAX = 15.0


class Relay(Service):
    """Relays one producer's outbox."""

    name = "relay"

    def __init__(self, settings: Settings, url: str, *, poll_seconds: float = _POLL_SECONDS) -> None:
        super().__init__()
        self.outbox = Outbox.open(url)
        self._client = Client(settings=settings, timeout=_CONFIRM_SECONDS)
        self._poll_seconds = poll_seconds
        self._is_unanswered = False
        self._pause_seconds = poll_seconds

    def work(self) -> float:
        """Relay what there is; return when to look again: at once when there may be more."""
        answered = self.relay()
        self._pause_seconds = min(_POLL_SECONDS_MAX, self._pause_seconds * 2) if self._is_unanswered else 0.0
        if answered < _BATCH:
            self._pause_seconds = max(self._pause_seconds, self._poll_seconds)
        return self._pause_seconds

    def relay(self) -> int:
        """Send one batch and wait for the workers' word; return how many commands have got one.

        Raises `BrokerUnavailable` and `DatabaseUnavailable`; what was not answered stays in the outbox.
        """
        with ExitStack() as stack:
            with self.gate.hold():
                size = _BATCH_UNANSWERED if self._is_unanswered else _BATCH
                batch = stack.enter_context(self.outbox.batch(size))
                sent = [(command, self._client.forward(command.id, command.body)) for command in batch.found]
            # Not under the gate: while workers are asked, children may be forked.
            deadline = time.monotonic() + _CONFIRM_SECONDS
            for command, receipt in sent:
                _answered(batch, command, receipt, max(deadline - time.monotonic(), 0.0))
            with self.gate.hold():
                stack.close()
        if sent:
            log.info(
                "relayed",
                accepted=len(batch.accepted),
                refused=len(batch.refused),
                unanswered=len(sent) - len(batch.accepted) - len(batch.refused),
                outbox=self.outbox.shown,
            )
        answered = len(batch.accepted) + len(batch.refused)
        self._is_unanswered = bool(sent) and not answered
        return answered

    def finish(self) -> None:
        """Close the connections."""
        self._client.close()
        self.outbox.dispose()


def _answered(batch: Batch, command: Written, receipt: Receipt, seconds: float) -> None:
    try:
        receipt.accepted(seconds)
    except (NotConfirmed, BrokerUnavailable):
        return  # it stays, and is sent again
    except KeepstepError as error:
        log.warning("start_refused", id=command.id, code=error.code, message=error.message)
        batch.refused[command.id] = json.dumps({"code": error.code, "message": error.message})
    else:
        batch.accepted.append(command.id)
