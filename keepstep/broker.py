"""Brokers: how each kind is connected to, what its queues are called, and how a message is answered.

Two kinds of traffic need opposite promises (DESIGN: commands are somebody's intent, nudges are hints), and the options
that make them are per connection, so each has its own. Importing this module makes `file://` known to Kombu and Celery.
"""

from __future__ import annotations

import hashlib
import logging
import re
import ssl
from typing import Any
from urllib.parse import quote, unquote

import kombu
from kombu.transport import TRANSPORT_ALIASES

from keepstep import blockage, brokertls
from keepstep.errors import InvalidSettings
from keepstep.priority import PRIORITIES

_logger = logging.getLogger(__name__)

TRANSPORT_ALIASES.setdefault("file", "keepstep.filebroker:Transport")
TRANSPORT_ALIASES.setdefault("keepstep-redis", "keepstep.redisbroker:Transport")

_KINDS = {
    "file": "file",
    "redis": "redis",
    "rediss": "redis",
    "redis+socket": "redis",
    "amqp": "amqp",
    "amqps": "amqp",
    "pyamqp": "amqp",
    "memory": "memory",
}
SENT_AT = "sent_at"
"""The header of a command that says when it was sent, in seconds since 1970 by its sender's clock."""
_REPLIES_EXPIRE_SECONDS = 600
_NUDGES_EXPIRE_SECONDS = 7 * 86400
_NAME_LENGTH_MAX = 255  # of RabbitMQ, and of a folder's name, which the file broker quotes
_REDIS_NUDGES = {"priority_steps": list(range(len(PRIORITIES))), "ack_emulation": False}
_REDELIVER_SECONDS = 30
_DELIVERY_LIMIT = 20


def kind_of(url: str) -> str:
    """Return `file`, `redis`, `amqp` or `memory`; raise `InvalidSettings` naming the scheme when it is none of them."""
    scheme, separator, rest = url.partition("://")
    kind = _KINDS.get(scheme) if separator else None
    if kind is None:
        shown = repr(scheme) if separator else "no scheme"
        message = f"broker: {shown} is not a broker Keepstep knows; use one of {', '.join(f'{s}://' for s in _KINDS)}"
        raise InvalidSettings(message)
    if kind == "file" and not rest.strip("/"):
        message = "broker: a file broker needs a folder: file://folder or file:///absolute/folder"
        raise InvalidSettings(message)
    return kind


def redacted(url: str) -> str:
    """Return `url` without passwords, for messages and logs."""
    if url.startswith("file://"):
        return url
    return ";".join(_redacted(one) for one in url.split(";"))


def _redacted(url: str) -> str:
    scheme, separator, rest = url.partition("://")
    if not separator:
        return "***"  # what has no shape of a URL may be anything, also a password
    rest, question, query = rest.partition("?")
    # To the last `@`: a password with an `@` or a `/` in it, which should have been quoted, must not show either.
    login, at, place = rest.rpartition("@")
    user, colon, _ = login.partition(":")
    query = re.sub(r"=[^&]*", "=***", query)  # passwords and key files stand there under many names
    return f"{scheme}{separator}{user}{':***' if colon else ''}{at}{place}{question}{query}"


def scrubbed(text: str, url: str) -> str:
    """Return `text`, which a library wrote about the broker at `url`, without the URL's password."""
    for one in url.split(";"):
        password = one.partition("://")[2].partition("?")[0].rpartition("@")[0].partition(":")[2]
        for form in {password, unquote(password)} - {""}:
            text = text.replace(form, "***")
    return text


def transport_options(
    url: str, *, commands: bool, queue: str = "keepstep", timeout_seconds: float = 5.0
) -> dict[str, Any]:
    """Return Kombu's `transport_options` for the broker at `url`.

    `commands`: the connection carries commands (acknowledged, confirmed, on the disk) and not nudges. `queue` is the
    prefix of this deployment's names. No single operation on the network takes longer than `timeout_seconds`.
    """
    kind = kind_of(url)
    if kind == "file":
        return {"fsync": commands}
    if kind == "amqp":
        return {
            "confirm_publish": True,
            "connect_timeout": timeout_seconds,
            "read_timeout": timeout_seconds,
            "write_timeout": timeout_seconds,
        }
    if kind == "redis":
        return {
            "socket_timeout": timeout_seconds,
            "socket_connect_timeout": min(2.0, timeout_seconds),
            "socket_keepalive": True,
            **(_redis_acknowledgement(queue) if commands else _REDIS_NUDGES),
        }
    return {}


def _redis_acknowledgement(queue: str) -> dict[str, Any]:
    """Return the options that keep a delivered command until it is acknowledged.

    The keys are the deployment's own: under Kombu's shared ones this short time-out would also apply to the tasks that
    another Celery application keeps in the same database.
    """
    return {
        # A priority is a key of its own here, and commands have none.
        "priority_steps": [0],
        "ack_emulation": True,
        "visibility_timeout": _REDELIVER_SECONDS,
        "unacked_key": f"{queue}.unacked",
        "unacked_index_key": f"{queue}.unacked_index",
        "unacked_mutex_key": f"{queue}.unacked_mutex",
        "unacked_mutex_expire": _REDELIVER_SECONDS,
        "unacked_restore_interval": 2,
        "unacked_restore_throttle": 1,
    }


def _connect_arguments(url: str) -> dict[str, Any]:
    """Return the URL as Kombu is to be given it, and the transport and TLS arguments that it would not find in it."""
    scheme = url.partition("://")[0]
    arguments: dict[str, Any] = {"hostname": url}
    if scheme == "amqps":
        arguments["hostname"], arguments["ssl"] = brokertls.separated(url)
    if scheme in {"redis", "rediss"}:
        arguments["transport"] = "keepstep-redis"
    if scheme == "rediss":
        # Kombu verifies no certificate unless told to; `?ssl_cert_reqs=…` and its like in the URL still win.
        arguments["ssl"] = {"ssl_cert_reqs": ssl.CERT_REQUIRED}
    return arguments


def connection(url: str, *, commands: bool, queue: str = "keepstep", timeout_seconds: float = 5.0) -> kombu.Connection:
    """Return a connection to the broker at `url`, not yet opened; arguments as of `transport_options`.

    Raises `InvalidSettings` for a URL that cannot be read.
    """
    options = transport_options(url, commands=commands, queue=queue, timeout_seconds=timeout_seconds)
    if kind_of(url) == "amqp":
        options |= blockage.options()
    try:
        return kombu.Connection(transport_options=options, connect_timeout=timeout_seconds, **_connect_arguments(url))
    except ValueError:
        # What could not be read may be a part of the password, and the parser's words quote it.
        message = (
            "broker: the URL cannot be read; signs like @, : and / in a user or password are written %40, %3A, %2F"
        )
        raise InvalidSettings(message) from None


def celery_settings(url: str, *, queue: str = "keepstep", timeout_seconds: float = 5.0) -> dict[str, Any]:
    """Return the Celery settings that make an application's own connections those of nudges at `url`."""
    arguments = _connect_arguments(url)
    settings: dict[str, Any] = {
        "broker_url": arguments["hostname"],
        "broker_transport_options": transport_options(
            url, commands=False, queue=queue, timeout_seconds=timeout_seconds
        ),
        "broker_connection_timeout": timeout_seconds,
    }
    if "transport" in arguments:
        settings["broker_transport"] = arguments["transport"]
    if "ssl" in arguments:
        settings["broker_use_ssl"] = arguments["ssl"]
    return settings


# --- queues -----------------------------------------------------------------------------------------------------------


def commands_name(queue: str) -> str:
    """Return the name of the queue of commands."""
    return f"{queue}.commands"


def nudges_name(queue: str, graph: str) -> str:
    """Return the name of the queue of one graph version's nudges; `graph` is how rows name it."""
    name = f"{queue}.nudges.{graph}"
    if len(quote(name, safe="")) <= _NAME_LENGTH_MAX:
        return name
    return f"{queue}.nudges.~{hashlib.blake2b(graph.encode(), digest_size=16).hexdigest()}"


def replies_prefix(queue: str) -> str:
    """Return what the name of every reply queue starts with."""
    return f"{queue}.replies."


def commands_queue(url: str, queue: str) -> kombu.Queue:
    """Return the durable queue of commands, which every client and worker declares alike.

    On RabbitMQ it is a quorum queue, and a command that was delivered too often without being acknowledged moves to
    `rejected_queue` instead of taking down worker after worker.
    """
    arguments = {}
    if kind_of(url) == "amqp":
        arguments = {
            "x-queue-type": "quorum",
            "x-delivery-limit": _DELIVERY_LIMIT,
            "x-dead-letter-exchange": "",
            "x-dead-letter-routing-key": f"{commands_name(queue)}.rejected",
        }
    return _queue(commands_name(queue), arguments)


def nudges_queue(url: str, queue: str, graph: str) -> kombu.Queue:
    """Return the queue of one graph version's nudges; one that nobody consumes any more vanishes."""
    arguments = {}
    if kind_of(url) == "amqp":
        arguments = {"x-max-priority": len(PRIORITIES) - 1, "x-expires": _NUDGES_EXPIRE_SECONDS * 1000}
    return _queue(nudges_name(queue, graph), arguments)


def message_priority(url: str, priority: int) -> int:
    """Return what a message says for a row's priority, 0 being the most urgent: on RabbitMQ the largest goes first."""
    return len(PRIORITIES) - 1 - priority if kind_of(url) == "amqp" else priority


def rejected_queue(queue: str) -> kombu.Queue:
    """Return the durable queue of commands that nobody could handle (RabbitMQ); workers declare it."""
    return _queue(f"{commands_name(queue)}.rejected", {})


def replies_queue(name: str) -> kombu.Queue:
    """Return a client's queue of replies, which vanishes ten minutes after it was last used."""
    # Durable, as RabbitMQ is giving up queues that are neither durable nor exclusive; and not exclusive, as a client
    # that has lost its connection comes back on another one.
    return _queue(name, {"x-expires": _REPLIES_EXPIRE_SECONDS * 1000})


def _queue(name: str, arguments: dict[str, Any]) -> kombu.Queue:
    return kombu.Queue(name, kombu.Exchange(""), routing_key=name, durable=True, queue_arguments=arguments)


def publish_reply(producer: kombu.Producer, body: bytes, *, reply_to: str, correlation_id: str, queue: str) -> bool:
    """Answer a command; say whether the reply was sent.

    A reply goes only to a queue of replies: whoever may send a command must not make a worker write to other queues.
    Losing one is harmless, since a client that got none asks again, so a caller logs an error of this and goes on.
    """
    if not reply_to.startswith(replies_prefix(queue)):
        _logger.warning("a command wants its reply in a queue that is none of replies: not answered")
        return False
    channel = producer.channel
    blockage.check(channel)
    # Redis and the file broker give a queue its time to live when it is declared or published to by a channel that
    # declared it. On RabbitMQ a reply to a client that is gone must find no queue.
    if producer.connection.transport.driver_type in {"redis", "file"}:
        replies_queue(reply_to)(channel).declare()
    producer.publish(
        body,
        exchange="",
        routing_key=reply_to,
        correlation_id=correlation_id,
        content_type="application/json",
        content_encoding="utf-8",
        delivery_mode="transient",
    )
    # The channel outlives its clients: it must not remember each of their queues.
    for memory in (getattr(channel, "_expires", None), getattr(channel, "_expires_seconds", None)):
        if memory is not None:
            memory.pop(reply_to, None)
    return True
