"""`keepstep show`: all there is to say of one thread."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from keepstep.cli.command import command
from keepstep.cli.control import GraphName, ThreadName
from keepstep.cli.questions import beginning_with, needs
from keepstep.cli.session import Session
from keepstep.cli.threads import PANEL
from keepstep.cli.waysout import way_out
from keepstep.errors import NotFound

if TYPE_CHECKING:
    from rich.text import Text

    from keepstep.runtime.reader import Approval, Reader, Thread
    from keepstep.store.views import AuditView, EffectView, NodeRunView

_RECENT = 10
_OF_UNDOING = {"undone": "undone", "given_up": "not undone: given up", "not_done": "nothing to undo"}
_EVENTS_MAX = 10_000


@command("show", panel=PANEL, reads=True, example="keepstep show order-81")
def show(session: Session, *, thread: ThreadName, graph: GraphName = None) -> None:
    """Show a thread: its status, parent, runs, node runs under way, waits, children, effects, who asked for what."""
    with session.reader() as reader:
        try:
            found = reader.get(thread, graph=graph)
        except NotFound as error:
            if not beginning_with(reader, thread):
                raise
            message = f"{error.message}; it is an approval: {session.hint(f'approvals {thread}')}"
            raise NotFound(message) from None
        if session.as_json:
            session.output.document(_document(reader, found))
        else:
            _print(session, reader, found)


def _document(reader: Reader, found: Thread) -> dict[str, Any]:
    from keepstep.cli import records

    open_approvals = reader.approvals(thread=found.id, status=None)
    return {
        "thread": records.thread(found),
        "runs": [records.run(each) for each in reader.runs(found.id)],
        "node_runs": [records.node_run(each) for each in reader.node_runs(found.id)],
        "parents": [records.kin(each) for each in reader.parents(found.id)],
        "children": [records.kin(each) for each in reader.children(found.id)],
        "approvals": [records.approval(each, reader.decisions(each.id)) for each in open_approvals],
        "waits": [records.wait(each) for each in reader.waits(found.id)],
        "effects": [records.effect(each) for each in reader.effects(found.id)],
        "events": [records.event(each) for each in reader.events(found.id, kind="node.emitted")],
        "audit": [records.audit(each) for each in reader.audit(found.id)],
    }


def _print(session: Session, reader: Reader, found: Thread) -> None:
    output = session.output
    output.facts(_facts(session, reader, found))
    _print_runs(session, reader, found)
    _print_node_runs(session, reader, found)
    _print_waits(session, reader, found)
    _print_children(session, reader, found)
    _print_effects(session, reader, found)
    _print_events(session, reader, found)
    _print_audit(session, reader, found)


def _facts(session: Session, reader: Reader, found: Thread) -> dict[str, str | Text | None]:
    from rich.text import Text

    from keepstep.cli.output import STATUS_STYLES, local

    status = Text(found.status, style=STATUS_STYLES.get(found.status, ""))
    if found.paused:
        status.append(f", paused: {session.hint(f'resume {found.name}')}", style="yellow")
    elif found.status == "ready":
        status.append(f", running on {found.running_on}" if found.running_on else ", in nobody's hands", style="dim")
    if found.undoing:
        status.append(", its failed run is being undone", style="yellow")
    row = found.row
    return {
        "thread": found.name,
        "graph": f"{found.graph} (version {found.version})",
        "id": found.id,
        "parent": ", ".join(dict.fromkeys(f"{kin.parent} ({kin.parent_graph})" for kin in reader.parents(found.id))),
        "status": status,
        "error": _error(found),
        "way out": way_out(session, found.name, found.status, found.error),
        "steps": f"{found.steps}" + (f" of {row.step_limit}" if row.step_limit else ""),
        "checkpoint": None if found.checkpoint is None else f"{found.checkpoint} (seq {found.seq})",
        "due": local(row.due_at) if found.status == "ready" and not found.running_on else None,
        "deaths": f"{row.deaths} (last: {row.last_death})" if row.deaths else None,
        "begun": local(row.created_at),
        "changed": local(row.updated_at),
    }


def _error(found: Thread) -> str | None:
    from keepstep.cli.records import said

    if found.error is None:
        return None
    if found.error.get("code") == "cancelled":
        return said(found.error)
    where = f" in {found.error.get('run') or found.error['node']}" if found.error.get("node") else ""
    return f"{found.error.get('code')}{where}: {found.error.get('message')}"


def _print_runs(session: Session, reader: Reader, found: Thread) -> None:
    from keepstep.cli.output import duration, local, status_text

    runs = reader.runs(found.id)
    session.output.heading(f"Runs ({len(runs)})")
    rows = []
    for each in runs[-_RECENT:]:
        took = duration(each.ended_at - each.started_at) if each.ended_at and each.started_at else ""
        present = each.id == found.run
        steps = found.steps if present else each.steps
        status = found.status if present and each.ended_at is None else each.status
        rows.append((str(each.number), each.id, status_text(status), str(steps), took, local(each.created_at) or ""))
    session.output.table(("NO.", "RUN", "STATUS", "STEPS", "TOOK", "ACCEPTED"), rows)


def _print_node_runs(session: Session, reader: Reader, found: Thread) -> None:
    from keepstep.cli.output import status_text

    if not found.row.fanned:
        return
    now = [each for each in reader.node_runs(found.id) if each.seq == found.seq + 1 and each.branch == found.row.branch]
    ended = found.row.fanned - found.row.pending
    what = "Node runs of the step that was cancelled" if found.status == "cancelled" else "Node runs under way"
    session.output.heading(f"{what} ({ended} of {found.row.fanned} ended)")
    counts = Counter((each.node, _status(each)) for each in now)
    session.output.table(
        ("NODE", "STATUS", "NODE RUNS"),
        [(node, status_text(status), str(count)) for (node, status), count in sorted(counts.items())],
    )
    troubled = [each for each in now if each.status in {"failed", "blocked"} or each.deaths]
    if troubled:
        session.output.table(
            ("NODE RUN", "STATUS", "STARTS", "ERROR"),
            [
                (
                    each.run,
                    status_text(each.status),
                    str(each.starts),
                    _short_error(each.error) or each.last_death or "",
                )
                for each in troubled[:_RECENT]
            ],
        )
        # The thread itself tells of them when its last node run has ended.
        if found.status == "waiting" and any(each.status in {"failed", "blocked"} for each in troubled):
            session.output.line(f"beside those under way: {session.hint(f'retry {found.name}')}")


def _status(each: NodeRunView) -> str:
    """Return a node run's status; of those that were cancelled, which had begun."""
    return "never started" if each.status == "cancelled" and not each.starts else each.status


def _short_error(text: str | None) -> str:
    from keepstep.cli.output import short
    from keepstep.cli.records import error_of

    found = error_of(text)
    return "" if found is None else short(f"{found.get('code')}: {found.get('message')}", 120)


def _print_waits(session: Session, reader: Reader, found: Thread) -> None:
    waits = [each for each in reader.waits(found.id) if each.status == "open"]
    if not waits:
        return
    questions = {each.id: each for each in reader.approvals(thread=found.id)}
    session.output.heading(f"Waits for ({len(waits)})")
    rows = []
    for each in waits[:_RECENT]:
        asked = questions.get(each.approval_id or "")
        what = waited_for(each, asked.question if asked else None)
        rows.append((each.run, what + _whom(session, reader, asked)))
    session.output.table(("NODE RUN", "WAIT"), rows)
    if questions:
        session.output.line(f"decide: {session.hint(f'approvals --thread {found.name}')}")


def _whom(session: Session, reader: Reader, asked: Approval | None) -> str:
    """Return who is asked and who must agree."""
    if asked is None:
        return ""
    who = f"; asks {', '.join(asked.to) or 'anybody'}"
    rule = needs(session, asked, reader.decisions(asked.id))
    return who if rule is None else f"{who}; needs {rule}"


def _print_children(session: Session, reader: Reader, found: Thread) -> None:
    from keepstep.cli.output import short, status_text
    from keepstep.cli.records import said

    children = reader.children(found.id)
    if not children:
        return
    ended = sum(each.state in {"ended", "delivered"} for each in children)
    session.output.heading(f"Children ({ended} of {len(children)} ended, the last {min(len(children), _RECENT)})")
    session.output.table(
        ("THREAD", "GRAPH", "STATUS", "NODE RUN", "NOTE"),
        [
            (
                each.thread,
                each.graph,
                status_text(each.status or each.state),
                each.node_run,
                short(said(each.error), 120) if each.error else "",
            )
            for each in children[-_RECENT:]
        ],
    )


def waited_for(wait: Any, question: str | None, *, absolute: bool = False) -> str:
    """Return what a wait waits for, in words; `absolute`: those that do not change while time passes."""
    from keepstep.cli.output import clock, relative, short

    when = clock if absolute else relative
    until = "" if wait.due_at is None else f", {when(wait.due_at)} at the latest"
    if wait.kind == "approval":
        return f"approval {wait.approval_id}: {short(question or '', 80)}{until}"
    if wait.kind == "signal":
        return f"signal {wait.signal_name}{until}"
    if wait.kind == "child":
        return f"child {wait.child}"
    return "time: " + ("" if wait.due_at is None else f"until {clock(wait.due_at)}" if absolute else when(wait.due_at))


def effect_state(each: EffectView) -> str:
    """Return an effect's state, and what came of undoing it."""
    return each.state if each.undone is None else f"{each.state}, {_OF_UNDOING[each.undone]}"


def _print_effects(session: Session, reader: Reader, found: Thread) -> None:
    from keepstep.cli.output import local

    effects = reader.effects(found.id)
    if not effects:
        return
    session.output.heading(f"Effects ({len(effects)}, the last {min(len(effects), _RECENT)})")
    session.output.table(
        ("NODE RUN", "EFFECT", "STATE", "CALLS", "BEGUN"),
        [
            (each.run, each.name, effect_state(each), str(each.calls), local(each.started_at) or "")
            for each in effects[-_RECENT:]
        ],
    )


def _print_events(session: Session, reader: Reader, found: Thread) -> None:
    from keepstep.cli.output import local, short

    events = reader.events(found.id, limit=_EVENTS_MAX, kind="node.emitted")
    if not events:
        return
    session.output.heading(f"Events ({len(events)}, the last {min(len(events), _RECENT)})")
    session.output.table(
        ("NODE RUN", "AT", "EVENT"),
        [(each.node, local(each.at) or "", short(each.payload, 200)) for each in events[-_RECENT:]],
    )


def _print_audit(session: Session, reader: Reader, found: Thread) -> None:
    from keepstep.cli.output import local

    audit = reader.audit(found.id)
    session.output.heading(f"Asked for ({len(audit)}, the last {min(len(audit), _RECENT)})")
    session.output.table(
        ("WHAT", "BY", "AT"), [(asked_for(each), each.actor, local(each.at) or "") for each in audit[-_RECENT:]]
    )


def asked_for(found: AuditView) -> str:
    """Return what was asked for, with what tells it apart from the next of its kind."""
    from keepstep.cli.records import error_of

    detail = error_of(found.detail) or {}
    if "tool" in detail:
        return _called(found.action, detail)
    more = detail.get("verdict") or detail.get("name") or ", ".join(detail.get("keys", ())) or detail.get("reason")
    return f"{found.action} ({more})" if more else found.action


def _called(action: str, detail: dict[str, Any]) -> str:
    """Return which tool a call was of, why it was made or not, and whose approval it ran on."""
    by = detail.get("by")
    approved = f"approved by {by}{', edited' if detail.get('edited') else ''}" if by and action == "call" else None
    why = ", ".join(each for each in (detail.get("verdict"), detail.get("reason"), approved) if each)
    return f"{action} {detail['tool']} ({why})" if why else f"{action} {detail['tool']}"
