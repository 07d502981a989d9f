"""The simulated broker: two queues that lose, repeat, delay and reorder what they are given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any

from keepstep.store.leases import Nudge

if TYPE_CHECKING:
    from tests.simulation.world import World


@dataclass(eq=False)
class Command:
    """A command message, as often as it was sent."""

    message: Any
    """What `commands.accept` is given."""
    outcome: str = ""
    """`accepted`, or the code of the error it was refused with; empty until a reply has come."""
    accepted: Any = None
    under_way: bool = False


class Broker:
    """What is in the queues."""

    def __init__(self, world: World, random: Random, *, loss: float, repetition: float) -> None:
        self._world = world
        self._random = random
        self.loss = loss
        self.repetition = repetition
        self.nudges: list[Nudge] = []
        self.commands: list[Command] = []

    def publish(self, nudges: Sequence[Nudge]) -> None:
        """Put nudges into the queue, or lose them, or put them there twice."""
        for nudge in nudges:
            draw = self._random.random()
            if draw < self.loss:
                self._world.note(f"lost {shown(nudge)}")
                continue
            self._world.note(f"queued {shown(nudge)}")
            self.nudges += [nudge] * (2 if draw > 1.0 - self.repetition else 1)

    __call__ = publish

    def waiting(self, graphs: Sequence[str]) -> dict[str, int]:
        """Return how many nudges wait for each graph's version."""
        return {graph: sum(nudge.queue == graph for nudge in self.nudges) for graph in graphs}

    def take_nudge(self) -> Nudge:
        """Take any nudge: order means nothing."""
        return self.nudges.pop(self._random.randrange(len(self.nudges)))

    def send(self, command: Command) -> None:
        """Put a command into the queue, or lose it: its sender sends it again until there is a reply."""
        if self._random.random() < self.loss:
            self._world.note(f"lost command {command.message.id}")
            return
        self.commands += [command] * (2 if self._random.random() < self.repetition else 1)

    def take_command(self) -> Command:
        """Take any command."""
        return self.commands.pop(self._random.randrange(len(self.commands)))

    def empty(self) -> None:
        """Lose everything."""
        self._world.note(f"the broker lost {len(self.nudges)} nudges and {len(self.commands)} commands")
        self.nudges.clear()
        self.commands.clear()


def shown(nudge: Nudge) -> str:
    """Return a nudge in a line of the schedule."""
    return f"{nudge.kind} {nudge.thread_id[-6:]}@{nudge.version}" + (f" {nudge.seq}/{nudge.run}" if nudge.run else "")
