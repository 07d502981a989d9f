"""An agent's operator at the command line alone: on a laptop, and on PostgreSQL with Redis or RabbitMQ."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Iterator

import pytest

from tests.stories.terminal import AGENTS, Terminal

# A busy machine needs long to start a worker, and the first command of each story waits for that.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
BIG = [2**53 + 1, 2**63 - 1, 2**63, -(2**63) - 1, 2**64, int("7" * 80)]


@pytest.fixture
def laptop(tmp_path, capsys) -> Iterator[Terminal]:
    """No setting at all: SQLite and the file broker under .keepstep/."""
    with contextlib.closing(Terminal(tmp_path, capsys)) as terminal:
        yield terminal


@pytest.fixture(params=["laptop", "redis", "rabbitmq"])
def terminal(request, monkeypatch) -> Terminal:
    """A laptop; and PostgreSQL with an empty database, and each broker that is a server."""
    if request.param != "laptop":
        request.getfixturevalue("durable_postgresql")
        monkeypatch.setenv("KEEPSTEP_DATABASE", request.getfixturevalue("empty_postgresql_url"))
        monkeypatch.setenv("KEEPSTEP_BROKER", request.getfixturevalue(f"{request.param}_url"))
    return request.getfixturevalue("laptop")


def test_an_operator_runs_an_agent_from_beginning_to_end(terminal):
    if "KEEPSTEP_DATABASE" in os.environ:
        assert "run 'keepstep db upgrade'" in terminal.type("worker", str(AGENTS), code=1)
        assert "upgraded from no schema" in terminal.type("db", "upgrade")
    worker = terminal.worker()

    # The worker is still starting: the start is sent again until it is accepted.
    start = terminal.begin(
        "start", "refunds", "order-81", "order_id=81", "amount=12.50", "parts=6", "--wait", "--confirm-timeout", "120"
    )
    assert start.stderr.readline().split() == ["accepted", "refunds/order-81"]
    asked = terminal.approval("order-81")
    assert asked["question"] == "Pay the refund?"
    assert asked["arguments"] == {"amount": {"$": "decimal", "v": "12.50"}}
    assert asked["to"] == ["money"]
    decide(terminal, asked)

    out, err = terminal.rest(start)
    assert start.returncode == 0, err
    assert re.search(r"^status +paid 10\.00 as anna said$", out, re.MULTILINE)
    assert re.search(rf"^big .*{2**64}", out, re.MULTILINE | re.DOTALL)
    told = [line.split()[0] for line in err.splitlines() if line.startswith(("event", "step", "done"))]
    assert told == ["event", "step", "step", "step", "done"]
    assert "step      2    check x6" in err
    assert f"keepstep approve {asked['id']}" in err

    look(terminal)
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(30) == 0
    assert "none is alive" in terminal.type("doctor")


def decide(terminal: Terminal, asked: dict) -> None:
    """Answer all that the thread asks."""
    text = terminal.type("approvals")
    assert f"keepstep approve {asked['id']}" in text
    assert f'keepstep approve {asked["id"]} --arguments \'{{"amount": "12.50"}}\'' in text
    assert '{"amount": 12.50}' in text
    listed = terminal.type("threads")
    assert re.search(r"order-81 +refunds +waiting +2 .*waits for 1 decision", listed)
    assert terminal.ask("threads", "--status", "done") == {"threads": [], "next_before": None}

    edited = ("--arguments", '{"amount": "10.00"}', "--by", "anna", "--comment", "with the shop")
    assert f"approved {asked['id']} as anna" in terminal.type("approve", asked["id"], *edited)
    assert "nothing was changed" in terminal.type("approve", asked["id"], *edited)
    refused = terminal.ask("reject", asked["id"], "--by", "ben", code=2)
    assert refused["error"]["code"] == "approval_closed"

    question = terminal.approval("order-81")
    assert question["schema"] == {"type": "integer"}
    assert "does not fit the question's schema" in terminal.type("answer", question["id"], "soon", code=2)
    wrong = terminal.type("approve", question["id"], code=2)
    assert f"this asks for an answer, not for an approval: keepstep answer {question['id']} VALUE" in wrong
    assert "keepstep approvals lists those that are open" in terminal.type("answer", "0zz", "3", code=2)
    terminal.type("answer", question["id"][:20], "3")
    deadline = time.monotonic() + 60
    while "waits for signal goods_returned" not in terminal.type("threads"):
        assert time.monotonic() < deadline
    sent = terminal.ask("signal", "order-81", "goods_returned", '{"parcel": "P-7"}')
    assert (sent["accepted"], sent["duplicate"]) == (True, False)


def look(terminal: Terminal) -> None:
    """Look at all that the thread was."""
    state = terminal.ask("state", "order-81")["state"]
    assert [int(each["v"]) for each in state["big"]] == BIG
    assert state["checked"] == [0, 1, 2, 3, 4, 5]
    assert state["order_id"] == "81"
    assert (state["days"], state["parcel"]) == (3, "P-7")
    assert "checked" not in terminal.ask("state", "order-81", "--at", "1")["state"]

    history = terminal.ask("history", "order-81")["checkpoints"]
    assert [each["seq"] for each in history] == [0, 1, 2, 3]
    assert history[1]["next"] == [f"check#{number}" for number in range(6)]
    at = history[1]["at"]
    assert terminal.ask("state", "order-81", "--at", at) == {
        **terminal.ask("state", "order-81", "--at", history[1]["id"]),
        "at": at,
    }
    assert [each["seq"] for each in terminal.ask("history", "order-81", "--last", "2")["checkpoints"]] == [2, 3]

    shown = terminal.ask("show", "order-81")
    assert shown["thread"]["status"] == "done"
    assert [each["payload"] for each in shown["events"]] == [{"planned": 6}]
    assert [each["action"] for each in shown["audit"]] == ["start", "decide", "decide", "signal"]
    assert shown["approvals"][0]["decisions"][0]["by"] == "anna"
    assert "Events (1" in terminal.type("show", "order-81")

    examined = terminal.ask("doctor")
    assert examined["healthy"] is True
    # Nobody signs here; where others reach the broker that is worth a word. So is a slow broker, on a busy machine.
    found = [each for each in examined["checks"] if each["level"] != "ok" and ": slow: " not in each["text"]]
    assert [each for each in found if each["what"] != "signatures"] == []


def test_a_run_that_reaches_its_step_limit_goes_on_with_a_higher_one(laptop):
    laptop.worker()
    begin = ("--wait", "--confirm-timeout", "120")
    assert laptop.ask("start", "counting", "a", "enough=20", *begin)["steps"] == 20
    assert laptop.ask("start", "counting", "a", "enough=30", *begin)["steps"] == 10  # of this run

    endless = laptop.ask("start", "counting", "a", "enough=1000000", *begin, code=1)
    assert (endless["status"], endless["steps"], endless["error"]["code"]) == ("failed", 25, "step_limit")
    assert endless["state"]["count"] == 55
    assert "keepstep retry a --step-limit N" in laptop.type("show", "a")

    refused = laptop.ask("retry", "a", code=2)
    assert refused["error"]["code"] == "wrong_status"
    assert "keepstep retry a --step-limit N" in refused["error"]["message"]
    laptop.type("retry", "a", "--step-limit", "40")
    again = laptop.status("a", "failed")
    assert (again["thread"]["steps"], again["thread"]["error"]["code"]) == (40, "step_limit")
    assert laptop.ask("state", "a")["state"]["count"] == 70


def test_threads_are_steered(laptop):
    laptop.worker()
    laptop.type("start", "held", "h", "--confirm-timeout", "120")
    refused = laptop.ask("start", "held", "h", "--reject-if-running", code=2)
    assert refused["error"]["code"] == "run_in_progress"
    laptop.status("h", "ready")
    behind = laptop.type("start", "held", "h")
    assert behind.endswith(", queued behind the one that is under way\n")
    queued = laptop.begin("start", "held", "h", "--wait")
    assert queued.stderr.readline().split() == ["accepted", "held/h"]

    assert laptop.ask("state", "h", "--set", "count=1", code=2)["error"]["message"].endswith(
        "keepstep pause h, then this again, then keepstep resume h"
    )
    assert laptop.type("pause", "h", "--reason", "a look first") == "h is paused\n"
    assert laptop.ask("show", "h")["thread"]["paused"] is True
    assert laptop.type("resume", "h") == "h is resumed\n"
    assert laptop.ask("start", "held", "h", "--wait", "--timeout", "0.3", code=1)["ended"] is False
    assert laptop.type("cancel", "h", "--reason", "enough", "--by", "anna") == "h is cancelled\n"
    _, err = laptop.rest(queued)
    assert queued.returncode == 1
    assert "cancelled" in err

    shown = laptop.ask("show", "h")
    assert shown["thread"]["error"] == {"code": "cancelled", "message": "enough", "by": "anna"}
    assert laptop.ask("pause", "h", code=2)["error"]["code"] == "wrong_status"
    assert laptop.ask("signal", "nobody", "s", code=2)["error"]["code"] == "not_found"
    # What was cancelled can be taken up again; the runs behind it were cancelled with it.
    assert laptop.ask("retry", "h")["run_id"] == shown["thread"]["run"]
    laptop.status("h", "ready")
    (laptop.folder / "release").touch()
    laptop.status("h", "done")
    assert laptop.ask("retry", "h", code=2)["error"]["code"] == "wrong_status"
    a_state_is_edited(laptop)


def a_state_is_edited(laptop):
    laptop.type("start", "refunds", "e", "order_id=81", "amount=12.50", "parts=1")
    asked = laptop.approval("e")
    looked_at = laptop.ask("show", "e")["thread"]["checkpoint"]

    edit = ("state", "e", "--set", "order_id=82", "--set", "amount=10.00", "--by", "anna", "--reason", "a typing error")
    assert laptop.type(*edit) == "e edited by anna: order_id 81 → 82, amount 12.50 → 10.00\n"
    assert laptop.ask("state", "e")["state"]["amount"] == {"$": "decimal", "v": "10.00"}
    assert "(edit by anna)" in laptop.type("history", "e")
    assert "edit (amount, order_id)" in laptop.type("show", "e")
    stale = laptop.ask(*edit, "--expect", looked_at, code=2)["error"]
    assert stale["code"] == "stale_edit"
    assert stale["message"].endswith("look at its state again, then edit that: keepstep state e")
    assert "$.amuont: unknown key" in laptop.type("state", "e", "--set", "amuont=1", code=2)
    # What was asked stays asked.
    assert laptop.ask("approvals")["approvals"][0]["id"] == asked["id"]


def test_a_failure_says_what_and_what_to_do(laptop):
    laptop.worker()
    err = laptop.type("start", "broken", "b", "--wait", "--confirm-timeout", "120", code=1)
    assert re.search(r"^failed +after 0 steps and .*: fail: the shop is closed \[node_failed\]$", err, re.MULTILINE)
    assert err.splitlines()[-1] == "once its cause is mended: keepstep retry b"
    assert re.search(r"b +broken +failed +0 .*node_failed: the shop is closed", laptop.type("threads"))
    unknown = laptop.ask("start", "nosuch", "t", code=2)
    assert unknown["error"]["code"] == "unknown_graph"
    assert "asleep, broken, counting, held, refunds" in unknown["error"]["message"]
    wrong = laptop.type("start", "counting", "c", "count=many", "colour=red", code=2)
    assert "$.colour: unknown key" in wrong
    assert laptop.ask("show", "c", code=2)["error"]["code"] == "not_found"


def test_ctrl_c_lets_running_steps_finish(laptop):
    worker = laptop.worker()
    laptop.type("start", "held", "h", "--confirm-timeout", "120")
    deadline = time.monotonic() + 60
    while laptop.ask("show", "h")["thread"]["running_on"] is None:
        assert time.monotonic() < deadline

    worker.send_signal(signal.SIGINT)
    while "worker_stopping" not in (laptop.folder / "worker.log").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    (laptop.folder / "release").touch()

    assert worker.wait(30) == 130
    assert laptop.ask("show", "h")["thread"]["status"] == "done"
    assert "error:" not in (laptop.folder / "worker.log").read_text()


def test_a_worker_whose_graphs_cannot_be_imported_refuses_at_once(laptop):
    (laptop.folder / "syn.py").write_text("def (\n")
    (laptop.folder / "imp.py").write_text("import json\nimport no_such_module\n")
    assert laptop.begin("worker", "syn.py", "-c", "1").communicate(timeout=60)[1].splitlines()[-1] == (
        "error: syn.py cannot be imported: SyntaxError: invalid syntax (syn.py, line 1)"
    )
    process = laptop.begin("worker", "imp.py", "-c", "1")
    lines = process.communicate(timeout=60)[1].splitlines()
    assert process.returncode == 1
    assert lines[-2:] == [
        "  imp.py:2 in <module>: import no_such_module",
        "error: imp.py cannot be imported: ModuleNotFoundError: No module named 'no_such_module'",
    ]
    assert not any("worker_died" in line or "Traceback" in line for line in lines)


def test_a_wait_for_time_is_told_once_with_its_time(laptop):
    laptop.worker()
    err = laptop.type("start", "asleep", "z", "--wait", "--timeout", "3", "--confirm-timeout", "120", code=1)
    waiting = [line for line in err.splitlines() if line.startswith("waiting")]
    assert len(waiting) == 1
    assert re.fullmatch(r"waiting +nap waits until \d{4}-\d\d-\d\d \d\d:\d\d:\d\d", waiting[0])
    assert re.search(r"z +asleep +waiting .* waits until \d{4}-", laptop.type("threads"))


def test_following_can_be_stopped_and_the_run_goes_on(laptop):
    laptop.worker()
    following = laptop.begin("start", "held", "h", "--wait", "--confirm-timeout", "120")
    assert following.stderr.readline().split() == ["accepted", "held/h"]
    following.send_signal(signal.SIGINT)
    out, err = laptop.rest(following)
    assert (following.returncode, out) == (130, "")
    assert err.splitlines()[-1] == "no longer followed, but h goes on; look again: keepstep show h"
    (laptop.folder / "release").touch()
    assert laptop.status("h", "done")["thread"]["steps"] == 1
