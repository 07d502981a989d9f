"""Who sent a command: the check of its signature, and what its key may be used for.

Keys are a JSON Web Key Set (RFC 7517) in a file, public ones, each with its `kid` and `alg`. Members of our own bound
what a key is trusted with: `tenants`, `verbs`, `principals` and `roles`. The file is read again when it has changed;
one that became unreadable leaves the keys as they were.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from keepstep.errors import Forbidden, InvalidSettings, KeyNotTrusted, Unauthenticated
from keepstep.runtime.principals import Principal
from keepstep.settings import Settings
from keepstep.signing import algorithm_of, library, read_key_file

log = structlog.get_logger("keepstep.worker")

_LOOK_SECONDS = 1.0
_CLOCK_SECONDS = 60.0
"""How far a sender's clock may be ahead of this one."""
_SECONDS_MAX = 2**53
_SECRET_BYTES_MIN = 32
_RSA_BITS_MIN = 2048
_MISSPELLED = {"tenant": "tenants", "verb": "verbs", "principal": "principals", "role": "roles"}
_ROLES_MAX = 100
_REQUIRED = ["aud", "exp", "iat", "jti", "sub"]


@dataclass(frozen=True, slots=True)
class _Key:
    key: Any
    algorithm: str
    tenants: tuple[str, ...] | None
    verbs: tuple[str, ...] | None
    principals: tuple[str, ...] | None
    roles: tuple[str, ...] | None


class TrustedKeys:
    """The keys whose word a worker takes."""

    def __init__(self, path: str, *, audience: str, backlog_seconds: float) -> None:
        """Raise `InvalidSettings` when the file cannot be used. See the settings for `backlog_seconds`."""
        self._path = path
        self._audience = audience
        self._backlog_seconds = backlog_seconds
        self._lock = threading.Lock()
        self._look_at = 0.0
        self._stamp: tuple[int, int, int] | None = None
        self._keys: Mapping[str, _Key] = {}
        self._read()

    @classmethod
    def of(cls, settings: Settings) -> TrustedKeys | None:
        """Return the keys that the settings name, None when they name none."""
        if not settings.trusted_keys:
            return None
        return cls(
            settings.trusted_keys, audience=settings.audience, backlog_seconds=settings.signature_backlog_seconds
        )

    def __len__(self) -> int:
        return len(self._current())

    def verified(self, token: object) -> tuple[dict[str, Any], Principal]:
        """Return the command that a token carries, and whose word it is.

        Raises `Unauthenticated` when the signature, the audience, the times or the id do not hold, `KeyNotTrusted` when
        the key is not trusted with what the command says, `Forbidden` when that names somebody else than the token.
        What the token says is shown in none of them.
        """
        if not isinstance(token, str):
            message = "$.jwt: a token (a string) is needed"
            raise Unauthenticated(message)
        jwt = library()
        kid, key = self._key_of(jwt, token)
        try:
            # The time it ends is judged below: a queue may have been away for longer.
            claims = jwt.decode(
                token,
                key.key,
                algorithms=[key.algorithm],
                audience=self._audience,
                options={"require": _REQUIRED, "verify_exp": False, "verify_iat": False},
                leeway=_CLOCK_SECONDS,
            )
        except jwt.InvalidAudienceError:
            message = f"$.jwt: it is not meant for this deployment (its audience is {self._audience!r})"
            raise Unauthenticated(message) from None
        except jwt.MissingRequiredClaimError as error:
            message = f"$.jwt: the claim {error.claim!r} is missing"
            raise Unauthenticated(message) from None
        except jwt.InvalidTokenError:
            message = f"$.jwt: its signature is not that of key {kid!r}, or it is no token"
            raise Unauthenticated(message) from None
        self._check_times(claims)
        command = claims.get("command")
        if not isinstance(command, dict):
            message = "$.jwt: the claim 'command' (an object) is missing"
            raise Unauthenticated(message)
        if command.get("id") != claims["jti"]:
            message = "$.jwt: jti is not the command's id"
            raise Unauthenticated(message)
        principal = Principal(str(claims["sub"]), _roles(claims.get("roles")), kid)
        _check_trusted(kid, key, command, principal)
        return _as(command, claims["sub"]), principal

    def _key_of(self, jwt: Any, token: str) -> tuple[str, _Key]:
        try:
            kid = jwt.get_unverified_header(token).get("kid")
        except jwt.InvalidTokenError:
            message = "$.jwt: it is no JSON Web Token"
            raise Unauthenticated(message) from None
        key = self._current().get(kid) if isinstance(kid, str) else None
        if key is None:
            message = "$.jwt: no trusted key has its kid: add its public key to the file that trusted_keys names"
            raise Unauthenticated(message)
        return str(kid), key

    def _check_times(self, claims: Mapping[str, Any]) -> None:
        now = time.time()
        expires, issued = claims["exp"], claims["iat"]
        if not all(_is_time(each) for each in (expires, issued)):
            message = "$.jwt: exp and iat are seconds since 1970"
            raise Unauthenticated(message)
        if issued > now + _CLOCK_SECONDS:
            message = "$.jwt: it was signed in the future; is the sender's clock right?"
            raise Unauthenticated(message)
        # Its id is kept for good, so that it counts once however late it comes; who wants it may have changed by then.
        if now > expires + self._backlog_seconds:
            message = "$.jwt: its time is over"
            raise Unauthenticated(message)

    # --- keys ---------------------------------------------------------------------------------------------------------

    def _current(self) -> Mapping[str, _Key]:
        now = time.monotonic()
        with self._lock:
            if now >= self._look_at:
                self._look_at = now + _LOOK_SECONDS
                try:
                    self._read()
                except InvalidSettings as error:
                    log.warning("trusted_keys_kept", reason=error.message)
            return self._keys

    def _read(self) -> None:
        try:
            found = Path(self._path).stat()
        except OSError as error:
            message = f"trusted_keys: {self._path} cannot be read: {error.strerror}"
            raise InvalidSettings(message) from None
        stamp = (found.st_mtime_ns, found.st_size, found.st_ino)
        if stamp == self._stamp:
            return
        self._keys = _keys_of(self._path, read_key_file("trusted_keys", self._path))
        self._stamp = stamp


def _is_time(value: object) -> bool:
    """Tell whether it is a number that an end can be told by: not NaN, which nothing is later than, nor infinity."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _SECONDS_MAX


def _keys_of(path: str, found: Any) -> dict[str, _Key]:
    listed = found.get("keys") if isinstance(found, dict) else None
    if not isinstance(listed, list) or not listed:
        message = f"trusted_keys: {path} must hold a JSON Web Key Set with keys"
        raise InvalidSettings(message)
    keys: dict[str, _Key] = {}
    for each in listed:
        kid = each.get("kid") if isinstance(each, dict) else None
        if not isinstance(kid, str) or not kid or kid in keys:
            message = f"trusted_keys: {path}: every key needs a kid of its own"
            raise InvalidSettings(message)
        keys[kid] = _key_of(path, kid, each)
    return keys


def _key_of(path: str, kid: str, found: Mapping[str, Any]) -> _Key:
    algorithm = algorithm_of(found)
    for wrong, right in _MISSPELLED.items():
        if wrong in found:  # a member that is not known bounds nothing, and this was meant to
            message = f"trusted_keys: {path}: key {kid!r}: {wrong!r} bounds nothing; {right!r} is a list"
            raise InvalidSettings(message)
    if "d" in found:
        message = f"trusted_keys: {path}: key {kid!r} is a private key; workers need the public one only"
        raise InvalidSettings(message)
    try:
        key = library().PyJWK(dict(found), algorithm).key
    except InvalidSettings:
        raise
    except Exception:  # noqa: BLE001  whatever is wrong with it, its values are not to be shown
        message = f"trusted_keys: {path}: key {kid!r} cannot be used for {algorithm}"
        raise InvalidSettings(message) from None
    if found.get("kty") == "RSA" and key.key_size < _RSA_BITS_MIN:
        message = f"trusted_keys: {path}: key {kid!r} has {key.key_size} bits; RSA needs {_RSA_BITS_MIN}"
        raise InvalidSettings(message)
    if isinstance(key, bytes) and len(key) < _SECRET_BYTES_MIN:
        message = f"trusted_keys: {path}: key {kid!r} is a shared secret of less than {_SECRET_BYTES_MIN} bytes"
        raise InvalidSettings(message)
    bounds = (_names(path, kid, found, member) for member in ("tenants", "verbs", "principals", "roles"))
    return _Key(key, algorithm, *bounds)


def _names(path: str, kid: str, found: Mapping[str, Any], member: str) -> tuple[str, ...] | None:
    value = found.get(member)
    if value is None:
        return None
    if not isinstance(value, list) or not all(isinstance(each, str) and each for each in value):
        message = f"trusted_keys: {path}: key {kid!r}: {member} must be a list of names"
        raise InvalidSettings(message)
    return tuple(value)


def _check_trusted(kid: str, key: _Key, command: Mapping[str, Any], principal: Principal) -> None:
    wanted = (
        ("tenant", key.tenants, [command.get("tenant")]),
        ("verb", key.verbs, [command.get("verb")]),
        ("principal", key.principals, [principal.name]),
        ("role", key.roles, principal.roles),
    )
    for member, allowed, named in wanted:
        if allowed is not None and not set(named) <= set(allowed):
            message = f"key {kid!r} is not trusted with this {member}: its {member}s in trusted_keys say with which"
            raise KeyNotTrusted(message)


def _as(command: dict[str, Any], subject: object) -> dict[str, Any]:
    """Return the command as its principal's: whoever the command itself names must be that one."""
    if not isinstance(subject, str) or not subject:
        message = "$.jwt: sub names who wants it"
        raise Unauthenticated(message)
    if command.get("by") not in (None, subject):
        message = "$.by: the command names somebody else than its token does"
        raise Forbidden(message)
    return {**command, "by": subject}


def _roles(found: object) -> tuple[str, ...]:
    if found is None:
        return ()
    if not isinstance(found, Sequence) or isinstance(found, str) or len(found) > _ROLES_MAX:
        message = "$.jwt: roles must be a list of names"
        raise Unauthenticated(message)
    if not all(isinstance(each, str) and each for each in found):
        message = "$.jwt: roles must be a list of names"
        raise Unauthenticated(message)
    return tuple(found)
