"""How urgent a thread's steps are, against those of other threads of its graph."""

from __future__ import annotations

from typing import Literal

Priority = Literal["high", "normal", "low"]

PRIORITIES: tuple[Priority, ...] = ("high", "normal", "low")
"""Most urgent first. Rows and messages hold the place in this list."""

NORMAL = PRIORITIES.index("normal")
