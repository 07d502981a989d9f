"""The program as a whole: help, errors, exit codes, secrets, what it loads."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from sqlalchemy import create_engine
from typer.main import get_command

import keepstep
from keepstep import broker, settings
from keepstep.cli import reference, values
from keepstep.cli.program import app, run
from keepstep.runtime import commands
from keepstep.runtime.environment import Runtime
from keepstep.store.engine import Store
from keepstep.store.leases import Owner
from keepstep.tasks import messages

SECRET = "s3cret/with@signs"


def all_commands():
    return dict(reference._commands(get_command(app), "keepstep"))


LOOKING = {"threads", "show", "history", "state", "effects", "events", "approvals"}
DECIDING = {"approve", "reject", "answer", "request-changes", "delegate"}
SENDING = {"start", *DECIDING, "signal", "pause", "resume", "cancel", "retry", "resolve"}


def program(*arguments, cwd=None, **options):
    command = [sys.executable, "-m", "keepstep", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=60, check=False, **options)


# --- help and documentation -------------------------------------------------------------------------------------------


def test_every_command_of_the_design_is_there():
    assert set(all_commands()) == {
        f"keepstep {name}" for name in (*LOOKING, *SENDING, "worker", "relay", "limit", "doctor", "new-key")
    } | {
        "keepstep db upgrade",
        "keepstep db status",
        "keepstep policy check",
        "keepstep policy test",
        *(f"keepstep schedule {name}" for name in ("add", "list", "show", "pause", "resume", "remove")),
        "keepstep db install-outbox",
        "keepstep db install-journal",
    }


def test_every_command_and_option_says_what_it_does():
    for path, command in all_commands().items():
        assert command.help, path
        for parameter in command.params:
            assert parameter.help, (path, parameter.name)
            assert parameter.param_type_name == "argument" or parameter.is_flag or parameter.metavar, (
                path,
                parameter.name,
            )


def test_every_command_that_ends_can_print_json():
    for path, command in all_commands().items():
        options = {name for parameter in command.params for name in parameter.opts}
        assert ("--json" in options) == (path != "keepstep worker"), path


def test_every_example_is_a_call_that_parses():
    for path, command in all_commands().items():
        lines = reference.EXAMPLES[path.removeprefix("keepstep ")].splitlines()
        assert lines, path
        for line in lines:
            import shlex

            words = shlex.split(line)
            assert " ".join(words)[: len(path)] == path
            command.make_context(path, words[len(path.split()) :])


def test_the_reference_is_current():
    path = Path(__file__).parents[2] / "docs" / "cli.md"
    assert path.read_text() == reference.markdown(), "run: python -m keepstep.cli.reference > docs/cli.md"


def test_the_reference_names_every_command_and_option():
    text = reference.markdown()
    for path, command in all_commands().items():
        part = text.partition(f"## {path}\n")[2].partition("\n## ")[0]
        for parameter in command.params:
            names = [parameter.metavar] if parameter.param_type_name == "argument" else parameter.opts
            assert "--help" in names or any(name in part for name in names), (path, parameter.name)


def test_help_of_every_command_shows_its_example(capsys):
    for path in all_commands():
        assert run([*path.split()[1:], "--help"]) == 0
        assert "Example:" in capsys.readouterr().out, path


def test_version(capsys):
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"keepstep {keepstep.__version__}\n"


def test_no_command_prints_the_help(capsys):
    assert run([]) == 2
    assert "Usage: keepstep" in capsys.readouterr().out


# --- what is loaded ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "forbidden"),
    [
        (["--help"], ["sqlalchemy", "kombu", "celery", "pydantic", "keepstep.runtime", "keepstep.store"]),
        (["start", "--help"], ["sqlalchemy", "kombu", "celery", "alembic", "keepstep.runtime", "keepstep.store"]),
        (["pause", "x", "--no-confirm"], ["sqlalchemy", "celery", "alembic", "keepstep.runtime", "keepstep.store"]),
        (["approve", "x", "--no-confirm"], ["sqlalchemy", "celery", "alembic", "keepstep.runtime", "keepstep.store"]),
    ],
)
def test_a_command_loads_only_what_it_needs(arguments, forbidden):
    code = f"""
import sys
from keepstep.cli.program import run
code = run({arguments!r})
sys.stderr.write(" ".join(name for name in {forbidden!r} if name in sys.modules))
sys.exit(code)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["nosuch"], 2, "No such command 'nosuch'"),
        (["threds"], 2, "Did you mean"),
        (["show"], 2, "Missing argument 'THREAD'"),
        (["show", "x", "--nosuch"], 2, "--nosuch"),
        (["threads", "--limit", "many"], 2, "--limit"),
        (["threads", "--status", "finished"], 2, "'ready', 'waiting', 'blocked'"),
        (["threads"], 1, "there is no database yet at .keepstep/keepstep.db"),
        (["show", "x"], 1, "there is no database yet"),
        (["db", "status"], 1, "there is no database yet"),
        (["worker"], 2, "name the modules or files that define your graphs"),
        (["worker", "nofile.py"], 2, "nofile.py: there is no such file"),
        (["worker", "no.such.module"], 2, "no.such.module: there is no module of that name"),
        (["start", "g", "t", "a"], 2, "key=value"),
        (["start", "g", "t", "a=1", "--input", "{}"], 2, "give the input once"),
        (["start", "g", "t", "--input", "[]"], 2, "an object is needed"),
        (["start", "g", "t", "--timeout", "3"], 2, "--timeout belongs to --wait"),
        (["start", "g", "t", "--wait", "--no-confirm"], 2, "exclude each other"),
        (["start", "g", "two\nlines"], 2, "thread must be 1 to 200 printable characters"),
        (["resolve", "x/0/1/n/pay:1"], 2, "say one of --happened RESULT"),
        (["resolve", "k", "--give-up", "--not-happened"], 2, "say one of --happened RESULT"),
        (["state", "t", "--set", "a"], 2, "an edit is written --set key=value"),
        (["state", "t", "--set", "a=1", "--at", "3"], 2, "--set and --at exclude each other"),
        (["state", "t", "--by", "anna"], 2, "belong to --set"),
        (["state", "t", "--expect", "3"], 2, "belong to --set"),
        (["approve", "x", "--arguments", "1"], 2, "--arguments: an object is needed"),
        (["start", "g", "t", "--broker", "kafka://x"], 2, "'kafka' is not a broker"),
        (["threads", "--database", "mysql://x/y"], 2, "'mysql' is not supported"),
        (["threads", "--database", "what is this"], 2, "not a database URL"),
        (["pause", "t", "--broker", "redis://127.0.0.1:1", "--confirm-timeout", "0.3"], 1, "cannot be reached"),
        (["pause", "t", "--confirm-timeout", "0.3"], 1, "no worker has accepted it within 0.3 s"),
        (["limit"], 1, "there is no database yet"),
        (["schedule", "list"], 1, "there is no database yet"),
        (["schedule", "add", "n", "g"], 2, "Missing argument 'CRON'"),
        (["schedule", "add", "n", "g", "@daily", "--missed", "some"], 2, "'skip', 'last', 'all'"),
        (["schedule", "add", "n", "g", "@daily", "a"], 2, "key=value"),
        (["limit", "queue", "x", "1"], 2, "'graph', 'tenant'"),
        (["start", "g", "t", "--priority", "urgent"], 2, "'high', 'normal', 'low'"),
        (["policy", "check"], 2, "no policies are configured: name a folder or file"),
        (["policy", "check", "nowhere"], 2, "nowhere: No such file or directory"),
        (["policy", "test", "--risk", "low"], 2, "a call to try is named by its tool: --tool NAME"),
        (["policy", "test", "--tool", "x"], 2, "say the tool's risk"),
        (["policy", "test", "--tool", "x", "--risk", "huge"], 2, "'low', 'medium', 'high'"),
        (
            ["policy", "test", "--tool", "x", "--risk", "low", "--arguments", "[]"],
            2,
            "--arguments: an object is needed",
        ),
        (["policy", "test", "--tool", "x", "--risk", "low", "--arguments", "{"], 2, "--arguments: not JSON"),
    ],
)
def test_an_error_is_one_line_and_a_document(arguments, code, said, capsys):
    assert run(arguments) == code
    out, err = capsys.readouterr()
    assert out == ""
    lines = err.splitlines()
    assert lines[0].startswith("error: ")
    assert said in lines[0]
    assert lines[1:] in ([], [lines[-1]])
    assert all(line.startswith("help: keepstep") for line in lines[1:])

    if arguments[0] == "worker":
        return
    assert run([*arguments, "--json"]) == code
    out, err = capsys.readouterr()
    assert said in err
    error = json.loads(out)["error"]
    assert said in error["message"]
    assert error["code"] == "usage" or issubclass(keepstep.errors.by_code(error["code"]), keepstep.errors.KeepstepError)


def test_a_setting_that_cannot_be_is_named(monkeypatch, capsys):
    monkeypatch.setenv("KEEPSTEP_RENEW_SECONDS", SECRET)
    assert run(["threads"]) == 2
    err = capsys.readouterr().err
    assert "renew_seconds" in err
    assert SECRET not in err


def test_an_empty_database_says_how_to_fill_it(capsys):
    Path("empty.db").touch()
    assert run(["threads", "--database", "sqlite:///empty.db"]) == 1
    assert "run 'keepstep db upgrade'" in capsys.readouterr().err
    Path("other.db").write_bytes(b"this is no database at all" * 100)
    assert run(["threads", "--database", "sqlite:///other.db"]) == 1
    assert "file is not a database" in capsys.readouterr().err


def test_looking_makes_no_files(capsys):
    for arguments in (["threads"], ["doctor"], ["db", "status"]):
        run(arguments)
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize(
    "arguments",
    [
        ["threads", "--database", f"postgresql://bob:{SECRET}@127.0.0.1:1/x"],
        ["threads", "--database", f"oracle://bob:{SECRET}@127.0.0.1:1/x"],
        ["db", "upgrade", "--database", f"postgresql://bob:{SECRET}@127.0.0.1:1/x"],
        ["pause", "t", "--broker", f"redis://bob:{SECRET}@127.0.0.1:1", "--confirm-timeout", "0.2"],
        ["pause", "t", "--broker", f"kafka://bob:{SECRET}@127.0.0.1:1"],
        [
            "doctor",
            "--database",
            f"postgresql://bob:{SECRET}@127.0.0.1:1/x",
            "--broker",
            f"redis://:{SECRET}@127.0.0.1:1",
        ],
    ],
)
@pytest.mark.parametrize("json_too", [[], ["--json"]])
def test_no_password_is_ever_printed(arguments, json_too, capsys):
    assert run([*arguments, *json_too]) in {1, 2}
    out, err = capsys.readouterr()
    for part in (SECRET, "s3cret", "with@signs"):
        assert part not in out + err


# --- ends -------------------------------------------------------------------------------------------------------------


def test_limits_are_set_listed_and_taken_away(sqlite_url, capsys):
    def typed(*arguments, code=0):
        assert run(["--database", sqlite_url, "limit", *arguments]) == code
        out, err = capsys.readouterr()
        return (err if code else out).splitlines()

    assert typed() == ["no limits are set here; a graph's code may have a running_max of its own"]
    unknown = "no live worker carries a graph named 'refunds': is the name right?"
    assert typed("graph", "refunds", "20") == ["graph refunds: at most 20 at once", unknown]
    assert typed("tenant", "acme", "4", "--by", "anna") == ["tenant acme: at most 4 at once"]
    assert [line.split() for line in typed()] == [
        ["OF", "NAME", "MAX", "RUNNING"],
        ["graph", "refunds", "20", "0"],
        ["tenant", "acme", "4", "0"],
    ]
    for text in ("0", "-1", "many", "1.5", str(2**31), "9" * 5000):
        assert "MAX: a whole number from 1 on, or none" in typed("graph", "refunds", "--", text, code=2)[0]
    assert "say which graph and how many" in typed("graph", code=2)[0]
    assert "graph must be 1 to 200 printable characters" in typed("graph", "a\nb", "1", code=2)[0]
    assert typed("graph", "refunds", "none") == ["graph refunds: no limit", unknown]
    assert json.loads("".join(typed("--json"))) == [{"kind": "tenant", "name": "acme", "running_max": 4, "running": 0}]
    engine = create_engine(sqlite_url)
    with engine.connect() as connection:
        audit = connection.exec_driver_sql("SELECT actor, detail FROM keepstep_audit ORDER BY id").all()
    engine.dispose()
    assert [json.loads(detail)["running_max"] for _, detail in audit] == [20, 4, None]
    assert audit[1].actor == "anna"


def test_a_reader_that_leaves_ends_it_quietly(sqlite_url):
    fill(sqlite_url, 500)  # more than a pipe holds
    for arguments in (["threads", "--limit", "500"], ["threads", "--limit", "500", "--json"]):
        with subprocess.Popen(
            [sys.executable, "-m", "keepstep", *arguments, "--database", sqlite_url],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"},
        ) as process:
            process.stdout.read(1)
            process.stdout.close()
            assert process.stderr.read() == ""
            assert process.wait(30) == 141


def test_ctrl_c_while_nobody_answers(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-m", "keepstep", "pause", "t", "--confirm-timeout", "60"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    queue = tmp_path / ".keepstep" / "broker" / "queues" / "keepstep.commands"
    wait_until(lambda: queue.is_dir() and any(each.name.endswith(".msg") for each in queue.iterdir()))
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (130, "", "")


# --- what is sent -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            [
                *("start", "g", "t", "a=[1]", "b=1.50", "--request-id", "r", "--reject-if-running"),
                *("--step-limit", "9", "--by", "anna"),
            ],
            {
                "verb": "start",
                "graph": "g",
                "thread": "t",
                "input": {"a": [1], "b": "1.50"},
                "request_id": "r",
                "if_running": "reject",
                "step_limit": 9,
                "by": "anna",
            },
        ),
        (
            ["start", "g", "t"],
            {
                "verb": "start",
                "graph": "g",
                "thread": "t",
                "input": {},
                "if_running": "queue",
                "by": values.this_user(),
            },
        ),
        (
            ["approve", "i", "--arguments", '{"n": 9007199254740993}', "--by", "anna", "--comment", "ok"],
            {
                "verb": "decide",
                "approval": "i",
                "verdict": "approve",
                "arguments": {"n": 2**53 + 1},
                "by": "anna",
                "comment": "ok",
            },
        ),
        (["reject", "i", "--by", "anna"], {"verb": "decide", "approval": "i", "verdict": "reject", "by": "anna"}),
        (
            ["answer", "i", "42", "--by", "anna"],
            {"verb": "decide", "approval": "i", "verdict": "answer", "answer": 42, "by": "anna"},
        ),
        (
            ["answer", "i", "42", "--text", "--by", "anna"],
            {"verb": "decide", "approval": "i", "verdict": "answer", "answer": "42", "by": "anna"},
        ),
        (
            ["signal", "t", "n", '{"p": 1}', "--key", "k", "--id", "s", "--graph", "g", "--by", "anna"],
            {
                "verb": "signal",
                "id": "s",
                "thread": "t",
                "name": "n",
                "payload": {"p": 1},
                "key": "k",
                "graph": "g",
                "by": "anna",
            },
        ),
        (
            ["signal", "t", "n", "--by", "anna"],
            {"verb": "signal", "thread": "t", "name": "n", "payload": None, "by": "anna"},
        ),
        (
            ["pause", "t", "--reason", "why", "--by", "anna"],
            {"verb": "control", "action": "pause", "thread": "t", "reason": "why", "by": "anna"},
        ),
        (["resume", "t", "--by", "anna"], {"verb": "control", "action": "resume", "thread": "t", "by": "anna"}),
        (["cancel", "t", "--by", "anna"], {"verb": "control", "action": "cancel", "thread": "t", "by": "anna"}),
        (
            ["retry", "t", "-g", "g", "--step-limit", "40", "--by", "anna"],
            {"verb": "control", "action": "retry", "thread": "t", "graph": "g", "step_limit": 40, "by": "anna"},
        ),
        (
            ["resolve", "x/0/1/n/pay:1", "--happened", '{"receipt": 7}', "--by", "anna"],
            {
                "verb": "resolve",
                "effect": "x/0/1/n/pay:1",
                "outcome": "happened",
                "result": {"receipt": 7},
                "by": "anna",
            },
        ),
        (
            ["resolve", "x/0/1/n/pay:1", "--give-up", "--reason", "too old", "--by", "anna"],
            {"verb": "resolve", "effect": "x/0/1/n/pay:1", "outcome": "give_up", "reason": "too old", "by": "anna"},
        ),
        (
            ["resolve", "x/0/1/n/pay:1", "--fail", "--by", "anna"],
            {"verb": "resolve", "effect": "x/0/1/n/pay:1", "outcome": "give_up", "by": "anna"},
        ),
        (
            ["schedule", "add", "nightly", "report", "30 2 * * *", "region=eu", "--by", "anna"],
            {
                "verb": "schedule",
                "name": "nightly",
                "graph": "report",
                "cron": "30 2 * * *",
                "input": {"region": "eu"},
                "timezone": "UTC",
                "missed": "last",
                "overlap": "allow",
                "by": "anna",
            },
        ),
        (
            [
                *("schedule", "add", "n", "g", "@daily", "-z", "Europe/Berlin", "--thread", "t", "--missed", "all"),
                *("--overlap", "skip", "--graph-version", "2", "--priority", "low", "--step-limit", "9"),
                *("-i", '{"a": 1}', "--by", "anna"),
            ],
            {
                "verb": "schedule",
                "name": "n",
                "graph": "g",
                "version": "2",
                "thread": "t",
                "cron": "@daily",
                "input": {"a": 1},
                "timezone": "Europe/Berlin",
                "missed": "all",
                "overlap": "skip",
                "priority": "low",
                "step_limit": 9,
                "by": "anna",
            },
        ),
        (
            ["schedule", "pause", "n", "--reason", "why", "--by", "anna"],
            {"verb": "schedule_control", "action": "pause", "name": "n", "reason": "why", "by": "anna"},
        ),
        (
            ["schedule", "resume", "n", "--by", "anna"],
            {"verb": "schedule_control", "action": "resume", "name": "n", "by": "anna"},
        ),
        (["schedule", "remove", "n", "--by", "anna"], {"verb": "unschedule", "name": "n", "by": "anna"}),
        (
            ["approve", "a1", "--choice", "7", "--by", "anna"],
            {"verb": "decide", "approval": "a1", "verdict": "approve", "answer": 7, "by": "anna"},
        ),
        (
            ["delegate", "a1", "bob", "finance", "--by", "anna"],
            {"verb": "decide", "approval": "a1", "verdict": "delegate", "to": ["bob", "finance"], "by": "anna"},
        ),
        (
            ["request-changes", "a1", "less", "--by", "anna"],
            {"verb": "decide", "approval": "a1", "verdict": "request_changes", "comment": "less", "by": "anna"},
        ),
        (
            ["state", "t", "--set", "a=[1]", "--set", "b=1.50", "--by", "anna"],
            {"verb": "edit", "thread": "t", "values": {"a": [1], "b": "1.50"}, "by": "anna"},
        ),
        (
            ["state", "t", "-g", "g", "--set", "a=null", "--by", "anna", "--reason", "why", "--expect", "3"],
            {
                "verb": "edit",
                "thread": "t",
                "graph": "g",
                "values": {"a": None},
                "by": "anna",
                "reason": "why",
                "expect": 3,
            },
        ),
        (
            ["state", "t", "--set", "a=1", "--by", "anna", "--expect", "01jdz8k3v5w0c9q2m7r4t6y8xa"],
            {
                "verb": "edit",
                "thread": "t",
                "values": {"a": "1"},
                "by": "anna",
                "expect": "01jdz8k3v5w0c9q2m7r4t6y8xa",
            },
        ),
    ],
)
def test_each_verb_is_its_message(arguments, expected, capsys):
    assert run([*arguments, "--no-confirm", "--tenant", "acme", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    body = taken()
    message = messages.parse(body, size_max=10**6)
    sent = json.loads(body)
    assert {key: value for key, value in sent.items() if key not in {"v", "id", "tenant", "application"}} == {
        key: value for key, value in expected.items() if key != "id"
    }
    assert sent["tenant"] == "acme"
    assert sent["id"] == expected.get("id", answer["command"])
    assert answer["accepted"] is False
    assert message.id == answer["command"]


def test_who_decides_is_the_user_unless_said(monkeypatch, capsys):
    monkeypatch.setattr("getpass.getuser", lambda: "anna")
    assert run(["approve", "i", "--no-confirm"]) == 0
    assert json.loads(taken())["by"] == "anna"


def test_options_may_stand_before_the_command(capsys):
    folder = Path("elsewhere").absolute()
    assert run(["--broker", f"file://{folder}", "--tenant", "acme", "--json", "pause", "t", "--no-confirm"]) == 0
    assert json.loads(taken(f"file://{folder}"))["tenant"] == "acme"
    assert json.loads(capsys.readouterr().out)["accepted"] is False


# --- helpers ----------------------------------------------------------------------------------------------------------


def taken(url="file://.keepstep/broker"):
    """Return the body of the one command in a broker's queue."""
    with broker.connection(url, commands=True) as connection:
        queue = broker.commands_queue(url, "keepstep")(connection.channel())
        message = queue.get()
        message.ack()
        assert queue.get() is None
        body = message.body
    return body.encode() if isinstance(body, str) else bytes(body)


def fill(url, count):
    """Make threads that nobody runs."""
    from typing import TypedDict

    from keepstep import END, START, Graph

    graph = Graph("idle", state=TypedDict("State", {"n": int}, total=False))
    graph.node(lambda state, ctx: None, name="wait")
    graph.edge(START, "wait")
    graph.edge("wait", END)
    store = Store.open(url)
    with contextlib.closing(store.engine.raw_connection()):
        pass
    runtime = Runtime(
        store=store,
        graphs={("idle", "1"): graph.compile()},
        settings=settings.load(),
        owner=Owner("nobody", 1),
        publish=lambda nudges: None,
    )
    for number in range(count):
        message = {"v": 1, "verb": "start", "id": f"c{number}", "tenant": "default", "graph": "idle"}
        body = json.dumps({**message, "thread": f"thread-{number}-{'x' * 180}", "input": {}}).encode()
        commands.accept(runtime, messages.parse(body, size_max=10**6))
    store.dispose()


def wait_until(look, seconds=20):
    import time

    deadline = time.monotonic() + seconds
    while not look():
        assert time.monotonic() < deadline
        time.sleep(0.02)


# --- a database of the user's -----------------------------------------------------------------------------------------


def test_the_journal_is_installed_once_in_a_database_of_the_users(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("SHOP_DATABASE", f"sqlite:///{tmp_path}/shop.db")
    assert run(["db", "install-journal", "--environment", "SHOP_DATABASE"]) == 0
    assert capsys.readouterr().out == f"sqlite+pysqlite:///{tmp_path}/shop.db: made table keepstep_journal\n"
    assert run(["db", "install-journal", f"sqlite:///{tmp_path}/shop.db", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"table": "keepstep_journal", "made": False}
    with contextlib.closing(sqlite3.connect(tmp_path / "shop.db")) as connection:
        connection.execute("INSERT INTO keepstep_journal (digest, key, thread) VALUES ('d', 'k', 't')")


def test_the_statement_that_makes_the_journal_is_printed(capsys):
    assert run(["db", "install-journal", "postgresql://shop:geheim@nowhere/shop", "--sql"]) == 0
    assert capsys.readouterr().out == (
        "CREATE TABLE IF NOT EXISTS keepstep_journal ( digest TEXT NOT NULL, key TEXT NOT NULL, thread TEXT NOT NULL, "
        "tape BYTEA, recorded_at TIMESTAMP WITH TIME ZONE DEFAULT CURRENT_TIMESTAMP NOT NULL, PRIMARY KEY (digest) );\n"
    )


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        ([], 2, "say which database: URL, or --environment NAME"),
        (["sqlite://", "--environment", "SHOP_DATABASE"], 2, "say which database: URL, or --environment NAME"),
        (["--environment", "NO_SUCH_DATABASE"], 2, "the environment variable NO_SUCH_DATABASE is not set"),
        (["geheim"], 2, "not a database URL"),
        (["mysql://shop:geheim@nowhere/shop"], 2, "mysql is not a database that ctx.transaction can use"),
        (["postgresql://shop:geheim@127.0.0.1:1/shop"], 1, "postgresql+psycopg2://shop:***@127.0.0.1:1/shop: "),
    ],
)
def test_a_database_that_cannot_have_the_journal_is_told_without_its_password(capsys, arguments, code, text):
    assert run(["db", "install-journal", *arguments]) == code
    told = capsys.readouterr().err
    assert text in told
    assert "geheim" not in told
