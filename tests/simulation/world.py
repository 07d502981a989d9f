"""A simulated world: one seed decides everything that happens in it."""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

from keepstep.crashpoints import Died
from keepstep.errors import DatabaseUnavailable, InvalidInput, NotCarried, StaleLease
from keepstep.runtime import commands, superstep
from keepstep.runtime.codec import Codec
from keepstep.runtime.environment import Runtime
from keepstep.store.leases import Nudge
from tests.simulation.broker import Broker, Command, shown
from tests.simulation.clients import Clients
from tests.simulation.database import SimulatedStore
from tests.simulation.fibers import Fiber, SimulatedCrash
from tests.simulation.outside import Outside
from tests.simulation.workers import SETTINGS, Attempt, Child, Process, SimulatedWorker, carried

_BEGINNING = 1_900_000_000.0
_DISOWNED = "SELECT name FROM keepstep_child WHERE thread_id = ? AND cancel = 1 AND state = 'started'"
_SORE = {
    *("in effect", "after_intent", "after_call", "before_commit", "before_pending_write", "before_park"),
    *("before_spawn", "after_spawn", "before_deliver", "before_child_cancel"),
}
"""Where most can go wrong, and so where most does."""
# Made once: a codec knows its graph's types and nothing of the world that uses it.
_codecs: dict[tuple[str, str], Codec] = {}


class Violation(Died):
    """An invariant does not hold."""


class World:
    """Workers, a broker, a database, an outside, people; and the order in which they get to act."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.random = random = Random(seed)
        self._ids = itertools.count()
        self._nonces = itertools.count()
        self.schedule: list[str] = []
        self.counts: Counter[str] = Counter()
        self.heard: list[dict[str, Any]] = []
        """The events that were published, as they came."""
        self.violation: str | None = None
        self.healing = False
        self.fiber: Fiber | None = None
        self.process: Process | None = None
        self._machine_seconds = 1000.0
        self._clock_offset = _BEGINNING
        self.suspends = random.choice((0.02, 0.06, 0.15))
        self.crashes = random.choice((0.0, 0.003, 0.01, 0.02))
        self.failures = random.choice((0.0, 0.0, 0.004, 0.02))
        self.codecs = _codecs
        self.graphs = carried()
        loss, repetition = random.choice((0.0, 0.1, 0.3)), random.choice((0.0, 0.1, 0.3))
        self.broker = Broker(self, random, loss=loss, repetition=repetition)
        self.store = SimulatedStore(self)
        self.outside = Outside(self)
        self.workers: list[SimulatedWorker] = []
        self._workers_made = 0
        self.clients = Clients(self, random)

    # --- what the real code sees of the world -------------------------------------------------------------------------

    def monotonic(self, *_: object) -> float:
        """Return the machines' time."""
        return self._machine_seconds

    def database_time(self) -> float:
        """Return the database's time; it moves whenever it is looked at."""
        self._clock_offset += 0.000001
        return self._machine_seconds + self._clock_offset

    def new_id(self) -> str:
        """Return an id; ids grow with time, as real ones do."""
        return f"id{next(self._ids):06}"

    def new_nonce(self, *_: object) -> str:
        """Return a nonce, and remember whose it is."""
        nonce = f"nonce {next(self._nonces)}"
        if self.attempt is not None:
            self.attempt.nonces.append(nonce)
            self.attempt.began_at = self.store.serial
        return nonce

    @property
    def attempt(self) -> Attempt | None:
        """The attempt whose code runs at this moment."""
        return None if self.process is None else self.process.attempt

    def point(self, name: str, detail: str = "") -> None:
        """Stand at a named point of the protocol, of a node's body or of an effect: may be stopped or killed there."""
        self._moment(name, detail, 3.0 if name in _SORE else 1.0)

    def boundary(self, name: str) -> None:
        """Stand between two transactions."""
        self._moment(name, "", 0.3)

    def _moment(self, name: str, detail: str, scale: float) -> None:
        fiber, process = self.fiber, self.process
        if fiber is None or process is None:
            return
        fiber.check_alive()
        self.counts[name] += 1
        if self.healing:
            return
        draw = self.random.random() / scale
        if draw < self.crashes:
            self.crash(f"{name} {detail}")
        if draw < self.crashes + self.suspends and not self.store.inside:
            self.note(f"{process.name} stops at {name} {detail}")
            self.counts["stops"] += 1
            self.counts["interruptions"] += 1
            fiber.stop_here()

    def crash(self, where: str) -> None:
        """Kill the process that runs at this moment."""
        self.note(f"{self.process.name if self.process else ''} is killed at {where}")
        self.counts["crashes"] += 1
        if self.fiber is not None:
            self.fiber.die()

    def sleep(self, seconds: float) -> None:
        """Let time pass before going on."""
        if self.fiber is not None:
            self.counts["interruptions"] += seconds > 1.0
            self.fiber.wake_at = self._machine_seconds + seconds
            self.fiber.stop_here()

    def database_fails(self, when: str) -> bool:
        """Tell whether the connection dies now."""
        if self.fiber is None or self.healing or self.random.random() >= self.failures:
            return False
        self.counts["database failures"] += 1
        self.counts["interruptions"] += 1
        self.note(f"{self.process.name if self.process else ''} loses its connection {when}")
        return True

    def note(self, event: str) -> None:
        """Write a line of the schedule."""
        self.schedule.append(f"{self._machine_seconds:9.2f} {event}")

    def require(self, holds: bool, invariant: str, detail: str | Callable[[], str] = "") -> None:
        """Stop the world when an invariant does not hold."""
        if not holds:
            text = detail if isinstance(detail, str) else detail()
            self.violation = self.violation or f"{invariant}: {text}"
            self.note(f"VIOLATION {self.violation}")
            raise Violation(self.violation)

    def check_entered(self) -> None:
        """Look at the row of a node run whose body is entered: not one that has killed too often."""
        if self.attempt is None:
            return
        nonce = self.attempt.nonces[-1]
        for table in ("keepstep_thread", "keepstep_node_run"):
            for (deaths,) in self.store.query(f"SELECT deaths FROM {table} WHERE lease_nonce = ?", nonce):
                self.require(deaths < SETTINGS.deaths_max, "a deadly node was entered again", f"{deaths} deaths")

    def unknown(self, thread_id: str) -> bool:
        """Whether a thread has an effect of which nobody knows whether it happened."""
        query = "SELECT 1 FROM keepstep_effect WHERE thread_id = ? AND state = 'intent'"
        return bool(self.store.query(query, thread_id))

    # --- processes ---------------------------------------------------------------------------------------------------

    def begin(self, process: Process, what: str, body: Callable[[], object]) -> None:
        """Have a process do something, until it stops or ends."""
        self.note(f"{process.name} {what}")
        process.fiber = Fiber(process.name, body)
        self.resume(process)

    def resume(self, process: Process) -> None:
        """Let a process go on, until it stops or ends."""
        fiber = process.fiber
        if fiber is None:
            return
        before = self.fiber, self.process
        self.fiber, self.process = fiber, process
        fiber.resume()
        self.fiber, self.process = before
        if self.violation:
            raise Violation(self.violation)
        if fiber.ended and process.fiber is fiber:
            process.fiber = process.attempt = None
            self._ended(process, fiber.error)

    def _ended(self, process: Process, error: BaseException | None) -> None:
        match error:
            case None:
                return
            case SimulatedCrash():
                if isinstance(process, Child):
                    self.kill_child(process)
                else:
                    self.kill_worker(process.worker)
            case StaleLease() | DatabaseUnavailable():
                self.note(f"{process.name} gives up: {type(error).__name__}")
            case _:
                if not isinstance(error, Exception):
                    raise error
                self.require(holds=False, invariant="an error nobody handles", detail=repr(error))

    def _end(self, process: Process) -> None:
        fiber = process.fiber
        process.fiber = process.attempt = None
        if fiber is not None:
            before = self.fiber, self.process
            self.fiber, self.process = fiber, process
            fiber.kill()
            self.fiber, self.process = before

    def kill_child(self, child: Child) -> None:
        """End a pool child; its worker, if it lives, is to notice."""
        worker = child.worker
        if child in worker.children:
            self.note(f"{child.name} is dead")
            worker.children.remove(child)
            worker.dead.append(child.pid)
            self.counts["interruptions"] += 1
            self._end(child)

    def kill_worker(self, worker: SimulatedWorker) -> None:
        """End a worker with everything it has."""
        self.note(f"{worker.id} is dead")
        self.counts["workers lost"] += 1
        self.counts["interruptions"] += 1
        worker.alive = False
        if worker in self.workers:
            self.workers.remove(worker)
        for process in worker.processes:
            self._end(process)

    def start_worker(self) -> None:
        """Start a worker, which may not live to see its registration."""
        self._workers_made += 1
        graphs = self.graphs
        if not self.healing and self.random.random() < 0.15:
            graphs = {key: graph for key, graph in graphs.items() if self.random.random() < 0.6}
        worker = SimulatedWorker(self, self._workers_made, self.random.choice((1, 2, 2)), graphs)
        self.workers.append(worker)
        self.begin(worker.commands, "starts", worker.begin)

    def drain(self, worker: SimulatedWorker) -> None:
        """Stop a worker in good order: what does not end in time is killed, what it holds is handed over."""
        self.note(f"{worker.id} drains")
        self.counts["interruptions"] += 1
        for process in worker.processes:
            self._end(process)
        worker.leave()
        worker.alive = False
        self.workers.remove(worker)

    # --- what happens ------------------------------------------------------------------------------------------------

    def working(self) -> list[SimulatedWorker]:
        """Return the workers that take work now."""
        return [worker for worker in self.workers if worker.ready and not worker.stopped]

    def idle_children(self) -> list[Child]:
        """Return the pool children that could take a nudge."""
        return [child for worker in self.working() for child in worker.children if child.runs and child.fiber is None]

    def suspended(self) -> list[Process]:
        """Return the processes that stopped somewhere and may go on."""
        now = self._machine_seconds
        return [
            process
            for worker in self.workers
            for process in worker.processes
            if process.fiber is not None and process.runs and process.fiber.wake_at <= now
        ]

    def deliver_nudge(self, child: Child) -> None:
        """Give a child a nudge."""
        nudge = self.broker.take_nudge()
        child.attempt = Attempt(self.store.serial)
        self.counts["deliveries"] += 1
        self.begin(child, f"takes {shown(nudge)}", lambda: self._task(child.runtime, nudge))

    @staticmethod
    def _task(runtime: Runtime, nudge: Nudge) -> bool:
        if nudge.kind == "step":
            return superstep.run_step(runtime, nudge.thread_id, nudge.version)
        return superstep.run_node(runtime, nudge.thread_id, nudge.seq, nudge.run, nudge.version)

    def deliver_command(self, worker: SimulatedWorker) -> None:
        """Give a worker a command; it is acknowledged only when its row is committed."""
        command = self.broker.take_command()
        runtime = worker.children[0].runtime if worker.children else None
        if runtime is None:
            self.broker.commands.append(command)
            return
        self.counts["commands"] += 1
        self.begin(worker.commands, f"takes {command.message.id}", lambda: self._accept(runtime, command))

    def _accept(self, runtime: Runtime, command: Command) -> None:
        acknowledged, known, failures = False, command.outcome, self.counts["database failures"]
        try:
            try:
                accepted = commands.accept(runtime, command.message)
                outcome = "accepted"
            except NotCarried as error:
                if error.elsewhere:
                    return  # not acknowledged: another worker may have it
                accepted, outcome = None, error.code
            except InvalidInput as error:
                accepted, outcome = None, error.code
            self.point("after_command", command.message.id)
            acknowledged = True
        finally:
            if not acknowledged:
                self.broker.send(command)
        self.require(
            not (known == "accepted" and outcome != "accepted"),
            "an accepted command was refused later",
            f"{command.message.id}: {outcome}",
        )
        cancels = command.message.verb == "control" and command.message.action == "cancel"
        applied = accepted is not None and not accepted.duplicate
        if cancels and applied and self.counts["database failures"] == failures:
            left = self.store.query(_DISOWNED, accepted.thread_id)
            self.require(not left, "a cancelled parent's child was left for later", str(left))
        self.note(f"{command.message.id} {outcome}{' again' if accepted and accepted.duplicate else ''}")
        if self.healing or self.random.random() >= self.broker.loss:
            command.outcome = outcome
        if accepted is not None:
            self.broker.publish(accepted.nudges)

    def sweep(self, worker: SimulatedWorker) -> None:
        """Have a worker sweep."""
        self.begin(worker.sweeps, "sweeps", worker.sweep)

    def pass_time(self, seconds: float) -> None:
        """Let time pass; workers that the machine gives time to renew all the while."""
        self._machine_seconds += seconds
        for worker in self.working():
            worker.renew(steadily=True)

    def bark(self, child: Child) -> None:
        """Have a child's watchdog end an attempt that overstays."""
        attempt = child.attempt
        if attempt is None or attempt.overdue is None or attempt.overdue[0] > self._machine_seconds:
            return
        overdue = attempt.overdue[1]
        attempt.overdue = None
        watchdog = Process(child.worker, f"{child.name}.watchdog")
        watchdog.attempt = attempt
        was_healing, self.healing = self.healing, True  # nothing else happens to it
        self.begin(watchdog, "barks", overdue)
        self.healing = was_healing

    def jump_clock(self, seconds: float) -> None:
        """Set the database's clock."""
        self.note(f"the clock jumps by {seconds:.0f} s")
        self.counts["clock jumps"] += 1
        self.counts["interruptions"] += 1
        self._clock_offset += seconds

    def digest(self) -> str:
        """Return what tells two schedules apart."""
        return hashlib.blake2b("\n".join(self.schedule).encode(), digest_size=8).hexdigest()
