"""Following a run: what is new since the last look, as lines, and where it stands, as a live display on a terminal."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, Self

from keepstep.cli import records
from keepstep.cli.output import STATUS_STYLES, console, duration, short, shown, visible
from keepstep.cli.questions import deciding
from keepstep.cli.session import Session
from keepstep.cli.show import waited_for

if TYPE_CHECKING:
    from rich.console import RenderableType

    from keepstep.runtime.reader import Approval, Checkpoint, Event, Reader, Thread
    from keepstep.store.views import RunView

_LOOK_SECONDS_MIN, _LOOK_SECONDS_MAX = 0.1, 0.5
_IDLE_SECONDS = 5.0
"""A thread that has been due this long in nobody's hands may have no worker."""
_EVENTS_MAX = 1000
_RUN_ENDED = ("done", "failed", "cancelled")
_WORTH_TELLING = ("running", "waiting", "failed", "blocked")


@dataclass(frozen=True)
class Ending:
    """How following a run ended."""

    status: str
    """The run's last status: `done`, `failed`, `cancelled`, `blocked`, or what it was when the time was over."""
    ended: bool
    seq: int
    """Of the run's last checkpoint; -1: there is none."""
    steps: int
    error: Any
    approvals: list[Approval]


@dataclass(frozen=True)
class Look:
    """A run at one moment, and what is new since the look before."""

    thread: Thread
    status: str
    steps: int
    error: Any
    checkpoints: list[Checkpoint]
    events: list[Event]
    node_runs: dict[str, Counter[str]]
    """Of the step that is fanned out: node → status → count."""
    approvals: list[Approval]
    waits: list[str]
    seconds: float | None
    """From its acceptance to its end."""
    idle: bool
    """It has been due for some time and no worker has taken it."""

    @property
    def ended(self) -> bool:
        """Whether nothing more will happen by itself."""
        return self.status in (*_RUN_ENDED, "blocked")


@dataclass
class Follower:
    """Looks at a run again and again."""

    reader: Reader
    thread_id: str
    run_id: str | None
    seq: int = -1
    cursor: int = 0
    idle_since: float | None = None
    own_seq: int = -1
    _first: bool = field(default=True, repr=False)

    def look(self) -> Look:
        """Return the run as it is now."""
        thread = self.reader.get(self.thread_id)
        run = self._run()
        checkpoints = self.reader.history(self.thread_id, after=self.seq) if thread.seq > self.seq else []
        self.seq = checkpoints[-1].seq if checkpoints else self.seq
        own = [each for each in checkpoints if each.run == self.run_id]
        self.own_seq = own[-1].seq if own else self.own_seq
        status = self._status(thread, run)
        present = thread.run == self.run_id
        parked = thread.status == "waiting" or (thread.row.fanned and not thread.row.pending)
        approvals = self.reader.approvals(thread=self.thread_id) if present and parked else []
        return Look(
            thread,
            status,
            thread.steps if present else run.steps,
            records.error_of(run.error) if status in _RUN_ENDED else thread.error if status == "blocked" else None,
            own,
            list(self._events()),
            self._node_runs(thread) if present and thread.row.fanned else {},
            approvals,
            self._waits(approvals) if present and thread.status == "waiting" else [],
            None if run.ended_at is None else run.ended_at - run.created_at,
            self._is_idle(thread),
        )

    def _run(self) -> RunView:
        runs = self.reader.runs(self.thread_id)
        if self.run_id is None:
            self.run_id = runs[-1].id
        return next(each for each in runs if each.id == self.run_id)

    def _status(self, thread: Thread, run: RunView) -> str:
        if run.status in _RUN_ENDED:
            return run.status
        if thread.run != self.run_id:
            return "queued"
        return "paused" if thread.paused else thread.status

    def _events(self) -> Iterator[Event]:
        while True:
            found = self.reader.events(self.thread_id, after=self.cursor, limit=_EVENTS_MAX, kind="node.emitted")
            for each in found:
                self.cursor = each.cursor
                if each.run == self.run_id:
                    yield each
            if len(found) < _EVENTS_MAX:
                return

    def _node_runs(self, thread: Thread) -> dict[str, Counter[str]]:
        counts: dict[str, Counter[str]] = {}
        for each in self.reader.node_runs(self.thread_id):
            if each.branch == thread.row.branch and each.seq == thread.seq + 1:
                running = each.status == "ready" and each.lease_worker is not None
                counts.setdefault(each.node, Counter())["running" if running else each.status] += 1
        return counts

    def _waits(self, approvals: list[Approval]) -> list[str]:
        questions = {each.id for each in approvals}
        return [
            f"{each.run} waits for {waited_for(each, None, absolute=True)}".replace("for time: ", "")
            for each in self.reader.waits(self.thread_id)
            if each.status == "open" and each.approval_id not in questions
        ]

    def _is_idle(self, thread: Thread) -> bool:
        due = thread.status == "ready" and not thread.paused and thread.running_on is None
        if not due or thread.row.due_at > time.time():
            self.idle_since = None
            return False
        self.idle_since = self.idle_since or time.monotonic()
        return time.monotonic() - self.idle_since > _IDLE_SECONDS


def follow(
    session: Session, reader: Reader, thread_id: str, run_id: str | None, *, title: str, timeout: float | None
) -> Ending:
    """Show a run until it has ended or is blocked, or `timeout` seconds have passed; return how that was."""
    begun = time.monotonic()
    follower = Follower(reader, thread_id, run_id)
    display = _display(session, title)
    with display:
        while True:
            looked = time.monotonic()
            look = follower.look()
            took = time.monotonic() - looked
            over = timeout is not None and time.monotonic() - begun >= timeout
            display.show(look)
            if look.ended or over:
                break
            # A database that answers slowly is not asked more often for it.
            pause = min(max(_LOOK_SECONDS_MIN, 4 * took), _LOOK_SECONDS_MAX)
            if timeout is not None:
                pause = min(pause, max(0.0, begun + timeout - time.monotonic()))
            time.sleep(pause)
    ending = Ending(look.status, look.ended, follower.own_seq, look.steps, look.error, look.approvals)
    display.close(ending, look.seconds or time.monotonic() - begun)
    return ending


# --- displays ---------------------------------------------------------------------------------------------------------


class Display(Protocol):
    """Where a run is shown."""

    def __enter__(self) -> Self:
        """Take the place."""

    def __exit__(self, *_: object) -> None:
        """Give it back."""

    def show(self, look: Look) -> None:
        """Show a look."""

    def close(self, ending: Ending, seconds: float) -> None:
        """Show how it ended."""


def _display(session: Session, title: str) -> Display:
    if session.as_json:
        return Silent()
    return Live(session, title) if sys.stderr.isatty() else Lines(session, title)


class Silent:
    """Shows nothing: the document at the end says all."""

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing."""

    def show(self, look: Look) -> None:
        """Do nothing."""

    def close(self, ending: Ending, seconds: float) -> None:
        """Do nothing."""


class Lines(Silent):
    """Prints what is new, one line each: for logs, and above the live display."""

    def __init__(self, session: Session, title: str) -> None:
        self.console = console(to_errors=True)
        self._session = session
        self._title = title
        self._asked: set[str] = set()
        self._told: dict[str, str] = {}

    def show(self, look: Look) -> None:
        """Print what is new."""
        self._once("begun", "accepted", self._title)
        for each in look.events:
            self._line("event", f"{each.node}: {short(each.payload, 200)}")
        for checkpoint in look.checkpoints:
            self._checkpoint(checkpoint)
        self._fan_out(look)
        for asked in look.approvals:
            self._approval(asked)
        self._once("waits", "waiting", "; ".join(look.waits))
        if look.status == "paused":
            self._once("paused", "paused", f"go on with: {self._session.hint(f'resume {look.thread.name}')}")
        if look.idle:
            hint = f"no worker has taken it yet: is one running? Try: {self._session.hint('doctor')}"
            self._once(f"idle {look.thread.seq}", "due", hint)

    def close(self, ending: Ending, seconds: float) -> None:
        """Print how it ended."""
        steps = f"{ending.steps} step{'' if ending.steps == 1 else 's'}"
        label = ending.status if ending.ended else "going on"
        text = f"after {steps} and {duration(seconds)}" + ("" if ending.ended else f" it is {ending.status}")
        if ending.error and ending.error.get("code") == "cancelled":
            text += f": {records.said(ending.error)}"
        elif ending.error:
            where = f"{ending.error.get('run') or ending.error['node']}: " if ending.error.get("node") else ""
            text += f": {where}{ending.error.get('message')} [{ending.error.get('code')}]"
        self._line(label, text)

    def _checkpoint(self, checkpoint: Checkpoint) -> None:
        if checkpoint.kind == "input":
            return
        ran = records.counted(node["run"] for node in checkpoint.nodes)
        failures = sum(node.get("failures", 0) for node in checkpoint.nodes)
        again = f" (after {failures} failed attempt{'' if failures == 1 else 's'})" if failures else ""
        self._line("step", f"{checkpoint.seq:<4} {ran or checkpoint.kind}{again}")

    def _fan_out(self, look: Look) -> None:
        """Tell the beginning of a fan-out and each quarter of it."""
        for node, counts in look.node_runs.items():
            total, ended = counts.total(), _ended(counts)
            text = f"{node} {ended * 4 // total * 25}%" if ended else f"{node} x{total}"
            if self._told.get(f"fan {look.thread.seq} {node}") != text:
                self._told[f"fan {look.thread.seq} {node}"] = text
                self._line("nodes", f"{node}: {ended} of {total} node runs ended")

    def _approval(self, asked: Approval) -> None:
        if asked.id in self._asked:
            return
        self._asked.add(asked.id)
        self._line("asks", f"{asked.node_run}: {asked.question}")
        if asked.arguments is not None:
            for line in shown(asked.arguments).splitlines()[:12]:
                self._line("", f"  {line}")
        for each in deciding(self._session, asked):
            self._line("", f"  {each}")

    def _once(self, key: str, label: str, text: str) -> None:
        if text and self._told.get(key) != text:
            self._told[key] = text
            self._line(label, text)

    def _line(self, label: str, text: str) -> None:
        from rich.text import Text

        style = STATUS_STYLES.get(label, "bold" if label == "asks" else "dim")
        line = Text.assemble((f"{label:<10}", style), visible(text))
        self.console.print(line, soft_wrap=True)


class Live(Lines):
    """Keeps where the run stands below the lines: status, bars of the node runs, what it waits for."""

    def __init__(self, session: Session, title: str) -> None:
        super().__init__(session, title)
        from rich.live import Live as RichLive
        from rich.spinner import Spinner

        self._spinner = Spinner("dots")
        self._live = RichLive(console=self.console, transient=True, refresh_per_second=8)
        self._begun = time.monotonic()

    def __enter__(self) -> Self:
        """Take the bottom of the terminal."""
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Give it back."""
        self._live.stop()

    def show(self, look: Look) -> None:
        """Print what is new above, and redraw."""
        super().show(look)
        if not look.ended:
            self._live.update(self._standing(look))

    def _fan_out(self, look: Look) -> None:
        """The bars tell it."""

    def _standing(self, look: Look) -> RenderableType:
        from rich.console import Group
        from rich.text import Text

        head = Text.assemble(
            (visible(self._title), "bold"),
            "  ",
            (look.status, STATUS_STYLES.get(look.status, "")),
            (f"  {look.steps} steps, {duration(time.monotonic() - self._begun)}", "dim"),
        )
        if look.approvals:
            count = len(look.approvals)
            head.append(f"  waits for {count} decision{'' if count == 1 else 's'} (no worker is held)", style="yellow")
        self._spinner.update(text=head)
        parts: list[RenderableType] = [self._spinner]
        if look.node_runs:
            parts.append(_bars(look.node_runs))
        return Group(*parts)


def _bars(node_runs: dict[str, Counter[str]]) -> RenderableType:
    from rich.progress_bar import ProgressBar
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    for node, counts in node_runs.items():
        total, ended = counts.total(), _ended(counts)
        rest = [f"{counts[status]} {status}" for status in _WORTH_TELLING if counts[status]]
        bar = ProgressBar(total=total, completed=ended, width=40)
        table.add_row(f"  {visible(node)}", bar, f"{ended}/{total}", ", ".join(rest))
    return table


def _ended(counts: Counter[str]) -> int:
    return sum(counts[status] for status in (*_RUN_ENDED, "blocked"))
