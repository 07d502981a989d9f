"""The secrets of one attempt: those that it has resolved, and what keeps them out of whatever it writes.

Nothing of them is journaled or stored. What the attempt would write and must not be changed (an update, an event, a
question, an argument) is refused when it holds a secret's text; what only tells (an error, a log line) or has happened
already (a result) is masked.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
import traceback
from collections.abc import Callable, Mapping, MutableMapping
from types import TracebackType
from typing import Any, get_type_hints

import structlog

from keepstep.errors import NotStorable
from keepstep.runtime.codec import Codec
from keepstep.runtime.masking import Masker
from keepstep.runtime.secrets import Secret, SecretSource


class SecretBook:
    """What an attempt of a node run has resolved. A reference is resolved once, so that it does not change midway."""

    def __init__(self, source: SecretSource, tenant: str) -> None:
        self._source = source
        self._tenant = tenant
        self._lock = threading.Lock()
        self._known: dict[str, Secret] = {}
        self.masker = Masker()

    def resolve(self, ref: str) -> Secret:
        """Return the secret of a reference; see `SecretSource.resolve`."""
        with self._lock:
            found = self._known.get(ref)
            if found is None:
                found = self._source.resolve(ref, self._tenant)
                self.masker.add(found)
                self._known[ref] = found
            return found

    def logger(self, name: str) -> Any:
        """Return a structured logger whose lines show none of these secrets, also those resolved later."""
        merged = structlog.contextvars.merge_contextvars  # what is merged later would not be masked
        processors = [merged, self._without_secrets, *structlog.get_config()["processors"]]
        return structlog.wrap_logger(None, processors=processors, logger_factory_args=(name,))

    def _without_secrets(self, _logger: Any, _method: str, event: MutableMapping[str, Any]) -> Mapping[str, Any]:
        if not self.masker:
            return event
        error = event.get("exc_info")
        if error:
            event = {**event, "exception": _told(error)}
            del event["exc_info"]
        return {self.masker.text(key): self.masker.value(value) for key, value in event.items()}


class GuardedCodec(Codec):
    """An attempt's codec: what it would write with a secret's text in it is refused."""

    def __init__(self, codec: Codec, masker: Masker) -> None:
        # A view of that codec, not one of its own: it is made for every attempt.
        vars(self).update(vars(codec))
        self._codec = codec
        self._masker = masker

    def including(self, *declared: Any) -> Codec:
        """Return a guarded codec of the same format that also knows the types `declared` reach."""
        wider = self._codec.including(*declared)
        return self if wider is self._codec else GuardedCodec(wider, self._masker)

    def encode(self, value: object, *, path: str = "$") -> bytes:
        """Return the payload of `value`, as `Codec.encode`; raise `NotStorable` when a secret's text is in it."""
        data = self._codec.encode(value, path=path)
        self._masker.refuse(value, path, data)
        return data


def by_reference(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call's arguments as they are known: of a secret among them its reference, which rotation leaves alone.

    A secret that stands inside another argument is refused by the codec, which names the path.
    """
    return {name: {"secret": value.ref} if isinstance(value, Secret) else value for name, value in values.items()}


def check_annotated(function: Callable[..., Any], name: str, values: Mapping[str, Any]) -> None:
    """Raise `NotStorable` for a secret that an undo could not be given again: nothing says that it was one.

    What stands in the journal in its place is told from a value that looks like it by the function's annotation alone.
    """
    takes: Mapping[str, bool] = {}
    for argument, value in values.items():
        if isinstance(value, Secret):
            takes = takes or _takes(function)
            if not takes.get(argument):
                message = (
                    f"${name}.{argument}: it is a secret, and the effect has an undo, which is given it again: "
                    f"annotate the parameter as {argument}: Secret"
                )
                raise NotStorable(message)


def with_secrets(
    function: Callable[..., Any], values: Mapping[str, Any], resolve: Callable[[str], Secret]
) -> dict[str, Any]:
    """Return arguments as a call of `function` was given them: the secrets in place of their references."""
    takes = _takes(function)
    return {
        name: resolve(value["secret"])
        if takes.get(name) and isinstance(value, dict) and set(value) == {"secret"}
        else value
        for name, value in values.items()
    }


@functools.lru_cache(maxsize=4096)
def _takes(function: Callable[..., Any]) -> Mapping[str, bool]:
    """Return the names of a function's parameters, and whether each is annotated as a `Secret`."""
    hints: dict[str, Any] = {}
    with contextlib.suppress(Exception):  # an annotation that cannot be resolved asks for nothing
        whole = function.func if isinstance(function, functools.partial) else function
        hints = get_type_hints(inspect.unwrap(whole))
    with contextlib.suppress(TypeError, ValueError):
        return {name: hints.get(name) is Secret for name in inspect.signature(function).parameters}
    return {}


def taken(function: Callable[..., Any], secrets: Mapping[str, Secret]) -> dict[str, Any]:
    """Return those of the secrets that a function takes: each as its text, or as the `Secret` that it asks for."""
    if not secrets:
        return {}
    takes = _takes(function)
    return {name: each if takes[name] else each.reveal() for name, each in secrets.items() if name in takes}


def _told(error: Any) -> str:
    """Return the traceback of structlog's `exc_info`: True, an exception, or what `sys.exc_info` returns."""
    if isinstance(error, BaseException):
        return "".join(traceback.format_exception(error)).rstrip()
    if isinstance(error, tuple):
        kind, instance, frames = error
        where = frames if isinstance(frames, TracebackType) else None
        return "".join(traceback.format_exception(kind, instance, where)).rstrip()
    return traceback.format_exc().rstrip()
