"""What a show claims, held against what is found."""

from __future__ import annotations

from typing import NamedTuple


class Check(NamedTuple):
    """One thing that must be true."""

    what: str
    expected: str
    found: str

    @property
    def holds(self) -> bool:
        """Whether it is."""
        return self.expected == self.found
