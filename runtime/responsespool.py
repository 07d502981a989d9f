"""Responses that were paid for, on this machine's disk until the database has them.

Between a model's answer and the commit that records it a process may be killed, and the database may be away. What is
here then is found by the next attempt on this machine, which records it instead of asking again. A file is named by the
digest of its call's idempotency key, and says itself whether it is whole. It outlives a process, not a machine: nothing
waits for the disk. Whatever goes wrong here costs nothing but that second chance: it is logged, and the call goes on.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import stat
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
import structlog

from keepstep.settings import Settings

log = structlog.get_logger("keepstep.model")

_MARK: Final = b"KSR1"
_DIGEST_BYTES: Final = 16
_SWEEP_SECONDS: Final = 60.0
_SHARED_WITH_OTHERS: Final = 0o077
_OURS: Final = re.compile(r"[0-9a-f]{40}(\.[0-9]+-[0-9]+)?")


class Received(NamedTuple):
    """A response that was received and not recorded."""

    arguments_digest: bytes
    """Of the request that it answers."""
    result: bytes
    said: bytes
    """What only the one who received it knows: how long it took, what was said of the call besides its request."""


@dataclass(frozen=True, slots=True)
class SpoolBounds:
    """How much is kept at most; the oldest is given up first."""

    seconds_max: float
    count_max: int
    bytes_max: int


class ResponseSpool:
    """A folder of responses; processes and threads share it. Made with mode 0700 when it is missing.

    It is not used unless it belongs to this user alone: what lies in it becomes what nodes are told.
    """

    def __init__(self, folder: Path, bounds: SpoolBounds) -> None:
        self.folder = folder
        self._prefix = f"{folder}{os.sep}"
        self._bounds = bounds
        self._lock = threading.Lock()
        self._next_sweep = 0.0
        self._usable: bool | None = None

    def put(self, key: str, received: Received) -> None:
        """Keep the response to the call with an idempotency key."""
        if not self._is_usable():
            return
        content = msgspec.msgpack.encode(received)
        path = self._path(key)
        part = f"{path}.{os.getpid()}-{threading.get_ident()}"
        try:
            descriptor = os.open(part, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_NOFOLLOW, 0o600)
            try:
                _write_all(descriptor, b"".join((_MARK, _digest(content), content)))
            finally:
                os.close(descriptor)
            os.rename(part, path)  # noqa: PTH104  this is on the way of every call, and a Path costs more than the rename
        except OSError as error:
            log.warning("response_not_spooled", folder=str(self.folder), reason=str(error))
            self._usable = None
        self.sweep_sometimes()

    def get(self, key: str, arguments_digest: bytes) -> Received | None:
        """Return the response to a call, if it is here whole and answers the same request."""
        if not self._is_usable():
            return None
        try:
            descriptor = os.open(self._path(key), os.O_RDONLY | os.O_NOFOLLOW)
            with os.fdopen(descriptor, "rb") as file:
                data = file.read()
        except FileNotFoundError:
            return None
        except OSError as error:
            log.warning("spooled_response_not_read", folder=str(self.folder), reason=str(error))
            return None
        head, content = data[: len(_MARK) + _DIGEST_BYTES], data[len(_MARK) + _DIGEST_BYTES :]
        if head != _MARK + _digest(content):
            return None  # torn
        with contextlib.suppress(msgspec.DecodeError):
            received = msgspec.msgpack.decode(content, type=Received)
            return received if received.arguments_digest == arguments_digest else None
        return None

    def remove(self, key: str) -> None:
        """Forget the response to a call: it is recorded."""
        if self._usable:
            with contextlib.suppress(OSError):
                os.unlink(self._path(key))  # noqa: PTH108  as above

    def sweep(self) -> int:
        """Remove what is older, more or larger than the bounds; return how many files."""
        found = []
        with contextlib.suppress(OSError), os.scandir(self.folder) as entries:
            for entry in entries:
                if _OURS.fullmatch(entry.name) is None:
                    continue  # the folder is a setting, and may hold what somebody else keeps there
                with contextlib.suppress(OSError):  # somebody else has removed it meanwhile
                    status = entry.stat(follow_symlinks=False)
                    found.append((status.st_mtime, status.st_size, entry.path))
        found.sort(reverse=True)
        oldest, bytes_left, removed = time.time() - self._bounds.seconds_max, self._bounds.bytes_max, 0
        for number, (changed, size, path) in enumerate(found):
            bytes_left -= size
            if changed < oldest or number >= self._bounds.count_max or bytes_left < 0:
                with contextlib.suppress(OSError):
                    Path(path).unlink()
                    removed += 1
        return removed

    def sweep_sometimes(self) -> None:
        """Sweep, unless that was done a moment ago; a worker without models to ask does it now and then, too."""
        with self._lock:
            now = time.monotonic()
            if now < self._next_sweep:
                return
            self._next_sweep = now + _SWEEP_SECONDS
        self.sweep()

    def _path(self, key: str) -> str:
        return self._prefix + hashlib.blake2b(key.encode(), digest_size=20).hexdigest()

    def _is_usable(self) -> bool:
        if self._usable is None:
            self._usable = self._checked()
        return self._usable

    def _checked(self) -> bool:
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = self.folder.lstat()
        except OSError as error:
            log.warning("response_spool_not_used", folder=str(self.folder), reason=str(error))
            return False
        ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
        if not ours or status.st_mode & _SHARED_WITH_OTHERS:
            reason = "it is not a folder of this user alone: chown it, chmod 700"
            log.warning("response_spool_not_used", folder=str(self.folder), reason=reason)
            return False
        return True


def of_settings(chosen: Settings) -> ResponseSpool | None:
    """Return the spool that settings name; None: responses are not kept."""
    if chosen.response_spool == "off":
        return None
    folder = default_folder() if chosen.response_spool == "auto" else Path(chosen.response_spool)
    bounds = SpoolBounds(
        chosen.response_spool_seconds_max, chosen.response_spool_count_max, chosen.response_spool_bytes_max
    )
    return ResponseSpool(folder, bounds)


def default_folder() -> Path:
    """Return this user's own folder in the system's temporary one."""
    return Path(tempfile.gettempdir()) / f"keepstep-responses-{os.geteuid()}"


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=_DIGEST_BYTES).digest()


def _write_all(descriptor: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(descriptor, left) :]
