"""Servers and databases that tests share, and the rule that a skipped test is never silent."""

from __future__ import annotations

import os
import signal
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import pytest

from tests.rabbitmq import NO_RABBITMQ, NoRabbitMQ, RabbitMQServer
from tests.servers import PostgreSQLServer, Proxy, RedisServer, running

if TYPE_CHECKING:
    from keepstep.store.engine import Store
    from tests.tls import Certificates

pytest_plugins = ["pytester", "tests.order", "tests.skips"]

# A shell gives what it starts in the background an ignored SIGINT, which every process below inherits: tests that press
# Ctrl+C would press it in vain.
signal.signal(signal.SIGINT, signal.default_int_handler)


# --- servers: one of each for the whole run ---------------------------------------------------------------------------


@pytest.fixture(scope="session")
def postgresql_server() -> Iterator[PostgreSQLServer]:
    """The PostgreSQL server of this run, which does not wait for the disk: no test crashes the machine."""
    server = PostgreSQLServer(waits_for_disk=False)
    with running(server):
        yield server


@pytest.fixture(scope="module")
def durable_postgresql(postgresql_server: PostgreSQLServer) -> Iterator[None]:
    """That server waits for the disk during a module's tests, as one in production does: `keepstep doctor` looks."""
    postgresql_server.wait_for_disk(on=True)
    yield
    postgresql_server.wait_for_disk(on=False)


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer]:
    """The Redis server of this run: a test that stops or freezes one uses `spare_redis`."""
    server = RedisServer()
    with running(server):
        yield server


@pytest.fixture(scope="session")
def rabbitmq_server() -> Iterator[RabbitMQServer]:
    """The RabbitMQ server of this run, which takes seconds to start: `rabbitmq_url` is a test's own part of it.

    Where there is none and none can be installed, the tests that need one are skipped, each by its name.
    """
    try:
        server = RabbitMQServer()
    except NoRabbitMQ as error:
        pytest.skip(f"{NO_RABBITMQ}: {error}")
    with running(server):
        yield server


# --- databases: one for each test -------------------------------------------------------------------------------------


def _migrate(url: str) -> None:
    # Imported here, as in `store`: tests that need no database load none.
    from keepstep.store.engine import Store
    from keepstep.store.migrate import upgrade

    store = Store.open(url)
    try:
        upgrade(store)
    finally:
        store.dispose()


@pytest.fixture(scope="session")
def _postgresql_template(postgresql_server: PostgreSQLServer) -> str:
    name = postgresql_server.create_database()
    _migrate(postgresql_server.url(name))
    postgresql_server.cut_connections(name)  # a template that somebody is connected to cannot be copied
    return name


@pytest.fixture(scope="session")
def _sqlite_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sqlite") / "template.db"
    _migrate(f"sqlite:///{path}")
    return path


@pytest.fixture
def empty_postgresql_url(postgresql_server: PostgreSQLServer) -> Iterator[str]:
    """A PostgreSQL database of this test's own, without tables."""
    name = postgresql_server.create_database()
    yield postgresql_server.url(name)
    postgresql_server.drop_database(name)


@pytest.fixture
def postgresql_url(postgresql_server: PostgreSQLServer, _postgresql_template: str) -> Iterator[str]:
    """A PostgreSQL database of this test's own, migrated."""
    name = postgresql_server.create_database(template=_postgresql_template)
    yield postgresql_server.url(name)
    postgresql_server.drop_database(name)


@pytest.fixture
def sqlite_url(tmp_path: Path, _sqlite_template: Path) -> str:
    """A SQLite database of this test's own, migrated."""
    path = tmp_path / "keepstep.db"
    with closing(sqlite3.connect(_sqlite_template)) as template, closing(sqlite3.connect(path)) as copy:
        template.backup(copy)
    return f"sqlite:///{path}"


@pytest.fixture(params=["sqlite", "postgresql"])
def store_url(request: pytest.FixtureRequest) -> str:
    """A migrated database of this test's own, on each kind that Keepstep supports."""
    url: str = request.getfixturevalue(f"{request.param}_url")
    return url


@pytest.fixture
def store(store_url: str) -> Iterator[Store]:
    """An open store on `store_url`."""
    from keepstep.store.engine import Store

    opened = Store.open(store_url)
    yield opened
    opened.dispose()


# --- brokers and broken connections -----------------------------------------------------------------------------------


@pytest.fixture
def redis_url(redis_server: RedisServer) -> str:
    """The shared Redis server, emptied for this test."""
    redis_server.flush()
    return redis_server.url


@pytest.fixture
def rabbitmq_vhost(rabbitmq_server: RabbitMQServer) -> Iterator[str]:
    """A virtual host of this test's own in the shared RabbitMQ server."""
    name = rabbitmq_server.create_vhost()
    yield name
    rabbitmq_server.mend()
    rabbitmq_server.drop_vhost(name)


@pytest.fixture
def rabbitmq_url(rabbitmq_server: RabbitMQServer, rabbitmq_vhost: str) -> str:
    """A virtual host of this test's own in the shared RabbitMQ server, which may be killed: it is started again."""
    return rabbitmq_server.url_of(rabbitmq_vhost)


@pytest.fixture
def rabbitmq_proxy(rabbitmq_server: RabbitMQServer) -> Iterator[Proxy]:
    """A proxy before the shared RabbitMQ server; `proxied_rabbitmq_url` is this test's virtual host through it."""
    proxy = Proxy(rabbitmq_server.port)
    with running(proxy):
        yield proxy


@pytest.fixture
def proxied_rabbitmq_url(rabbitmq_server: RabbitMQServer, rabbitmq_vhost: str, rabbitmq_proxy: Proxy) -> str:
    """The virtual host of `rabbitmq_url`, reached through `rabbitmq_proxy`."""
    return rabbitmq_server.url_of(rabbitmq_vhost, rabbitmq_proxy.port)


@pytest.fixture(params=["redis", "rabbitmq"])
def broker_kind(request: pytest.FixtureRequest) -> str:
    """Each of the two brokers that are servers; the fixtures below are this one's."""
    kind: str = request.param
    return kind


@pytest.fixture
def broker_server(request: pytest.FixtureRequest, broker_kind: str) -> RedisServer | RabbitMQServer:
    """The shared server of each kind of broker."""
    server: RedisServer | RabbitMQServer = request.getfixturevalue(f"{broker_kind}_server")
    return server


@pytest.fixture
def broker_url(request: pytest.FixtureRequest, broker_kind: str) -> str:
    """A broker of each kind, empty at the start of this test: `redis_url` and `rabbitmq_url`."""
    url: str = request.getfixturevalue(f"{broker_kind}_url")
    return url


@pytest.fixture
def broker_proxy(request: pytest.FixtureRequest, broker_kind: str) -> Proxy:
    """A proxy before the server of each kind; `proxied_broker_url` leads through it."""
    proxy: Proxy = request.getfixturevalue(f"{broker_kind}_proxy")
    return proxy


@pytest.fixture
def proxied_broker_url(request: pytest.FixtureRequest, broker_kind: str) -> str:
    """The broker of `broker_url`, reached through `broker_proxy`."""
    url: str = request.getfixturevalue(f"proxied_{broker_kind}_url")
    return url


@pytest.fixture
def spare_redis() -> Iterator[RedisServer]:
    """A Redis server of this test's own, to kill, freeze and start again."""
    server = RedisServer()
    with running(server):
        yield server


@pytest.fixture
def spare_postgresql() -> Iterator[PostgreSQLServer]:
    """A PostgreSQL server of this test's own, to crash and start again; its databases are empty."""
    server = PostgreSQLServer()
    with running(server):
        yield server


@pytest.fixture
def redis_proxy(redis_url: str, redis_server: RedisServer) -> Iterator[Proxy]:
    """A proxy before the shared Redis server; `proxied_redis_url` leads through it."""
    assert redis_url
    proxy = Proxy(redis_server.port)
    with running(proxy):
        yield proxy


@pytest.fixture
def proxied_redis_url(redis_proxy: Proxy) -> str:
    """The server of `redis_url`, reached through `redis_proxy`."""
    return f"redis://127.0.0.1:{redis_proxy.port}/0"


@pytest.fixture
def postgresql_proxy(postgresql_server: PostgreSQLServer) -> Iterator[Proxy]:
    """A proxy before the PostgreSQL server; `proxied_url` is this test's database through it."""
    proxy = Proxy(postgresql_server.socket_path)
    with running(proxy):
        yield proxy


@pytest.fixture
def proxied_url(postgresql_url: str, postgresql_proxy: Proxy) -> str:
    """The database of `postgresql_url`, reached through `postgresql_proxy`."""
    database = urlsplit(postgresql_url).path.removeprefix("/")
    return f"postgresql+psycopg2://postgres@127.0.0.1:{postgresql_proxy.port}/{database}?sslmode=disable"


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """The certificates of this run's TLS servers."""
    from tests.tls import Certificates

    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture
def secured_postgresql_url(
    postgresql_url: str, postgresql_server: PostgreSQLServer, certificates: Certificates
) -> Iterator[str]:
    """The database of `postgresql_url`, reached by TLS alone; clients check who they talk to."""
    from tests.tls import TlsFront

    front = TlsFront(postgresql_server.socket_path, certificates, postgresql=True)
    database = urlsplit(postgresql_url).path.removeprefix("/")
    with running(front):
        yield (
            f"postgresql+psycopg2://postgres@localhost:{front.port}/{database}"
            f"?sslmode=verify-full&sslrootcert={certificates.authority}"
        )


@pytest.fixture
def secured_redis_url(redis_url: str, redis_server: RedisServer, certificates: Certificates) -> Iterator[str]:
    """The shared Redis server, emptied for this test, reached by TLS."""
    from tests.tls import TlsFront

    assert redis_url
    front = TlsFront(redis_server.port, certificates)
    with running(front):
        yield f"rediss://localhost:{front.port}/0?ssl_ca_certs={certificates.authority}"


@pytest.fixture
def secured_rabbitmq_url(
    rabbitmq_server: RabbitMQServer, rabbitmq_vhost: str, certificates: Certificates
) -> Iterator[str]:
    """The virtual host of `rabbitmq_url`, reached by TLS."""
    from tests.tls import TlsFront

    front = TlsFront(rabbitmq_server.port, certificates)
    with running(front):
        yield (f"amqps://guest:guest@localhost:{front.port}/{rabbitmq_vhost}?ssl_ca_certs={certificates.authority}")


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A developer's KEEPSTEP_… variables and keepstep.toml never reach a test."""
    for name in [name for name in os.environ if name.startswith("KEEPSTEP_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
