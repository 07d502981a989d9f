"""Taking in commands: the only copy of somebody's intent, acknowledged after its row is committed.

They come over a connection of their own, so that they have acknowledgements and nudges do not. What cannot be read is
rejected with a line in the log and, where it says whom to tell, a refusal; it never stops the worker. While the
database is away a command goes back to the queue, where another worker may find it. So does one that needs a graph
which this worker does not carry, after a pause in which others are taken in, and with a count of how often it has been
put back: it must not go round for ever.
"""

from __future__ import annotations

import json
import time
from typing import Any, NamedTuple

import structlog
from kombu import Connection, Consumer

from keepstep import broker
from keepstep.blockage import Blocked
from keepstep.crashpoints import reach
from keepstep.errors import Forbidden, InvalidInput, KeepstepError, NotCarried, Unauthenticated, Unavailable
from keepstep.runtime import commands, refusals
from keepstep.runtime.environment import Runtime
from keepstep.runtime.principals import Principal
from keepstep.settings import Settings
from keepstep.tasks import messages, refused
from keepstep.tasks.logs import told
from keepstep.tasks.replies import Replies
from keepstep.tasks.service import Service
from keepstep.tasks.tokens import TrustedKeys

log = structlog.get_logger("keepstep.worker")

_PREFETCH = 10
_LOOK_SECONDS = 0.25
_BACKOFF_SECONDS_MAX = 5.0
_ID_LENGTH_MAX = 200
_PUT_BACK = "keepstep-put-back"
_PUT_BACK_SECONDS = 1.0
_PUT_BACK_MAX = 60
"""How often a command is put back while a live worker carries the graph that it needs."""
_PUT_BACK_ALONE_MAX = 3
"""How often while none does: one may be starting."""


class _Held(NamedTuple):
    """A command that another worker is to have, in a moment."""

    message: Any
    due_at: float
    times: int


class Commands(Service):
    """Consumes the command queue; reconnects for ever."""

    name = "commands"

    def __init__(self, settings: Settings, runtime: Runtime) -> None:
        super().__init__()
        self._settings = settings
        self._runtime = runtime
        self._replies = Replies(settings)
        self._keys = TrustedKeys.of(settings)
        self._accept_unsigned = self._keys is None or settings.accept_unsigned
        self._backoff_seconds = 0.0
        self._held: list[_Held] = []

    def work(self) -> float:
        """Consume until told to stop or the connection breaks."""
        url, prefix = self._settings.broker, self._settings.queue
        try:
            with broker.connection(url, commands=True, queue=prefix) as connection:
                channel = connection.channel()
                # Where RabbitMQ puts what was delivered too often: it must be there before that happens.
                broker.rejected_queue(prefix)(channel).declare()
                queues = [broker.commands_queue(url, prefix)]
                with Consumer(channel, queues, on_message=self._received, prefetch_count=_PREFETCH):
                    self._drain(connection)
        finally:
            self._held.clear()  # not acknowledged: the broker delivers them again
        return 0.0

    def finish(self) -> None:
        """Close the connections."""
        self._replies.close()
        self._runtime.store.dispose()

    def _drain(self, connection: Connection) -> None:
        while not self.stopping:
            due_at = min((held.due_at for held in self._held), default=float("inf"))
            seconds = max(0.01, min(_LOOK_SECONDS, due_at - time.monotonic()))
            try:
                connection.drain_events(timeout=seconds)
            except TimeoutError:
                seconds = 0.0
            if self._held:
                with self.gate.hold():
                    self._put_back()
            if seconds and self._backoff_seconds:
                self.pause(self._backoff_seconds)
        for held in self._held:
            held.message.requeue()

    def _received(self, message: Any) -> None:
        if self.stopping:
            message.requeue()
            return
        with self.gate.hold():
            self._take(message)

    def _take(self, message: Any) -> None:
        raw = message.body
        body = raw.encode("utf-8", "surrogatepass") if isinstance(raw, str) else bytes(raw)
        principal = None
        try:
            command, principal = messages.receive(
                body,
                size_max=self._settings.message_bytes_max,
                keys=self._keys,
                accept_unsigned=self._accept_unsigned,
            )
            accepted = commands.accept(self._runtime, command, principal)
        except NotCarried as error:
            self._hold(message, body, error)
        except InvalidInput as error:
            self._audit(body, principal, error)
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

    def _hold(self, message: Any, body: bytes, error: NotCarried) -> None:
        """Keep a command for a moment, then leave it to a worker that carries what it needs; refuse it in the end."""
        self._backoff_seconds = 0.0
        times = _times_put_back(message)
        if times >= (_PUT_BACK_MAX if error.elsewhere else _PUT_BACK_ALONE_MAX):
            self._refuse(message, body, error)
            return
        log.info("command_left_to_others", command_id=_id_of(message, body), times=times + 1, reason=error.message)
        self._held.append(_Held(message, time.monotonic() + _PUT_BACK_SECONDS, times + 1))

    def _put_back(self) -> None:
        """Publish what was kept long enough again, with its count, behind what waits; then acknowledge it."""
        now = time.monotonic()
        for held in [held for held in self._held if held.due_at <= now]:
            properties = held.message.properties
            try:
                self._replies.publish(
                    held.message.body,
                    exchange="",
                    routing_key=broker.commands_name(self._settings.queue),
                    content_type=held.message.content_type or "application/json",
                    content_encoding=held.message.content_encoding or "utf-8",
                    correlation_id=properties.get("correlation_id"),
                    reply_to=properties.get("reply_to"),
                    headers={**_sent_at(held.message), _PUT_BACK: held.times},
                    delivery_mode="persistent",
                )
            except Blocked:
                return  # kept until RabbitMQ takes messages again
            self._held.remove(held)
            held.message.ack()

    def _audit(self, body: bytes, principal: Principal | None, error: InvalidInput) -> None:
        """Keep who wanted what they may not, with the thread that it is about."""
        if not isinstance(error, Forbidden | Unauthenticated):
            return
        found = refused.said_by(body)
        if found is not None:
            said, subject = found
            sender = refused.sender_of(said, subject, principal, error, takes_unsigned=self._accept_unsigned)
            refusals.record(self._runtime, said, sender, error)

    def _refuse(self, message: Any, body: bytes, error: KeepstepError) -> None:
        self._backoff_seconds = 0.0
        command_id = _id_of(message, body)
        log.warning("command_refused", command_id=command_id, code=error.code, reason=error.message[:1000])
        self._replies.send(message, command_id, messages.reply(command_id, error=error))
        if isinstance(error, Forbidden | Unauthenticated):
            # RabbitMQ keeps it, whole, for a person to look at: somebody tried what they may not.
            message.reject()
        else:
            message.ack()


def _sent_at(message: Any) -> dict[str, float]:
    """Return the header that says when a command was sent, if its sender said so."""
    found = (message.headers or {}).get(broker.SENT_AT)
    return {broker.SENT_AT: float(found)} if isinstance(found, int | float) else {}


def _times_put_back(message: Any) -> int:
    """Return how often workers have left a command to others."""
    found = (message.headers or {}).get(_PUT_BACK)
    return found if type(found) is int and found >= 0 else _PUT_BACK_MAX if found is not None else 0


def _id_of(message: Any, body: bytes) -> str:
    """Return the id that a refusal can be matched by, as far as the message has one."""
    found = message.properties.get("correlation_id")
    if not found:
        try:
            found = json.loads(body).get("id")
        except (ValueError, AttributeError, RecursionError):
            found = None
    return found if isinstance(found, str) and 0 < len(found) <= _ID_LENGTH_MAX and found.isprintable() else ""
