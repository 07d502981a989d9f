"""Answers: one JSON document for programs, tables and lines for people."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from functools import cached_property
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

_PIPE_COLUMNS = 100_000
_LINES_MAX = 20
STATUS_STYLES = {
    "done": "green",
    "ready": "cyan",
    "waiting": "yellow",
    "blocked": "bold red",
    "failed": "red",
    "cancelled": "dim",
    "open": "yellow",
    "approved": "green",
    "answered": "green",
    "rejected": "red",
}


class _Console(Console):
    """A console that lets its caller know when nobody reads any more."""

    def on_broken_pipe(self) -> None:
        """Raise `BrokenPipeError`."""
        raise BrokenPipeError


def console(*, to_errors: bool = False) -> Console:
    """Return a console; one that is no terminal neither wraps nor cuts lines, as programs read them."""
    stream = sys.stderr if to_errors else sys.stdout
    width = None if stream.isatty() else _PIPE_COLUMNS
    return _Console(file=stream, width=width, highlight=False, markup=False, soft_wrap=width is not None)


class Output:
    """Where a command answers to: `as_json` decides for whom."""

    def __init__(self, *, as_json: bool) -> None:
        self.as_json = as_json

    @cached_property
    def console(self) -> Console:
        """Standard output, for people."""
        return console()

    def document(self, value: object) -> None:
        """Print the JSON document."""
        print_json(value)

    def record(self, value: object) -> None:
        """Print a value as one line of JSON, at once: for a program that reads on as it comes."""
        sys.stdout.write(json.dumps(value, ensure_ascii=True, allow_nan=False, default=_plain) + "\n")
        sys.stdout.flush()

    def line(self, text: str | Text = "") -> None:
        """Print a line for people."""
        self.console.print(visible(text) if isinstance(text, str) else text, soft_wrap=True)

    def table(self, columns: Sequence[str], rows: Iterable[Sequence[str | Text]]) -> None:
        """Print a table for people; the last column takes the room that is left."""
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
        for index, column in enumerate(columns):
            table.add_column(column, overflow="fold", no_wrap=index < len(columns) - 1)
        for row in rows:
            table.add_row(*(visible(cell) if isinstance(cell, str) else cell for cell in row))
        self._print(table)

    def facts(self, facts: Mapping[str, str | Text | None]) -> None:
        """Print names and values below each other; those without a value are left out."""
        table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
        table.add_column(style="bold", no_wrap=True)
        table.add_column(overflow="fold")
        for name, value in facts.items():
            if value not in (None, ""):
                table.add_row(name, visible(value) if isinstance(value, str) else value)
        self._print(table)

    def _print(self, table: Table) -> None:
        if self.console.is_terminal:
            self.console.print(table)
            return
        with self.console.capture() as captured:
            self.console.print(table)
        # Rich fills each line up to the table's width.
        lines = "".join(f"{line.rstrip()}\n" for line in captured.get().splitlines())
        self.console.file.write(lines)

    def heading(self, text: str) -> None:
        """Print the head of a part."""
        self.line()
        self.line(Text(text, style="bold"))

    def state(self, state: Mapping[str, Any], *, lines_max: int = _LINES_MAX, more: str = "") -> None:
        """Print a state; of a value longer than `lines_max` lines the beginning, and `more` says where the rest is."""
        facts = {}
        for key, value in state.items():
            lines = shown(value).splitlines() or ['""']
            if len(lines) > lines_max:
                rest = f"… {len(lines) - lines_max} more lines" + (f": {more}" if more else "")
                lines = [*lines[:lines_max], rest]
            facts[key] = "\n".join(lines)
        if facts:
            self.facts(facts)
        else:
            self.line("(empty)")


def print_json(value: object) -> None:
    """Print one JSON document on standard output, exact: no rounding, no NaN, lone surrogates escaped."""
    text = json.dumps(value, ensure_ascii=False, indent=2, allow_nan=False, default=_plain)
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        text = json.dumps(value, indent=2, allow_nan=False, default=_plain)
    sys.stdout.write(text + "\n")


def _plain(value: object) -> object:
    if isinstance(value, datetime):
        return iso(value.timestamp())
    message = f"{type(value).__name__} has no place in a JSON document"
    raise TypeError(message)


def print_error(code: str, message: str, *, as_json: bool) -> None:
    """Print an error: a line for people on standard error, and with `as_json` the document that was asked for."""
    text = Text(f"error: {visible(' '.join(message.split()))}", style="red")
    console(to_errors=True).print(text, soft_wrap=True)
    if as_json:
        print_json({"error": {"code": code, "message": message}})
        sys.stdout.flush()


# --- values for people ------------------------------------------------------------------------------------------------


def visible(text: str) -> str:
    """Return `text` with control characters escaped: data must not steer a terminal."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode("ascii") for c in text)


def shown(value: Any, indent: int = 0) -> str:
    """Return a value of the reader's views as people read it: JSON, in which typed values look like themselves."""
    if isinstance(value, str) and indent == 0:
        return value
    flat = _flat(value)
    if len(flat) + indent <= 72 or not isinstance(value, (dict, list)) or not value:  # noqa: PLR2004  a line of a terminal
        return flat
    pad = " " * (indent + 2)
    if isinstance(value, list):
        inner = [pad + shown_in(item, indent + 2) for item in value]
        return "[\n" + ",\n".join(inner) + "\n" + " " * indent + "]"
    if set(value) == {"$", "v"}:
        return f"{value['$']} {shown_in(value['v'], indent)}"
    inner = [f"{pad}{json.dumps(key, ensure_ascii=False)}: {shown_in(item, indent + 2)}" for key, item in value.items()]
    return "{\n" + ",\n".join(inner) + "\n" + " " * indent + "}"


def shown_in(value: Any, indent: int) -> str:
    """Return a value as it stands inside another one."""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else shown(value, max(indent, 1))


def _flat(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(map(_flat, value)) + "]"
    if not isinstance(value, dict):
        return json.dumps(value, ensure_ascii=False)
    if set(value) != {"$", "v"}:
        return "{" + ", ".join(f"{json.dumps(k, ensure_ascii=False)}: {_flat(v)}" for k, v in value.items()) + "}"
    kind, inner = value["$"], value["v"]
    if kind in {"int", "decimal", "datetime", "date", "time", "uuid", "float"} and isinstance(inner, str):
        return inner
    return f"{kind} {_flat(inner)}"


def short(value: Any, width: int = 100) -> str:
    """Return a value on one line, cut to `width`."""
    text = value if isinstance(value, str) else _flat(value)
    text = " ".join(text.split())
    return text if len(text) <= width else f"{text[: width - 1]}…"


def status_text(status: str) -> Text:
    """Return a status in its colour."""
    return Text(status, style=STATUS_STYLES.get(status, ""))


def iso(at: float | None) -> str | None:
    """Return a time (seconds since 1970) as programs read it: ISO 8601 in UTC."""
    return None if at is None else datetime.fromtimestamp(at, UTC).isoformat()


def local(at: float | datetime | None) -> str | None:
    """Return a time as people read it: this machine's zone, with how long ago or ahead that is."""
    if at is None:
        return None
    seconds = at.timestamp() if isinstance(at, datetime) else at
    return f"{clock(seconds)} ({relative(seconds)})"


def clock(at: float) -> str:
    """Return a time as people read it in this machine's zone, which stays the same however often it is said."""
    return f"{datetime.fromtimestamp(at, UTC).astimezone():%Y-%m-%d %H:%M:%S}"


def relative(at: float) -> str:
    """Return how far away a time is: `3 min ago`, `in 2 h`."""
    away = at - time.time()
    text = duration(abs(away))
    return f"in {text}" if away > 0 else f"{text} ago"


def duration(seconds: float) -> str:
    """Return a duration in one unit: `0.4 s`, `12 s`, `3 min`, `2 h`, `5 d`."""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"  # noqa: PLR2004
