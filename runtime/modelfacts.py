"""What a model's request and response say of the call: which model, with which settings, at what cost.

Read from the shapes of OpenAI's chat completions and responses and of Anthropic's messages, whole or in chunks, which
most servers speak. Of any other shape what is there is taken: nothing here fails, and nothing is guessed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, Final, NamedTuple

import msgspec
from pydantic import BaseModel

_TEXT_MAX: Final = 200
_DEPTH_MAX: Final = 100
_COUNT_MAX: Final = 2**63


class Tokens(NamedTuple):
    """How many tokens were paid for; None: the response does not say."""

    input: int | None = None
    output: int | None = None
    total: int | None = None


NO_TOKENS: Final = Tokens()


@dataclasses.dataclass(frozen=True, slots=True)
class Facts:
    """What is known of a call; None: neither request nor response says it."""

    model: str | None = None
    model_version: str | None = None
    temperature: float | None = None
    seed: int | None = None
    tokens: Tokens = NO_TOKENS
    finish_reason: str | None = None


def facts_of(request: Any, response: Any, chunks: Sequence[Any] | None = None) -> Facts:
    """Return what a request and its response say; of a streamed one `chunks`, of which the last word counts."""
    asked = plain(request)
    told = [part for each in (chunks if chunks is not None else [response]) for part in _parts(plain(each))]
    return Facts(
        model=_last(_text(part.get("model")) for part in told) or _text(_of(asked, "model")),
        model_version=_last(_text(part.get("system_fingerprint")) for part in told),
        temperature=_number(_of(asked, "temperature")),
        seed=_count(_of(asked, "seed")),
        tokens=_tokens(part.get("usage") for part in told),
        finish_reason=_last(reason for part in told for reason in _reasons(part)),
    )


def text_of(response: Any, chunks: Sequence[Any] | None = None) -> str:
    """Return the text of a response, as far as its shape is known; else ""."""
    if chunks is not None:
        return "".join(_chunk_text(plain(chunk)) for chunk in chunks)
    if isinstance(response, str):
        return response
    whole = plain(response)
    if not isinstance(whole, Mapping):
        return ""
    message = _of(_first(whole.get("choices")), "message")
    if isinstance(message, Mapping):
        return _content_text(message.get("content"))
    if isinstance(whole.get("output"), list):
        return "".join(_content_text(_of(item, "content")) for item in whole["output"])
    return _content_text(whole.get("content"))


def tool_versions(tools: Iterable[Any]) -> list[dict[str, str | None]]:
    """Return names and versions of what a model may call: things with `name` and `version`, or such mappings."""
    return [{"name": _text(_member(tool, "name")), "version": _text(_member(tool, "version"))} for tool in tools]


def plain(value: Any, depth: int = 0) -> Any:
    """Return a value with its objects (pydantic models, dataclasses, msgspec Structs) as mappings of their fields.

    What is nested too deep stays as it is.
    """
    if depth > _DEPTH_MAX or value is None or isinstance(value, str | int | float | bytes):
        return value
    if isinstance(value, BaseModel):
        return plain(value.model_dump(), depth + 1)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {each.name: plain(getattr(value, each.name), depth + 1) for each in dataclasses.fields(value)}
    if isinstance(value, msgspec.Struct):
        return {name: plain(getattr(value, name), depth + 1) for name in value.__struct_fields__}
    if isinstance(value, Mapping):
        return {key: plain(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item, depth + 1) for item in value]
    return value


def is_whole(response: Any) -> bool:
    """Tell whether a response is a value, and not a stream of chunks."""
    if isinstance(
        response, str | bytes | bytearray | memoryview | Mapping | Sequence | AbstractSet | BaseModel | msgspec.Struct
    ):
        return True
    if dataclasses.is_dataclass(response):
        return True
    return not hasattr(response, "__aiter__") and not hasattr(response, "__next__")


def _parts(chunk: Any) -> list[Mapping[str, Any]]:
    """Return a response or a chunk, and what its envelope holds: a stream's first and last events carry the message."""
    if not isinstance(chunk, Mapping):
        return []
    inner = (chunk.get("message"), chunk.get("response"), chunk.get("delta"))
    return [chunk, *(part for part in inner if isinstance(part, Mapping))]


def _reasons(part: Mapping[str, Any]) -> Iterable[str | None]:
    yield _text(_of(_first(part.get("choices")), "finish_reason"))
    yield _text(part.get("stop_reason"))
    if "output" in part:
        yield _text(part.get("status"))
        yield _text(_of(part.get("incomplete_details"), "reason"))


def _tokens(told: Iterable[Any]) -> Tokens:
    usages = [usage for usage in told if isinstance(usage, Mapping)]
    given = _last(_count(usage.get(name)) for usage in usages for name in ("prompt_tokens", "input_tokens"))
    made = _last(_count(usage.get(name)) for usage in usages for name in ("completion_tokens", "output_tokens"))
    total = _last(_count(usage.get("total_tokens")) for usage in usages)
    if total is None and given is not None and made is not None:
        total = given + made
    return Tokens(given, made, total)


def _chunk_text(chunk: Any) -> str:
    if isinstance(chunk, str):
        return chunk
    if not isinstance(chunk, Mapping):
        return ""
    content = _of(_of(_first(chunk.get("choices")), "delta"), "content")
    if content is not None:
        return _content_text(content)
    kind, delta = chunk.get("type"), chunk.get("delta")
    if kind == "response.output_text.delta":
        return delta if isinstance(delta, str) else ""
    if kind == "content_block_delta":
        text = _of(delta, "text")
        return text if isinstance(text, str) else ""
    return ""


def _content_text(content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return ""
    texts = (_of(item, "text") for item in content if _of(item, "type") in {"text", "output_text"})
    return "".join(text for text in texts if isinstance(text, str))


def _member(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)


def _of(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, Mapping) else None


def _first(value: Any) -> Any:
    return value[0] if isinstance(value, list) and value else None


def _last(values: Iterable[Any]) -> Any:
    found = None
    for value in values:
        if value is not None:
            found = value
    return found


def _text(value: Any) -> str | None:
    return str(value)[:_TEXT_MAX] if isinstance(value, str) and value else None


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _count(value: Any) -> int | None:
    is_count = isinstance(value, int) and not isinstance(value, bool) and abs(value) < _COUNT_MAX
    return int(value) if is_count else None
