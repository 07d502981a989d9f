"""Deployments of this folder's tests: PostgreSQL, a broker, and an outside world that counts.

The broker is Redis. Where something else may come of it on RabbitMQ a test is marked `on_each_broker`, or is one of
those of `rabbitmq_crew`.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from tests.crash.crew import Crew
from tests.crash.outside import outside_world
from tests.worker.deployment import deployed

on_each_broker = pytest.mark.parametrize("broker_kind", ["redis", "rabbitmq"], indirect=True)
AGENTS = str(Path(__file__).with_name("agents.py"))


@pytest.fixture(scope="module")
def outside():
    """The outside world of a module's tests."""
    with outside_world() as world:
        yield world


@pytest.fixture(scope="module")
def module_database(postgresql_server, _postgresql_template):
    """A migrated PostgreSQL database of the module's own."""
    name = postgresql_server.create_database(template=_postgresql_template)
    yield postgresql_server.url(name)
    postgresql_server.drop_database(name)


@contextlib.contextmanager
def _crew(folder, database, broker, outside):
    # A window that no worker misses on a busy machine: nobody here is to be given up who lives.
    times = {"renew_seconds": 0.5, "liveness_window_seconds": 5.0}
    spool = str(folder / "responses")
    with deployed(folder, database, broker, graphs=AGENTS, response_spool=spool, **times) as deployment:
        deployment.environment["KEEPSTEP_TEST_OUTSIDE"] = outside.address
        deployment.environment["KEEPSTEP_CRASH_MARK"] = str(folder / "mark")
        yield Crew(deployment, outside, folder / "mark")


@pytest.fixture(scope="module")
def crew(tmp_path_factory, module_database, redis_server, outside):
    """One deployment for all tests of a module, whose workers can be told where to die next."""
    redis_server.flush()
    with _crew(tmp_path_factory.mktemp("crew"), module_database, redis_server.url, outside) as made:
        yield made


@pytest.fixture(scope="module")
def rabbitmq_crew(tmp_path_factory, postgresql_server, _postgresql_template, rabbitmq_server, outside):
    """The same on RabbitMQ, on a database of its own."""
    name, vhost = postgresql_server.create_database(template=_postgresql_template), rabbitmq_server.create_vhost()
    folder = tmp_path_factory.mktemp("rabbitmq-crew")
    with _crew(folder, postgresql_server.url(name), rabbitmq_server.url_of(vhost), outside) as made:
        yield made
    rabbitmq_server.drop_vhost(vhost)
    postgresql_server.drop_database(name)


@pytest.fixture
def deploy(tmp_path, outside):
    """Make deployments of a test's own: `deploy(database, broker)`; they end with the test."""
    made = []

    def make(database, broker, looked_at=None, **overrides):
        context = deployed(tmp_path, database, broker, looked_at, **{"graphs": AGENTS, **overrides})
        deployment = context.__enter__()
        made.append(context)
        deployment.environment["KEEPSTEP_TEST_OUTSIDE"] = outside.address
        return deployment

    yield make
    for context in made:
        context.__exit__(None, None, None)


@pytest.fixture
def broker_kind(request):
    """Redis, unless a test is marked `on_each_broker`."""
    return getattr(request, "param", "redis")


@pytest.fixture
def served(deploy, postgresql_url, broker_url, outside):
    """A deployment of a test's own, and an outside world that nobody has called yet."""
    outside.forget()
    return deploy(postgresql_url, broker_url)
