"""The show: the licence audit on two workers, of which one is killed half-way, and a person who is asked.

    python -m examples.licence_audit

Everything is real: the packages are those of this environment, the workers are processes of their own over SQLite and
a broker in a folder, the kill is SIGKILL, the decision comes as a message from another process. At the end the
database is asked what happened; exit code 1 when anything is not as it must be.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from examples.deployment import ROOT, Deployment, ShowFailed, WorkerProcess, until
from examples.licence_audit import proof
from examples.licence_audit.licences import Category
from examples.licence_audit.proof import GRAPH, Story
from examples.licence_audit.watch import FanOut
from examples.screen import Bars, Screen
from keepstep import Client, Reader
from keepstep.errors import KeepstepError
from keepstep.runtime.reader import Approval

_THREAD = "audit-of-this-environment"
_BY = "dana@legal"
_KILL_AT = 0.4
_FAN_OUT_SECONDS = 60.0
_QUIET_SECONDS = 1.5
_PRODUCER_SECONDS = 40.0


def main() -> int:
    """Run the show; return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m examples.licence_audit", description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--pace", type=float, default=0.3, metavar="SECONDS", help="least time of a package (%(default)s)"
    )
    pace = parser.parse_args().pace
    screen = Screen()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _terminated)
    try:
        _show(screen, pace)
    except (ShowFailed, KeepstepError) as error:
        screen.say(f"FAILED: {error}", style="bold red")
        return 1
    except KeyboardInterrupt:
        screen.say("stopped; so are the workers")
        return 130
    return 0


def _terminated(_number: int, _frame: object) -> NoReturn:
    raise KeyboardInterrupt


def _show(screen: Screen, pace: float) -> None:
    (ROOT / "build").mkdir(exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="licence-audit-", dir=ROOT / "build"))
    published = folder / "published"
    screen.title("A licence audit of the packages in this environment, on workers that die")
    with Deployment(folder, "examples/licence_audit/agent.py") as deployment:
        screen.say("starting two of: keepstep worker examples/licence_audit/agent.py")
        screen.detail(f"SQLite and a file broker in {folder.relative_to(ROOT)}")
        workers = deployment.start_workers(2, concurrency=2)
        for worker in workers:
            screen.detail(f"{worker.name}: pid {worker.pid}, 2 steps at once, id {worker.id}")
        with Client(settings=deployment.settings) as client, Reader(settings=deployment.settings) as reader:
            state = {"folder": str(published), "pace_seconds": pace}
            client.start(GRAPH, _THREAD, state, request_id=folder.name).accepted(20)
            screen.say(f"run of {GRAPH} accepted; it plans, then fans out: one node run for each package")
            killed = _fan_out(screen, reader, workers)
            approval = _waiting(screen, reader, deployment)
            accepted = _decide(screen, deployment, approval)
            thread = reader.wait(_THREAD, 30, graph=GRAPH)
            screen.say(f"the run is {thread.status}")
            _prove(screen, reader, Story(_THREAD, published, killed, approval.id, _BY, accepted))
    screen.say("both workers are stopped; everything was as it must be", style="bold green")
    screen.console.print(f"\nThe report: {published / 'report.md'}", soft_wrap=True)


# --- the fan-out, and the kill ----------------------------------------------------------------------------------------


def _fan_out(screen: Screen, reader: Reader, workers: list[WorkerProcess]) -> list[str]:
    """Watch the fan-out to its end, killing the first worker on the way; return the node runs that it held."""
    fan_out = FanOut(_THREAD)
    victim, survivor = workers
    killed: list[str] = []
    news: list[tuple[str, Callable[[], bool]]] = []
    deadline = time.monotonic() + _FAN_OUT_SECONDS
    with screen.bars([worker.name for worker in workers]) as bars:
        while not fan_out.is_over:
            if time.monotonic() > deadline:
                message = f"the fan-out: {fan_out.done} of {fan_out.total} done after {_FAN_OUT_SECONDS:g} s"
                raise ShowFailed(message)
            fan_out.look(reader)
            _draw(bars, fan_out, workers, dead=victim if killed else None)
            if not killed and fan_out.done >= _KILL_AT * fan_out.total and _just_began(fan_out, victim):
                killed = _kill(screen, fan_out, reader, victim)
                news = _expected(fan_out, victim, survivor, killed)
            while news and news[0][1]():
                screen.say(news.pop(0)[0])
            time.sleep(0.02)
    if not killed:
        message = "the fan-out was over before the worker could be killed: give a longer --pace"
        raise ShowFailed(message)
    by_worker = fan_out.done_by()
    each = [f"{worker.name} {by_worker[worker.id]}" for worker in workers]
    if by_worker[""]:
        each.append(f"too quick to be seen {by_worker['']}")
    screen.say(f"all {fan_out.total} node runs are done: {', '.join(each)}")
    return killed


def _just_began(fan_out: FanOut, worker: WorkerProcess) -> bool:
    """Tell whether a worker has begun a node run since the last look, so that a kill meets it at work."""
    return bool(fan_out.fresh & set(fan_out.held_by(worker.id)))


def _kill(screen: Screen, fan_out: FanOut, reader: Reader, victim: WorkerProcess) -> list[str]:
    """Kill a worker; return the node runs that were under way in it."""
    victim.kill()
    fan_out.look(reader)
    held = fan_out.held_by(victim.id)
    if not held:
        message = f"{victim.name} finished what it held at the very moment of the kill: give a longer --pace"
        raise ShowFailed(message)
    packages = reader.state(_THREAD, graph=GRAPH)["packages"]
    positions = {row.run: row.position for row in fan_out.rows}
    screen.say(f"SIGKILL to {victim.name} and its pool, at {fan_out.done} of {fan_out.total}", style="red")
    screen.detail(f"under way in it: {', '.join(f'{run} ({packages[positions[run]]})' for run in held)}")
    return held


def _expected(
    fan_out: FanOut, victim: WorkerProcess, survivor: WorkerProcess, killed: list[str]
) -> list[tuple[str, Callable[[], bool]]]:
    """Return what must come after a kill, in this order, and how to tell that it has."""
    return [
        (
            f"{victim.name} is given up: nobody has heard of it, its leases are free",
            lambda: not fan_out.held_by(victim.id),
        ),
        (f"{survivor.name} has taken over what it held", lambda: fan_out.taken_over(killed, victim.id)),
    ]


def _draw(bars: Bars, fan_out: FanOut, workers: list[WorkerProcess], *, dead: WorkerProcess | None) -> None:
    by_worker = fan_out.done_by()
    done = {worker.name: by_worker[worker.id] for worker in workers}
    notes = {worker.name: f"{len(fan_out.held_by(worker.id))} under way" for worker in workers}
    if dead is not None:
        held = len(fan_out.held_by(dead.id))
        notes[dead.name] = f"killed; {held} leases not yet given up" if held else "killed"
    bars.show(done, fan_out.total, notes)


# --- the wait, and the decision ---------------------------------------------------------------------------------------


def _waiting(screen: Screen, reader: Reader, deployment: Deployment) -> Approval:
    """Show that a thread that waits for a person holds nothing but rows."""
    approval = until(lambda: next(iter(reader.approvals(thread=_THREAD, graph=GRAPH)), None), 30, "the approval")
    screen.say(f"the run asks a person: {approval.question}", style="bold")
    for name, concern in approval.context.items():
        screen.detail(f"{name}: {concern}")
    until(lambda: not _held(reader) and not deployment.messages(), 10, "nothing held and nothing queued")
    looks = 0
    deadline = time.monotonic() + _QUIET_SECONDS
    while time.monotonic() < deadline:
        held, messages = _held(reader), deployment.messages()
        status = reader.get(_THREAD, graph=GRAPH).status
        if held or messages or status != "waiting":
            message = f"while it waits the thread is {status}, {held} leases are held, {messages} messages are queued"
            raise ShowFailed(message)
        looks += 1
        time.sleep(0.1)
    screen.say(
        f"it waits: status waiting, 0 leases held, 0 messages in the broker ({looks} looks in {_QUIET_SECONDS} s)"
    )
    return approval


def _held(reader: Reader) -> int:
    """Return the number of leases that anybody holds on the thread or its node runs."""
    on_thread = reader.get(_THREAD, graph=GRAPH).running_on is not None
    return on_thread + sum(row.lease_worker is not None for row in reader.node_runs(_THREAD, graph=GRAPH))


def _decide(screen: Screen, deployment: Deployment, approval: Approval) -> list[str]:
    """Let another process decide: accept what asks for little, strike the rest off the list."""
    asked: list[str] = approval.arguments["accept"]
    accepted = [name for name in asked if str(Category.WEAK) in approval.context[name]]
    screen.say(
        f"{_BY} decides, by a message from a process that has only the broker: {len(accepted)} of {len(asked)} accepted"
    )
    comment = "Linked or used as they are, not changed."
    words = _sent(deployment, approval.id, "approve", "--by", _BY, "--accept", ",".join(accepted), "--comment", comment)
    screen.detail(words)
    return accepted


def _sent(deployment: Deployment, approval: str, *options: str) -> str:
    """Send a decision from a process of its own, which knows the broker and not the database; return its words."""
    command = [sys.executable, "-m", "examples.licence_audit.decide", approval, *options]
    try:
        done = subprocess.run(
            command,
            env=deployment.producer_environment,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_PRODUCER_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        message = f"the producer did not end within {_PRODUCER_SECONDS:g} s"
        raise ShowFailed(message) from None
    if done.returncode:
        message = f"the producer's decision was not accepted: {done.stderr.strip()}"
        raise ShowFailed(message)
    return done.stdout.strip()


# --- the proof --------------------------------------------------------------------------------------------------------


def _prove(screen: Screen, reader: Reader, story: Story) -> None:
    """Print what the database says and compare it with what was done; raise `ShowFailed` naming what differs."""
    head = ("checkpoint", "holds the work of", "starts", "next")
    screen.table("Checkpoints, from the database", head, proof.steps(reader, story.thread))
    checks = proof.checks(reader, story)
    rows = [(check.what, check.expected, check.found, "yes" if check.holds else "NO") for check in checks]
    screen.table("What must be true", ("what", "expected", "found", ""), rows)
    wrong = [check.what for check in checks if not check.holds]
    if wrong:
        message = f"not as it must be: {'; '.join(wrong)}"
        raise ShowFailed(message)


if __name__ == "__main__":
    sys.exit(main())
