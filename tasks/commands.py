"""Taking in commands: the only copy of somebody's intent, acknowledged after its row is committed.

They come over a connection of their own, so that they have acknowledgements and nudges do not. What cannot be read is
rejected with a line in the log and, where it says whom to tell, a refusal; it never stops the worker. While the
database is away a command goes back to the queue, where another worker may find it.
"""

from __future__ import annotations

import json
from typing import Any

import structlog
from kombu import Connection, Consumer

from keepstep import broker
from keepstep.crashpoints import reach
from keepstep.errors import InvalidInput, KeepstepError, Unavailable
from keepstep.runtime import commands
from keepstep.runtime.environment import Runtime
from keepstep.settings import Settings
from keepstep.tasks import messages
from keepstep.tasks.logs import told
from keepstep.tasks.replies import Replies
from keepstep.tasks.service import Service

log = structlog.get_logger("keepstep.worker")

_PREFETCH = 10
_LOOK_SECONDS = 1.0
_BACKOFF_SECONDS_MAX = 5.0
_ID_LENGTH_MAX = 200


class Commands(Service):
    """Consumes the command queue; reconnects for ever."""

    name = "commands"

    def __init__(self, settings: Settings, runtime: Runtime) -> None:
        super().__init__()
        self._settings = settings
        self._runtime = runtime
        self._replies = Replies(settings)
        self._backoff_seconds = 0.0

    def work(self) -> float:
        """Consume until told to stop or the connection breaks."""
        url, prefix = self._settings.broker, self._settings.queue
        with broker.connection(url, commands=True, queue=prefix) as connection:
            channel = connection.channel()
            # Where RabbitMQ puts what was delivered too often: it must be there before that happens.
            broker.rejected_queue(prefix)(channel).declare()
            queues = [broker.commands_queue(url, prefix)]
            with Consumer(channel, queues, on_message=self._received, prefetch_count=_PREFETCH):
                self._drain(connection)
        return 0.0

    def finish(self) -> None:
        """Close the connections."""
        self._replies.close()
        self._runtime.store.dispose()

    def _drain(self, connection: Connection) -> None:
        while not self.stopping:
            try:
                connection.drain_events(timeout=_LOOK_SECONDS)
            except TimeoutError:
                continue
            if self._backoff_seconds:
                self.pause(self._backoff_seconds)

    def _received(self, message: Any) -> None:
        if self.stopping:
            message.requeue()
            return
        with self.gate.hold():
            self._take(message)

    def _take(self, message: Any) -> None:
        raw = message.body
        body = raw.encode("utf-8", "surrogatepass") if isinstance(raw, str) else bytes(raw)
        try:
            command = messages.parse(body, size_max=self._settings.message_bytes_max)
            accepted = commands.accept(self._runtime, command)
        except InvalidInput as error:
            self._refuse(message, body, error)
        except Unavailable as error:
            self._backoff_seconds = min(_BACKOFF_SECONDS_MAX, self._backoff_seconds * 2 or 0.1)
            log.warning("command_put_back", reason=error.message, again_in_seconds=self._backoff_seconds)
            message.requeue()
        except Exception as error:  # noqa: BLE001  one command's bad luck must not stop the others
            # It would fail again, here and everywhere: told to the sender, not tried for ever.
            log.warning("command_failed", command_id=_id_of(message, body), **told(error))
            self._refuse(message, body, KeepstepError(f"the command failed: {type(error).__name__}"))
        else:
            self._backoff_seconds = 0.0
            reach("after_command", command.verb)
            self._runtime.publish(accepted.nudges)
            reply = messages.reply(
                command.id, thread_id=accepted.thread_id, run_id=accepted.run_id, duplicate=accepted.duplicate
            )
            self._replies.send(message, command.id, reply)
            reach("before_ack", command.verb)
            message.ack()

    def _refuse(self, message: Any, body: bytes, error: KeepstepError) -> None:
        self._backoff_seconds = 0.0
        command_id = _id_of(message, body)
        log.warning("command_refused", command_id=command_id, code=error.code, reason=error.message[:1000])
        self._replies.send(message, command_id, messages.reply(command_id, error=error))
        message.reject()


def _id_of(message: Any, body: bytes) -> str:
    """Return the id that a refusal can be matched by, as far as the message has one."""
    found = message.properties.get("correlation_id")
    if not found:
        try:
            found = json.loads(body).get("id")
        except (ValueError, AttributeError, RecursionError):
            found = None
    return found if isinstance(found, str) and 0 < len(found) <= _ID_LENGTH_MAX and found.isprintable() else ""
