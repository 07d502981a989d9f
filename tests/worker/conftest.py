"""Deployments of this folder's tests."""

from __future__ import annotations

import pytest

from tests.worker.deployment import deployed


@pytest.fixture
def embedded(tmp_path, sqlite_url):
    """A deployment on the file broker and SQLite, as on a laptop."""
    with deployed(tmp_path, sqlite_url, f"file://{tmp_path}/broker") as deployment:
        yield deployment


@pytest.fixture
def served(tmp_path, postgresql_url, redis_url):
    """A deployment on Redis and PostgreSQL."""
    with deployed(tmp_path, postgresql_url, redis_url) as deployment:
        yield deployment


@pytest.fixture
def served_by_rabbitmq(tmp_path, postgresql_url, rabbitmq_url):
    """A deployment on RabbitMQ and PostgreSQL."""
    with deployed(tmp_path, postgresql_url, rabbitmq_url) as deployment:
        yield deployment


@pytest.fixture(params=["embedded", "served"])
def deployment(request):
    """A deployment on each kind of database: for what does not depend on the broker."""
    return request.getfixturevalue(request.param)


@pytest.fixture(params=["embedded", "served", "served_by_rabbitmq"])
def on_each_broker(request):
    """A deployment on each kind of broker."""
    return request.getfixturevalue(request.param)
