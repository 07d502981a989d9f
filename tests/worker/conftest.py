"""Deployments of this folder's tests: one suite for each kind of broker, unless a test says why not."""

from __future__ import annotations

import pytest

from tests.worker.deployment import deployed


@pytest.fixture
def embedded(tmp_path, sqlite_url):
    """A deployment on the file broker and SQLite, as on a laptop."""
    with deployed(tmp_path, sqlite_url, f"file://{tmp_path}/broker") as deployment:
        yield deployment


@pytest.fixture
def served_by_redis(tmp_path, postgresql_url, redis_url):
    """A deployment on Redis and PostgreSQL: for what is about Redis itself."""
    with deployed(tmp_path, postgresql_url, redis_url) as deployment:
        yield deployment


@pytest.fixture
def served_by_rabbitmq(tmp_path, postgresql_url, rabbitmq_url):
    """A deployment on RabbitMQ and PostgreSQL: for what is about RabbitMQ itself."""
    with deployed(tmp_path, postgresql_url, rabbitmq_url) as deployment:
        yield deployment


@pytest.fixture
def served(tmp_path, postgresql_url, broker_url):
    """A deployment on PostgreSQL and each broker that is a server."""
    with deployed(tmp_path, postgresql_url, broker_url) as deployment:
        yield deployment


@pytest.fixture(params=["embedded", "served_by_redis", "served_by_rabbitmq"])
def deployment(request):
    """A deployment on each kind of broker, with the database that goes with it."""
    return request.getfixturevalue(request.param)


@pytest.fixture(params=["sqlite and files", "postgresql and redis", "postgresql and rabbitmq"])
def urls(request, tmp_path):
    """The database and the broker of `deployment`, for one with settings of its own."""
    database, _, broker = request.param.partition(" and ")
    url = f"file://{tmp_path}/broker" if broker == "files" else request.getfixturevalue(f"{broker}_url")
    return request.getfixturevalue(f"{database}_url"), url
