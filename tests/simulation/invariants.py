"""What must hold when everything has come to rest, whatever happened on the way."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from datetime import datetime
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from keepstep.errors import HistoryCorrupt
from keepstep.runtime.codec import view
from keepstep.runtime.history import restore, verify
from keepstep.store import checkpoints
from keepstep.store.claims import CheckpointRow
from keepstep.store.schema import UNDONE
from keepstep.store.ticks import CAUGHT_UP_MAX
from tests.simulation import agents
from tests.simulation.agents import SIGNAL, Planned

if TYPE_CHECKING:
    from tests.simulation.world import World


_WAITED_FOR = """
SELECT c.child_id FROM keepstep_wait w JOIN keepstep_child c ON c.run_id = w.child_run
JOIN keepstep_thread t ON t.id = c.child_id
WHERE w.thread_id = ? AND w.status = 'open' AND t.status IN ('blocked', 'waiting')
"""
_CHILDREN = """
SELECT c.name, c.agent, c.run_id, c.child_id, c.state, c.status, c.cancel, c.due_at, c.input, p.status,
    t.status, r.status
FROM keepstep_child c
JOIN keepstep_checkpoint s
    ON s.thread_id = c.thread_id AND c.step = c.thread_id || '/' || s.branch || '/' || (s.seq + 1)
JOIN keepstep_run p ON p.id = s.run_id
LEFT JOIN keepstep_thread t ON t.id = c.child_id LEFT JOIN keepstep_run r ON r.id = c.run_id
"""
_RESERVED = """
SELECT e.step || '/' || e.run || '/' || e.call, r.status, e.undone, u.state
FROM keepstep_effect e JOIN keepstep_run r ON r.id = e.run_id
LEFT JOIN keepstep_effect u
    ON u.thread_id = e.thread_id AND u.step = e.step AND u.run = e.run AND u.call = e.call || '/undo'
WHERE e.undo IS NOT NULL AND e.state = 'done'
"""
_RELEASED = """
SELECT e.run_id, u.started_at, e.ended_at FROM keepstep_effect e JOIN keepstep_effect u
    ON u.thread_id = e.thread_id AND u.step = e.step AND u.run = e.run AND u.call = e.call || '/undo'
WHERE e.thread_id = ? AND e.undone = 'undone' ORDER BY u.started_at
"""
_ANSWERS = "SELECT answer FROM keepstep_wait WHERE kind = 'signal' AND answer IS NOT NULL"


def unfinished(world: World) -> list[str]:
    """Return what is not at rest yet."""
    processes = [process for worker in world.workers for process in worker.processes if process.fiber]
    found = [f"{process.name} is under way" for process in processes]
    found += [f"{run.tag} is not started" for run in world.clients.planned if not world.clients.is_started(run)]
    found += [f"{command.message.id} has no reply" for command in world.clients.sent if not command.outcome]
    for thread_id, name, status, control, error, undoing in world.store.query(
        "SELECT id, name, status, control, error, undoing FROM keepstep_thread ORDER BY name"
    ):
        code = json.loads(error or "{}").get("code")
        unknown = status == "blocked" and code == "effect_unknown" and world.unknown(thread_id)
        # Input that no worker could check at the door, as none that carried the graph took the command.
        unfit = status == "failed" and (code == "state" or undoing == UNDONE)
        held_up = status == "waiting" and control == "" and _waits_for_unknown(world, thread_id)
        at_rest = status in {"done", "cancelled"} or unfit or (unknown and control == "") or held_up
        if not at_rest:
            found.append(f"{name} is {status} {control} {error or ''}")
    found += ["the schedule stands" for _ in world.store.query("SELECT 1 FROM keepstep_schedule")]
    return found


def _waits_for_unknown(world: World, thread_id: str) -> bool:
    """Whether a thread waits for a child of which nobody knows whether its effect happened, or one that waits for such.

    Everything else that it waits for has come by then: people have decided and time has passed.
    """
    return any(
        world.unknown(child_id) or _waits_for_unknown(world, child_id)
        for (child_id,) in world.store.query(_WAITED_FOR, thread_id)
    )


def check(world: World) -> None:
    """Hold everything that is left against everything that was asked for."""
    for worker in world.workers:
        world.require(not worker.dead, "a dead child was not missed", worker.id)
    _check_starts(world)
    for row in world.store.query("SELECT id, name, agent, branch, status, run_id, run_steps FROM keepstep_thread"):
        _check_thread(world, *row)
    _check_leases(world)
    _check_effects(world)
    _check_undone(world)
    _check_approvals(world)
    _check_commands(world)
    _check_children(world)
    _check_events(world)
    _check_schedule(world)


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
        channels = restore(codec, _since_snapshot(history)).channels
        _check_log(world, thread_id, name, channels)
        _check_edits(world, thread_id, name, history, channels)


def _check_edits(
    world: World, thread_id: str, name: str, history: list[CheckpointRow], channels: dict[str, Any]
) -> None:
    """Every accepted edit is one checkpoint, which leaves the pending step as it was, and the last one counts."""
    sent = {command.message.id: command.message for command in world.clients.sent}
    accepted = {}
    for command_id, detail in world.store.query(
        "SELECT command_id, detail FROM keepstep_audit WHERE thread_id = ? AND action = 'edit' ORDER BY id", thread_id
    ):
        accepted[json.loads(detail)["seq"]] = sent[command_id].values
    edits = [row.seq for row in history if row.kind == "edit"]
    world.counts["edits"] += len(edits)
    world.require(edits == sorted(accepted), "an edit was lost or came twice", f"{name}: {edits} of {accepted}")
    wanted = accepted[edits[-1]]["edited"] if edits else None
    found = channels.get("edited")
    world.require(found == wanted, "an edit was overwritten", f"{name}: {found} is not {wanted}")
    keys, before = [], view(history[0].cursor)
    for row in history[1:]:
        cursor, key = view(row.cursor), before["key"] or f"{thread_id}/0/{row.seq}"
        if row.kind == "edit":
            same = {**cursor, "key": ""} == {**before, "key": ""}
            kept = cursor["key"] == (key if cursor["due"] else "")
            world.require(
                same and kept, "an edit changed what is pending", f"{name} {row.seq}: {cursor} after {before}"
            )
        elif row.kind == "step":
            keys.append(key)
        before = cursor
    world.require(len(keys) == len(set(keys)), "a step was committed twice", f"{name}: {keys}")


def _since_snapshot(history: list[CheckpointRow]) -> list[CheckpointRow]:
    last = max(number for number, row in enumerate(history) if row.snapshot is not None)
    return history[last:]


def _check_log(world: World, thread_id: str, name: str, channels: dict[str, Any]) -> None:
    """Hold what the runs have written, and told, against what they would have without any fault."""
    log = list(channels.get("log", []))
    events = [
        _decoded(world, payload)
        for (payload,) in world.store.query(
            "SELECT payload FROM keepstep_event WHERE thread_id = ? AND kind = 'node.emitted' ORDER BY id", thread_id
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
    tags = {run.tag for run in world.clients.planned} | {view(row[8])["tag"] for row in world.store.query(_CHILDREN)}
    tags.add(agents.CLOCK)
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


def _check_undone(world: World) -> None:
    """What a failed run has reserved is released, once and the newest first; what another run has is kept."""
    for key, status, undone, undo in world.store.query(_RESERVED):
        detail = f"{key} of a {status} run: {undone}, its undo {undo}"
        if status == "failed":
            world.counts["undone"] += 1
            world.require(undone == "undone" and undo == "done", "a failed run was not undone", detail)
        elif status == "done":
            world.require(undone is None and undo is None, "a run that is done was undone", detail)
    for (thread,) in world.store.query("SELECT DISTINCT thread_id FROM keepstep_effect WHERE undone = 'undone'"):
        released = world.store.query(_RELEASED, thread)
        for (run, after, before), (other, _, earlier) in pairwise(released):
            world.require(run != other or earlier <= before, "the older was undone before the newer", f"{run} {after}")


# --- commands -----------------------------------------------------------------------------------------------------


def _check_starts(world: World) -> None:
    for run in world.clients.planned:
        rows = world.store.query("SELECT status FROM keepstep_run WHERE request_id = ?", f"request {run.tag}")
        detail = f"{run.tag}: {rows}"
        world.require(len(rows) == 1, "a start was lost or came twice", detail)
        threads = world.store.query("SELECT id, status, undoing FROM keepstep_thread WHERE name = ?", run.thread)
        held_up = any(status == "blocked" or _waits_for_unknown(world, thread_id) for thread_id, status, _ in threads)
        at_rest = {"done", "cancelled"} | ({"queued", "running"} if held_up else set())
        at_rest |= {"failed"} if any(undoing == UNDONE for *_, undoing in threads) else set()
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
        words = [by for verdict, _, by in decided if verdict != "delegate"]
        world.require(len(set(words)) == len(words), "one person counted twice", detail)
        state, answer = waits[0]
        if status in {"approved", "rejected", "answered", "changes_requested"}:
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
        if message.verb in {"signal", "control", "edit"} and command.outcome == "accepted":
            world.require(audited[message.id] == 1, "an accepted command left nothing", message.id)


# --- children -----------------------------------------------------------------------------------------------------


def _check_children(world: World) -> None:
    """Each child was started once, is what its row says, and does not outlive the cancel of its parent."""
    spawned = [run_id for (run_id,) in world.store.query("SELECT id FROM keepstep_run WHERE spawned = 1")]
    rows = world.store.query(_CHILDREN)
    started = [row[2] for row in rows if row[3] is not None]
    world.require(sorted(spawned) == sorted(started), "a child has another number of runs than one", str(rows))
    names = [row[0] for row in rows]
    world.require(len(names) == len(set(names)), "two children have one thread", str(names))
    for name, agent, _, child_id, state, status, cancel, due_at, given, parent, thread, run in rows:
        detail = f"{name}: {state} {status} {cancel} {due_at}, its run {run} on {thread}, its parent's {parent}"
        world.require(due_at is None, "an errand was forgotten", detail)
        world.require(state != "wanted", "a child was never started", detail)
        world.require((child_id is None) <= (status == "cancelled" and cancel == 1), "a child has no thread", detail)
        world.require((status is None) == (state == "started"), "a child's end is not told", detail)
        world.require(state != "started" or thread in {"blocked", "waiting"}, "a child's end was missed", detail)
        if child_id is not None and status == "done":
            # One that failed or was cancelled may have been retried after its parent was told.
            world.require(run == status, "a child ended otherwise than its parent was told", detail)
        if cancel or parent == "cancelled":
            world.require(state == "delivered", "a child outlived the cancel of its parent", detail)
        if parent == "done":
            world.require(state == "delivered", "a child was joined and not told", detail)
        _check_child_log(world, agent, child_id, status, _decoded(world, given)["tag"])


def _check_child_log(world: World, agent: str, child_id: str | None, status: str | None, tag: str) -> None:
    if child_id is None or status != "done":
        return
    ((branch,),) = world.store.query("SELECT branch FROM keepstep_thread WHERE id = ?", child_id)
    history = [row for row, _ in checkpoints.history(world.store, child_id, branch)]
    log = list(restore(world.codecs[agent, "1"], _since_snapshot(history)).channels.get("log", []))
    wanted = agents.expected(Planned("", agent, tag, 0), world.clients.verdict)
    world.require(log == wanted, "a child did not write what it should", f"{log} is not {wanted}")


_ENDS = {"thread.done": "done", "thread.failed": "failed", "thread.cancelled": "cancelled"}
_GOES_ON = ("thread.started", "thread.retried")


def _check_events(world: World) -> None:
    """Hold the log against what has become of runs and approvals, and what was heard against the log."""
    log = world.store.query("SELECT id, position, thread_id, run_id, kind, approval_id, detail FROM keepstep_event")
    positions = sorted(row[1] for row in log if row[1] is not None)
    world.require(positions == list(range(1, len(log) + 1)), "an event has no place of its own", f"{positions}")
    in_order = sorted(log, key=lambda row: row[1])
    for thread_id in {row[2] for row in log}:
        ids = [row[0] for row in in_order if row[2] == thread_id]
        world.require(ids == sorted(ids), "the log has a thread's events in another order", f"{thread_id}: {ids}")
    heard = [event["position"] for event in world.heard]
    first = list(dict.fromkeys(heard))
    world.require(first == positions, "an event was not heard in its turn", f"{heard} of {len(positions)}")
    for run_id, status, started_at in world.store.query("SELECT id, status, started_at FROM keepstep_run"):
        told = [row[4] for row in in_order if row[3] == run_id]
        begun = told.count("thread.started")
        world.require(begun == (started_at is not None), "a beginning was told wrong", f"{run_id}: {told}")
        ends = [_ENDS[kind] for kind in told if kind in _ENDS]
        if status in _ENDS.values():
            world.require(ends[-1:] == [status], "an end was not told", f"{run_id} {status}: {told}")
        elif ends:
            last = max(place for place, kind in enumerate(told) if kind in _ENDS)
            went_on = any(kind in _GOES_ON for kind in told[last:])
            world.require(went_on, "an end was told that was none", f"{run_id} {status}: {told}")
        world.require(ends.count("done") <= 1, "a run was told done twice", f"{run_id}: {told}")
    for approval_id, status in world.store.query("SELECT id, status FROM keepstep_approval"):
        told = [(row[4], row[6]) for row in in_order if row[5] == approval_id]
        kind, detail = told[-1]
        said = json.loads(detail or "{}").get("status", "open") if kind == "approval.closed" else "open"
        world.require(said == status, "an approval was told wrong", f"{approval_id} is {status}: {told}")


# --- schedules ----------------------------------------------------------------------------------------------------


def _check_schedule(world: World) -> None:
    """Each tick that came has one run, on a thread of its own, or was skipped where the policy says so."""
    rows = world.store.query("SELECT name, runs, status FROM keepstep_thread WHERE agent = 'clocked' ORDER BY name")
    world.counts["ticks"] += len(rows)
    world.require(all(runs == 1 for _, runs, _ in rows), "a tick has another number of runs than one", str(rows))
    requests = world.store.query("SELECT request_id FROM keepstep_run WHERE request_id LIKE 'schedule %'")
    world.require(len(requests) == len(rows), "a tick started two runs", str(requests))
    made = world.store.query("SELECT detail FROM keepstep_audit WHERE action = 'schedule'")
    skipped = world.store.query("SELECT detail FROM keepstep_audit WHERE action = 'skip'")
    fired = [_minute(name.removeprefix(f"{agents.CLOCK}-")) for name, *_ in rows]
    if not made:
        world.require(not fired, "a schedule that nobody made has fired", str(rows))
        return
    detail = json.loads(made[0][0])
    spans = [json.loads(each) for (each,) in skipped]
    left_out = {minute for span in spans for minute in range(_minute(span["from"]), _minute(span["to"]) + 1)}
    world.require(not left_out & set(fired), "a tick was fired and skipped", f"{spans} {rows}")
    dealt_with = sorted([*left_out, *fired])
    first = _minute(detail["next"])
    wanted = list(range(first, first + len(dealt_with)))
    world.require(dealt_with == wanted, "a tick was lost", f"{detail} {spans} {rows}")
    if detail["missed"] == "all" and detail["overlap"] == "allow" and len(dealt_with) < CAUGHT_UP_MAX:
        world.require(not spans, "a tick was skipped that was to be made up for", f"{detail} {spans}")


def _minute(tick: str) -> int:
    return int(datetime.fromisoformat(tick).timestamp()) // 60
