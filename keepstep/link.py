"""A client's connections: bounded in time, made again when they break; and the replies that come back on one."""

from __future__ import annotations

import functools
import json
import random
import threading
import time
from collections import OrderedDict
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import kombu
from amqp.exceptions import MessageNacked

from keepstep import broker, errors, ids
from keepstep.blockage import Blocked

if TYPE_CHECKING:
    from collections.abc import Callable


_REPLIES_KEPT_MAX = 10_000
_COLLECTED_MAX = 1000
_WAIT_SECONDS = 0.2
_SILENCE_SECONDS = 0.01


class Link:
    """One connection for commands or replies; for one thread at a time."""

    def __init__(self, url: str, queue: str, timeout: float) -> None:
        self._url = url
        # An operation takes all of its own time-out to notice that its connection is dead, and must leave room for
        # another try.
        self._make = functools.partial(
            broker.connection, url, commands=True, queue=queue, timeout_seconds=max(timeout / 2, 0.05)
        )
        self._connection: kombu.Connection | None = None
        self._channel: Any = None

    @property
    def channel(self) -> Any:
        """The open connection's channel; None when nothing is open."""
        return self._channel

    def run(self, action: Callable[[Any], None], deadline: float) -> None:
        """Do `action(channel)`, again when the broker fails, until `deadline` (`time.monotonic()`).

        Raises `BrokerUnavailable` naming the broker when time is over; the action may have happened even so.
        """
        pause = 0.05
        while True:
            try:
                if self._channel is None:
                    self._open()
                action(self._channel)
            except Exception as error:
                outage = self._connection is not None and isinstance(error, self._outages())
                late = time.monotonic() + pause >= deadline
                # One that is blocked is kept, as long as it is for the same message.
                if late or not isinstance(error, Blocked):
                    self.close(broken=True)
                if not outage:
                    raise
                if late:
                    cause = broker.scrubbed(f"{type(error).__name__}: {error}", self._url)
                    message = f"the broker at {broker.redacted(self._url)} cannot be reached: {cause}"
                    raise errors.BrokerUnavailable(message) from error
            else:
                return
            time.sleep(pause * random.uniform(0.5, 1))  # noqa: S311  spreads clients, hides nothing
            pause = min(pause * 2, 1.0)

    def _open(self) -> None:
        self._connection = self._make()
        self._connection.ensure_connection(max_retries=0, reraise_as_library_errors=False)
        self._channel = self._connection.channel()

    def _outages(self) -> tuple[type[Exception], ...]:
        """Return what a client library raises when it is the broker's fault, or the network's."""
        connection = self._connection
        assert connection is not None  # noqa: S101  `run` asked
        # RabbitMQ refuses a message when the queue's leader is just being chosen, or was lost.
        return (*connection.connection_errors, *connection.channel_errors, OSError, MessageNacked)

    def drain(self, seconds: float) -> bool:
        """Deliver what comes within `seconds` to the channel's consumers; say whether anything came."""
        assert self._connection is not None  # noqa: S101  called by an action of `run`
        try:
            self._connection.drain_events(timeout=seconds)
        except TimeoutError:
            return False
        return True

    def close(self, *, broken: bool = False) -> None:
        """Close the connection; a broken one without telling the broker, which could take long."""
        connection, channel = self._connection, self._channel
        self._connection = self._channel = None
        if connection is None:
            return
        # Whatever a library has to say about a connection that we give up is no news to our caller.
        with suppress(Exception):
            if hasattr(channel, "hang_up"):
                channel.hang_up()
            if broken:
                connection.collect()
        try:
            connection.release()
        except Exception:  # noqa: BLE001  as above; but the socket must not stay open
            with suppress(Exception):
                connection.collect()


class Replies:
    """A client's reply queue, and the replies that came and were not asked for yet. For any number of threads."""

    def __init__(self, url: str, queue: str, timeout: float) -> None:
        self.name = broker.replies_prefix(queue) + ids.new_id()
        self._link = Link(url, queue, timeout)
        self._consuming_on: Any = None
        self._reading = threading.Lock()
        self._arrived: OrderedDict[str, dict[str, Any]] = OrderedDict()

    def wait(self, command_id: str, timeout: float) -> dict[str, Any]:
        """Return the reply to a command; raise `NotConfirmed` when none came within `timeout` seconds."""
        deadline = time.monotonic() + timeout
        outage: errors.BrokerUnavailable | None = None
        while True:
            reply = self._arrived.get(command_id)
            if reply is not None:
                return reply
            left = deadline - time.monotonic()
            if left <= 0 or outage is not None:
                because = f"; {outage}" if outage else ""
                message = (
                    f"no worker has confirmed command {command_id} within {timeout:g} s{because}: "
                    "it may still be accepted later, and may be sent again with the same id"
                )
                raise errors.NotConfirmed(message)
            # One of the waiting threads reads for all of them.
            if self._reading.acquire(timeout=min(left, _WAIT_SECONDS)):
                try:
                    if command_id not in self._arrived:
                        self._link.run(self._wait_a_little, deadline)
                except errors.BrokerUnavailable as error:
                    outage = error
                finally:
                    self._reading.release()

    def collect(self, deadline: float) -> None:
        """Take in what has arrived, so that replies nobody asks for do not fill the broker."""

        def read(channel: Any) -> None:
            for _ in range(_COLLECTED_MAX):
                if not self._read(channel, _SILENCE_SECONDS):
                    return

        if self._reading.acquire(blocking=False):
            try:
                with suppress(errors.BrokerUnavailable):  # the message is sent; replies can wait
                    self._link.run(read, deadline)
            finally:
                self._reading.release()

    def _wait_a_little(self, channel: Any) -> None:
        self._read(channel, _WAIT_SECONDS)

    def _read(self, channel: Any, seconds: float) -> bool:
        if self._consuming_on is not channel:
            kombu.Consumer(
                channel, [broker.replies_queue(self.name)], no_ack=True, on_message=self._on_message
            ).consume()
            self._consuming_on = channel
        return self._link.drain(seconds)

    def _on_message(self, message: Any) -> None:
        with suppress(ValueError, TypeError, KeyError):  # whatever else may stand in our queue is not a reply
            reply = json.loads(message.body)
            self._arrived.setdefault(str(reply["id"]), reply)
        while len(self._arrived) > _REPLIES_KEPT_MAX:
            self._arrived.popitem(last=False)

    def close(self) -> None:
        """Close the connection."""
        with self._reading:
            self._link.close()
