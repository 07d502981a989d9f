"""Kombu's Redis transport without its largest costs; under its own alias, so that nobody else's Celery changes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

from kombu.transport import redis
from redis.exceptions import NoScriptError

# One round trip for several queues; a list that is empty costs Redis next to nothing.
_FIRST = """\
for place, key in ipairs(KEYS) do
    local found = redis.call("RPOP", key)
    if found then return {place, found} end
end
return false"""
_FIRST_DIGEST = hashlib.sha1(_FIRST.encode()).hexdigest()  # noqa: S324  Redis's name for it


class Channel(redis.Channel):
    """A channel that keeps its Redis client."""

    _operations: Any = None
    _line: Any = None

    def _create_client(self, asynchronous: bool = False) -> Any:  # noqa: FBT001, FBT002  kombu's signature
        """Return the client of this channel's pool.

        Kombu makes a `redis.Redis` for every operation, which is half of the processor time of a publish (155 against
        78 µs measured). One serves them all: it is only a face of the pool, and the pool hands a connection of its own
        to every thread. A channel gets another pool after a fork or a lost connection, and then another client.
        """
        if asynchronous:
            return super()._create_client(asynchronous=True)  # made once per channel already: it does the waiting
        if self._operations is None or self._operations.connection_pool is not self.pool:
            self._operations = super()._create_client()
        return self._operations

    def push(self, queue: str, priority: int, message: bytes) -> None:
        """Put a message, which is as Kombu writes it, into a queue; one thread at a time.

        Past Kombu's and redis-py's layers, over a connection that the channel keeps: a third of the processor time.
        Raises redis-py's errors; the channel is of no further use then.
        """
        self._ask("LPUSH", self._q_for_pri(queue, priority), message)

    def pull(self, queues: Sequence[str]) -> tuple[str, bytes] | None:
        """Take the most urgent message that has waited longest out of the first of the queues that has one.

        Returns the key that it lay under and the message, None when there is none; done as `push` does it.
        """
        keys = [self._q_for_pri(queue, priority) for priority in self.priority_steps for queue in queues]
        try:
            found = self._ask("EVALSHA", _FIRST_DIGEST, len(keys), *keys)
        except NoScriptError:
            found = self._ask("EVAL", _FIRST, len(keys), *keys)
        return None if found is None else (keys[found[0] - 1], found[1])

    def put_back(self, key: str, message: bytes) -> None:
        """Put a message that was pulled back to where it was."""
        self._ask("RPUSH", key, message)

    def _ask(self, *command: str | int | bytes) -> Any:
        if self._line is None:
            self._line = self.pool.get_connection()
        self._line.send_command(*command)
        return self._line.read_response()

    def hang_up(self) -> None:
        """Drop the connection that waits for a message, as closing the channel would sit out that wait (a second).

        A message that arrives in this moment is lost: for replies that nobody waits for any more, not for work.
        """
        if self._in_poll:
            self.client.connection.disconnect()


class _Loop:
    """An event loop that is told of a reader once, not at every turn: a tenth of a consumer's processor time."""

    def __init__(self, loop: Any) -> None:
        self._loop = loop

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loop, name)

    def add_reader(self, fd: int, callback: Callable[..., object], *args: object) -> None:
        # What drops or replaces a connection takes its reader off first.
        if self._loop.readers.get(fd) != (callback, args):
            self._loop.add_reader(fd, callback, *args)


class Transport(redis.Transport):
    """Redis with the channel above."""

    Channel = Channel

    def register_with_event_loop(self, connection: Any, loop: Any) -> None:
        """Have a worker's event loop watch this transport's connections."""
        super().register_with_event_loop(connection, _Loop(loop))
