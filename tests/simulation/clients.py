"""The people and producers of a simulation: what they ask for, twice, late, at once and against each other."""

from __future__ import annotations

from random import Random
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from keepstep.runtime.codec import view
from keepstep.store.schema import UNDONE
from tests.commands import defaults
from tests.simulation.agents import CHILD, CLOCK, GRAPHS, Planned
from tests.simulation.broker import Command

if TYPE_CHECKING:
    from tests.simulation.world import World

_DEFAULTS: dict[str, dict[str, Any]] = {
    "start": defaults("start"),
    "decide": defaults("decide"),
    "signal": defaults("signal"),
    "control": defaults("control", by="operator"),
    "edit": defaults("edit", by="operator"),
    "schedule": defaults("schedule", name=CLOCK, graph="clocked", cron="* * * * *"),
    "unschedule": defaults("unschedule", name=CLOCK),
    "schedule_control": defaults("schedule_control", name=CLOCK),
}
_TROUBLES = {
    "chain": ("fail", "refuse", "poison", "slow"),
    "loop": ("fail", "poison", "slow"),
    "fan": ("fail", "refuse", "poison", "slow"),
    "parallel": ("fail", "refuse", "poison"),
    "waiting": ("fail", "refuse", "poison"),
    "deadline": ("poison",),
    "nested": ("refuse", "poison"),
    "lead": ("fail", "refuse", "poison"),
    "trip": ("fail", "refuse", "poison", "slow"),
}
_CHOICES = (*(name for name in GRAPHS if name != "trip"), "fan", "parallel", "lead", "trip")
_OF_CHILDREN = {".a": ("fail", "poison", "slow"), ".b": ("fail", "refuse", "poison"), ".b.c": ("fail", "slow")}
"""Troubles of the children of a run, by what their tags end in."""
_WAITED_FOR = """
SELECT t.name, w.signal_name, w.signal_key FROM keepstep_wait w JOIN keepstep_thread t ON t.id = w.thread_id
WHERE w.kind = 'signal' AND w.status = 'open' ORDER BY w.created_at, w.run, w.occurrence
"""
_PEOPLE = ("anna", "bert", "cleo")


class Clients:
    """Everybody outside the fleet. Commands are sent again until there is a reply."""

    def __init__(self, world: World, random: Random) -> None:
        self._world = world
        self._random = random
        self.sent: list[Command] = []
        self.planned = self._plan()
        self.unsent = list(self.planned)

    def _plan(self) -> list[Planned]:
        random, planned = self._random, []
        for number in range(random.choice((1, 1, 2, 3))):
            graph = random.choice(_CHOICES)
            for again in range(random.choice((1, 1, 1, 2))):
                tag = f"t{number}r{again}"
                planned.append(Planned(f"thread{number}", graph, tag, random.randrange(8 if graph == "loop" else 6)))
                for trouble in _TROUBLES[graph]:
                    if random.random() < 0.25:
                        self._world.outside.trouble[f"{trouble} {tag}"] = random.randrange(1, 5)
                if graph == "lead":
                    self._trouble_children(tag)
        return planned

    def _trouble_children(self, tag: str) -> None:
        for ending, troubles in _OF_CHILDREN.items():
            for trouble in troubles:
                if self._random.random() < 0.25:
                    self._world.outside.trouble[f"{trouble} {tag}{ending}"] = self._random.randrange(1, 5)

    # --- acts ---------------------------------------------------------------------------------------------------------

    def act(self) -> None:
        """Do one thing."""
        random = self._random
        draw = random.random()
        if self.unsent and (draw < 0.5 or not self.sent):
            self.start(self.unsent.pop(0))
        elif draw < 0.6:
            self.decide_something()
        elif draw < 0.75:
            self._signal_something()
        elif draw < 0.85:
            self._send_again(random.choice(self.sent))
        elif draw < 0.92:
            self._control_something()
        else:
            self.edit_something()

    def start(self, run: Planned) -> None:
        """Ask for a run, and now and then twice under one request, or for another under the same."""
        given = {"tag": run.tag, "size": run.size, "count": 0}
        fields = {"graph": run.graph, "thread": run.thread, "request_id": f"request {run.tag}", "if_running": "queue"}
        self._send("start", **fields, input=given)
        draw = self._random.random()
        if draw < 0.15:
            self._send("start", **fields, input=given)
        elif draw < 0.2:
            self._send("start", **fields, input={**given, "size": run.size + 1})
        elif draw < 0.25:
            self._send(
                "start",
                **{**fields, "request_id": None, "if_running": "reject"},
                input={**given, "tag": "other", "nonsense": 1},
            )

    def schedule(self) -> None:
        """Ask for a run each minute, in a thread of its own, with one of the policies."""
        missed, overlap = self._random.choice(("skip", "last", "all", "all")), self._random.choice(("allow", "skip"))
        self._send("schedule", input={"tag": CLOCK, "size": 0, "count": 0}, missed=missed, overlap=overlap)

    def unschedule(self) -> None:
        """Take the schedule back, when there is one."""
        if self._world.store.query("SELECT 1 FROM keepstep_schedule"):
            self._send("unschedule")

    def is_started(self, run: Planned) -> bool:
        """Whether a run was accepted."""
        query = "SELECT 1 FROM keepstep_run WHERE request_id = ?"
        return bool(self._world.store.query(query, f"request {run.tag}"))

    def decide_something(self) -> None:
        """Decide an approval: an open one, or now and then one that is not; rightly, or as somebody foreign."""
        random = self._random
        rows = self._world.store.query("SELECT id, kind, status FROM keepstep_approval ORDER BY created_at, id")
        rows = [row for row in rows if row[2] == "open" or random.random() < 0.2]
        if rows:
            approval, kind, _ = random.choice(rows)
            self._decide(approval, kind, random.choice(_PEOPLE), foreign=random.random() < 0.1)
        elif random.random() < 0.1:
            self._decide("no-such-approval", "approve", "anna")

    def decide_everything(self) -> None:
        """Answer what is open, as often as it takes."""
        for approval, kind in self._world.store.query(
            "SELECT id, kind FROM keepstep_approval WHERE status = 'open' ORDER BY created_at, id"
        ):
            for person in _PEOPLE:
                self._decide(approval, kind, person, positive=True)

    def signal_everything(self) -> None:
        """Send what is waited for."""
        rows = self._world.store.query(_WAITED_FOR)
        for thread, name, key in rows:
            self._signal(thread, name, key)

    def resend(self) -> None:
        """Send everything again that has no reply."""
        for command in self.sent:
            if not command.outcome:
                self._send_again(command)

    def repair(self) -> None:
        """Do what an operator would: resume what is paused, retry what can be, start what nobody could start."""
        for run in self.planned:
            if not self.is_started(run):
                self.start(run)
        for thread_id, thread, graph, status, control, error, undoing in self._world.store.query(
            "SELECT id, name, agent, status, control, error, undoing FROM keepstep_thread ORDER BY name"
        ):
            if control == "pause":
                self._send("control", thread=thread, graph=graph, action="resume")
            helps = '"effect_unknown"' not in (error or "") or not self._world.unknown(thread_id)
            if status in {"failed", "blocked"} and self._random.random() < 0.3:
                self._edit(thread, graph)
            if (status == "failed" and undoing != UNDONE) or (status == "blocked" and helps):
                self._send("control", thread=thread, graph=graph, action="retry", step_limit=30)

    def _decide(self, approval: str, kind: str, by: str, *, foreign: bool = False, positive: bool = False) -> None:
        random = self._random
        yes, payload = ("answer", {"answer": 7}) if kind == "ask" else ("approve", {})
        if positive or random.random() < 0.7:
            fields: dict[str, Any] = {"verdict": yes, **payload}
        elif random.random() < 0.3:
            fields = {"verdict": "request_changes", "comment": "less"}
        else:
            fields = {"verdict": "reject"}
        if not positive and random.random() < 0.1:
            self._send("decide", approval=approval, by=by, verdict="delegate", to=[random.choice(_PEOPLE)])
        self._send("decide", approval=approval, by=by, tenant="foreign" if foreign else "default", **fields)
        if not positive and random.random() < 0.2:
            self._send("decide", approval=approval, by=by, **{**fields, "verdict": random.choice((yes, "reject"))})

    def _signal_something(self) -> None:
        random = self._random
        run = random.choice(self.planned)
        name, key = random.choice((("news", None), ("more", "k"), ("more", "other"), ("hint", None)))
        self._signal(run.thread, name, key)

    def _signal(self, thread: str, name: str, key: str | None) -> None:
        self._send("signal", thread=thread, name=name, key=key, payload=f"signal {len(self.sent)}")

    def _control_something(self) -> None:
        run = self._random.choice(self.planned)
        thread = run.thread
        children = self._world.store.query("SELECT name FROM keepstep_child ORDER BY created_at, name")
        if children and self._random.random() < 0.5:
            ((thread,),) = self._random.choices(children)
        family = children or run.graph == "lead"
        action = self._random.choices(("pause", "resume", "retry", "cancel"), (4, 4, 4, 5 if family else 1))[0]
        self._send("control", thread=thread, action=action, step_limit=None)

    def edit_something(self) -> None:
        """Edit the state of a thread: rightly, or what is not there, or what was looked at some time ago."""
        random = self._random
        rows = self._world.store.query("SELECT name, agent, seq, checkpoint_id FROM keepstep_thread ORDER BY name")
        if not rows:
            return
        thread, graph, seq, checkpoint = random.choice(rows)
        draw = random.random()
        if draw < 0.1:
            self._send("edit", thread=thread, graph=graph, values={"editde": "1"})
        elif draw < 0.4:
            self._edit(thread, graph, expect=random.choice((seq, checkpoint, max(seq - 1, 0))))
        else:
            self._edit(thread, graph)
        if draw > 0.8:  # as a person does who is told to
            for action in ("pause", "resume"):
                self._send("control", thread=thread, graph=graph, action=action)

    def _edit(self, thread: str, graph: str, expect: int | str | None = None) -> None:
        values = {"edited": f"edit {len(self.sent)}"}
        self._send("edit", thread=thread, graph=graph, values=values, expect=expect)

    # --- sending ------------------------------------------------------------------------------------------------------

    def _send(self, verb: str, **fields: Any) -> None:
        message = {"verb": verb, "id": f"command {len(self.sent)}", "tenant": "default", **_DEFAULTS[verb], **fields}
        command = Command(SimpleNamespace(**message))
        self.sent.append(command)
        told = {
            name: value
            for name, value in fields.items()
            if name in {"thread", "approval", "verdict", "action", "name", "values"}
        }
        self._world.note(f"sent {message['id']}: {verb} {told}")
        self._world.broker.send(command)

    def _send_again(self, command: Command) -> None:
        self._world.broker.send(command)

    # --- what came of it ----------------------------------------------------------------------------------------------

    def verdict(self, question: str) -> str:
        """Return what was decided on a question, or how a child ended (see `agents.CHILD`)."""
        if question.startswith(CHILD):
            return self._ended(question.removeprefix(CHILD)) or "?"
        found = [
            status
            for status, stored in self._world.store.query("SELECT status, question FROM keepstep_approval")
            if view(stored)["question"] == question
        ]
        self._world.require(len(found) == 1, "a question was not asked exactly once", f"{question}: {found}")
        verdicts = {"approved": "approve", "rejected": "reject", "answered": "answer"}
        verdicts["changes_requested"] = "request_changes"
        return verdicts.get(found[0], found[0])

    def _ended(self, tag: str) -> str | None:
        found = [
            status
            for status, given in self._world.store.query("SELECT status, input FROM keepstep_child")
            if view(given)["tag"] == tag
        ]
        self._world.require(len(found) <= 1, "a child was spawned twice", f"{tag}: {found}")
        return found[0] if found else None
