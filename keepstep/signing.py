"""Signed commands: who sends one, and that nobody has changed it on its way.

A signed command is `{"v": 1, "jwt": TOKEN}`: a JSON Web Token (RFC 7519) that carries the whole command as the claim
`command`, so that there is no form of it to agree on but its bytes. `sub` is who wants it, `jti` is the command's id.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Final, Self

from keepstep.errors import InvalidSettings

ALGORITHMS: Final = ("EdDSA", "ES256", "ES384", "RS256", "PS256", "HS256")
"""Those that a key may be for. Which one a key is for stands in the key, never in the token alone."""
KEY_FILE_BYTES_MAX: Final = 1024 * 1024
LIFETIME_SECONDS: Final = 3600.0


def library() -> ModuleType:
    """Return PyJWT; raise `InvalidSettings` naming the extra when it is not installed."""
    try:
        import jwt  # noqa: PLC0415  who does not sign needs none
        import jwt.algorithms  # noqa: PLC0415  the same
    except ImportError:
        message = "signed commands need an extra: pip install 'keepstep[signed]'"
        raise InvalidSettings(message) from None
    if not jwt.algorithms.has_crypto:
        message = "signed commands need cryptography, too: pip install 'keepstep[signed]'"
        raise InvalidSettings(message)
    return jwt


def read_key_file(setting: str, path: str) -> Any:
    """Return what a file of keys says (JSON); raise `InvalidSettings` naming the setting and the path, never a key."""
    try:
        if Path(path).stat().st_size > KEY_FILE_BYTES_MAX:
            message = f"{setting}: {path} is too large for a file of keys"
            raise InvalidSettings(message)
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        message = f"{setting}: {path} cannot be read: {error.strerror}"
        raise InvalidSettings(message) from None
    except ValueError:
        message = f"{setting}: {path} is not JSON"
        raise InvalidSettings(message) from None


def algorithm_of(key: Mapping[str, Any]) -> str:
    """Return the algorithm that a JSON Web Key (RFC 7517) is for; raise `InvalidSettings` when it is none of ours."""
    found = key.get("alg") or {"OKP": "EdDSA", "RSA": "RS256", "oct": "HS256"}.get(str(key.get("kty")))
    found = found or {"P-256": "ES256", "P-384": "ES384"}.get(str(key.get("crv")))
    if found not in ALGORITHMS:
        message = f"key {key.get('kid')!r}: its alg must be one of {', '.join(ALGORITHMS)}"
        raise InvalidSettings(message)
    return str(found)


@dataclass(frozen=True)
class Signer:
    """Signs commands with one private key."""

    kid: str
    _key: Any
    _algorithm: str
    _audience: str

    @classmethod
    def load(cls, path: str, *, audience: str) -> Self:
        """Return the signer of a file that holds one private JSON Web Key; `audience`: the deployment's setting.

        Raises `InvalidSettings` naming the path, never the key.
        """
        found = read_key_file("signing_key", path)
        if not isinstance(found, dict) or not isinstance(found.get("kid"), str) or not found["kid"]:
            message = f"signing_key: {path} must hold one JSON Web Key with a kid"
            raise InvalidSettings(message)
        algorithm = algorithm_of(found)
        try:
            key = library().PyJWK(found, algorithm).key
        except InvalidSettings:
            raise
        except Exception:  # noqa: BLE001  whatever is wrong with it, its values are not to be shown
            message = f"signing_key: {path} holds no key that can be used for {algorithm}"
            raise InvalidSettings(message) from None
        if not ("d" in found or found.get("kty") == "oct"):
            message = f"signing_key: {path} holds a public key; a private one is needed to sign"
            raise InvalidSettings(message)
        return cls(found["kid"], key, algorithm, audience)

    def signed(
        self,
        command: Mapping[str, Any],
        *,
        principal: str,
        roles: Sequence[str] = (),
        seconds: float = LIFETIME_SECONDS,
    ) -> dict[str, Any]:
        """Return the message that carries a command, signed, as the word of `principal`."""
        now = int(time.time())
        claims = {
            "sub": principal,
            "aud": self._audience,
            "jti": command["id"],
            "iat": now,
            "exp": now + int(seconds),
            "command": dict(command),
        }
        if roles:
            claims["roles"] = list(roles)
        token = library().encode(claims, self._key, algorithm=self._algorithm, headers={"kid": self.kid})
        return {"v": 1, "jwt": token}
