"""Model calls: recorded with what is known of them, streamed ones whole, and paid for once."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import BaseModel

from keepstep import ModelReply, Retry, crashpoints, effect
from keepstep.crashpoints import Died
from keepstep.errors import DatabaseUnavailable, InvalidInput
from keepstep.runtime.modelfacts import Tokens
from keepstep.store import effects, workers
from tests.steps.test_effects import AGAIN, Crash, Outside, acts
from tests.steps.test_unknown import killed

REQUEST = {"model": "small", "temperature": 0.5, "seed": 7, "messages": [{"role": "user", "content": "Hello"}]}


class Provider:
    """A model that counts what it is asked."""

    def __init__(self) -> None:
        self.asked = []

    def answer(self, request) -> dict[str, Any]:
        self.asked.append(request)
        return {
            "model": f"{request['model']}-2026",
            "system_fingerprint": "fp",
            "choices": [{"message": {"content": f"answer {len(self.asked)}"}, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": 4, "completion_tokens": 2, "total_tokens": 6},
        }

    def chunks(self, request) -> Iterator[dict[str, Any]]:
        number = len(self.asked) + 1
        self.asked.append(request)
        for text in ("answer ", str(number)):
            yield {"model": "small-2026", "choices": [{"delta": {"content": text}}]}
        yield {"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": 2, "total_tokens": 6}}


@pytest.fixture
def provider():
    return Provider()


@pytest.fixture
def spooled(deploy, tmp_path):
    """Make deployments whose responses are spooled in a folder of the test's own."""
    return functools.partial(deploy, response_spool=str(tmp_path / "responses"))


def files(tmp_path):
    folder = tmp_path / "responses"
    return [path for path in folder.iterdir() if path.is_file()] if folder.exists() else []


def meta(d):
    [found] = [each.meta for each in d.reader.effects("t")]
    return found


def test_a_reply_is_recorded_with_what_is_known_of_it(spooled, provider, tmp_path):
    replies: list[ModelReply] = []

    def ask(request, *, idempotency_key):
        replies.append(idempotency_key)
        return provider.answer(request)

    def body(ctx):
        tools = [SimpleNamespace(name="pay", version="2"), {"name": "mail", "version": "1"}]
        reply = ctx.model(ask, REQUEST, key="greet", prompt_version="p3", tools=tools)
        replies.append(reply)
        if ctx.attempt == 1:
            raise Crash
        return reply.text

    d = spooled(acts(body, retry=AGAIN))
    d.start()
    assert d.drain() == "done"

    assert provider.asked == [REQUEST]
    key, first, second = replies
    assert key.endswith("/node/ask:greet")
    assert (first.recorded, second.recorded) == (False, True)
    for reply in (first, second):
        assert reply.response["system_fingerprint"] == "fp"
        assert (reply.text, reply.model, reply.model_version) == ("answer 1", "small-2026", "fp")
        assert (reply.tokens, reply.finish_reason, reply.chunks) == (Tokens(4, 2, 6), "stop", None)
        assert reply.first_chunk_seconds is None
    assert first.response == second.response
    assert first.seconds == pytest.approx(second.seconds, abs=1e-5)
    assert d.values()["log"] == ["answer 1"]
    assert d.effects() == [("ask", "done", 1)]
    said = meta(d)
    digest = said.pop("request_digest")
    assert 0 <= said.pop("seconds") < 60
    assert said == {
        "model": "small-2026",
        "model_version": "fp",
        "prompt_version": "p3",
        "tools": [{"name": "pay", "version": "2"}, {"name": "mail", "version": "1"}],
        "temperature": 0.5,
        "seed": 7,
        "tokens": {"input": 4, "output": 2, "total": 6},
        "finish_reason": "stop",
        "first_chunk_seconds": None,
    }
    assert len(digest) == len(hashlib.blake2b(digest_size=16).hexdigest())
    assert d.reader.result("t", d.reader.effects("t")[0].key)["response"] == first.response
    assert files(tmp_path) == []


def test_an_explicit_model_version_stands_over_what_the_response_says(spooled, provider):
    d = spooled(acts(lambda ctx: ctx.model(provider.answer, REQUEST, model_version="mine").model_version))
    d.start()
    assert d.drain() == "done"
    assert d.values()["log"] == ["mine"]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_stream_is_passed_on_as_it_comes_and_recorded_whole(spooled, provider, asynchronous):
    heard, replies = [], []

    def body(ctx):
        reply = ctx.model(provider.chunks, REQUEST, on_chunk=heard.append)
        return end(ctx, reply)

    async def body_async(ctx):
        async def ask(request):
            await asyncio.sleep(0)
            return chunks(request)

        async def chunks(request):
            for chunk in provider.chunks(request):
                await asyncio.sleep(0)
                yield chunk

        async def hear(chunk):
            await asyncio.sleep(0)
            heard.append(chunk)

        return end(ctx, await ctx.model(ask, REQUEST, on_chunk=hear))

    def end(ctx, reply):
        replies.append(reply)
        if ctx.attempt == 1:
            raise Crash
        return reply.text

    d = spooled(acts(body_async if asynchronous else body, asynchronous=asynchronous, retry=AGAIN))
    d.start()
    assert d.drain() == "done"
    assert len(provider.asked) == 1
    first, second = replies
    assert heard == list(first.chunks) == list(second.chunks)
    assert len(heard) == 3
    assert (first.recorded, second.recorded) == (False, True)
    for reply in replies:
        assert (reply.response, reply.text, reply.tokens, reply.model) == (
            None,
            "answer 1",
            Tokens(4, 2, 6),
            "small-2026",
        )
        assert 0 <= reply.first_chunk_seconds <= reply.seconds
    assert d.values()["log"] == ["answer 1"]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_stream_that_breaks_off_is_a_failure_of_which_nothing_is_recorded(spooled, tmp_path, asynchronous):
    begun = []

    def broken(request):
        begun.append(request)
        yield "a"
        if len(begun) == 1:
            raise ConnectionResetError
        yield "b"

    async def body_async(ctx):
        return (await ctx.model(broken, "go")).text

    sync = acts(lambda ctx: ctx.model(broken, "go").text, retry=AGAIN)
    d = spooled(acts(body_async, asynchronous=True, retry=AGAIN) if asynchronous else sync)
    d.start()
    nudge = d.queue.pop(0)
    d.work(nudge)
    assert d.drain() == "done"
    assert begun == ["go", "go"]
    assert d.values()["log"] == ["ab"]
    assert d.effects() == [("broken", "done", 1)]
    assert files(tmp_path) == []


@pytest.mark.parametrize("asynchronous", [False, True])
def test_what_on_chunk_raises_breaks_the_stream_off(spooled, asynchronous):
    closed, kept = [], []

    def chunks(request):
        try:
            yield "a"
            yield "b"
        finally:
            closed.append(request)

    async def chunks_async(request):
        try:
            yield "a"
            yield "b"
        finally:
            closed.append(request)

    def enough(chunk):
        raise Crash

    def ask(request):
        # Held, so that it is closed by whoever takes the chunks, or not at all.
        kept.append(chunks_async(request) if asynchronous else chunks(request))
        return kept[0]

    async def body_async(ctx):
        with contextlib.suppress(Crash):
            await ctx.model(ask, "go", on_chunk=enough)
        return [*closed]

    def body(ctx):
        with contextlib.suppress(Crash):
            ctx.model(ask, "go", on_chunk=enough)
        return [*closed]

    d = spooled(acts(body_async if asynchronous else body, asynchronous=asynchronous))
    d.start()
    assert d.drain() == "done"
    assert d.values()["log"] == [["go"]]
    assert d.effects() == []


# --- what is called, what is returned -----------------------------------------------------------------------------


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int


class Completion(BaseModel):
    model: str
    usage: Usage


def declared(request) -> Completion:
    return Completion(model="m", usage=Usage(prompt_tokens=1, completion_tokens=2))


def undeclared(request):
    return declared(request)


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (declared, Completion(model="m", usage=Usage(prompt_tokens=1, completion_tokens=2))),
        (undeclared, {"model": "m", "usage": {"prompt_tokens": 1, "completion_tokens": 2}}),
    ],
)
def test_an_object_is_the_same_now_and_on_a_retry(spooled, call, expected):
    replies = []

    def body(ctx):
        replies.append(ctx.model(call, "go"))
        if ctx.attempt == 1:
            raise Crash
        return 0

    d = spooled(acts(body, retry=AGAIN))
    d.start()
    assert d.drain() == "done"
    assert [(reply.response, reply.tokens.total) for reply in replies] == [(expected, 3), (expected, 3)]
    assert [type(reply.response) for reply in replies] == [type(expected), type(expected)]


def test_an_async_call_of_a_sync_node_is_refused(spooled):
    async def ask(request):
        return {}

    d = spooled(acts(lambda ctx: ctx.model(ask, "go")))
    d.start()
    assert d.drain() == "failed"
    assert "'ask' is async" in d.error[1]


def test_a_lambda_needs_a_name(spooled):
    def body(ctx):
        with pytest.raises(InvalidInput, match=r"ctx\.model needs a named function"):
            ctx.model(lambda _request: {}, "go")
        return ctx.model(lambda _request: "yes", "go", name="llm").text

    d = spooled(acts(body))
    d.start()
    assert d.drain() == "done"
    assert d.effects() == [("llm", "done", 1)]


def test_a_request_that_cannot_be_stored_is_refused_before_the_call(spooled, provider):
    d = spooled(acts(lambda ctx: ctx.model(provider.answer, {"model": "m", "client": object()})))
    d.start()
    assert d.drain() == "failed"
    assert "$answer.request.client" in d.error[1]
    assert (provider.asked, d.effects()) == ([], [])


def test_a_version_that_is_no_text_is_refused_before_the_call(spooled, provider):
    d = spooled(acts(lambda ctx: ctx.model(provider.answer, REQUEST, prompt_version=object())))
    d.start()
    assert d.drain() == "failed"
    assert "prompt_version must be text, not a object" in d.error[1]
    assert (provider.asked, d.effects()) == ([], [])


def test_one_key_for_two_requests_is_refused(spooled, provider):
    def body(ctx):
        ctx.model(provider.answer, REQUEST, key="k")
        ctx.model(provider.answer, {**REQUEST, "seed": 8}, key="k")

    d = spooled(acts(body))
    d.start()
    assert d.drain() == "failed"
    assert d.error[0] == "effect_conflict"
    assert provider.asked == [REQUEST]


def test_a_call_that_was_an_effect_before_is_answered_from_the_journal(spooled):
    outside = Outside()

    @effect(idempotent=True)
    def ask(request):
        outside.calls.append(request)
        return {"model": "m"}

    def body(ctx):
        if ctx.attempt == 1:
            ctx.effect(ask, "go", key="k")
            raise Crash
        reply = ctx.model(ask, "go", key="k")
        return [reply.response, reply.recorded, reply.tokens]

    graph = acts(body, retry=AGAIN)
    graph.types = (Tokens,)
    d = spooled(graph)
    d.start()
    assert d.drain() == "done"
    assert d.values()["log"] == [[{"model": "m"}, True, Tokens()]]
    assert outside.calls == ["go"]


def test_models_at_once(spooled, provider):
    async def body(ctx):
        replies = await asyncio.gather(*(ctx.model(provider.answer, {**REQUEST, "seed": n}) for n in range(5)))
        return sorted(reply.text for reply in replies)

    d = spooled(acts(body, asynchronous=True))
    d.start()
    assert d.drain() == "done"
    assert d.values()["log"] == [[f"answer {n}" for n in range(1, 6)]]


def test_graph_run_asks_models_too(provider):
    graph = acts(lambda ctx: ctx.model(provider.answer, REQUEST).text)
    assert graph.run({}) == {"log": ["answer 1"]}


# --- the lease is lost meanwhile ------------------------------------------------------------------------------------


class Held:
    """A model whose first answer is held back."""

    def __init__(self):
        self.asked = []
        self.reached, self.go_on = threading.Event(), threading.Event()

    def ask(self, request):
        self.asked.append(request)
        number = len(self.asked)
        if number == 1:
            self.reached.set()
            assert self.go_on.wait(20)
        return {"number": number}


@pytest.fixture
def held():
    return Held()


def lost(d, held, body_ended):
    """Have a worker ask, and lose its lease before the answer is there; return what lets it go on to its end."""
    slow = d.worker_of(pid=2)
    d.start()
    nudge = d.queue.pop(0)
    running = threading.Thread(target=lambda: body_ended.append(d.work(nudge, slow)))
    running.start()
    assert held.reached.wait(20)
    d.queue += workers.release_child(d.store, slow.owner.worker, 2, reason="given up")

    def end():
        held.go_on.set()
        running.join()

    return end


def test_what_was_paid_for_is_recorded_although_the_lease_was_lost(spooled, held):
    ended, seen = [], []

    def body(ctx):
        reply = ctx.model(held.ask, "go")
        seen.append((reply.response, reply.recorded))
        return reply.response

    d = spooled(acts(body))
    lost(d, held, ended)()
    assert d.effects() == [("ask", "done", 1)]
    assert d.thread.status == "ready"  # the late worker's commit was refused
    assert d.drain() == "done"
    assert seen == [({"number": 1}, False), ({"number": 1}, True)]
    assert held.asked == ["go"]


def test_of_two_attempts_that_both_asked_the_first_recorded_stands_for_both(spooled, held):
    ended, seen = [], []

    def body(ctx):
        reply = ctx.model(held.ask, "go")
        seen.append((reply.response, reply.recorded, reply.model))
        return reply.response

    d = spooled(acts(body))
    end = lost(d, held, ended)
    assert d.drain() == "done"
    end()
    assert seen == [({"number": 2}, False, None), ({"number": 2}, True, None)]
    assert held.asked == ["go", "go"]
    assert d.values()["log"] == [{"number": 2}]
    assert d.reader.result("t", d.reader.effects("t")[0].key)["response"] == {"number": 2}


def test_an_attempt_that_knows_its_lease_is_lost_pays_for_nothing_more(spooled, held):
    ended = []

    def body(ctx):
        return [ctx.model(held.ask, name).response for name in ("a", "b")]

    d = spooled(acts(body))
    lost(d, held, ended)()
    assert held.asked == ["a"]
    assert d.drain() == "done"
    assert held.asked == ["a", "b"]
    assert d.values()["log"] == [[{"number": 1}, {"number": 2}]]


# --- the process dies between the answer and the commit ---------------------------------------------------------------


@pytest.fixture
def dies(monkeypatch):
    """Have the process die at a crash point, once."""

    def arm(point):
        left = [point]

        def hook(name, detail):
            if left == [name]:
                left.clear()
                raise Died

        monkeypatch.setattr(crashpoints, "hook", hook)

    return arm


@pytest.mark.parametrize("streamed", [False, True])
def test_a_response_that_was_received_is_not_paid_for_again(spooled, provider, tmp_path, dies, streamed):
    replies, heard = [], []
    call = provider.chunks if streamed else provider.answer

    def body(ctx):
        reply = ctx.model(call, REQUEST, on_chunk=heard.append)
        replies.append(reply)
        return reply.text

    d = spooled(acts(body))
    d.start()
    dies("after_call")
    killed(d)
    assert d.effects() == []
    assert len(files(tmp_path)) == 1
    assert d.drain() == "done"
    assert provider.asked == [REQUEST]
    assert d.values()["log"] == ["answer 1"]
    [reply] = replies
    assert (reply.recorded, reply.tokens, reply.model) == (True, Tokens(4, 2, 6), "small-2026")
    assert len(heard) == (3 if streamed else 0)
    assert d.effects() == [(call.__name__, "done", 1)]
    assert meta(d)["tokens"] == {"input": 4, "output": 2, "total": 6}
    assert files(tmp_path) == []


def test_without_a_spool_it_is(deploy, provider, dies):
    d = deploy(acts(lambda ctx: ctx.model(provider.answer, REQUEST).text), response_spool="off")
    d.start()
    dies("after_call")
    killed(d)
    assert d.drain() == "done"
    assert d.values()["log"] == ["answer 2"]


def test_a_torn_response_is_paid_for_again(spooled, provider, tmp_path, dies):
    d = spooled(acts(lambda ctx: ctx.model(provider.answer, REQUEST).text))
    d.start()
    dies("after_call")
    killed(d)
    [path] = files(tmp_path)
    path.write_bytes(path.read_bytes()[:-1])
    assert d.drain() == "done"
    assert d.values()["log"] == ["answer 2"]
    assert files(tmp_path) == []


def test_the_response_to_another_request_of_that_key_is_none(spooled, provider, dies):
    requests = [REQUEST, {**REQUEST, "seed": 8}]

    d = spooled(acts(lambda ctx: ctx.model(provider.answer, requests.pop(0), key="k").text))
    d.start()
    dies("after_call")
    killed(d)
    assert d.drain() == "done"
    assert len(provider.asked) == 2
    assert d.values()["log"] == ["answer 2"]


def test_a_read_is_not_spooled(spooled, tmp_path, dies):
    outside = Outside()

    @effect(idempotent=True)
    def look(what):
        outside.calls.append(what)

    d = spooled(acts(lambda ctx: ctx.effect(look, 1)))
    d.start()
    dies("after_call")
    killed(d)
    assert files(tmp_path) == []
    assert d.drain() == "done"
    assert outside.calls == [1, 1]


def test_a_database_that_stays_away_costs_no_second_call(spooled, provider, tmp_path, monkeypatch):
    d = spooled(acts(lambda ctx: ctx.model(provider.answer, REQUEST).text), retry_in_place_seconds_max=60.0)
    keep, away = effects.keep, [True]

    def unreachable(*arguments, **options):
        if away:
            away.clear()
            raise DatabaseUnavailable
        return keep(*arguments, **options)

    monkeypatch.setattr(effects, "keep", unreachable)
    monkeypatch.setattr(type(d.store), "patiently", lambda _store, action, **_: action())
    d.start()
    assert d.drain() == "done"
    assert provider.asked == [REQUEST]
    assert d.values()["log"] == ["answer 1"]
    assert files(tmp_path) == []


def test_a_response_that_cannot_be_stored_names_its_path(spooled):
    d = spooled(
        acts(lambda ctx: ctx.model(lambda _request: {"a": [object()]}, "go", name="llm"), retry=Retry(attempts=1))
    )
    d.start()
    assert d.drain() == "failed"
    assert "$llm.response.a[0]" in d.error[1]
