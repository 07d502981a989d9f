"""Where the simulated world takes the place of the real one: time, chance, threads, crash points.

Everything else is the code that runs in production. The replacements stand while a world runs and are taken away after.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace, TracebackType
from typing import TYPE_CHECKING, Any, Self

import structlog

from keepstep import crashpoints, ids
from keepstep.runtime import execution, superstep
from keepstep.runtime.watchdog import Watchdog
from keepstep.store import leases
from keepstep.tasks import events, liveness, sweeper

if TYPE_CHECKING:
    from tests.simulation.world import World

_worlds: list[World] = []


def current() -> World:
    """Return the world that runs now."""
    return _worlds[-1]


class _OneAfterTheOther:
    """A pool of threads whose jobs run one after the other, in the thread that gives them."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def map(self, function: Callable[[Any], Any], items: Iterable[Any]) -> list[Any]:
        results: list[Any] = []
        errors: list[Exception] = []
        for item in items:
            try:
                results.append(function(item))
            except Exception as error:  # noqa: BLE001  as in a real pool, the others run all the same
                errors.append(error)
        if errors:
            raise errors[0]
        return results


class SimulatedWatchdog(Watchdog):
    """Remembers what is watched; the world calls back when its time is over and it likes to."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world

    @contextlib.contextmanager
    def watch(self, seconds: float, write_off: Callable[[], None], end: Callable[[], None]) -> Iterator[None]:
        """Have the world call both if the block takes longer than that."""

        def overdue() -> None:
            write_off()
            end()

        attempt = self._world.attempt
        if attempt is None:
            yield
            return
        before = attempt.overdue
        attempt.overdue = (self._world.monotonic() + seconds, overdue)
        try:
            yield
        finally:
            attempt.overdue = before


def _everywhere(function: Callable[..., Any], replacement: Callable[..., Any]) -> list[tuple[Any, str, Any]]:
    """Return the places at which a function of ours is known by its name."""
    ours = [module for name, module in list(sys.modules.items()) if name.startswith("keepstep.")]
    name = function.__name__
    return [(module, name, replacement) for module in ours if vars(module).get(name) is function]


@contextlib.contextmanager
def installed(world: World) -> Iterator[None]:
    """Put the world's time, chance and threads in the place of the machine's."""
    clock = SimpleNamespace(
        monotonic=world.monotonic, perf_counter=world.monotonic, sleep=world.sleep, time=world.monotonic
    )
    chance = SimpleNamespace(random=lambda: 0.0, uniform=lambda low, _high: low)
    replaced: list[tuple[Any, str, Any]] = [
        (crashpoints, "hook", world.point),
        (execution, "time", clock),
        (execution, "random", chance),
        (superstep, "time", clock),
        (superstep, "ThreadPoolExecutor", _OneAfterTheOther),
        *_everywhere(ids.new_id, world.new_id),
        *_everywhere(leases.new_nonce, world.new_nonce),
        (liveness, "time", clock),
        (sweeper, "random", chance),
        (events, "random", chance),
        (sweeper, "time", clock),
    ]
    configuration = structlog.get_config()
    with contextlib.ExitStack() as stack:
        for module, name, value in replaced:
            stack.callback(setattr, module, name, getattr(module, name))
            setattr(module, name, value)
        stack.callback(structlog.configure, **configuration)
        structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
        _worlds.append(world)
        stack.callback(_worlds.remove, world)
        yield
