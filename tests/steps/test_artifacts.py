"""Large values: kept by the digest of their content, in the database or outside, read as if they stood in the row."""

from __future__ import annotations

import functools
import importlib.util

import pytest

from keepstep import NOT_DONE, effect, settings
from keepstep.cli.program import run
from keepstep.errors import ArtifactCorrupt, ArtifactsUnavailable, DatabaseUnavailable, InvalidSettings
from keepstep.runtime.environment import Runtime
from keepstep.store import artifacts
from keepstep.store.artifacts import Artifacts, digest_of
from keepstep.store.leases import Owner
from tests.steps.test_effects import AGAIN, Crash, Outside, acts
from tests.steps.test_unknown import killed

LARGE = "x" * 1000
PLACES = ("database", "folder", "memory")


@pytest.fixture(params=PLACES)
def place(request, tmp_path):
    """Where artifacts are kept."""
    return {"database": "", "folder": f"file://{tmp_path}/artifacts", "memory": f"memory:///{tmp_path.name}"}[
        request.param
    ]


@pytest.fixture
def large(deploy, tmp_path):
    """Make deployments in which a kilobyte is large."""
    return functools.partial(deploy, artifact_bytes_min=1000, response_spool=str(tmp_path / "responses"))


def rows(d):
    with d.store.engine.connect() as connection:
        found = connection.exec_driver_sql(
            "SELECT tenant, digest, bytes_count, data, location FROM keepstep_artifact ORDER BY bytes_count"
        ).all()
    return [
        (tenant, digest, count, None if data is None else bytes(data), at) for tenant, digest, count, data, at in found
    ]


def columns(d):
    with d.store.engine.connect() as connection:
        found = connection.exec_driver_sql(
            "SELECT result, artifact, arguments, arguments_artifact FROM keepstep_effect ORDER BY started_at"
        ).all()
    return [tuple(bytes(each) if isinstance(each, memoryview) else each for each in row) for row in found]


@pytest.mark.parametrize("idempotent", [False, True])
def test_a_large_result_is_an_artifact_and_is_read_as_ever(large, place, idempotent):
    outside = Outside()

    @effect(idempotent=idempotent)
    def fetch(count):
        outside.calls.append(count)
        return "x" * count

    def body(ctx):
        got = [ctx.effect(fetch, 1000), ctx.effect(fetch, 10)]
        if ctx.attempt == 1:
            raise Crash
        return [len(each) for each in got]

    d = large(acts(body, retry=AGAIN), artifacts=place)
    d.start()
    assert d.drain() == "done"
    assert outside.calls == [1000, 10]
    assert d.values()["log"] == [[1000, 10]]

    [(tenant, digest, count, data, location)] = rows(d)
    assert (tenant, location) == ("default", place or None)
    assert count > 1000
    assert (data is None) == bool(place)
    if not place:
        assert digest_of(data) == digest
    (result, artifact, *_), (small, none, *_) = columns(d)
    assert (result, artifact, none) == (None, digest, None)
    assert len(small) < 100
    first, second = d.reader.effects("t")
    assert (first.artifact, second.artifact) == (digest, None)
    assert d.reader.result("t", first.key) == LARGE
    assert d.reader.result("t", second.key) == "x" * 10


def test_large_arguments_of_an_effect_at_risk_are_shown_to_who_must_find_out(large, place):
    outside = Outside()

    def send(text):
        outside.calls.append(text)
        raise_died()

    d = large(acts(lambda ctx: ctx.effect(send, LARGE)), artifacts=place)
    d.start()
    killed(d)
    assert d.drain() == "blocked"
    [(_, digest, *_)] = rows(d)
    assert columns(d) == [(None, None, None, digest)]
    [unknown] = d.reader.unknown_effects()
    assert unknown.arguments == {"text": LARGE}


def raise_died():
    from keepstep.crashpoints import Died

    raise Died


def test_what_a_lookup_finds_may_be_large(large, place):
    outside = Outside()

    @effect(lookup=lambda _count: LARGE if outside.calls else NOT_DONE)
    def make(count):
        outside.calls.append(count)
        raise_died()

    d = large(acts(lambda ctx: len(ctx.effect(make, 1))), artifacts=place)
    d.start()
    killed(d)
    assert d.drain() == "done"
    assert d.values()["log"] == [1000]
    assert [row[:2] for row in columns(d)] == [(None, rows(d)[0][1])]


def test_a_large_response_of_a_model_is_one_too(large, place):
    asked = []

    def ask(request):
        asked.append(request)
        return {"model": "m", "content": [{"type": "text", "text": LARGE}]}

    def body(ctx):
        reply = ctx.model(ask, "go")
        if ctx.attempt == 1:
            raise Crash
        return [len(reply.text), reply.recorded, reply.model]

    d = large(acts(body, retry=AGAIN), artifacts=place)
    d.start()
    assert d.drain() == "done"
    assert d.values()["log"] == [[1000, True, "m"]]
    assert asked == ["go"]
    [(result, artifact, *_)] = columns(d)
    assert (result, artifact) == (None, rows(d)[0][1])


def test_equal_values_are_kept_once(large):
    @effect(idempotent=True)
    def fetch(number):
        return LARGE

    d = large(acts(lambda ctx: [len(ctx.effect(fetch, number)) for number in range(3)]))
    d.start()
    assert d.drain() == "done"
    assert len(rows(d)) == 1
    assert len(columns(d)) == 3


@pytest.mark.parametrize("damage", ["changed", "gone", "row"])
@pytest.mark.parametrize("kept", ["database", "folder"])
def test_a_value_that_is_not_what_was_put_there_blocks_the_thread(large, tmp_path, kept, damage):
    place = f"file://{tmp_path}/artifacts" if kept == "folder" else ""
    outside = Outside()

    @effect(idempotent=True)
    def fetch(number):
        outside.calls.append(number)
        return LARGE

    def body(ctx):
        try:
            got = ctx.effect(fetch, 1)
        except ArtifactCorrupt:
            return "swallowed"
        if ctx.attempt == 1:
            raise_died()
        return len(got)

    d = large(acts(body), artifacts=place)
    d.start()
    killed(d)
    [(_, digest, _, data, _)] = rows(d)
    whole = spoil(d, tmp_path, damage) if place else spoil_row(d, data, damage)
    assert d.drain() == "blocked"
    code, message = d.error
    assert code == "artifact_corrupt"
    assert digest in message
    where = "database" if damage == "row" or not place else f"{place}/"
    assert where in message
    assert outside.calls == [1]
    with pytest.raises(ArtifactCorrupt, match=digest):
        d.reader.result("t", d.reader.effects("t")[0].key)

    # Restored, it goes on.
    d.execute("DELETE FROM keepstep_artifact")
    Artifacts(d.store, location=place).put("default", whole)
    d.control("retry")
    assert d.drain() == "done"
    assert d.values()["log"] == [1000]


def spoil_row(d, data, damage):
    """Damage what the database holds; return what it was."""
    if damage == "row":
        d.execute("DELETE FROM keepstep_artifact")
    else:
        d.execute("UPDATE keepstep_artifact SET data = :data", data=None if damage == "gone" else b"other")
    return data


def spoil(d, tmp_path, damage):
    """Damage what the folder holds, or the row that says so; return what it was."""
    [path] = [path for path in (tmp_path / "artifacts").rglob("*") if path.is_file()]
    data = path.read_bytes()
    if damage == "row":
        d.execute("DELETE FROM keepstep_artifact")
    elif damage == "gone":
        path.unlink()
    else:
        path.write_bytes(b"other")
    return data


def test_artifacts_are_the_tenants_own(store, place):
    kept = Artifacts(store, location=place)
    digest = kept.put("a", b"value")
    assert kept.put("a", b"value") == digest
    assert kept.get("a", digest) == b"value"
    with pytest.raises(ArtifactCorrupt, match=f"artifact {digest} of tenant 'b'"):
        kept.get("b", digest)


def test_what_was_put_elsewhere_before_is_found_there(store, tmp_path):
    folder = f"file://{tmp_path}/artifacts"
    old = Artifacts(store).put("a", b"old")
    new = Artifacts(store, location=folder).put("a", b"new")
    for kept in (Artifacts(store), Artifacts(store, location=folder)):
        assert [kept.get("a", digest) for digest in (old, new)] == [b"old", b"new"]
    Artifacts(store, location=folder).put("a", b"old")
    assert len([path for path in (tmp_path / "artifacts").rglob("*") if path.is_file()]) == 2


@pytest.fixture
def nowhere(monkeypatch):
    """An object store that nobody listens for."""
    environment = {"ENDPOINT_URL": "http://127.0.0.1:9", "ALLOW_HTTP": "true", "REGION": "x"}
    for name, value in {**environment, "ACCESS_KEY_ID": "key", "SECRET_ACCESS_KEY": "hidden"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    artifacts._object_store.cache_clear()
    yield "s3://bucket/folder"
    artifacts._object_store.cache_clear()


def test_what_cannot_be_put_outside_is_kept_in_the_database(large, nowhere):
    def pay(amount):
        return LARGE

    d = large(acts(lambda ctx: len(ctx.effect(pay, 1))), artifacts=nowhere)
    d.start()
    assert d.drain() == "done"
    [(_, digest, _, data, location)] = rows(d)
    assert (digest_of(data), location) == (digest, None)
    assert d.reader.result("t", d.reader.effects("t")[0].key) == LARGE


def test_a_place_that_cannot_be_read_is_the_stores_failure_not_the_nodes(store, nowhere, tmp_path):
    digest = Artifacts(store, location=f"file://{tmp_path}/artifacts").put("a", b"value")
    with store.engine.begin() as connection:
        connection.exec_driver_sql(f"UPDATE keepstep_artifact SET location = '{nowhere}'")
    with pytest.raises(ArtifactsUnavailable, match=f"artifacts in {nowhere}: ") as failed:
        Artifacts(store).get("a", digest)
    assert "hidden" not in str(failed.value)
    assert isinstance(failed.value, DatabaseUnavailable)


def test_a_place_whose_library_is_missing_is_refused_at_the_start(store, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "obstore" else find(name))
    chosen = settings.load(artifacts="s3://bucket")
    with pytest.raises(InvalidSettings, match=r"'keepstep\[artifacts\]'"):
        Runtime(store, {}, chosen, Owner("w", 1), lambda _nudges: None)
    assert Artifacts(store).put("a", b"v") == digest_of(b"v")


def test_the_command_shows_model_and_tokens_and_reads_large_arguments(
    deploy, sqlite_url, capsys, monkeypatch, tmp_path
):
    def ask(request):
        return {"model": "tiny-1", "usage": {"input_tokens": 4, "output_tokens": 3}}

    def send(text):
        raise_died()

    d = deploy(
        acts(lambda ctx: [ctx.model(ask, "go"), ctx.effect(send, LARGE)]),
        url=sqlite_url,
        artifact_bytes_min=1000,
        response_spool=str(tmp_path / "responses"),
    )
    d.start()
    killed(d)
    assert d.drain() == "blocked"
    monkeypatch.setenv("KEEPSTEP_DATABASE", sqlite_url)
    monkeypatch.chdir(tmp_path)
    shown = command(capsys, "effects", "t")
    assert [line.split()[-3:-1] for line in shown.splitlines() if "ask:" in line] == [["tiny-1", "7"]]
    assert '"total": 7' in command(capsys, "effects", "t", "--json")
    assert LARGE in command(capsys, "effects", "--json")


def command(capsys, *arguments):
    assert run(list(arguments)) == 0
    return capsys.readouterr().out


def test_arguments_that_are_lost_hide_no_other_unknown_effect(large, capsys):
    def pay(order, note):
        message = "read timed out"
        raise TimeoutError(message)

    d = large(acts(lambda ctx: ctx.effect(pay, "7", LARGE * 10)))
    for thread in ("t", "u"):
        d.start(thread=thread)
        d.drain()
    d.execute("DELETE FROM keepstep_artifact")
    found = d.reader.unknown_effects()
    assert [each.thread for each in found] == ["t", "u"]
    assert [each.arguments for each in found] == [None, None]
    assert run(["effects", "--database", d.url]) == 0
    told = capsys.readouterr().out
    whole = f"artifact {found[0].effect.arguments_artifact}, which cannot be read"
    assert " ".join(told.split()).count(whole) == 2
    d.send("resolve", effect=found[0].effect.key, outcome="happened", result="receipt")
    d.drain()
    assert d.values()["log"] == ["receipt"]


def test_people_are_shown_the_beginning_of_large_arguments(large, capsys):
    def pay(order, note):
        message = "read timed out"
        raise TimeoutError(message)

    d = large(acts(lambda ctx: ctx.effect(pay, "7", LARGE * 100)))
    d.start()
    d.drain()
    assert run(["effects", "--database", d.url]) == 0
    told = capsys.readouterr().out
    assert len(told) < 10_000
    assert "characters in all; --json has them)" in told.replace("\n", " ").replace("  ", " ")
    assert run(["effects", "--json", "--database", d.url]) == 0
    assert LARGE * 100 in capsys.readouterr().out
