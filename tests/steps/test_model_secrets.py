"""Model calls and secrets: a response is masked as any other result is, and no table, file or reply shows a secret."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from keepstep import crashpoints
from keepstep.errors import NotStorable
from tests.steps.agents import AGAIN, Killed, acts, killed, released

SECRET = "s3cr3t-of-the-model"
REQUEST = {"model": "small", "messages": [{"role": "user", "content": "hello"}]}


@pytest.fixture
def spooled(deploy, tmp_path, monkeypatch):
    """Make deployments with a response spool, in whose environment there is a secret."""
    monkeypatch.setenv("MODEL_KEY", SECRET)

    def make(graph):
        return deploy(graph, response_spool=str(tmp_path / "responses"))

    return make


def told(text: str) -> dict[str, Any]:
    return {"choices": [{"message": {"content": text}}], "model": text, "usage": {"prompt_tokens": 1}}


@dataclasses.dataclass
class Answer:
    """A client's own class, which the graph does not declare."""

    content: str


def chunks(text):
    yield {"choices": [{"delta": {"content": "I say "}}]}
    yield {"choices": [{"delta": {"content": text}}]}


@pytest.mark.parametrize("answer", [told, Answer, chunks, str], ids=["mapping", "object", "chunks", "text"])
@pytest.mark.parametrize("dies", [False, True])
def test_a_response_that_tells_a_secret_is_masked_now_and_on_a_retry(spooled, answer, dies, tmp_path):
    asked, replies = [], []

    def ask(request):
        asked.append(request)
        return answer(f"the key is {SECRET}")

    def body(ctx):
        ctx.secret("env:MODEL_KEY")
        reply = ctx.model(ask, REQUEST)
        replies.append(repr(reply))
        if ctx.attempt == 1:
            raise Killed if dies else ConnectionError
        return [reply.text, reply.model]

    d = spooled(acts(body, retry=AGAIN))
    if dies:
        killed(d)
        released(d)
    else:
        d.start()
    assert d.drain() == "done"
    assert len(asked) == 1
    assert len(replies) == 2
    assert SECRET not in repr(replies)
    assert "the key is ***" in replies[0]
    assert SECRET not in repr(d.dump())
    assert "the key is ***" in repr(d.dump())


def test_a_response_that_waits_in_the_spool_is_masked(spooled, tmp_path, monkeypatch):
    seen = []

    def ask(_request):
        return f"the key is {SECRET}"

    def hook(reached, _detail):
        if reached == "after_call":
            seen.extend(path.read_bytes() for path in (tmp_path / "responses").rglob("*") if path.is_file())

    monkeypatch.setattr("keepstep.crashpoints.hook", hook)

    def body(ctx):
        ctx.secret("env:MODEL_KEY")
        return ctx.model(ask, REQUEST).text

    d = spooled(acts(body))
    d.start()
    assert d.drain() == "done"
    assert b"the key is ***" in b"".join(seen)
    assert SECRET.encode() not in b"".join(seen)


@pytest.mark.parametrize(
    "said",
    [
        {"prompt_version": SECRET},
        {"model_version": SECRET},
        {"tools": [{"name": "pay", "version": SECRET}]},
        {"name": SECRET},
        {"key": SECRET},
        {"request": SECRET},
    ],
    ids=lambda said: next(iter(said)),
)
def test_what_is_said_of_a_call_with_a_secret_in_it_is_refused_before_it_is_paid_for(spooled, said):
    asked = []

    def ask(request):
        asked.append(request)
        return "answer"

    def body(ctx):
        ctx.secret("env:MODEL_KEY")
        options = {name: value for name, value in said.items() if name != "request"}
        with pytest.raises(NotStorable) as refused:
            ctx.model(ask, {"content": said.get("request", "hello")}, **options)
        return refused.value.message

    d = spooled(acts(body))
    d.start()
    assert d.drain() == "done"
    assert asked == []
    assert SECRET not in repr(d.dump())


def test_a_secret_that_only_the_call_resolves_is_masked_in_what_the_request_says(spooled):
    def body(ctx):
        def ask(_request):
            ctx.secret("env:MODEL_KEY")
            return "answer"

        return ctx.model(ask, {"model": SECRET, "seed": 7}).model

    d = spooled(acts(body))
    d.start()
    assert d.drain() == "done"
    assert d.values()["log"] == ["***"]
    assert SECRET not in repr(d.dump())


def test_an_error_of_a_model_that_tells_a_secret_is_masked(spooled):
    def ask(_request):
        message = f"401 for {SECRET}"
        raise ValueError(message)

    def body(ctx):
        ctx.secret("env:MODEL_KEY")
        return ctx.model(ask, REQUEST)

    d = spooled(acts(body))
    d.start()
    assert d.drain() == "failed"
    assert d.error[1] == "401 for ***"
    assert SECRET not in repr(d.dump())


@pytest.mark.parametrize("is_early", [True, False], ids=["resolved_before", "resolved_by_the_next_attempt"])
def test_a_secret_in_a_response_that_is_found_again_is_masked(spooled, monkeypatch, tmp_path, is_early):
    asked = []

    def ask(request):
        asked.append(request)
        return told(f"the key is {SECRET}")

    def body(ctx):
        if is_early or asked:
            ctx.secret("env:MODEL_KEY")
        return ctx.model(ask, REQUEST).text

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
    assert d.values()["log"] == ["the key is ***"]
    assert len(asked) == 1
    assert SECRET not in repr(d.dump())
