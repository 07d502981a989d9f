"""Deployments of this folder's tests."""

from __future__ import annotations

import contextlib

import pytest

from tests.steps.business import furnish
from tests.steps.driver import Clock, Deployment


@pytest.fixture
def deploy(store_url):
    """Make deployments on this test's database, on each kind that Keepstep supports."""
    with contextlib.ExitStack() as stack:

        def make(*graphs, **options):
            deployment = Deployment(options.pop("url", store_url), *graphs, **options)
            stack.callback(deployment.close)
            return deployment

        yield make


@pytest.fixture
def clock():
    """A clock to be set, for SQLite."""
    return Clock()


@pytest.fixture
def timed(sqlite_url, clock):
    """Make deployments on SQLite whose time is `clock`'s."""
    with contextlib.ExitStack() as stack:

        def make(*graphs, **options):
            deployment = Deployment(sqlite_url, *graphs, clock=clock, **options)
            stack.callback(deployment.close)
            return deployment

        yield make


@pytest.fixture
def served(postgresql_url):
    """Make deployments on PostgreSQL."""
    with contextlib.ExitStack() as stack:

        def make(*graphs, **options):
            deployment = Deployment(postgresql_url, *graphs, **options)
            stack.callback(deployment.close)
            return deployment

        yield make


@pytest.fixture
def shop(deploy):
    """Make deployments whose database has the user's tables, with one account of 100.00."""
    made = []

    def make(graph, **options):
        d = deploy(graph, **options)
        furnish(d)
        made.append(d)
        return d

    yield make
    for d in made:
        assert d.worker.store.connections_in_use == 0
