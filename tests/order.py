"""A pytest plugin: the files that take longest come first, so that no process is left with one of them at the end.

xdist alone would begin with the files of most tests, which are the quick ones.
"""

from __future__ import annotations

import pytest

LONGEST = (
    "tests/simulation/test_simulation.py",
    "tests/crash/test_rolling.py",
    "tests/worker/test_timeouts.py",
    "tests/stories/test_cli.py",
    "tests/worker/test_deaths.py",
    "tests/chaos/test_short.py",
    "tests/worker/test_outages.py",
    "tests/worker/test_graphs_run.py",
    "tests/crash/test_database.py",
    "tests/crash/test_zombies.py",
    "tests/worker/test_dispatcher.py",
    "tests/worker/test_outbox.py",
    "tests/benchmarks/test_quick.py",
    "tests/worker/test_several_decisions.py",
    "tests/worker/test_backlog.py",
    "tests/crash/test_points.py",
    "tests/worker/test_redelivery.py",
    "tests/worker/test_rabbitmq.py",
    "tests/worker/test_mixed_fleet.py",
    "tests/steps/test_processes.py",
    "tests/stories/test_payments.py",
    "tests/crash/test_fan_out.py",
    "tests/stories/test_licence_audit.py",
    "tests/broker/test_client_broker.py",
    "tests/worker/test_refusals.py",
)
"""By the sums of their tests' times in a whole run, the longest first."""

_PLACES = {path: place for place, path in enumerate(LONGEST)}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest files first; the others, and each file's tests, stay as they were."""
    items.sort(key=lambda item: _PLACES.get(item.nodeid.partition("::")[0], len(LONGEST)))
