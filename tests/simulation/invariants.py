"""What must hold when everything has come to rest, whatever happened on the way."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from keepstep.errors import HistoryCorrupt
from keepstep.runtime.codec import view
from keepstep.runtime.history import restore, verify
from keepstep.store import checkpoints
from keepstep.store.claims import CheckpointRow
from tests.simulation import agents
from tests.simulation.agents import SIGNAL, Planned

if TYPE_CHECKING:
    from tests.simulation.world import World


_ANSWERS = "SELECT answer FROM keepstep_wait WHERE kind = 'signal' AND answer IS NOT NULL"


def unfinished(world: World) -> list[str]:
    """Return what is not at rest yet."""
    processes = [process for worker in world.workers for process in worker.processes if process.fiber]
    found = [f"{process.name} is under way" for process in processes]
    found += [f"{run.tag} is not started" for run in world.clients.planned if not world.clients.is_started(run)]
    found += [f"{command.message.id} has no reply" for command in world.clients.sent if not command.outcome]
    for thread_id, name, status, control, error in world.store.query(
        "SELECT id, name, status, control, error FROM keepstep_thread ORDER BY name"
    ):
        code = json.loads(error or "{}").get("code")
        unknown = status == "blocked" and code == "effect_unknown" and world.unknown(thread_id)
        # Input that no worker could check at the door, as none that carried the graph took the command.
        unfit = status == "failed" and code == "state"
        at_rest = status in {"done", "cancelled"} or unfit or (unknown and control == "")
        if not at_rest:
            found.append(f"{name} is {status} {control} {error or ''}")
    return found


def check(world: World) -> None:
    """Hold everything that is left against everything that was asked for."""
    for worker in world.workers:
        world.require(not worker.dead, "a dead child was not missed", worker.id)
    _check_starts(world)
    for row in world.store.query("SELECT id, name, agent, branch, status, run_id, run_steps FROM keepstep_thread"):
        _check_thread(world, *row)
    _check_leases(world)
    _check_effects(world)
    _check_approvals(world)
    _check_commands(world)


# --- threads ------------------------------------------------------------------------------------------------------


def _check_thread(
    world: World, thread_id: str, name: str, agent: str, branch: int, status: str, run_id: str | None, run_steps: int
) -> None:
    history = [row for row, _ in checkpoints.history(world.store, thread_id, branch)]
    world.require([row.seq for row in history] == list(range(len(history))), "the history has a gap", name)
    try:
        verify(history)
    except HistoryCorrupt as error:
        world.require(holds=False, invariant="the digest chain is broken", detail=f"{name}: {error}")
    steps = Counter(row.run_id for row in history if row.kind == "step")
    inputs = Counter(row.run_id for row in history if row.kind == "input")
    world.require(all(count == 1 for count in inputs.values()), "a run began twice", name)
    world.require(status == "cancelled" or run_steps == steps[run_id or ""], "the steps are miscounted", name)
    for run, run_status, counted in world.store.query(
        "SELECT id, status, steps FROM keepstep_run WHERE thread_id = ?", thread_id
    ):
        if run_status in {"done", "failed"}:
            world.require(counted == steps[run], "a run's steps are miscounted", f"{name}: {counted} of {steps[run]}")
    if history:
        codec = world.codecs[agent, "1"]
        _check_log(world, thread_id, name, restore(codec, _since_snapshot(history)).channels)


def _since_snapshot(history: list[CheckpointRow]) -> list[CheckpointRow]:
    last = max(number for number, row in enumerate(history) if row.snapshot is not None)
    return history[last:]


def _check_log(world: World, thread_id: str, name: str, channels: dict[str, Any]) -> None:
    """Hold what the runs have written, and told, against what they would have without any fault."""
    log = list(channels.get("log", []))
    events = [
        _decoded(world, payload)
        for (payload,) in world.store.query(
            "SELECT payload FROM keepstep_event WHERE thread_id = ? ORDER BY id", thread_id
        )
    ]
    for run in (run for run in world.clients.planned if run.thread == name):
        status, given = world.store.query(
            "SELECT status, input FROM keepstep_run WHERE request_id = ?", f"request {run.tag}"
        )[0]
        # Of two starts under one request the first one counts.
        run = replace(run, size=_decoded(world, given)["size"])  # noqa: PLW2901
        written = [_without_signals(entry) for entry in log if entry.startswith(f"{run.tag}:")]
        told = sorted(event for event in events if event.startswith(f"{run.tag}:"))
        if status == "done":
            wanted = agents.expected(run, world.clients.verdict)
            world.require(written == wanted, "a run did not write what it should", f"{written} is not {wanted}")
            world.require(told == sorted(agents.expected_events(run)), "a run did not tell what it should", str(told))
        else:
            wanted = agents.expected(run, lambda question: _verdict_or(world, question))
            fits = all(_alike(one, other) for one, other in zip(written, wanted, strict=False))
            world.require(fits and len(written) <= len(wanted), "a run wrote what it should not", f"{written} {wanted}")
            world.require(len(told) == len(set(told)), "an event was told twice", str(told))
    tags = {run.tag for run in world.clients.planned}
    foreign = [entry for entry in log if entry.split(":")[0] not in tags]
    world.require(not foreign, "an entry of no run", str(foreign))


def _decoded(world: World, payload: bytes) -> Any:
    return next(iter(world.codecs.values())).decode(payload)


def _verdict_or(world: World, question: str) -> str:
    asked = [view(stored)["question"] for (stored,) in world.store.query("SELECT question FROM keepstep_approval")]
    return world.clients.verdict(question) if question in asked else "?"


def _alike(one: str, other: str) -> bool:
    return one == other or "?" in other


def _without_signals(entry: str) -> str:
    parts = entry.split("[")
    return "".join([parts[0], *(SIGNAL + part.split("]", 1)[1] for part in parts[1:])])


def _check_leases(world: World) -> None:
    for table, name in (("keepstep_thread", "name"), ("keepstep_node_run", "run")):
        held = world.store.query(
            f"SELECT {name} FROM {table} WHERE lease_nonce IS NOT NULL OR lease_worker IS NOT NULL "
            "OR lease_child IS NOT NULL OR lease_deadline IS NOT NULL"
        )
        world.require(not held, "a lease was left behind", str(held))
    under_way = world.store.query(
        "SELECT t.name, n.run, n.status FROM keepstep_node_run n JOIN keepstep_thread t ON t.id = n.thread_id "
        "WHERE n.status IN ('ready', 'waiting')"
    )
    world.require(not under_way, "a node run was forgotten", str(under_way))
    waits = world.store.query(
        "SELECT t.name, w.step, w.status FROM keepstep_wait w JOIN keepstep_thread t ON t.id = w.thread_id "
        "WHERE t.status IN ('done', 'cancelled') AND w.status != 'closed'"
    )
    world.require(not [w for w in waits if w[2] == "open"], "an ended thread has open waits", str(waits))


def _check_effects(world: World) -> None:
    for key, state, at_risk, error in world.store.query(
        "SELECT step || '/' || run || '/' || call, state, at_risk, error FROM keepstep_effect"
    ):
        happened = world.outside.happened[key]
        if at_risk and state == "done":
            world.require(happened == 1, "an effect at risk is recorded and happened otherwise", f"{key}: {happened}")
        elif at_risk and state == "failed":
            world.require(happened == 0, "a failed effect happened", f"{key}: {happened} {error}")
        elif state == "done":
            world.require(happened >= 1, "an effect is recorded that never happened", key)
        if state == "intent":
            world.require(world.counts["interruptions"] > 0, "an effect is unknown for no reason", key)


# --- commands -----------------------------------------------------------------------------------------------------


def _check_starts(world: World) -> None:
    for run in world.clients.planned:
        rows = world.store.query("SELECT status FROM keepstep_run WHERE request_id = ?", f"request {run.tag}")
        detail = f"{run.tag}: {rows}"
        world.require(len(rows) == 1, "a start was lost or came twice", detail)
        blocked = world.store.query("SELECT 1 FROM keepstep_thread WHERE name = ? AND status = 'blocked'", run.thread)
        at_rest = {"done", "cancelled"} | ({"queued", "running"} if blocked else set())
        world.require(rows[0][0] in at_rest or _was_left(world, run), "a run was forgotten", detail)


def _was_left(world: World, run: Planned) -> bool:
    """Whether a failed run was given up by the next one on its thread."""
    rows = world.store.query(
        "SELECT later.number FROM keepstep_run r JOIN keepstep_run later ON later.thread_id = r.thread_id "
        "AND later.number > r.number WHERE r.request_id = ? AND r.status = 'failed'",
        f"request {run.tag}",
    )
    return bool(rows)


def _check_approvals(world: World) -> None:
    for approval, status, quorum in world.store.query("SELECT id, status, quorum FROM keepstep_approval"):
        decided = world.store.query(
            'SELECT verdict, payload, "by" FROM keepstep_decision WHERE approval_id = ? ORDER BY rowid', approval
        )
        waits = world.store.query("SELECT status, answer FROM keepstep_wait WHERE approval_id = ?", approval)
        world.require(len(waits) == 1, "an approval without its wait", approval)
        detail = f"{status} by {decided}, its wait {waits}"
        world.require(len({by for _, _, by in decided}) == len(decided), "one person counted twice", detail)
        state, answer = waits[0]
        if status in {"approved", "rejected", "answered"}:
            world.require(state != "open" and answer == decided[-1][1], "an answer was lost or changed", detail)
            approvals = [verdict for verdict, _, _ in decided if verdict == "approve"]
            world.require(status != "approved" or len(approvals) == quorum, "the quorum is wrong", detail)
        elif status == "expired":
            world.require(answer is None, "an expired approval was answered", detail)
        else:
            world.require(status in {"open", "withdrawn"}, "an approval of no status", detail)


def _check_commands(world: World) -> None:
    """Every accepted command is there, once; every accepted signal was given to one wait, or is kept."""
    audited = Counter(row[0] for row in world.store.query("SELECT command_id FROM keepstep_audit"))
    codec = next(iter(world.codecs.values()))
    answers = Counter(codec.decode(answer)["payload"] for (answer,) in world.store.query(_ANSWERS))
    kept = Counter(
        codec.decode(payload)["payload"]
        for (payload,) in world.store.query("SELECT payload FROM keepstep_signal WHERE consumed_by IS NULL")
    )
    for command in world.clients.sent:
        message = command.message
        world.require(audited[message.id] <= 1, "a command was applied twice", message.id)
        if message.verb == "signal":
            given = answers[message.payload] + kept[message.payload]
            world.require(given == audited[message.id], "a signal was lost or given twice", f"{message.id}: {given}")
        if message.verb in {"signal", "control"} and command.outcome == "accepted":
            world.require(audited[message.id] == 1, "an accepted command left nothing", message.id)
