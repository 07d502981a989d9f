"""What the doctor finds."""

from __future__ import annotations

import json
import socket
from contextlib import closing
from pathlib import Path

import kombu
import psycopg2
import pytest

from keepstep import __version__, broker
from keepstep.cli.program import run
from keepstep.store import workers
from keepstep.store.engine import Store
from tests.servers import free_port


def examined(capsys, *arguments, code):
    capsys.readouterr()
    assert run(["doctor", *arguments, "--json"]) == code
    document = json.loads(capsys.readouterr().out)
    assert document["healthy"] is (code == 0)
    return [(each["level"], each["what"], each["text"], each["way_out"]) for each in document["checks"]]


def found(checks, what, level):
    return [(text, way_out) for each, name, text, way_out in checks if (name, each) == (what, level)]


def test_a_machine_where_nothing_was_done_yet_is_healthy(capsys):
    checks = examined(capsys, code=0)
    assert found(checks, "database", "warning") == [
        ("there is no database yet at .keepstep/keepstep.db", "a worker makes it, or: keepstep db upgrade")
    ]
    assert found(checks, "broker", "ok") == [
        ("file://.keepstep/broker: no folder yet; the first worker or client makes it", None)
    ]


def test_every_line_is_shown_to_people_with_the_way_out(sqlite_url, capsys):
    assert run(["doctor", "--database", sqlite_url]) == 0
    lines = capsys.readouterr().out.splitlines()
    at = next(number for number, line in enumerate(lines) if line.split()[:2] == ["warning", "workers"])
    assert lines[at].split(maxsplit=2)[2] == "none is alive"
    assert lines[at + 1].strip() == "→ keepstep worker MODULE"


def test_a_setting_that_cannot_be_is_a_problem(monkeypatch, capsys):
    monkeypatch.setenv("KEEPSTEP_SWEEP_SECONDS", "never")
    checks = examined(capsys, code=1)
    assert [each[:2] for each in checks] == [("problem", "settings")]
    assert "sweep_seconds" in checks[0][2]


def test_the_options_that_were_given_are_named(sqlite_url, capsys):
    checks = examined(capsys, "--database", sqlite_url, "--tenant", "acme", code=0)
    assert found(checks, "settings", "ok") == [("from --database, --tenant; tenant acme, queues keepstep.*", None)]


def test_places_that_cannot_be_written_to_are_problems(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("os.access", lambda *_: False)  # root may write everywhere
    checks = examined(capsys, code=1)
    what = f".keepstep cannot be made in {tmp_path}: permission denied"
    way_out = "let this user write there, or set KEEPSTEP_DATABASE and KEEPSTEP_BROKER"
    assert found(checks, "database", "problem") == [(what, way_out)]
    assert found(checks, "broker", "problem") == [(f"file://.keepstep/broker: {what}", way_out)]


def test_a_window_that_one_late_renewal_breaks_is_a_problem(monkeypatch, capsys):
    monkeypatch.setenv("KEEPSTEP_LIVENESS_WINDOW_SECONDS", "4")
    [(text, way_out)] = found(examined(capsys, code=1), "settings", "problem")
    assert "given up after 4 s" in text
    assert "liveness_window_seconds" in way_out


# --- database ---------------------------------------------------------------------------------------------------------


def test_a_database_that_cannot_be_reached_is_a_problem(capsys):
    url = f"postgresql://127.0.0.1:{free_port()}/x"
    [(text, _)] = found(examined(capsys, "--database", url, code=1), "database", "problem")
    assert "Connection refused" in text


def test_a_database_without_schema_is_a_problem(capsys, empty_postgresql_url):
    checks = examined(capsys, "--database", empty_postgresql_url, code=1)
    [(text, way_out)] = found(checks, "schema", "problem")
    assert text.startswith("has none, this release needs ")
    assert way_out.endswith(" db upgrade")


def test_a_schema_of_a_newer_release_is_a_problem(capsys, sqlite_url):
    store = Store.open(sqlite_url)
    with store.engine.begin() as connection:
        connection.exec_driver_sql("UPDATE keepstep_schema_version SET version_num = '9999'")
    store.dispose()
    [(text, way_out)] = found(examined(capsys, "--database", sqlite_url, code=1), "schema", "problem")
    assert text.startswith("has 9999")
    assert way_out == "run the release that made it"


def test_durable_settings_are_named(capsys, durable_postgresql, postgresql_url):
    checks = examined(capsys, "--database", postgresql_url, code=0)
    [(text, _)] = found(checks, "durability", "ok")
    assert text.startswith("fsync on, synchronous_commit on")
    [(text, _)] = found(checks, "clock", "ok")
    assert text.startswith("the database and this machine differ by 0.")


def test_a_database_that_may_lose_commits_is_a_problem(capsys, durable_postgresql, postgresql_url):
    name = postgresql_url.partition("?")[0].rpartition("/")[2]
    with closing(psycopg2.connect(postgresql_url.replace("+psycopg2", ""))) as link:
        link.autocommit = True
        link.cursor().execute(f"ALTER DATABASE {name} SET synchronous_commit = off")
    [(text, way_out)] = found(examined(capsys, "--database", postgresql_url, code=1), "durability", "problem")
    assert text.startswith("synchronous_commit off")
    assert "SET synchronous_commit = on" in way_out


# --- broker -----------------------------------------------------------------------------------------------------------


def test_a_broker_that_cannot_be_reached_is_a_problem(capsys, sqlite_url):
    url = f"redis://127.0.0.1:{free_port()}/0"
    [(text, _)] = found(examined(capsys, "--database", sqlite_url, "--broker", url, code=1), "broker", "problem")
    assert "not reached: ConnectionError" in text


def test_a_broker_that_says_nothing_is_given_up(capsys, sqlite_url, monkeypatch):
    monkeypatch.setattr("keepstep.cli.brokerchecks._BROKER_SECONDS", 0.3)
    with closing(socket.create_server(("127.0.0.1", 0))) as silent:
        url = f"redis://127.0.0.1:{silent.getsockname()[1]}/0"
        [(text, _)] = found(examined(capsys, "--database", sqlite_url, "--broker", url, code=1), "broker", "problem")
    assert "not reached: TimeoutError" in text


def test_a_folder_that_is_a_file_is_a_problem(capsys):
    Path("broker").touch()
    [(text, _)] = found(examined(capsys, "--broker", "file://broker", code=1), "broker", "problem")
    assert text.startswith("file://broker: ")


@pytest.mark.parametrize("kind", ["file", "redis"])
def test_commands_that_nobody_takes_are_a_problem(capsys, sqlite_url, kind, request):
    url = f"file://{Path('broker').absolute()}" if kind == "file" else request.getfixturevalue("redis_url")
    for number in range(3):
        assert run(["pause", f"t{number}", "--broker", url, "--no-confirm"]) == 0
    capsys.readouterr()
    checks = examined(capsys, "--database", sqlite_url, "--broker", url, code=1)
    [(text, _)] = found(checks, "broker", "ok")
    assert "commands 3" in text
    assert found(checks, "workers", "problem") == [
        ("none is alive; commands that wait for one: 3", "keepstep worker MODULE")
    ]


def test_a_slow_broker_is_a_warning(capsys, sqlite_url, redis_proxy, monkeypatch):
    monkeypatch.setattr("keepstep.cli.brokerchecks._SLOW_SECONDS", 0.1)
    redis_proxy.delay_seconds = 0.11
    url = f"redis://127.0.0.1:{redis_proxy.port}/0"
    checks = examined(capsys, "--database", sqlite_url, "--broker", url, code=0)
    [(text, way_out)] = found(checks, "broker", "warning")
    assert text.startswith(f"{url}: slow: it takes 1")
    assert text.endswith(" ms to say how long a queue is")
    assert way_out.startswith("look at its load")
    assert found(checks, "broker", "problem") == []


@pytest.mark.parametrize("kind", ["file", "redis"])
def test_commands_that_live_workers_do_not_take_are_a_problem(capsys, sqlite_url, kind, request, monkeypatch):
    url = f"file://{Path('broker').absolute()}" if kind == "file" else request.getfixturevalue("redis_url")
    store = Store.open(sqlite_url)
    fleet = {"host": "box", "pid": 7, "concurrency": 1, "release": __version__, "window_seconds": 60.0}
    workers.register(store, graphs=[("idle", "1")], **fleet)
    store.dispose()
    for number in range(2):
        assert run(["pause", f"t{number}", "--broker", url, "--no-confirm"]) == 0
    capsys.readouterr()
    checks = examined(capsys, "--database", sqlite_url, "--broker", url, code=0)
    [(text, _)] = found(checks, "broker", "ok")
    assert "commands 2 (the oldest for " in text

    monkeypatch.setattr("keepstep.cli.fleetchecks._COMMANDS_SECONDS", 0.0)
    checks = examined(capsys, "--database", sqlite_url, "--broker", url, code=1)
    [(text, way_out)] = found(checks, "workers", "problem")
    assert text.startswith("commands wait in the queue (2, the oldest for ")
    assert text.endswith("), and no live worker takes them")
    assert "the same KEEPSTEP_BROKER" in way_out


@pytest.mark.parametrize("kind", ["file", "redis"])
def test_the_nudges_of_every_priority_are_counted(capsys, sqlite_url, kind, request):
    url = f"file://{Path('broker').absolute()}" if kind == "file" else request.getfixturevalue("redis_url")
    store = Store.open(sqlite_url)
    fleet = {"host": "box", "pid": 7, "concurrency": 1, "release": __version__, "window_seconds": 60.0}
    workers.register(store, graphs=[("idle", "1"), ("busy", "2")], **fleet)
    store.dispose()
    with broker.connection(url, commands=False) as connection:
        for graph, priority in (("idle@1", 0), ("busy@2", 0), ("busy@2", 2)):
            queue = broker.nudges_queue(url, "keepstep", graph)
            kombu.Producer(connection).publish({}, routing_key=queue.name, declare=[queue], priority=priority)
    checks = examined(capsys, "--database", sqlite_url, "--broker", url, code=0)
    [(text, _)] = found(checks, "broker", "ok")
    assert text.endswith("nudges 3")
