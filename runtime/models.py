"""Model calls: effects that are safe to repeat and costly to, recorded with what there is to know of them.

Safe to repeat: so one write, no intent. Costly: so a response that was received is never thrown away. It is recorded
even when the attempt's lease was lost meanwhile (the first one recorded stands, for every attempt), and from when it is
whole until it is recorded it lies in the response spool, where the next attempt finds it.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import time
from collections.abc import AsyncIterable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from keepstep.crashpoints import reach
from keepstep.errors import InvalidInput, NotStorable
from keepstep.ids import checked_name
from keepstep.runtime.effects import EffectDeclaration, declaration_of
from keepstep.runtime.journal import Call, Journal, Recorded
from keepstep.runtime.masking import Masker
from keepstep.runtime.modelfacts import Facts, Tokens, facts_of, is_whole, plain, text_of, tool_versions
from keepstep.runtime.performing import Doing, Procedure
from keepstep.runtime.responsespool import Received, ResponseSpool
from keepstep.runtime.watchdog import undisturbed

OnChunk = Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class ModelReply:
    """What a model answered, and what is known of the call."""

    response: Any
    """As the call returned it, when its type is one that the graph or the call's annotation declares; else its plain
    data. None when it came in chunks."""
    chunks: tuple[Any, ...] | None
    """The chunks of a streamed response, all of them; None: it came whole."""
    text: str
    """What the model said, where the response has a shape that is known; else ""."""
    model: str | None
    model_version: str | None
    tokens: Tokens
    finish_reason: str | None
    seconds: float | None
    """From the call to the end of the response, when it was received."""
    first_chunk_seconds: float | None
    recorded: bool
    """It came from the journal: nothing was called now."""


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """What a caller says besides call and request."""

    key: str | None = None
    name: str | None = None
    prompt_version: str | None = None
    model_version: str | None = None
    tools: Sequence[Any] = ()
    on_chunk: OnChunk | None = None


@dataclass(frozen=True, slots=True)
class _Heard:
    """A response that was received."""

    response: Any
    chunks: list[Any] | None
    seconds: float
    first_chunk_seconds: float | None


def model(
    journal: Journal, spool: ResponseSpool | None, call: Callable[..., Any], request: Any, options: ModelOptions
) -> Procedure[ModelReply]:
    """Ask a model, once, or return its recorded response."""
    said = _said(options)
    # Told before the call is paid for: what was received is masked, and this is not.
    journal.masker.refuse({**said, "name": options.name}, "$ctx.model", json.dumps([options.name, said]).encode())
    begun = journal.begin(call, (request,), {}, options.key, _declaration(call, options.name))
    if isinstance(begun, Recorded):
        return _reply(begun.result, begun.meta, recorded=True)
    if not isinstance(begun, Call):  # a lookup: only effects at risk have one
        raise TypeError(begun)
    spooled = spool.get(begun.key.text, begun.digest) if spool is not None else None
    if spooled is not None:
        # By a secret that this attempt has resolved, and the one that received it had not.
        answer = journal.masker.value(begun.codec.decode(spooled.result))
        if journal.masker:
            spooled = spooled._replace(result=begun.codec.encode(answer, path=f"${begun.declared.name}"))
        return _recorded(journal, spool, begun, request, answer, spooled, is_new=False)
    journal.check_lease(begun)
    try:
        heard = yield from _heard(call, request, begun, options.on_chunk)
    except Exception as error:
        journal.raised(begun, error)
        raise
    reach("after_response", begun.key.call)
    with undisturbed():
        # Nothing before the spool that can wait until after it: what dies meanwhile was paid for in vain.
        answer, received = _received(journal, begun, heard, said)
        if spool is not None:
            spool.put(begun.key.text, received)
        reach("after_call", begun.key.call)
        reply = _recorded(journal, spool, begun, request, answer, received, is_new=True)
    reach("after_result", begun.key.call)
    return reply


def _declaration(call: Callable[..., Any], name: str | None) -> EffectDeclaration:
    if name is not None:
        return EffectDeclaration(checked_name("a model call's name", name), idempotent=True)
    try:
        declared = declaration_of(call)
    except InvalidInput:
        message = "ctx.model needs a named function: its name is part of the call's key; use def, or give name=…"
        raise InvalidInput(message) from None
    return EffectDeclaration(declared.name, idempotent=True)


def _said(options: ModelOptions) -> dict[str, Any]:
    """Return what the caller says of a call, checked before it is paid for."""
    for name in ("prompt_version", "model_version"):
        if not isinstance(getattr(options, name), str | None):
            message = f"ctx.model: {name} must be text, not a {type(getattr(options, name)).__name__}"
            raise InvalidInput(message)
    return {
        "prompt_version": options.prompt_version,
        "model_version": options.model_version,
        "tools": tool_versions(options.tools),
    }


# --- receiving ---


def _heard(call: Callable[..., Any], request: Any, begun: Call, on_chunk: OnChunk | None) -> Procedure[_Heard]:
    began = time.monotonic()
    response = yield Doing(call, (request,), begun.extra)
    if is_whole(response):
        return _Heard(response, None, time.monotonic() - began, None)
    stream = _Stream(on_chunk, began)
    yield Doing(stream.drain_async if hasattr(response, "__aiter__") else stream.drain, (response,))
    return _Heard(None, stream.chunks, time.monotonic() - began, stream.first_chunk_seconds)


class _Stream:
    """Takes a response's chunks as they come, and passes them on."""

    def __init__(self, on_chunk: OnChunk | None, began: float) -> None:
        self._on_chunk = on_chunk
        self._began = began
        self.chunks: list[Any] = []
        self.first_chunk_seconds: float | None = None

    def drain(self, response: Iterator[Any]) -> None:
        try:
            for chunk in response:
                if inspect.isawaitable(self._take(chunk)):
                    message = "ctx.model: on_chunk is async: use it with an async stream, or give a plain function"
                    raise InvalidInput(message)
        finally:
            # One that was left in the middle goes on being paid for until it is closed.
            with contextlib.suppress(Exception):
                _closing(response)

    async def drain_async(self, response: AsyncIterable[Any]) -> None:
        try:
            async for chunk in response:
                taken = self._take(chunk)
                if inspect.isawaitable(taken):
                    await taken
        finally:
            with contextlib.suppress(Exception):
                closing = _closing(response)
                if inspect.isawaitable(closing):
                    await closing

    def _take(self, chunk: Any) -> Any:
        if self.first_chunk_seconds is None:
            self.first_chunk_seconds = time.monotonic() - self._began
        self.chunks.append(chunk)
        return None if self._on_chunk is None else self._on_chunk(chunk)


def _closing(response: Any) -> Any:
    close = getattr(response, "aclose", None) or getattr(response, "close", None)
    return None if close is None else close()


# --- recording ---


def _received(journal: Journal, begun: Call, heard: _Heard, said: dict[str, Any]) -> tuple[dict[str, Any], Received]:
    """Return a response as the node will see it, now and on every retry, and as it is stored."""
    path = f"${begun.declared.name}"
    try:
        answer, result = _stored(begun, journal.masker, heard, path)
    except InvalidInput as error:  # it cannot be stored, or is too large: the call is over all the same
        journal.raised(begun, error)
        raise
    times = {"seconds": heard.seconds, "first_chunk_seconds": heard.first_chunk_seconds}
    said |= {name: None if value is None else round(value, 6) for name, value in times.items()}
    return answer, Received(begun.digest, result, begun.codec.encode(said, path=f"{path}.said"))


def _stored(begun: Call, masker: Masker, heard: _Heard, path: str) -> tuple[dict[str, Any], bytes]:
    answer = masker.value({"response": heard.response, "chunks": heard.chunks})
    try:
        return answer, begun.codec.encode(answer, path=path)
    except NotStorable:
        # A client's own classes, which the graph does not declare: what they hold is kept, and they are not.
        chunks = None if heard.chunks is None else [plain(chunk) for chunk in heard.chunks]
        answer = masker.value({"response": plain(heard.response), "chunks": chunks})
        return answer, begun.codec.encode(answer, path=path)


def _recorded(
    journal: Journal,
    spool: ResponseSpool | None,
    begun: Call,
    request: Any,
    answer: dict[str, Any],
    received: Received,
    *,
    is_new: bool,
) -> ModelReply:
    """Record what was received, and return the reply that is recorded: another attempt's when that one was first."""
    facts = facts_of(request, answer["response"], answer["chunks"])
    # What the request says of its model may hold a secret that only the call has resolved.
    meta = journal.masker.value(_meta(begun, facts, begun.codec.decode(received.said)))
    before = journal.keep(begun, received.result, begun.codec.encode(meta))
    if spool is not None:
        spool.remove(begun.key.text)
    if before is not None:
        return _reply(before.result, before.meta, recorded=True)
    return _reply(answer, meta, recorded=not is_new)


def _meta(begun: Call, facts: Facts, said: dict[str, Any]) -> dict[str, Any]:
    """Return what is known of a call; what the caller says stands over what the response does."""
    return {
        "model": facts.model,
        "model_version": said["model_version"] or facts.model_version,
        "prompt_version": said["prompt_version"],
        "tools": said["tools"],
        "temperature": facts.temperature,
        "seed": facts.seed,
        "tokens": facts.tokens._asdict(),
        "finish_reason": facts.finish_reason,
        "seconds": said["seconds"],
        "first_chunk_seconds": said["first_chunk_seconds"],
        "request_digest": begun.digest.hex(),
    }


def _reply(result: Any, meta: Any, *, recorded: bool) -> ModelReply:
    if meta is None:  # it was recorded by ctx.effect, before the node's code was changed
        result, meta = {"response": result, "chunks": None}, {}
    response, chunks = result["response"], result["chunks"]
    return ModelReply(
        response=response,
        chunks=None if chunks is None else tuple(chunks),
        text=text_of(response, chunks),
        model=meta.get("model"),
        model_version=meta.get("model_version"),
        tokens=Tokens(**meta.get("tokens", {})),
        finish_reason=meta.get("finish_reason"),
        seconds=meta.get("seconds"),
        first_chunk_seconds=meta.get("first_chunk_seconds"),
        recorded=recorded,
    )
