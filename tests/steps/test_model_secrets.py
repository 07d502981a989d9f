"""Responses of models in which a secret turns up: they are paid for, and kept without it."""

from __future__ import annotations

import functools

import pytest

from keepstep import crashpoints
from tests.steps.agents import Killed, acts, killed, released

SECRET = "s3cr3t-of-the-model"


@pytest.fixture
def spooled(deploy, tmp_path, monkeypatch):
    monkeypatch.setenv("MODEL_KEY", SECRET)
    return functools.partial(deploy, response_spool=str(tmp_path / "responses"))


def asking(asked, respond):
    def ask(request):
        asked.append(request)
        return respond()

    return ask


def whole():
    return {"choices": [{"message": {"content": f"your key is {SECRET}"}}]}


def in_chunks():
    return iter([{"choices": [{"delta": {"content": text}}]} for text in ("your key ", f"is {SECRET}")])


@pytest.mark.parametrize("respond", [whole, in_chunks])
def test_a_secret_in_a_response_is_masked_for_node_and_journal(spooled, respond):
    asked = []

    def body(ctx):
        ctx.secret("env:MODEL_KEY")
        return ctx.model(asking(asked, respond), "which key?", name="ask").text

    d = spooled(acts(body))
    d.start()
    assert d.drain() == "done"
    assert d.values()["log"] == ["your key is ***"]
    assert len(asked) == 1
    assert SECRET not in repr(d.dump())


@pytest.mark.parametrize("is_early", [True, False], ids=["resolved_before", "resolved_by_the_next_attempt"])
def test_a_secret_in_a_response_that_is_found_again_is_masked(spooled, monkeypatch, tmp_path, is_early):
    asked = []

    def body(ctx):
        if is_early or asked:
            ctx.secret("env:MODEL_KEY")
        return ctx.model(asking(asked, whole), "which key?", name="ask").text

    def dies(name, _detail):
        if name == "after_call":
            raise Killed

    d = spooled(acts(body))
    with monkeypatch.context() as patched:
        patched.setattr(crashpoints, "hook", dies)
        killed(d)
    (kept,) = [path.read_bytes() for path in (tmp_path / "responses").iterdir()]
    assert (SECRET.encode() in kept) is not is_early
    released(d)
    assert d.drain() == "done"
    assert d.values()["log"] == ["your key is ***"]
    assert len(asked) == 1
    assert SECRET not in repr(d.dump())
