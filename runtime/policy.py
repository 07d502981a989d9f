"""Policies: how a node is retried."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from keepstep.errors import GraphError, KeepstepError

Errors = tuple[type[BaseException], ...]


def seconds(what: str, value: float | timedelta, *, zero: bool = False) -> float:
    """Return a duration as seconds; raise `GraphError` naming `what` unless it is finite and positive (or zero)."""
    number = value.total_seconds() if isinstance(value, timedelta) else value
    if isinstance(number, bool) or not isinstance(number, int | float) or not math.isfinite(number) or number < 0:
        message = f"{what} must be a finite, positive number of seconds or a timedelta, not {value!r}"
        raise GraphError(message)
    if number == 0 and not zero:
        message = f"{what} must be longer than zero"
        raise GraphError(message)
    return float(number)


@dataclass(frozen=True)
class Retry:
    """How often a node is tried, and how long is waited in between.

    `attempts` counts the first one. The wait after the n-th failure is `delay * factor ** (n - 1)`, at most
    `delay_max`, shortened by up to the fraction `jitter`; durations are seconds or timedeltas. Errors in `on` are
    retried unless they are in `never`. Keepstep's own errors are retried only when they say that it can help
    (`retryable`): input that was refused once is refused again.
    """

    attempts: int = 3
    delay: float | timedelta = 1.0
    factor: float = 2.0
    delay_max: float | timedelta = 60.0
    jitter: float = 0.1
    on: type[BaseException] | Errors = (Exception,)
    # These are mistakes in the program: every attempt meets them again.
    never: type[BaseException] | Errors = (ImportError, NameError, NotImplementedError, SyntaxError)

    def __post_init__(self) -> None:
        """Check every field, and turn timedeltas into seconds and single classes into tuples."""
        if isinstance(self.attempts, bool) or not isinstance(self.attempts, int) or self.attempts < 1:
            message = f"Retry.attempts must be an integer of at least 1, not {self.attempts!r}"
            raise GraphError(message)
        _number("Retry.factor", self.factor, least=1.0, most=math.inf)
        _number("Retry.jitter", self.jitter, least=0.0, most=1.0)
        object.__setattr__(self, "delay", seconds("Retry.delay", self.delay, zero=True))
        object.__setattr__(self, "delay_max", seconds("Retry.delay_max", self.delay_max, zero=True))
        object.__setattr__(self, "on", _classes("Retry.on", self.on))
        object.__setattr__(self, "never", _classes("Retry.never", self.never))

    def wait(self, failures: int, random: Callable[[], float]) -> float:
        """Return the seconds to wait after the `failures`-th failure (1 is the first).

        `random` gives floats from 0 to 1, as `random.random` does.
        """
        shortest = seconds("Retry.delay", self.delay, zero=True)
        longest = seconds("Retry.delay_max", self.delay_max, zero=True)
        try:
            planned = shortest * float(self.factor) ** max(failures - 1, 0)
        except OverflowError:
            planned = longest if shortest else 0.0
        # Jitter only shortens: a wait is never longer than what was declared, and waits at the cap still spread out.
        return min(planned, longest) * (1.0 - self.jitter * random())

    def allows(self, error: BaseException, failures: int) -> bool:
        """Tell whether to try again after `error`, which was the `failures`-th failure (1 is the first)."""
        if failures >= self.attempts or (isinstance(error, KeepstepError) and not error.retryable):
            return False
        return isinstance(error, self.on) and not isinstance(error, self.never)


def _number(what: str, value: float, *, least: float, most: float) -> None:
    fits = isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most
    if not fits or not math.isfinite(value):
        limits = f"at least {least:g}" if most == math.inf else f"from {least:g} to {most:g}"
        message = f"{what} must be a number {limits}, not {value!r}"
        raise GraphError(message)


def _classes(what: str, value: object) -> Errors:
    classes: tuple[Any, ...] = value if isinstance(value, tuple) else (value,)
    for item in classes:
        if not (isinstance(item, type) and issubclass(item, BaseException)):
            message = f"{what} must hold exception classes, not {item!r}"
            raise GraphError(message)
    return classes


NO_RETRY = Retry(attempts=1)
"""A node that declares no policy: one attempt."""
