"""Where the processes of these tests die, and what each death may cost: nothing else may be different after it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

HISTORY: tuple[tuple[str, dict[str, int]], ...] = (
    ("input", {}),
    ("step", {"price": 1}),
    ("step", {"fare": 1}),
    ("step", {"seat#0": 1, "seat#1": 1, "seat#2": 1}),
    ("edit", {}),
    ("step", {"captain": 2}),
    ("step", {"tide": 2}),
    ("step", {"night": 2}),
    ("step", {"toll": 1}),
)
"""The history of a voyage that nobody disturbs: the kind of each checkpoint, and the starts of its node runs."""

ENTERED = {"price": 1, "fare": 1, "seat0": 1, "seat1": 1, "seat2": 1, "captain": 2, "tide": 2, "night": 2, "toll": 1}
"""How often the node's bodies are entered: one that waits is entered again with the answer."""

CALLS = {"price": 1, "fare": 1, "seat0": 1, "seat1": 1, "seat2": 1, "rules": 1, "cabin": 1, "toll": 1}
"""How often the outside world is asked for each effect. `fare` and `cabin` are payments, the others may be repeated."""


@dataclass(frozen=True)
class Death:
    """One place where a process is killed, and what is different afterwards."""

    point: str
    at: str
    """Part of the point's detail: `/3` is the super-step that writes checkpoint 3."""
    costs: str
    """What the death costs, for people."""
    entered: Mapping[str, int] = field(default_factory=dict)
    """Bodies that are entered more often than otherwise, and how often in all."""
    starts: Mapping[str, int] = field(default_factory=dict)
    """Node runs with more starts; a start is counted before the body is entered."""
    calls: Mapping[str, int] = field(default_factory=dict)
    """Effects that are asked for more often, or not at all."""
    blocked: bool = False
    """The thread ends blocked: nobody knows whether its payment was made."""
    of_main_process: bool = False
    """The worker's main process dies, not a child of its pool."""
    of_the_broker: bool = False
    """What it costs depends on the broker: it is tested on Redis and on RabbitMQ."""

    @property
    def id(self) -> str:
        """The test's name."""
        return f"{self.point}-{self.at.strip('/')}" if self.at else self.point


_AGAIN = "the node's body is entered again; what it did is answered from the journal"
_NEXT = "nothing; the sweep finds the thread"
_NOTHING = "nothing; the lease is given back at once"

OF_CHILDREN = (
    Death("before_claim", "", "nothing; the sweep finds the thread"),
    Death("after_claim", "/0", _NOTHING),
    Death("after_claim", "/2", "a start is counted that entered no body", starts={"fare": 2}),
    Death("after_claim", "/4", "a start is counted that entered no body", starts={"captain": 3}),
    Death("after_begin", "", "a start is counted that entered no body", starts={"price": 2}),
    Death("before_fan_out", "", _NOTHING),
    Death("after_fan_out", "", "nothing; the sweep finds the node runs"),
    Death("before_intent", "fare", _AGAIN, entered={"fare": 2}, starts={"fare": 2}),
    Death("before_intent", "cabin", _AGAIN, entered={"captain": 3}, starts={"captain": 3}),
    Death(
        "after_intent",
        "fare",
        "the thread is blocked as `effect_unknown`; nothing was called, and nothing is",
        entered={"fare": 2},
        calls={"fare": 0},
        blocked=True,
    ),
    Death("after_call", "price", "an effect that may be repeated is", {"price": 2}, {"price": 2}, {"price": 2}),
    Death("after_call", "seat1", "an effect that may be repeated is", {"seat1": 2}, {"seat#1": 2}, {"seat1": 2}),
    Death(
        "after_call",
        "fare",
        "the thread is blocked as `effect_unknown`; a payment is not made again",
        entered={"fare": 2},
        blocked=True,
    ),
    Death("after_result", "price", _AGAIN, {"price": 2}, {"price": 2}),
    Death("after_result", "fare", _AGAIN, {"fare": 2}, {"fare": 2}),
    Death("after_result", "seat1", _AGAIN, {"seat1": 2}, {"seat#1": 2}),
    Death("after_result", "cabin", _AGAIN, {"captain": 3}, {"captain": 3}),
    Death("before_pending_write", "seat#1", _AGAIN, {"seat1": 2}, {"seat#1": 2}),
    Death("after_pending_write", "seat#0", "nothing; the node run is not run again"),
    Death("after_pending_write", "seat#2", "nothing; of the last node run: the sweep finds the thread"),
    Death("before_park", "captain", _AGAIN, {"captain": 3}, {"captain": 3}),
    Death("before_park", "tide", _AGAIN, {"tide": 3}, {"tide": 3}),
    Death("after_park", "captain", "nothing; the thread waits"),
    Death("after_park", "night", "nothing; the thread waits"),
    Death("before_commit", "/0", "nothing; the run begins again"),
    Death("before_commit", "/1", _AGAIN, {"price": 2}, {"price": 2}),
    Death("before_commit", "/3", "nothing; the node runs are joined again, and none is run again"),
    Death("before_commit", "/5", _AGAIN, {"captain": 3}, {"captain": 3}),
    Death("inside_commit", "input/0", "nothing; the run begins again"),
    Death("inside_commit", "step/2", _AGAIN, {"fare": 2}, {"fare": 2}),
    Death("inside_commit", "step/8", _AGAIN, {"toll": 2}, {"toll": 2}),
    Death("after_commit", "/0", _NEXT),
    Death("after_commit", "/2", _NEXT, of_the_broker=True),
    Death("after_commit", "/8", "nothing; the run has ended"),
    Death("after_nudge", "/2", "nothing; the next step is in the queue", of_the_broker=True),
)
"""Where a pool child dies."""

_REPLAY = "nothing is known of the command; it is sent again and applied"
_DUPLICATE = "nothing; the command is sent again and found applied; the sweep finds what is due"
_ANSWERED = "nothing; the sender has its answer, and the command comes back from the broker and is found applied"

OF_MAIN_PROCESS = (
    *(
        Death("inside_command", verb, _REPLAY, of_main_process=True)
        for verb in ("start", "control", "edit", "decide", "signal")
    ),
    *(
        Death("after_command", verb, _DUPLICATE, of_main_process=True, of_the_broker=verb in {"start", "decide"})
        for verb in ("start", "control", "edit", "decide", "signal")
    ),
    # Of a command after which nothing runs: who runs something dies with the main process.
    Death("before_ack", "control", _ANSWERED, of_main_process=True, of_the_broker=True),
    Death("after_sweep", "", "nothing; another sweep finds the same, a little later", of_main_process=True),
)
"""Where a worker's main process dies under a voyage."""

OF_FAMILIES = (
    Death("before_spawn", ".boat", _AGAIN, {"launch": 3}, {"launch": 3}),
    Death(
        "after_spawn",
        ".boat",
        "the node's body is entered again; the child is found, and started",
        {"launch": 3},
        {"launch": 3},
    ),
    Death(
        "after_child_start",
        ".boat",
        "the node's body is entered again; the child is found",
        {"launch": 3},
        {"launch": 3},
    ),
    Death("before_deliver", ".boat", "nothing; the sweep tells the parent"),
    Death("after_deliver", ".boat", "nothing; the sweep finds the parent"),
)
"""Where a pool child dies under a parent or its child."""

_UNDONE = "the node's body is entered again; the rows were undone with the transaction, and are written"
_SELL: dict[str, dict[str, int]] = {"entered": {"sell": 2}, "starts": {"sell": 2}}

OF_TRANSACTIONS = (
    Death("inside_transaction", "till", _UNDONE, **_SELL),
    Death("before_intent", "bank", _AGAIN, **_SELL),
    Death(
        "after_intent",
        "bank",
        "the node's body is entered again; the other database knows of nothing",
        **_SELL,
        calls={"bank": 2},
    ),
    Death("inside_transaction", "bank", _UNDONE, **_SELL, calls={"bank": 2}),
    Death(
        "after_transaction",
        "bank",
        "the node's body is entered again; the other database has the transaction's record, which answers it",
        **_SELL,
        calls={"bank": 2},
    ),
)
"""Where a pool child dies under a node with transactions; `calls` are the intents of one."""

OF_CANCELS = (
    Death("before_child_cancel", ".boat", "nothing; the sweep cancels the child", of_main_process=True),
    Death("after_child_cancel", ".boat", "nothing; the sweep cancels the child's children", of_main_process=True),
)
"""Where a worker's main process dies while a parent is cancelled."""

_HANDLED = "the node's body is entered again; each of the tool's functions that was called is answered from the journal"
_UNSURE = "the thread is blocked as `effect_unknown`; a person says what happened, and it goes on from there"


def _of_handler(call: str, *, happens: str) -> tuple[Death, ...]:
    return (
        Death("before_intent", call, _HANDLED),
        Death("after_intent", call, _UNSURE, calls={happens: 0}, blocked=True),
        Death("after_call", call, _UNSURE, blocked=True),
        Death("after_result", call, _HANDLED),
    )


OF_APPROVED_CALLS = (
    *_of_handler("cargo.prepare:cargo", happens="reserve"),
    Death("before_park", "load", _HANDLED),
    Death("after_park", "load", "nothing; the thread waits"),
    *_of_handler("cargo:cargo", happens="load"),
    *_of_handler("cargo.commit:cargo", happens="seal"),
)
"""Where a pool child dies under a two-phase tool whose call is approved."""

OF_REJECTED_CALLS = _of_handler("cargo.cancel:cargo", happens="release")
"""Where a pool child dies under a two-phase tool whose call is rejected."""

OF_UNDOS = (
    Death("before_undo", "charge:car", "nothing; the effect is undone by who takes the thread next"),
    Death(
        "after_intent",
        "charge:car/undo",
        "the thread is blocked as `effect_unknown`; nothing was undone, and nothing is",
        calls={"refund-car": 0},
        blocked=True,
    ),
    Death(
        "after_call",
        "charge:hotel/undo",
        "the thread is blocked as `effect_unknown`; what was undone is not undone again",
        blocked=True,
    ),
    Death("after_result", "charge:hotel/undo", "nothing; the effect is known to be undone"),
    Death("after_undo", "charge:hotel", "nothing; the effect is known to be undone"),
    Death("after_undo", "charge:flight", "nothing; of the last one: the run then fails"),
)
"""Where a pool child dies while it undoes what a failed run did."""

OF_MODELS = (
    Death(
        "after_response",
        "oracle",
        "the model is asked again: that its response arrived, nobody but the dead process knew",
        {"consult": 2},
        calls={"oracle": 2},
    ),
    Death("after_call", "oracle", "the node's body is entered again; the response is found spooled", {"consult": 2}),
    Death("after_call", "sibyl", "the node's body is entered again; all chunks are found spooled", {"consult": 2}),
    Death("after_result", "sibyl", _AGAIN, {"consult": 2}),
)
"""Where a pool child dies that asks a model, on the same machine as the one that goes on."""

OF_PUBLISHERS = (
    Death("after_place", "", "nothing; another worker publishes them", of_main_process=True, of_the_broker=True),
    Death(
        "after_announce",
        "",
        "events are published twice, at the same positions",
        of_main_process=True,
        of_the_broker=True,
    ),
)
"""Where a worker dies that publishes events."""
OF_SCHEDULES = (
    Death(
        "inside_tick", "", "nothing; another worker's sweep finds the tick due, a little later", of_main_process=True
    ),
    Death(
        "after_tick", "", "nothing; the sweep finds the thread, and the schedule at its next tick", of_main_process=True
    ),
)
"""Where a worker's main process dies that fires a schedule."""

REGISTERED = Death("after_register", "", "nothing; the row lapses and is removed", of_main_process=True)
"""Where a worker dies before it takes any work."""

ADMITTED = Death("after_admission", "", "nothing; another worker nudges them, a little later", of_main_process=True)
"""Where a worker dies that found a thread whose nudge was lost."""

DEATHS = (
    *OF_CHILDREN,
    *OF_APPROVED_CALLS,
    *OF_REJECTED_CALLS,
    *OF_MAIN_PROCESS,
    *OF_FAMILIES,
    *OF_CANCELS,
    *OF_TRANSACTIONS,
    *OF_UNDOS,
    *OF_MODELS,
    *OF_PUBLISHERS,
    *OF_SCHEDULES,
    REGISTERED,
    ADMITTED,
)
