"""A real RabbitMQ server for tests, on loopback and in a folder of its own; and where the program comes from.

Nothing of it is shared with another RabbitMQ on the machine: node name, ports, port mapper, cookie, data, log. It is a
child of the tests and is spoken to through its Erlang shell, whose input is a pipe: `rabbitmqctl` would start a virtual
machine for every word (a second or two each), and a server whose pipe is closed ends, so none outlives killed tests.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import itertools
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path

import psutil

from tests.servers import free_port

NO_RABBITMQ = "no RabbitMQ"
"""What the reason of every skip begins with that is for want of a RabbitMQ server."""

_START_SECONDS = 90.0
_STOP_SECONDS = 10.0
_ANSWER_SECONDS = 30.0
_INSTALL_SECONDS = 100.0
_WRITE_DOWN = (
    "begin mnesia:dump_log(), [disk_log:sync(L) || L <- element(1, disk_log:accessible_logs())], "
    "[dets:sync(T) || T <- dets:all()] end"
)
_INSTALL = "apt-get -q -y -o Acquire::http::Timeout=10 -o Acquire::Retries=1 -o DPkg::Lock::Timeout=60"
# Debian's program on the PATH is a wrapper that becomes another user; this is the program itself.
_DEBIAN = Path("/usr/lib/rabbitmq/bin/rabbitmq-server")

# In the old format: reading the other one costs a second at each start.
_CONFIGURATION = """\
[{rabbit, [
    {log, [{console, [{enabled, true}, {level, warning}]}, {file, [{file, false}]}]},
    {disk_free_limit, 1000000}%s
 ]},
 {ra, [{wal_max_size_bytes, 16777216}]}].
"""


class NoRabbitMQ(RuntimeError):
    """There is no RabbitMQ on this machine, and none could be installed."""


def _found() -> str | None:
    if shutil.which("epmd") is None:
        return None
    return str(_DEBIAN) if _DEBIAN.exists() else shutil.which("rabbitmq-server")


@functools.cache
def rabbitmq_program() -> str:
    """Return the path of rabbitmq-server; install it when this is root on a Debian; raise `NoRabbitMQ`."""
    if found := _found():
        return found
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        message = "rabbitmq-server is not installed (Debian: apt-get install rabbitmq-server)"
        raise NoRabbitMQ(message)
    # Another session of tests may be about to do the same.
    with (Path(tempfile.gettempdir()) / "keepstep-rabbitmq.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        told = "" if _found() else _installed()
    if found := _found():
        return found
    message = f"rabbitmq-server is not installed, and apt-get could not install it: {told[-300:].strip()}"
    raise NoRabbitMQ(message)


def _installed() -> str:
    """Install RabbitMQ's package, in bounded time; return what was said of it."""
    # In this runlevel the package's own service is not started.
    quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}
    command = f"{_INSTALL} update; {_INSTALL} install --no-install-recommends rabbitmq-server"
    try:
        ran = subprocess.run(
            ["timeout", "-k", "5", str(_INSTALL_SECONDS), "sh", "-c", command],
            env=quiet,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError as error:
        return str(error)
    return f"{ran.stdout[-500:]}{ran.stderr[-500:]}"


class RabbitMQServer:
    """A RabbitMQ server on a loopback port of its own; what it stores survives `kill`, until `stop`."""

    def __init__(self, **settings: str) -> None:
        """`settings`: more of the configuration's section `rabbit`, as Erlang terms."""
        self._program = rabbitmq_program()
        self._settings = settings
        self._questions = itertools.count(1)
        self._vhosts: set[str] = set()
        self._process: subprocess.Popen[bytes] | None = None
        self._mapper: subprocess.Popen[bytes] | None = None
        self.port = 0
        self.folder = Path(tempfile.mkdtemp(prefix="keepstep-rabbitmq-"))
        try:
            self.start()
        except BaseException:
            self.stop()
            raise

    # --- places -----------------------------------------------------------------------------------------------------

    @property
    def url(self) -> str:
        """The URL of the virtual host `/`."""
        return self.url_of("/")

    def url_of(self, vhost: str, port: int | None = None) -> str:
        """Return the URL of a virtual host; `port`: of a proxy before this server."""
        return f"amqp://guest:guest@127.0.0.1:{port or self.port}/{vhost}"

    def create_vhost(self) -> str:
        """Make a virtual host, empty; return its name."""
        name = f"test_{next(self._questions)}"
        self._vhosts.add(name)
        self._make_vhost(name)
        return name

    def _make_vhost(self, name: str) -> None:
        all_of_it = ", ".join(['<<".*">>'] * 3)
        self.ask(f'rabbit_vhost:add(<<"{name}">>, <<"tests">>)')
        self.ask(f'rabbit_auth_backend_internal:set_permissions(<<"guest">>, <<"{name}">>, {all_of_it}, <<"tests">>)')

    def drop_vhost(self, name: str) -> None:
        """Remove a virtual host with all that is in it; whoever is connected to it is cut off."""
        self._vhosts.discard(name)
        self.ask(f'rabbit_vhost:delete(<<"{name}">>, <<"tests">>)')

    # --- asking it --------------------------------------------------------------------------------------------------

    def ask(self, expression: str, seconds: float = _ANSWER_SECONDS) -> str:
        """Evaluate an Erlang expression in the server; return its value as text."""
        if self._process is None:
            message = "the server does not run"
            raise RuntimeError(message)
        assert self._process.stdin is not None
        answer = self.folder / f"answer-{next(self._questions)}"
        written = f'file:write_file("{answer}.part", io_lib:format("~0p", [catch ({expression})]))'
        self._process.stdin.write(f'{written}, file:rename("{answer}.part", "{answer}").\n'.encode())
        self._process.stdin.flush()
        deadline = time.monotonic() + seconds
        while not answer.exists():
            if time.monotonic() > deadline or self._process.poll() is not None:
                message = f"no answer to {expression}: {self._log().read_text(errors='replace')[-2000:]}"
                raise RuntimeError(message)
            time.sleep(0.002)
        told = answer.read_text()
        answer.unlink()
        if told.startswith(("{'EXIT'", "{error")):
            message = f"{expression}: {told}"
            raise RuntimeError(message)
        return told

    def flush(self) -> None:
        """Empty all queues; what is delivered and not acknowledged stays."""
        # One that is just being removed has nothing to lose.
        self.ask("[catch rabbit_amqqueue:purge(Q) || Q <- rabbit_amqqueue:list()]")

    def queues(self, vhost: str) -> list[str]:
        """Return the names of a virtual host's queues."""
        names = f'[element(4, amqqueue:get_name(Q)) || Q <- rabbit_amqqueue:list(<<"{vhost}">>)]'
        return sorted(self.ask(f'iolist_to_binary(lists:join(" ", {names}))').strip('<>"').split())

    def cut_connections(self) -> None:
        """Close every connection from the server's side."""
        self.ask('[rabbit_networking:close_connection(C, "tests") || C <- rabbit_networking:connections()]')

    def connections(self) -> int:
        """Return how many connections are open."""
        return int(self.ask("length(rabbit_networking:connections())"))

    def unacknowledged(self) -> int:
        """Return how many messages are delivered and not acknowledged."""
        count = "rabbit_amqqueue:info(Q, [messages_unacknowledged])"
        return int(self.ask(f"lists:sum([N || Q <- rabbit_amqqueue:list(), {{_, N}} <- {count}])"))

    def remove_queues(self, vhost: str) -> None:
        """Remove a virtual host's queues with all that is in them."""
        remove = 'rabbit_amqqueue:delete(Q, false, false, <<"tests">>)'
        self.ask(f'[{remove} || Q <- rabbit_amqqueue:list(<<"{vhost}">>)]')

    def setting(self, name: str) -> str:
        """Return one of its settings, as Erlang writes it."""
        return self.ask(f"element(2, application:get_env(rabbit, {name}))")

    def set(self, **settings: str) -> None:
        """Change settings; connections that are made afterwards heed them."""
        for name, value in settings.items():
            self.ask(f"application:set_env(rabbit, {name}, {value})")

    def alarm(self) -> None:
        """Let it believe that its memory is full: it reads nothing more of whoever publishes."""
        self._watermark("0.000001")
        self._until("rabbit_alarm:get_alarms()", "[_|_]")

    def end_alarm(self) -> None:
        """Let there be memory again."""
        self._watermark("0.4")
        self._until("rabbit_alarm:get_alarms()", "[]")

    def _watermark(self, share: str) -> None:
        self.ask(f"vm_memory_monitor:set_vm_memory_high_watermark({share})")

    def _until(self, expression: str, pattern: str, seconds: float = _ANSWER_SECONDS) -> None:
        look = f"case catch {expression} of {pattern} -> ok; _ -> timer:sleep(10), Look() end"
        self.ask(f"(fun Look() -> {look} end)()", seconds)

    # --- processes --------------------------------------------------------------------------------------------------

    def start(self, *, empty: bool = False) -> None:
        """Start it; after `kill` on the port it had before, with what it has stored, or `empty`."""
        if empty:
            shutil.rmtree(self.folder / "mnesia", ignore_errors=True)
        chosen = self.port
        for _ in range(3):
            # Somebody else may take a free port between our look and the server's bind: then another one is tried.
            self.port = chosen or free_port()
            if self._started():
                if empty:
                    for name in self._vhosts:
                        self._make_vhost(name)
                return
        message = f"rabbitmq-server did not start: {self._log().read_text(errors='replace')[-2000:]}"
        raise RuntimeError(message)

    def mend(self) -> None:
        """Let it be as at the start, whatever a test has done to it: running, and with memory."""
        self.thaw()
        if self._process is None or self._process.poll() is not None:
            self.kill()
            self.start()
        self.end_alarm()

    def restart(self) -> None:
        """Kill it and start it again, with what it has stored."""
        self.kill()
        self.start()

    def _log(self) -> Path:
        return self.folder / "log.txt"

    def _started(self) -> bool:
        mapper_port = free_port()
        environment = self._environment(mapper_port)
        with self._log().open("ab") as log:
            # Ends with the tests, as the server does: when its input is closed.
            mapper = f"epmd -address 127.0.0.1 -port {mapper_port} & read _; kill $!; wait"
            self._mapper = subprocess.Popen(
                ["sh", "-c", mapper], stdin=subprocess.PIPE, stdout=log, stderr=log, process_group=0
            )
            _until_taken(mapper_port)
            self._process = subprocess.Popen(
                [self._program], env=environment, stdin=subprocess.PIPE, stdout=log, stderr=log, process_group=0
            )
        with contextlib.suppress(RuntimeError):
            self._until("rabbit_boot_state:get()", "ready", _START_SECONDS)
            return True
        self.kill()
        return False

    def _environment(self, mapper_port: int) -> dict[str, str]:
        settings = "".join(f", {{{name}, {value}}}" for name, value in self._settings.items())
        (self.folder / "advanced.config").write_text(_CONFIGURATION % settings)
        (self.folder / "plugins").write_text("[].\n")
        return {
            "PATH": os.environ["PATH"],
            "LANG": "C.UTF-8",
            "HOME": str(self.folder),  # where the cookie is made
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "ERL_EPMD_PORT": str(mapper_port),
            "RABBITMQ_CONF_ENV_FILE": "/dev/null",
            "RABBITMQ_NODENAME": f"keepstep-{self.port}@localhost",
            "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODE_PORT": str(self.port),
            "RABBITMQ_DIST_PORT": str(free_port()),
            "RABBITMQ_MNESIA_BASE": str(self.folder / "mnesia"),
            "RABBITMQ_LOG_BASE": str(self.folder / "log"),
            "RABBITMQ_CONFIG_FILE": str(self.folder / "none"),
            "RABBITMQ_ADVANCED_CONFIG_FILE": str(self.folder / "advanced.config"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(self.folder / "plugins"),
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "+S 2:2 -kernel inet_dist_use_interface {127,0,0,1}",
            # The shell that `ask` types into.
            "RABBITMQ_ALLOW_INPUT": "1",
        }

    def freeze(self) -> None:
        """Let it accept connections and never answer; it has stopped when this returns."""
        self._signal(signal.SIGSTOP)
        while self._process is not None and psutil.Process(self._process.pid).status() != psutil.STATUS_STOPPED:
            time.sleep(0.001)

    def thaw(self) -> None:
        """Let it go on after `freeze`."""
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """End it at once, as a power cut does."""
        # It writes down a little late that there is a new queue: a quorum queue that was made just before a kill stays
        # unusable until somebody removes it, and a classic one is sometimes gone. That is RabbitMQ's fault and would be
        # taken for ours.
        with contextlib.suppress(RuntimeError, OSError):
            self.ask(_WRITE_DOWN, 2.0)
        self._signal(signal.SIGKILL)
        for process in (self._process, self._mapper):
            if process is not None:
                assert process.stdin is not None
                with contextlib.suppress(OSError):
                    process.stdin.close()
                process.wait(_STOP_SECONDS)
        self._process = self._mapper = None

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.poll() is None:
            os.kill(self._process.pid, number)

    def stop(self) -> None:
        """End it and remove its folder."""
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)


def _until_taken(port: int) -> None:
    """Wait until somebody listens on a port."""
    deadline = time.monotonic() + _STOP_SECONDS
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.005)
