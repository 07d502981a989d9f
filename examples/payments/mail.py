"""The mail server: takes every mail in, and does not always live to say so.

python -m examples.payments.mail --mailbox mails.db --lost 0.1 --seed 7
"""

from __future__ import annotations

import argparse
import asyncio
import random
import signal
import sys
from email import message_from_bytes, policy
from email.message import EmailMessage
from pathlib import Path
from typing import Any

from aiosmtpd.smtp import SMTP, Envelope, Session

from examples.payments.mailbox import Mailbox

_ACCEPTED = "250 taken in"


class Receiver:
    """Takes mails in. `lost` is the share of those after which the connection is closed without an answer."""

    def __init__(self, mailbox: Mailbox, *, seed: int = 0, lost: float = 0.0, slow_seconds_max: float = 0.0) -> None:
        self._mailbox = mailbox
        self._seed = seed
        self._lost = lost
        self._slow_seconds_max = slow_seconds_max
        self._taken = 0

    async def handle_DATA(self, server: SMTP, _session: Session, envelope: Envelope) -> str:  # noqa: N802  the library's
        """Store a mail, then answer: whoever is killed in between does not know that it has arrived."""
        self._taken += 1
        rolled = random.Random(f"{self._seed}/mail/{self._taken}")  # noqa: S311  seeded on purpose
        content = envelope.content
        parsed = message_from_bytes(content if isinstance(content, bytes) else b"", policy=policy.SMTP)
        self._mailbox.add(
            message_id=_header(parsed, "Message-ID"),
            recipient=", ".join(envelope.rcpt_tos),
            reference=_header(parsed, "X-Refund"),
            subject=_header(parsed, "Subject"),
            text=_text(parsed),
        )
        await asyncio.sleep(rolled.random() * self._slow_seconds_max)
        if rolled.random() < self._lost and isinstance(server.transport, asyncio.WriteTransport):
            server.transport.abort()
        return _ACCEPTED


def _header(mail: Any, name: str) -> str:
    return str(mail[name] or "")


def _text(mail: Any) -> str:
    content = mail.get_content() if isinstance(mail, EmailMessage) and not mail.is_multipart() else ""
    return "\n".join(content.splitlines()).strip()


async def serve(receiver: Receiver, port: int = 0) -> asyncio.Server:
    """Listen on the loopback interface."""
    loop = asyncio.get_running_loop()
    return await loop.create_server(
        lambda: SMTP(receiver, hostname="localhost", loop=loop, enable_SMTPUTF8=True), "127.0.0.1", port
    )


async def _until_told(receiver: Receiver, port: int) -> None:
    told = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, told.set)
    server = await serve(receiver, port)
    print(f"listening on 127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await told.wait()
    server.close()


def main() -> int:
    """Serve until SIGTERM; the first line of output says where."""
    parser = argparse.ArgumentParser(prog="python -m examples.payments.mail", description=__doc__.partition("\n")[0])
    parser.add_argument("--mailbox", type=Path, required=True, help="the SQLite file")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0, help="decides after which mails the answer is lost")
    parser.add_argument("--lost", type=float, default=0.0, metavar="SHARE", help="share of answers that are lost")
    parser.add_argument("--slow", type=float, default=0.0, metavar="SECONDS", help="the longest time until the answer")
    chosen = parser.parse_args()
    mailbox = Mailbox(chosen.mailbox)
    receiver = Receiver(mailbox, seed=chosen.seed, lost=chosen.lost, slow_seconds_max=chosen.slow)
    asyncio.run(_until_told(receiver, chosen.port))
    mailbox.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
