"""Who wants something: a person or a program, as somebody's signature vouches for it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Principal:
    """Whose word a signed command is."""

    name: str
    roles: tuple[str, ...] = ()
    kid: str = ""
    """The key that vouches for it."""

    def is_among(self, named: list[str]) -> bool:
        """Tell whether it is named itself, or one of its roles is."""
        return self.name in named or not set(self.roles).isdisjoint(named)
