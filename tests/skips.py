"""A pytest plugin: skipped tests are counted and named at the end, and in CI only the listed ones may be."""

from __future__ import annotations

import os

import pytest

from tests.rabbitmq import NO_RABBITMQ

# Test id (or the part before `[`) → why it may be skipped in CI. Empty on purpose: a test that cannot run is an error.
ALLOWED: dict[str, str] = {}

# How a reason begins → why tests may be skipped for it in CI. PostgreSQL and Redis come with the tests' own packages.
ALLOWED_REASONS = {NO_RABBITMQ: "it comes from the machine's packages, which not everybody may install"}


def _skipped(config: pytest.Config) -> list[tuple[str, str]]:
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    found = []
    for report in reporter.stats.get("skipped", []) if reporter else []:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        found.append((report.nodeid, reason.removeprefix("Skipped: ")))
    return sorted(found)


def _forbidden(config: pytest.Config) -> list[str]:
    if not os.environ.get("CI"):
        return []
    return [
        nodeid
        for nodeid, reason in _skipped(config)
        if nodeid.split("[")[0] not in ALLOWED and not reason.startswith(tuple(ALLOWED_REASONS))
    ]


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail a CI run in which a test was skipped that may not be."""
    if session.exitstatus == pytest.ExitCode.OK and _forbidden(session.config):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Name every skipped test with its reason, even when there is none."""
    skipped = _skipped(config)
    terminalreporter.write_line(f"skipped tests: {len(skipped)}")
    for nodeid, reason in skipped:
        terminalreporter.write_line(f"  {nodeid}: {reason}")
    for beginning, why in ALLOWED_REASONS.items():
        if number := sum(reason.startswith(beginning) for _, reason in skipped):
            terminalreporter.write_line(f"{beginning}: {number} skipped ({why})")
    if forbidden := _forbidden(config):
        terminalreporter.write_line(f"CI fails: {len(forbidden)} skipped without leave (tests/skips.py)", red=True)
