"""A skipped test is named, and fails CI."""

from __future__ import annotations

from pathlib import Path

import pytest

CASES = """
import pytest

def test_runs():
    pass

@pytest.mark.skip(reason="no server here")
def test_left_out():
    raise AssertionError
"""


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch):
    def run(case: str, *, ci: bool, allowed: str = "") -> pytest.RunResult:
        monkeypatch.setenv("CI", "true" if ci else "")
        pytester.makeconftest(f"from tests import skips\nskips.ALLOWED.update({{{allowed}}})\n")
        pytester.makepyfile(test_cases=case)
        return pytester.runpytest_subprocess("-p", "tests.skips", "-p", "no:cacheprovider")

    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    return run


def test_ci_fails_when_a_test_is_skipped(run):
    result = run(CASES, ci=True)
    result.assert_outcomes(passed=1, skipped=1)
    result.stdout.fnmatch_lines(["skipped tests: 1", "*test_cases.py::test_left_out: no server here"])
    assert result.ret == pytest.ExitCode.TESTS_FAILED


def test_ci_passes_when_the_skip_is_listed(run):
    result = run(CASES, ci=True, allowed="'test_cases.py::test_left_out': 'shown elsewhere'")
    result.stdout.fnmatch_lines(["skipped tests: 1"])
    assert result.ret == pytest.ExitCode.OK


def test_a_machine_without_rabbitmq_skips_by_name_and_number(run):
    reason = "no RabbitMQ: rabbitmq-server is not installed"
    result = run(CASES.replace("no server here", reason), ci=True)
    result.stdout.fnmatch_lines(
        ["skipped tests: 1", f"*test_cases.py::test_left_out: {reason}", "no RabbitMQ: 1 skipped*"]
    )
    assert result.ret == pytest.ExitCode.OK


def test_a_developer_may_skip(run):
    result = run(CASES, ci=False)
    result.stdout.fnmatch_lines(["skipped tests: 1", "*test_cases.py::test_left_out: no server here"])
    assert result.ret == pytest.ExitCode.OK


def test_no_skips_are_said_too(run):
    result = run("def test_runs(): pass", ci=True)
    result.stdout.fnmatch_lines(["skipped tests: 0"])
    assert result.ret == pytest.ExitCode.OK


def test_a_module_that_skips_itself_counts(run):
    result = run("import pytest\npytest.importorskip('no_such_module_at_all')\n" + CASES, ci=True)
    result.stdout.fnmatch_lines(["skipped tests: 1"])
    assert result.ret != pytest.ExitCode.OK
