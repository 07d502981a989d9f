"""One seed's story: some events of every kind, then everything heals, then what must hold is looked at."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from tests.simulation import invariants, seams
from tests.simulation.workers import SimulatedWorker
from tests.simulation.world import Violation, World

_ROUNDS_MAX = 120
_REPAIRS_MAX = 12


@dataclass(frozen=True)
class Report:
    """What became of a seed."""

    seed: int
    violation: str | None
    digest: str
    schedule: list[str]
    counts: Counter[str]


def simulate(seed: int) -> Report:
    """Run one seed."""
    world = World(seed)
    with seams.installed(world):
        try:
            _events(world)
            _heal(world)
            invariants.check(world)
        except Violation as violation:
            world.violation = world.violation or str(violation)
        except Exception as error:
            world.violation = world.violation or f"the simulation failed: {error!r}"
            raise
        finally:
            _end(world)
    world.counts["seeds"] = 1
    return Report(seed, world.violation, world.digest(), world.schedule, world.counts)


def _end(world: World) -> None:
    for worker in list(world.workers):
        for process in worker.processes:
            world._end(process)
    world.store.dispose()


# --- events -------------------------------------------------------------------------------------------------------


def _events(world: World) -> None:
    random = world.random
    for _ in range(random.choice((1, 2, 2, 3))):
        world.start_worker()
    for _ in range(random.choice((2, 4))):
        world.clients.act()
    if random.random() < 0.4:
        world.clients.schedule()
    for _ in range(random.randrange(40, 120)):
        world.counts["events"] += 1
        world._machine_seconds += random.random() * 0.4
        _one_event(world)
        if not world.workers:
            world.start_worker()


def _one_event(world: World) -> None:
    random = world.random
    draw = random.random()
    idle, suspended = world.idle_children(), world.suspended()
    services = [worker for worker in world.working() if worker.commands.fiber is None]
    if draw < 0.3 and idle and world.broker.nudges:
        world.deliver_nudge(random.choice(idle))
    elif draw < 0.52 and suspended:
        world.resume(random.choice(suspended))
    elif draw < 0.64 and services and world.broker.commands:
        world.deliver_command(random.choice(services))
    elif draw < 0.74:
        world.clients.act()
    elif draw < 0.82:
        world.pass_time(random.choice((0.5, 2.0, 5.0, 12.0, 40.0)))
    elif draw < 0.9 and world.working():
        _service(world, random.choice(world.working()))
    else:
        _fault(world)


def _service(world: World, worker: SimulatedWorker) -> None:
    if worker.dead and worker.reaps.fiber is None and world.random.random() < 0.7:
        pid = worker.dead[0]
        worker.fork()
        world.begin(worker.reaps, f"misses {pid}", worker.release)
    elif worker.sweeps.fiber is None:
        world.sweep(worker)


def _fault(world: World) -> None:
    random, broker = world.random, world.broker
    children = [child for worker in world.workers for child in worker.children if child.fiber is not None]
    stopped = [worker for worker in world.workers if worker.stopped]
    faults: dict[str, Callable[[], object]] = {}
    if broker.nudges:
        faults["lose"] = lambda: world.note(f"lost {broker.take_nudge()}")
        faults["repeat"] = lambda: broker.nudges.append(random.choice(broker.nudges))
    if random.random() < 0.1:
        faults["empty"] = broker.empty
        faults["jump"] = lambda: world.jump_clock(random.choice((-20.0, -2.0, 15.0, 60.0, 3000.0)))
    if children and world.crashes:
        faults["kill child"] = lambda: world.kill_child(random.choice(children))
    if children:
        faults["bark"] = lambda: world.bark(random.choice(children))
        faults["abandon"] = lambda: _abandon(world, random.choice(children).worker)
        faults["stop child"] = lambda: _stop(world, random.choice(children))
    if len(world.workers) > 1 and world.crashes and random.random() < 0.3:
        faults["kill worker"] = lambda: world.kill_worker(random.choice(world.workers))
        faults["drain"] = lambda: world.drain(random.choice(world.workers))
    if world.workers:
        faults["stop worker"] = lambda: _stop(world, random.choice(world.workers))
    if len(world.workers) < 3:
        faults["start worker"] = world.start_worker
    if stopped:
        faults["go on"] = lambda: _go_on(world, random.choice(stopped))
    if faults:
        faults[random.choice(sorted(faults))]()


def _stop(world: World, what: object) -> None:
    if isinstance(what, SimulatedWorker):
        world.note(f"{what.id} is stopped")
        what.stopped = True
        world.counts["zombies"] += 1
        world.counts["interruptions"] += 1
    else:
        world.note(f"{what.name} is stopped")  # type: ignore[attr-defined]
        what.stopped = True  # type: ignore[attr-defined]
        world.counts["zombies"] += 1
        world.counts["interruptions"] += 1


def _abandon(world: World, worker: SimulatedWorker) -> None:
    """Stop a worker in the middle of its work for so long that the others take it over; it may come back."""
    _stop(world, worker)
    if not world.working():
        world.start_worker()
    world.pass_time(12.0)
    for other in world.working():
        if other.sweeps.fiber is None:
            world.sweep(other)
            break
    if world.random.random() < 0.5:
        _go_on(world, worker)


def _go_on(world: World, worker: SimulatedWorker) -> None:
    world.note(f"{worker.id} goes on")
    worker.stopped = False
    for process in worker.processes:
        process.stopped = False


# --- healing ------------------------------------------------------------------------------------------------------


def _heal(world: World) -> None:
    """Let everything work again, and everybody have their say, until nothing is left to do."""
    world.note("everything heals")
    world.healing = True
    if world.random.random() < 0.5:
        world.broker.empty()
    world.broker.loss = world.broker.repetition = 0.0
    for worker in list(world.workers):
        if worker.ready or worker.commands.fiber is not None:
            _go_on(world, worker)
        else:
            world.kill_worker(worker)
    while world.clients.unsent:
        world.clients.start(world.clients.unsent.pop(0))
    quiet = 0
    for number in range(_ROUNDS_MAX):
        busy = _round(world, number)
        quiet = 0 if busy else quiet + 1
        if quiet >= 2 and not invariants.unfinished(world):
            return
    world.require(holds=False, invariant="it never comes to rest", detail="; ".join(invariants.unfinished(world)))


def _round(world: World, number: int) -> bool:
    """Let everybody do what there is to be done, then let time pass; return whether anything was done."""
    for worker in world.working():
        if len(worker.graphs) < len(world.graphs):  # of another release, whose deploy ends now
            world.drain(worker)
    if not world.working():
        world.start_worker()
    busy = _work(world)
    world.clients.resend()
    world.clients.unschedule()
    if number % 3 == 2:
        world.clients.decide_everything()
        world.clients.signal_everything()
    if number % 6 == 5 and number < 6 * _REPAIRS_MAX:
        world.clients.repair()
    busy = _work(world) or busy
    world.pass_time(20.0)
    for worker in world.working():
        while worker.dead:
            worker.fork()
            world.begin(worker.reaps, "misses a child", worker.release)
    sweeping = [worker for worker in world.working() if worker.sweeps.fiber is None]
    if sweeping:
        world.sweep(world.random.choice(sweeping))
    return _work(world) or busy


def _work(world: World) -> bool:
    busy = False
    while True:
        suspended, idle = world.suspended(), world.idle_children()
        services = [worker for worker in world.working() if worker.commands.fiber is None and worker.children]
        if suspended:
            world.resume(world.random.choice(suspended))
        elif services and world.broker.commands:
            world.deliver_command(world.random.choice(services))
        elif idle and world.broker.nudges:
            world.deliver_nudge(world.random.choice(idle))
        else:
            return busy
        busy = True
