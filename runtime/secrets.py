"""Secrets: a reference in code, resolved when it is used, and held so that nothing shows or stores it.

`env:NAME` is a variable of the worker's environment, `file:/run/secrets/x` a file, as containers mount them. Any other
reference is a name that the deployment's own provider knows (the setting `secrets_provider`).
"""

from __future__ import annotations

import contextlib
import hmac
import importlib
import inspect
import os
import re
import stat
from collections.abc import Callable
from pathlib import PurePosixPath
from typing import Any, ClassVar, NoReturn

from keepstep.errors import InvalidInput, InvalidSettings, NotStorable, SecretNotFound, SecretUnavailable
from keepstep.ids import checked_name

Provider = Callable[[str, str], str]
"""Called with tenant and name, returns the secret's text."""

FILE_BYTES_MAX = 64 * 1024
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_SHOWN = "***"


class Secret:
    """A secret's text, which only `reveal` shows.

    Printing, formatting, comparing and copying it is safe. It cannot be pickled, nor stored in a state, an event, a
    question or a result: keep its reference and resolve that where it is used.
    """

    __slots__ = ("_text", "ref")
    __hash__: ClassVar[None]  # type: ignore[assignment]  # a lookup by hash would compare in no constant time

    def __init__(self, text: str, ref: str) -> None:
        self._text = text
        self.ref = ref
        """The reference that it was resolved from."""

    def reveal(self) -> str:
        """Return the text."""
        return self._text

    def __repr__(self) -> str:
        return f"Secret({self.ref!r}, {_SHOWN})"

    def __str__(self) -> str:
        return _SHOWN

    def __format__(self, _spec: str) -> str:
        return _SHOWN

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Secret):
            return NotImplemented
        return hmac.compare_digest(self._text.encode(), other._text.encode())

    def __copy__(self) -> Secret:
        return self

    def __deepcopy__(self, _memo: dict[int, Any]) -> Secret:
        return self

    def __reduce_ex__(self, _protocol: object) -> NoReturn:
        message = f"secret {self.ref!r} is not pickled: pass its reference and resolve it where it is used"
        raise NotStorable(message)


class SecretSource:
    """Where a deployment's secrets are. Threads may share it."""

    def __init__(self, provider: str = "") -> None:
        """`provider`: `module:function`, called with (tenant, name); empty: none. It is imported at first use."""
        self._named = provider
        self._provider: Provider | None = None

    def resolve(self, ref: str, tenant: str) -> Secret:
        """Return the secret that a reference leads to, for a tenant.

        Raises `InvalidInput` for a reference that is none, `SecretNotFound` when it leads to nothing and
        `SecretUnavailable` when the provider failed, which may be tried again; each names the reference alone.
        """
        checked_name("a secret's reference", ref)
        scheme, colon, rest = ref.partition(":")
        if colon and scheme == "env":
            text = _of_environment(ref, rest)
        elif colon and scheme == "file":
            text = _of_file(ref, rest)
        else:
            text = self._provided(ref, tenant)
        if not text:
            _not_found(ref, "it is empty")
        try:
            text.encode()
        except UnicodeEncodeError:
            _not_found(ref, "it is not UTF-8 text")
        return Secret(text, ref)

    def _provided(self, ref: str, tenant: str) -> str:
        if not self._named:
            _not_found(
                ref, "it is neither env:NAME nor file:/path, and the setting secrets_provider names nobody who knows it"
            )
        provider = self._provider = self._provider or _loaded(self._named)
        failed: str | None = None
        try:
            text: object = provider(tenant, ref)
        except SecretNotFound:
            _not_found(ref, f"the provider {self._named} has none of that name")
        except Exception as error:  # noqa: BLE001  the provider is the deployment's; its errors may quote what it read
            failed = type(error).__name__
            text = None
        if failed is not None:  # raised here, where no error of the provider's hangs on as its context
            message = f"secret {ref!r}: the provider {self._named} raised {failed}"
            raise SecretUnavailable(message)
        if text is None:
            _not_found(ref, f"the provider {self._named} has none of that name")
        if not isinstance(text, str):
            _not_found(ref, f"the provider {self._named} returned {type(text).__qualname__}, not text")
        return text


def _loaded(named: str) -> Provider:
    module, _, name = named.partition(":")
    reason = ""
    found: Any = None
    try:
        found = getattr(importlib.import_module(module), name, None)
    except Exception as error:  # noqa: BLE001  whatever the deployment's module raises while it is imported
        reason = f"{module} could not be imported: {type(error).__name__}"
    if not reason and (not callable(found) or inspect.iscoroutinefunction(found)):
        reason = f"{name!r} in {module} is not a plain function of tenant and name"
    if reason:
        message = f"secrets_provider {named!r}: {reason}"
        raise InvalidSettings(message)
    return found  # type: ignore[no-any-return]  # callable, as just seen; what it returns is checked


def _of_environment(ref: str, name: str) -> str:
    if not _VARIABLE.fullmatch(name):
        message = f"secret {ref!r}: a variable's name has letters, digits and _, as in env:PAYMENTS_KEY"
        raise InvalidInput(message)
    text = os.environ.get(name)
    if text is None:
        _not_found(ref, "the worker's environment has no such variable")
    return text


def _of_file(ref: str, path: str) -> str:
    if not path.startswith("/") or ".." in PurePosixPath(path).parts:
        message = f"secret {ref!r}: the path must be absolute and without .., as in file:/run/secrets/payments"
        raise InvalidInput(message)
    data = b""
    reason = ""
    try:
        # Not blocking: a pipe that nobody writes to would hold the node. Links are followed: mounted secrets are links.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            if stat.S_ISREG(os.fstat(descriptor).st_mode):
                with open(descriptor, "rb", closefd=False) as file:
                    data = file.read(FILE_BYTES_MAX + 1)
            else:
                reason = "it is no regular file"
        finally:
            os.close(descriptor)
    except OSError as error:
        reason = error.strerror or type(error).__name__
    if len(data) > FILE_BYTES_MAX:
        reason = f"the file is larger than {FILE_BYTES_MAX} bytes"
    if reason:
        _not_found(ref, reason)
    text: str | None = None
    with contextlib.suppress(UnicodeDecodeError):  # whose text quotes the bytes
        text = data.decode()
    if text is None:
        _not_found(ref, "it is not UTF-8 text")
    return text.removesuffix("\n").removesuffix("\r")


def _not_found(ref: str, reason: str) -> NoReturn:
    message = f"secret {ref!r}: {reason}"
    raise SecretNotFound(message) from None
