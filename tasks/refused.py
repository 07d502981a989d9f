"""What a command that was refused says of itself, read without believing it: for the audit."""

from __future__ import annotations

import json
from typing import Any

from keepstep.errors import Forbidden, InvalidSettings, KeepstepError, KeyNotTrusted
from keepstep.runtime.principals import Principal
from keepstep.runtime.refusals import Said
from keepstep.signing import library

_LENGTH_MAX = 200


def said_by(body: bytes) -> tuple[Said, str | None] | None:
    """Return what a message says, and whose token it says it in (None: it has none); None when it cannot be read."""
    message = _object(body)
    claims = _claims(message["jwt"]) if "jwt" in message else {}
    command = claims.get("command") if "jwt" in message else message
    if not isinstance(command, dict) or not command:
        return None
    names = ("id", "tenant", "verb", "approval", "thread", "graph", "verdict", "by")
    return Said(**{name: _name(command.get(name)) for name in names}), _name(claims.get("sub"))


def sender_of(
    said: Said, subject: str | None, principal: Principal | None, error: KeepstepError, *, takes_unsigned: bool
) -> str | None:
    """Return who sent a refused command, None when nobody knows: a signature that does not hold says nothing."""
    if principal is not None:
        return principal.name
    if not isinstance(error, Forbidden) or isinstance(error, KeyNotTrusted):
        return None
    # What is forbidden was signed by somebody who may not, or is unsigned where that is taken.
    return subject or (said.by if takes_unsigned else None)


def _object(body: bytes) -> dict[str, Any]:
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _claims(token: object) -> dict[str, Any]:
    try:
        jwt = library()
    except InvalidSettings:
        return {}
    try:
        claims = jwt.decode(str(token), options={"verify_signature": False})
    except (jwt.InvalidTokenError, ValueError, RecursionError):
        return {}
    return dict(claims)


def _name(value: object) -> str | None:
    fits = isinstance(value, str) and 0 < len(value) <= _LENGTH_MAX and value.isprintable()
    return str(value) if fits else None
