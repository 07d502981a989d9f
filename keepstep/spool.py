"""The file broker's folder: queues as folders, messages as files, every step one atomic rename.

    queues/<queue>/<priority><time>-<process>.msg
                                             a message that waits; its name gives its place in the line
    queues/<queue>/.<…>.msg                  a message that is still being written: nobody reads names with a dot
    queues/<queue>/.expires                  the queue vanishes this many seconds after it was last asked for
    in-flight/<process>/<queue>/<…>.msg      a message that a live process has claimed and not yet acknowledged
    in-flight/<process>.lock                 held by `flock` for as long as that process lives
    bindings/<exchange>/<queue>/<key>        a routing key by which the queue is bound to a topic exchange
    rejected/<queue>/<…>.msg                 a file that is not a message, kept for a person to look at

A process that dies by any signal loses its lock, and its peers give back what it had claimed. A claimed message is
deleted when it is acknowledged, so a message is delivered at least once, and twice only when its consumer died between
doing the work and saying so. All of it needs one machine and a local file system: `flock` and `rename` over a network
are other promises.

Files reach the disk when the kernel likes, unless the publisher asks for `fsync`: a process that dies loses nothing
either way, a machine that loses its power may lose what was published in the last seconds, or leave an empty file,
which is rejected when it is read. Commands ask for it, nudges do not, since the sweep sends those again.
"""

# Names are strings here: this is the hot path of every hop, and making a Path costs more than the rename.
# ruff: noqa: PTH103, PTH104, PTH106, PTH108, PTH112, PTH116, PTH118, PTH119, PTH123, PTH208

from __future__ import annotations

import base64
import errno
import fcntl
import logging
import os
import secrets
import shutil
import threading
import time
from collections import deque
from contextlib import suppress
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, unquote

from kombu.utils.json import dumps, loads

_logger = logging.getLogger(__name__)

_MESSAGE = ".msg"
_RETURNED = ".again.msg"
_EXPIRES = ".expires"
_RECOVER_SECONDS = 1.0
_TIDY_SECONDS = 30.0
_ABANDONED_SECONDS = 3600.0
_LISTING_MAX = 1000
_LISTING_SECONDS = 0.25


class Claim(NamedTuple):
    """A message taken from its queue: what it says, and where its file waits for the acknowledgement."""

    payload: dict[str, Any]
    path: str | None
    """None: it was consumed without acknowledgement, so there is no file any more."""
    pid: int
    """The process that claimed it; a forked child must not give it back."""


class Spool:
    """One broker folder as one process sees it; shared by the connections and threads of that process."""

    def __init__(self, root: str) -> None:
        self._queues = os.path.join(root, "queues")
        self._in_flight = os.path.join(root, "in-flight")
        self._bindings = os.path.join(root, "bindings")
        self._rejected = os.path.join(root, "rejected")
        self._process = f"{os.getpid()}-{secrets.token_hex(8)}"
        self._names = threading.Lock()
        self._last_name = 0
        self._holding = threading.Lock()
        self._lock_file: int | None = None
        self._listings: dict[str, deque[str]] = {}
        self._listed_at: dict[str, float] = {}
        self._expiring: dict[str, tuple[float, float]] = {}
        self._upkeep = threading.Lock()
        self._recover_at = self._tidy_at = 0.0
        # The state, inputs and decisions of threads pass through here: the folder is its owner's alone, unless
        # somebody made it beforehand with the mode they want.
        os.makedirs(root, mode=0o700, exist_ok=True)
        for folder in (self._queues, self._in_flight, self._rejected):
            os.makedirs(folder, exist_ok=True)
        Finalize(self, Spool.leave, args=(self,), exitpriority=0)  # after kombu gave its messages back, at priority 1

    # --- publishing ---------------------------------------------------------------------------------------------

    def put(self, queue: str, payload: dict[str, Any], *, priority: int = 0, fsync: bool) -> None:
        """Add a message to `queue`, behind those of its priority (0 to 9, 0 goes first).

        It is there for everybody, whole, or not at all.
        """
        data = dumps(payload).encode()
        folder, name = self._folder(queue), self._next_name(priority)
        for again in (True, False):
            try:
                _write(folder, name, data, fsync=fsync)
            except FileNotFoundError:
                if not again:
                    raise
                os.makedirs(folder, exist_ok=True)
            else:
                return

    def _next_name(self, priority: int) -> str:
        """Return a name after every name of this process, and near its place among those of the others."""
        with self._names:
            self._last_name = max(time.time_ns(), self._last_name + 1)  # the clock may be set back
            return f"{priority}{self._last_name:019d}-{self._process}{_MESSAGE}"

    # --- consuming ----------------------------------------------------------------------------------------------

    def claim(self, queue: str, *, keep: bool) -> Claim | None:
        """Take the first message of `queue`, or None when it is empty.

        `keep`: hold its file until `acknowledge` or `give_back`; otherwise it is gone once it was read.
        """
        self._keep_alive(queue)
        while (name := self._next_listed(queue)) is not None:
            path = os.path.join(self._folder(queue), name)
            claimed = self._take(queue, name, path) if keep else path
            if claimed is None:
                continue
            try:
                payload = _read(claimed)
                if not keep:
                    os.unlink(claimed)  # whoever deletes it has it
            except FileNotFoundError:
                continue
            except (OSError, ValueError) as error:
                self._reject(queue, name, claimed, error)
                continue
            if name.endswith(_RETURNED):
                payload["properties"].setdefault("delivery_info", {})["redelivered"] = True
            return Claim(payload, claimed if keep else None, os.getpid())
        return None

    def _next_listed(self, queue: str) -> str | None:
        """Return the name that is next in `queue`; others may have taken it meanwhile.

        One listing serves many claims: listing and sorting a long queue for each of them would be quadratic.
        """
        listing = self._listings.setdefault(queue, deque())
        now = time.monotonic()
        # What came since may be more urgent.
        if now - self._listed_at.get(queue, 0.0) < _LISTING_SECONDS:
            with suppress(IndexError):
                return listing.popleft()
        try:
            names = os.listdir(self._folder(queue))
        except FileNotFoundError:
            return None
        waiting = sorted(name for name in names if name.endswith(_MESSAGE) and not name.startswith("."))
        listing.clear()
        listing.extend(waiting[1:_LISTING_MAX])
        self._listed_at[queue] = now
        return waiting[0] if waiting else None

    def _take(self, queue: str, name: str, path: str) -> str | None:
        """Move a message into this process's in-flight folder; None when somebody else was faster."""
        folder = os.path.join(self._own_folder(), _quoted(queue))
        target = os.path.join(folder, name)
        for again in (True, False):
            try:
                os.rename(path, target)
            except FileNotFoundError:
                if not again or os.path.isdir(folder):
                    return None
                os.makedirs(folder, exist_ok=True)
            else:
                return target
        return None

    def _reject(self, queue: str, name: str, path: str, error: Exception) -> None:
        """Move a file that cannot be read as a message out of everybody's way."""
        folder = os.path.join(self._rejected, _quoted(queue))
        os.makedirs(folder, exist_ok=True)
        with suppress(FileNotFoundError):
            os.rename(path, os.path.join(folder, name))
            # Its content may be secret: the error's type and the file's place must do.
            _logger.error("queue %s: %s is not a message (%s), moved to %s", queue, name, type(error).__name__, folder)

    def acknowledge(self, claim: Claim) -> None:
        """Delete a claimed message."""
        if claim.path is not None:
            with suppress(FileNotFoundError):
                os.unlink(claim.path)

    def give_back(self, queue: str, claim: Claim) -> None:
        """Return a claimed message to its place in `queue`."""
        if claim.path is not None and claim.pid == os.getpid():
            self._return(_quoted(queue), claim.path)

    def _return(self, quoted: str, path: str) -> None:
        folder = os.path.join(self._queues, quoted)
        name = os.path.basename(path).removesuffix(_RETURNED).removesuffix(_MESSAGE) + _RETURNED
        os.makedirs(folder, exist_ok=True)
        with suppress(FileNotFoundError):
            os.rename(path, os.path.join(folder, name))

    # --- queues -------------------------------------------------------------------------------------------------

    def declare(self, queue: str, *, expires_seconds: float | None) -> None:
        """Make sure that `queue` exists."""
        folder = self._folder(queue)
        os.makedirs(folder, exist_ok=True)
        if expires_seconds is not None:
            Path(folder, _EXPIRES).write_text(repr(expires_seconds), encoding="ascii")

    def consume(self, queue: str, *, expires_seconds: float) -> None:
        """Keep an expiring queue alive for as long as this process asks it for messages."""
        self._expiring[queue] = (expires_seconds, 0.0)

    def _keep_alive(self, queue: str) -> None:
        seconds, due = self._expiring.get(queue, (0.0, 0.0))
        now = time.monotonic()
        if seconds and now >= due:
            self._expiring[queue] = (seconds, now + seconds / 4)
            self.declare(queue, expires_seconds=seconds)

    def size(self, queue: str) -> int:
        """Return the number of messages that wait in `queue`."""
        return len(self._waiting(queue))

    def oldest(self, queue: str) -> float | None:
        """Return when the message that comes next in `queue` was put there (seconds since 1970), None without one."""
        name = min(self._waiting(queue), default=None)
        return None if name is None else int(name.partition("-")[0]) / 1e9

    def purge(self, queue: str) -> int:
        """Delete the messages that wait in `queue`; return their number."""
        count = 0
        for name in self._waiting(queue):
            with suppress(FileNotFoundError):
                os.unlink(os.path.join(self._folder(queue), name))
                count += 1
        return count

    def delete(self, queue: str) -> None:
        """Delete `queue` with all that waits in it, and its bindings."""
        self._expiring.pop(queue, None)
        self._listings.pop(queue, None)
        shutil.rmtree(self._folder(queue), ignore_errors=True)
        for exchange in _listed(self._bindings):
            shutil.rmtree(os.path.join(self._bindings, exchange, _quoted(queue)), ignore_errors=True)

    def bind(self, exchange: str, queue: str, key: str) -> None:
        """Bind `queue` to `exchange` by a routing key, which is all that is kept of it."""
        folder = os.path.join(self._bindings, _quoted(exchange), _quoted(queue))
        os.makedirs(folder, exist_ok=True)
        Path(folder, _quoted(key)).touch()

    def bound(self, exchange: str) -> list[tuple[str, str]]:
        """Return (routing key, queue) of every binding to `exchange`."""
        folder = os.path.join(self._bindings, _quoted(exchange))
        return [
            (unquote(key), unquote(queue)) for queue in _listed(folder) for key in _listed(os.path.join(folder, queue))
        ]

    def exists(self, queue: str) -> bool:
        """Say whether `queue` was declared."""
        return os.path.isdir(self._folder(queue))

    def _waiting(self, queue: str) -> list[str]:
        try:
            names = os.listdir(self._folder(queue))
        except FileNotFoundError:
            return []
        return [name for name in names if name.endswith(_MESSAGE) and not name.startswith(".")]

    def _folder(self, queue: str) -> str:
        return os.path.join(self._queues, _quoted(queue))

    # --- life and death of processes ----------------------------------------------------------------------------

    def _own_folder(self) -> str:
        """Return this process's in-flight folder, locked before its first message is in it."""
        with self._holding:
            while self._lock_file is None:
                lock = os.open(self._lock_path(self._process), os.O_RDWR | os.O_CREAT, 0o600)
                # A peer that sees the file before it is locked takes it for a dead process's and deletes it: then
                # this lock is on a file that nobody finds, so another name is needed.
                if _locked(lock) and os.fstat(lock).st_nlink:
                    os.makedirs(os.path.join(self._in_flight, self._process), exist_ok=True)
                    self._lock_file = lock
                else:
                    os.close(lock)
                    self._process = f"{os.getpid()}-{secrets.token_hex(8)}"
            return os.path.join(self._in_flight, self._process)

    def look_after(self) -> None:
        """Give back what dead processes held, and delete what nobody needs; cheap enough to call at every poll."""
        now = time.monotonic()
        if now < self._recover_at or not self._upkeep.acquire(blocking=False):
            return
        try:
            self._recover_at = now + _RECOVER_SECONDS
            self._recover()
            if now >= self._tidy_at:
                self._tidy_at = now + _TIDY_SECONDS
                self._tidy()
        finally:
            self._upkeep.release()

    def _recover(self) -> None:
        with suppress(FileNotFoundError):  # the folder was deleted under us; publishing makes it again
            for process in {name.removesuffix(".lock") for name in os.listdir(self._in_flight)} - {self._process}:
                lock = os.open(self._lock_path(process), os.O_RDWR | os.O_CREAT, 0o600)
                try:
                    if _locked(lock):
                        self._bury(process)
                finally:
                    os.close(lock)

    def _bury(self, process: str) -> None:
        """Give back the messages of a process that is dead; its lock is ours. The lock goes last: see `_own_folder`."""
        held = os.path.join(self._in_flight, process)
        with suppress(FileNotFoundError):
            for quoted in os.listdir(held):
                returned = os.listdir(os.path.join(held, quoted))
                for name in returned:
                    self._return(quoted, os.path.join(held, quoted, name))
                os.rmdir(os.path.join(held, quoted))
                if returned:
                    _logger.warning("queue %s: gave back %d messages of a dead process", unquote(quoted), len(returned))
            os.rmdir(held)
        with suppress(FileNotFoundError):
            os.unlink(self._lock_path(process))

    def _tidy(self) -> None:
        """Delete expired queues, and files whose publisher died while it wrote them."""
        now = time.time()
        for quoted in os.listdir(self._queues):
            folder = os.path.join(self._queues, quoted)
            with suppress(FileNotFoundError, ValueError):
                marker = Path(folder, _EXPIRES)
                if marker.stat().st_mtime + float(marker.read_text(encoding="ascii")) < now:
                    shutil.rmtree(folder, ignore_errors=True)
            with suppress(FileNotFoundError):
                for name in os.listdir(folder):
                    path = os.path.join(folder, name)
                    if name.startswith(".") and name != _EXPIRES and os.stat(path).st_mtime + _ABANDONED_SECONDS < now:
                        os.unlink(path)

    def leave(self) -> None:
        """Remove this process's folder when nothing is left in it; a peer gives the rest back later."""
        with self._holding:
            if self._lock_file is None:
                return
            held = os.path.join(self._in_flight, self._process)
            try:
                for quoted in os.listdir(held):
                    os.rmdir(os.path.join(held, quoted))
                os.rmdir(held)
                os.unlink(self._lock_path(self._process))
            except OSError as error:
                if error.errno not in {errno.ENOENT, errno.ENOTEMPTY}:
                    raise

    def forget(self) -> None:
        """Close the parent's lock in a forked child, so that it dies with the parent alone."""
        if self._lock_file is not None:
            os.close(self._lock_file)  # closing a copy does not release it, unlocking would

    def _lock_path(self, process: str) -> str:
        return os.path.join(self._in_flight, f"{process}.lock")


def _listed(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []


def _quoted(queue: str) -> str:
    """Return the folder name of a queue: no separator, never hidden, never `..`."""
    quoted = quote(queue, safe="")
    return "%2E" + quoted[1:] if quoted.startswith(".") else quoted


def _locked(lock_file: int) -> bool:
    try:
        fcntl.flock(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _write(folder: str, name: str, data: bytes, *, fsync: bool) -> None:
    hidden = os.path.join(folder, f".{name}")
    try:
        with open(hidden, "xb") as file:
            file.write(data)
            if fsync:
                file.flush()
                os.fsync(file.fileno())
        os.rename(hidden, os.path.join(folder, name))
    except BaseException:
        with suppress(OSError):
            os.unlink(hidden)
        raise
    if fsync:
        directory = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


def _read(path: str) -> dict[str, Any]:
    """Return the message in a file; raise `ValueError` when it is none."""
    with open(path, "rb") as file:
        data = file.read()
    try:
        payload = loads(data.decode())
        properties = payload["properties"]
        if properties.get("body_encoding") == "base64":
            base64.b64decode(payload["body"])  # kombu does so later, where an error would end the worker
        if isinstance(properties["delivery_tag"], str) and isinstance(payload["body"], str):
            return dict(payload)
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(type(error).__name__) from None
    message = "no message"
    raise ValueError(message)


_spools: dict[str, Spool] = {}
_spools_lock = threading.Lock()


def opened(root: str) -> Spool:
    """Return this process's spool in the folder `root`; make the folder when it is not there."""
    spool = _spools.get(root)
    if spool is None:
        with _spools_lock:
            spool = _spools.get(root)
            if spool is None:
                spool = _spools[root] = Spool(root)
    return spool


def _after_fork() -> None:
    global _spools_lock  # noqa: PLW0603  another thread of the parent may have held it
    _spools_lock = threading.Lock()
    for spool in _spools.values():
        spool.forget()
    _spools.clear()


os.register_at_fork(after_in_child=_after_fork)
