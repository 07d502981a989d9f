"""The outside world of a simulation: what effects do to it, counted under their idempotency keys."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.simulation.world import World


class OutsideError(Exception):
    """The outside refused; nothing happened there."""


class Outside:
    """Counts what happened, and refuses what may never happen."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.calls: Counter[str] = Counter()
        self.happened: Counter[str] = Counter()
        self.trouble: Counter[str] = Counter()
        """How much trouble of each kind is still to be made, by name."""

    def makes_trouble(self, name: str) -> bool:
        """Tell whether trouble of that name is due, and count it."""
        if self.trouble[name] <= 0:
            return False
        self.trouble[name] -= 1
        return True

    def read(self, key: str) -> str:
        """Something that may safely happen twice, but not once its result is known."""
        world, attempt = self._world, self._world.attempt
        world.point("in effect", key)
        recorded = world.store.results.get(key)
        late = recorded is not None and (attempt is None or attempt.began_at > recorded)
        world.require(not late, "an effect with a recorded result was performed again", key)
        self.calls[key] += 1
        self.happened[key] += 1
        world.point("in effect", key)
        return "read"

    def pay(self, key: str, tag: str) -> str:
        """Something at risk: once, whatever happens."""
        world = self._world
        world.point("in effect", key)
        journal = world.store.query(
            "SELECT state FROM keepstep_effect WHERE step || '/' || run || '/' || call = ?", key
        )
        world.require(bool(journal), "an effect at risk was called without an intent", key)
        world.require(journal[0][0] == "intent", f"an effect at risk was called although it is {journal[0][0]}", key)
        self.calls[key] += 1
        if self.makes_trouble(f"refuse {tag}"):
            world.note(f"outside refuses {key}")
            message = "refused"
            raise OutsideError(message)
        self.happened[key] += 1
        world.note(f"outside pays {key}")
        world.require(self.happened[key] == 1, "an effect at risk happened twice", key)
        world.point("in effect", key)
        return f"paid {self.happened[key]}"
