"""What a show prints: bars that move on a terminal, plain lines anywhere else."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

_SHARE = 0.2
_WIDTH_WITHOUT_TERMINAL = 120


class Screen:
    """The show's output. Times are seconds since it began."""

    def __init__(self) -> None:
        self.console = Console(highlight=False)
        if not self.console.is_terminal:
            self.console = Console(highlight=False, width=_WIDTH_WITHOUT_TERMINAL)
        self._began = time.monotonic()

    def title(self, text: str) -> None:
        """Begin the show."""
        self.console.print(f"[bold]{escape(text)}[/bold]\n")

    def say(self, text: str, *, style: str = "") -> None:
        """Tell what happened, and when."""
        line = f"[dim]{time.monotonic() - self._began:5.1f} s[/dim]  {escape(text)}"
        self.console.print(line, style=style, soft_wrap=True)

    def detail(self, text: str) -> None:
        """Tell more about it."""
        self.console.print(f"         [dim]{escape(text)}[/dim]", soft_wrap=True)

    @contextmanager
    def bars(self, names: Sequence[str]) -> Iterator[Bars]:
        """Show one bar for each name, and one for all, while the block runs."""
        progress = Progress(
            TextColumn("         {task.description}"),
            BarColumn(40),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            console=self.console,
            transient=True,
            disable=not self.console.is_terminal,
        )
        with progress:
            yield Bars(self, progress, names)

    def table(self, title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Print a table."""
        table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
        for name in head:
            table.add_column(name, overflow="fold")
        for row in rows:
            table.add_row(*(escape(cell) for cell in row))
        self.console.print()
        self.console.print(table)


class Bars:
    """Bars that move; without a terminal a line at every fifth of the way."""

    def __init__(self, screen: Screen, progress: Progress, names: Sequence[str]) -> None:
        self._screen = screen
        self._progress = progress
        self._live = screen.console.is_terminal
        self._tasks = {name: progress.add_task(name, total=None, note="") for name in (*names, "all")}
        self._told = 0

    def show(self, done: Mapping[str, int], total: int, notes: Mapping[str, str]) -> None:
        """Show how much each has done, of `total`."""
        for name, task in self._tasks.items():
            count = sum(done.values()) if name == "all" else done.get(name, 0)
            self._progress.update(task, completed=count, total=total, note=notes.get(name, ""))
        step = int(sum(done.values()) / total / _SHARE) if total else 0
        if step > self._told and not self._live:
            self._told = step
            each = ", ".join(f"{name} {done.get(name, 0)}" for name in self._tasks if name != "all")
            self._screen.say(f"{sum(done.values())} of {total} done: {each}")
