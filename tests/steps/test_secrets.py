"""Secrets in a node: used, and found in no row, error or line of the log."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import sys
from typing import Annotated, Any, TypedDict

import pytest
import structlog

from keepstep import END, NOT_DONE, START, Goto, Graph, Retry, Secret, Send, append, effect
from keepstep.crashpoints import Died
from keepstep.errors import SecretNotFound
from keepstep.runtime.codec import view
from keepstep.store import workers
from keepstep.tasks import logs

TEXT = 'hunter2/+Ä"x'
AGAIN = Retry(attempts=3, delay=0)


class State(TypedDict, total=False):
    log: Annotated[list[Any], append]


@pytest.fixture(autouse=True)
def key(monkeypatch):
    monkeypatch.setenv("KEY", TEXT)


def uses(body, *, retry=None, asynchronous=False, **options):
    """A graph of one node; what `body(ctx)` returns is logged, unless it says itself where to go on."""
    graph = Graph("uses", state=State)
    if asynchronous:

        @graph.node(name="node", retry=retry, **options)
        async def node_async(state, ctx):
            return {"log": [await body(ctx)]}

    else:

        @graph.node(retry=retry, **options)
        def node(state, ctx):
            found = body(ctx)
            return found if isinstance(found, Goto) else {"log": [found]}

    @graph.node
    def after(state, ctx):
        return {"log": list(ctx.failures)}

    graph.edge(START, "node")
    graph.edge("node", "after")
    graph.edge("after", END)
    return graph


def forms():
    raw = TEXT.encode()
    return [raw, json.dumps(TEXT)[1:-1].encode(), repr(TEXT)[1:-1].encode(), b"hunter2", base64.b64encode(raw)[:-2]]


def leaks(d):
    """The tables in which some form of the secret stands."""
    found = []
    for table, rows in d.dump().items():
        data = b"\x1f".join(value if isinstance(value, bytes) else str(value).encode() for row in rows for value in row)
        found += [table for form in forms() if form in data]
    return found


def test_the_search_finds_what_is_there(deploy):
    d = deploy(uses(lambda ctx: TEXT))  # a text that nobody knows to be a secret
    d.start()
    assert d.drain() == "done"
    assert "keepstep_checkpoint" in leaks(d)


def test_a_secret_is_used_and_nowhere_stored(deploy):
    used = []

    def body(ctx):
        secret = ctx.secret("env:KEY")
        used.append(secret.reveal())
        ctx.log.info("used", secret=secret)
        return len(secret.reveal())

    d = deploy(uses(body))
    d.start()
    assert d.drain() == "done"
    assert used == [TEXT]
    assert d.values()["log"][0] == len(TEXT)
    assert d.effects() == []  # nothing is journaled
    assert leaks(d) == []


def test_the_same_in_an_async_node(deploy):
    async def body(ctx):
        first, second = await asyncio.gather(ctx.secret("env:KEY"), ctx.secret("env:KEY"))
        return [first == second, isinstance(first, Secret)]

    d = deploy(uses(body, asynchronous=True))
    d.start()
    assert d.drain() == "done"
    assert d.values()["log"][0] == [True, True]


def test_a_secret_that_is_not_there_fails_the_node_by_its_name(deploy):
    d = deploy(uses(lambda ctx: ctx.secret("env:NOT_SET_ANYWHERE"), retry=AGAIN))
    d.start()
    assert d.drain() == "failed"
    assert d.error == (
        SecretNotFound.code,
        "secret 'env:NOT_SET_ANYWHERE': the worker's environment has no such variable",
    )


VAULT = """
asked = []

def read(tenant, name):
    asked.append((tenant, name))
    if len(asked) == 1:
        raise ConnectionError("hunter2")
    return "hunter2 of " + tenant
"""


def test_a_provider_is_asked_with_the_threads_tenant_and_again_when_it_was_away(deploy, tmp_path, monkeypatch):
    (tmp_path / "vault_of_steps.py").write_text(VAULT)
    monkeypatch.syspath_prepend(tmp_path)
    d = deploy(
        uses(lambda ctx: len(ctx.secret("payments/key").reveal()), retry=AGAIN),
        secrets_provider="vault_of_steps:read",
    )
    d.start()
    assert d.drain() == "done"
    assert d.values()["log"][0] == len("hunter2 of default")
    assert sys.modules["vault_of_steps"].asked == [("default", "payments/key")] * 2
    assert leaks(d) == []
    del sys.modules["vault_of_steps"]


# --- what a node says ---


@pytest.mark.parametrize("on_error", ["fail", "continue"])
@pytest.mark.parametrize("retry", [None, AGAIN])
def test_an_error_is_masked(deploy, on_error, retry):
    def body(ctx):
        key = ctx.secret("env:KEY").reveal()
        message = f"401 for key={key} {key!r} {base64.b64encode(f'user:{key}'.encode()).decode()}"
        raise ConnectionError(message)

    d = deploy(uses(body, retry=retry, on_error=on_error))
    d.start()
    if on_error == "fail":
        assert d.drain() == "failed"
        assert d.error[1].startswith("401 for key=*** '***' ")
    else:
        assert d.drain() == "done"
        (failure,) = d.values()["log"]
        assert failure["message"].startswith("401 for key=*** '***' ")
    assert leaks(d) == []


def test_an_error_is_masked_before_it_is_cut(deploy):
    def body(ctx):
        message = "x" * (4000 - 7) + ctx.secret("env:KEY").reveal()
        raise ConnectionError(message)

    d = deploy(uses(body))
    d.start()
    assert d.drain() == "failed"
    assert d.error[1] == "x" * 3993 + "***"
    assert leaks(d) == []


def logged(capsys, body, d, *, as_json):
    """What a worker writes to its log while the step runs."""
    before, root = logging.getLogger().handlers[:], logging.getLogger()
    level = root.level
    try:
        logs.configure(logging.DEBUG, as_json=as_json)
        d.start()
        d.drain()
    finally:
        root.handlers[:] = before
        root.setLevel(level)
        logging.getLogger("keepstep").setLevel(logging.NOTSET)
        structlog.reset_defaults()
    return capsys.readouterr().err


@pytest.mark.parametrize("as_json", [True, False])
def test_lines_of_the_log_are_masked(deploy, capsys, as_json):
    def body(ctx):
        log = ctx.log.bind(early=TEXT)  # bound before the attempt knows it
        key = ctx.secret("env:KEY").reveal()
        with structlog.contextvars.bound_contextvars(request=key):
            log.info("with %s", key)
        headers = {"Authorization": [key.encode()]}
        ctx.log.warning(f"key {key}", key=key, headers=headers, error=ValueError(key))  # noqa: G004  as nodes do
        try:
            _ = {}[f"no such key: {key}"]
        except KeyError:
            ctx.log.exception("failed")
        raise ConnectionError(key)

    d = deploy(uses(body))
    text = logged(capsys, body, d, as_json=as_json)
    for told in ("with ***", "key ***", "ValueError('***')", "no such key: ***", "Traceback", "node_failed"):
        assert told in text
    for form in forms():
        assert form.decode() not in text
        assert json.dumps(form.decode())[1:-1] not in text


# --- what a node writes: refused ---


def writes(name):
    """Bodies that write the secret's text somewhere, and the path that the refusal names."""

    def charge(amount, token=None):
        raise AssertionError(amount)

    bodies = {
        "update": (lambda ctx, key: [1, {"key": key}], "$.log[0][1].key"),
        "bytes": (lambda ctx, key: key.encode(), "$.log[0]"),
        "secret itself": (lambda ctx, key: ctx.secret("env:KEY"), "$.log[0]"),
        "event": (lambda ctx, key: ctx.emit({"key": f"is {key}"}), "$event.key"),
        "question": (lambda ctx, key: ctx.approve(f"Use {key}?"), "$.question"),
        "arguments of a question": (lambda ctx, key: ctx.approve("Use it?", arguments={"key": key}), "$.question"),
        "signal": (lambda ctx, key: ctx.wait_signal("paid", key=key), "$"),
        "argument of an effect": (lambda ctx, key: ctx.effect(charge, 5, token=key), "$charge.token"),
        "inside an argument": (lambda ctx, key: ctx.effect(charge, [ctx.secret("env:KEY")]), "$charge.amount[0]"),
        "key of an effect": (lambda ctx, key: ctx.effect(charge, 5, key=f"order {key}"), "$charge, the key"),
        "child's input": (lambda ctx, key: ctx.spawn("other", {"key": key}), "$.input.key"),
        "child's name": (lambda ctx, key: ctx.spawn("other", {}, thread=f"of {key}"), "$.thread"),
        "child's key": (lambda ctx, key: ctx.spawn("other", {}, key=key), "$.key"),
        "goto": (lambda ctx, key: Goto([Send("after", {"log": [key]})]), "$result"),
    }
    return bodies[name]


@pytest.mark.parametrize(
    "name",
    [
        "update",
        "bytes",
        "secret itself",
        "event",
        "question",
        "arguments of a question",
        "signal",
        "argument of an effect",
        "inside an argument",
        "key of an effect",
        "child's input",
        "child's name",
        "child's key",
        "goto",
    ],
)
@pytest.mark.parametrize("codec", ["msgpack", "json"])
def test_what_would_be_stored_with_a_secret_in_it_is_refused_with_its_path(deploy, name, codec):
    write, path = writes(name)
    d = deploy(uses(lambda ctx: write(ctx, ctx.secret("env:KEY").reveal()), retry=AGAIN), codec=codec)
    d.start()
    assert d.drain() == "failed"
    code, message = d.error
    assert code == "not_storable"
    assert message.startswith(path)
    assert "secret" in message
    assert (d.effects(), d.approvals(None), leaks(d)) == ([], [], [])
    assert d.checkpoints() == [(0, "input")]


# --- what effects bring: masked ---


@pytest.mark.parametrize("idempotent", [True, False])
def test_a_result_is_masked_on_the_first_attempt_as_on_every_other(deploy, idempotent):
    seen = []

    @effect(idempotent=idempotent)
    def fetch(url):
        return {"request": {"authorization": f"Bearer {TEXT}"}, "raw": TEXT.encode(), "url": url}

    def body(ctx):
        ctx.secret("env:KEY")
        seen.append(ctx.effect(fetch, "/"))
        if ctx.attempt == 1:
            raise ConnectionError
        return seen[-1]

    d = deploy(uses(body, retry=AGAIN))
    d.start()
    assert d.drain() == "done"
    assert seen == [{"request": {"authorization": "Bearer ***"}, "raw": b"***", "url": "/"}] * 2
    assert d.effects() == [("fetch", "done", 1)]
    assert leaks(d) == []


def test_an_effects_error_is_masked_in_the_journal(deploy):
    def pay():
        message = f"denied: {TEXT}"
        raise PermissionError(message)

    def body(ctx):
        ctx.secret("env:KEY")
        with pytest.raises(PermissionError):
            ctx.effect(pay)

    d = deploy(uses(body))
    d.start()
    assert d.drain() == "done"
    assert d.effects() == [("pay", "failed", 1)]
    assert "denied: ***" in repr(d.dump()["keepstep_effect"])
    assert leaks(d) == []


def test_a_secret_is_an_argument_by_its_reference(deploy, monkeypatch):
    given = []

    @effect(idempotent=False)
    def pay(amount: int, token: Secret) -> str:
        given.append((amount, token.reveal()))
        return f"paid with {token.reveal()}"

    def body(ctx):
        receipt = ctx.effect(pay, 5, token=ctx.secret("env:KEY"))
        if ctx.attempt == 1:
            monkeypatch.setenv("KEY", "rotated-text")
            raise ConnectionError
        return receipt

    d = deploy(uses(body, retry=AGAIN))
    d.start()
    assert d.drain() == "done"
    assert given == [(5, TEXT)]  # the same call, although the secret has another text by now
    assert d.values()["log"][0] == "paid with ***"
    (paid,) = d.reader.effects("t")
    assert view(paid.arguments) == {"amount": 5, "token": {"secret": "env:KEY"}}
    assert leaks(d) == []


class Killed(Died):
    """Takes the attempt out of the node's hands, as a kill does."""


@pytest.mark.parametrize("answer", ["result", "error"])
def test_what_a_lookup_brings_is_masked(deploy, answer):
    def find(token):
        if answer == "error":
            message = "denied:" + " " * 268 + token.reveal()  # where it would be cut
            raise PermissionError(message)
        return f"paid with {token.reveal()}" if answer == "result" else NOT_DONE

    @effect(lookup=find)
    def pay(token):
        raise Killed

    d = deploy(uses(lambda ctx: ctx.effect(pay, ctx.secret("env:KEY"))))
    d.start()
    with pytest.raises(Killed):
        d.work(d.queue.pop(0))
    d.queue += workers.release_child(d.store, d.worker.owner.worker, 1, reason="signal 9 (SIGKILL)")
    if answer == "result":
        assert d.drain() == "done"
        assert d.values()["log"][0] == "paid with ***"
    else:
        assert d.drain() == "blocked"
        assert d.error[1].endswith(" ***")
    assert leaks(d) == []
