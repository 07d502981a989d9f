"""Retry: how long is waited, what is tried again."""

import random
from datetime import timedelta

import pytest

from keepstep.errors import (
    ConflictingWrites,
    DatabaseUnavailable,
    EffectUnknown,
    GraphError,
    InvalidInput,
    NodeTimeout,
    StateError,
)
from keepstep.runtime.policy import NO_RETRY, Retry


def never_shorter() -> float:
    return 0.0


def test_waits_grow_by_the_factor_up_to_the_longest():
    retry = Retry(attempts=9, delay=2, factor=3, delay_max=50)

    assert [retry.wait(failures, never_shorter) for failures in (1, 2, 3, 4, 5)] == [2.0, 6.0, 18.0, 50.0, 50.0]


def test_jitter_shortens_by_up_to_its_fraction_also_at_the_longest():
    retry = Retry(delay=10, factor=2, delay_max=20, jitter=0.25)

    assert retry.wait(1, lambda: 1.0) == 7.5
    assert retry.wait(2, lambda: 0.5) == 17.5
    assert retry.wait(9, lambda: 1.0) == 15.0
    draw = random.Random(7).random
    waits = [retry.wait(1, draw) for _ in range(200)]
    assert 7.5 <= min(waits) < 8.0
    assert 9.5 < max(waits) <= 10.0


def test_a_wait_has_no_overflow():
    assert Retry(delay=1, factor=1e9, delay_max=60).wait(10_000, never_shorter) == 60.0
    assert Retry(delay=0, factor=1e9, delay_max=60).wait(10_000, never_shorter) == 0.0


def test_durations_may_be_timedeltas():
    retry = Retry(delay=timedelta(milliseconds=1500), delay_max=timedelta(minutes=1))

    assert (retry.delay, retry.delay_max) == (1.5, 60.0)
    assert retry == Retry(delay=1.5, delay_max=60)


def test_attempts_count_the_first_one():
    retry = Retry(attempts=3)
    error = ValueError("no")

    assert [retry.allows(error, failures) for failures in (1, 2, 3, 4)] == [True, True, False, False]
    assert not NO_RETRY.allows(error, 1)


def test_only_errors_in_on_and_not_in_never_are_retried():
    retry = Retry(on=OSError, never=FileNotFoundError)

    assert retry.on == (OSError,)
    assert retry.never == (FileNotFoundError,)
    assert retry.allows(ConnectionError("reset"), 1)
    assert not retry.allows(FileNotFoundError("x"), 1)
    assert not retry.allows(ValueError("x"), 1)


@pytest.mark.parametrize("error", [NameError("x"), ImportError("x"), NotImplementedError("x"), KeyboardInterrupt()])
def test_mistakes_in_the_program_are_not_retried_by_default(error):
    assert not Retry().allows(error, 1)


@pytest.mark.parametrize(
    ("error", "again"),
    [
        (NodeTimeout(), True),
        (DatabaseUnavailable(), True),
        (InvalidInput(), False),
        (StateError(), False),
        (ConflictingWrites(), False),
        (EffectUnknown(), False),
    ],
)
def test_own_errors_are_retried_only_when_that_can_help(error, again):
    assert Retry(attempts=5).allows(error, 1) is again


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("attempts", 0, "Retry.attempts must be an integer of at least 1, not 0"),
        ("attempts", True, "Retry.attempts must be an integer of at least 1, not True"),
        ("attempts", 2.0, "Retry.attempts must be an integer of at least 1, not 2.0"),
        ("delay", -1, "Retry.delay must be a finite, positive number of seconds or a timedelta, not -1"),
        ("delay", float("nan"), "Retry.delay must be a finite, positive number of seconds or a timedelta, not nan"),
        ("delay_max", "60", "Retry.delay_max must be a finite, positive number of seconds or a timedelta, not '60'"),
        ("factor", 0.5, "Retry.factor must be a number at least 1, not 0.5"),
        ("factor", float("inf"), "Retry.factor must be a number at least 1, not inf"),
        ("jitter", 1.5, "Retry.jitter must be a number from 0 to 1, not 1.5"),
        ("on", "ValueError", "Retry.on must hold exception classes, not 'ValueError'"),
        ("never", (ValueError, int), "Retry.never must hold exception classes, not <class 'int'>"),
    ],
)
def test_a_wrong_field_is_refused_by_name(field, value, said):
    with pytest.raises(GraphError) as caught:
        Retry(**{field: value})
    assert caught.value.message == said
