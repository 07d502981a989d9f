"""`keepstep new-key`: a pair of keys for signed commands."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from keepstep.cli.command import command
from keepstep.cli.session import Session
from keepstep.errors import Conflict, InvalidSettings
from keepstep.ids import checked_name


@command(
    "new-key",
    panel="Operate",
    has_tenant=False,
    example="""\
keepstep new-key shop --private shop.jwk --public trusted.jwks
keepstep new-key shop-2027 --private shop-2027.jwk --public trusted.jwks --for-tenant acme --for-verb start""",
)
def new_key(
    session: Session,
    *,
    kid: Annotated[
        str, typer.Argument(metavar="KID", help="The key's id: which service signs with it, and since when.")
    ],
    private: Annotated[
        Path, typer.Option("--private", metavar="FILE", help="Where to write the private key; it must not be there.")
    ],
    public: Annotated[
        Path, typer.Option("--public", metavar="FILE", help="The workers' key set, to which the public key is added.")
    ],
    tenants: Annotated[
        list[str] | None,
        typer.Option("--for-tenant", metavar="NAME", help="Trust it with this tenant only; may be given again."),
    ] = None,
    verbs: Annotated[
        list[str] | None,
        typer.Option("--for-verb", metavar="VERB", help="Trust it with this verb only; may be given again."),
    ] = None,
    principals: Annotated[
        list[str] | None,
        typer.Option(
            "--for-principal", metavar="NAME", help="Trust it to speak for this name only; may be given again."
        ),
    ] = None,
    roles: Annotated[
        list[str] | None,
        typer.Option("--for-role", metavar="NAME", help="Trust it to give this role only; may be given again."),
    ] = None,
) -> None:
    """Make a pair of keys (Ed25519) for signed commands: the private one for a client, the public one for the workers.

    A client signs with the file that KEEPSTEP_SIGNING_KEY names; workers take the word of the keys in
    KEEPSTEP_TRUSTED_KEYS, which they read again when it changes.
    """
    from keepstep.signing import library
    from keepstep.tasks import messages

    checked_name("a key's id", kid)
    for verb in verbs or ():
        if verb not in messages.VERBS:
            message = f"--for-verb: one of {', '.join(messages.VERBS)}, not {verb!r}"
            raise InvalidSettings(message)
    library()
    known = _known(public)
    if any(each.get("kid") == kid for each in known["keys"]):
        message = f"{public} has a key {kid!r} already: give each key an id of its own"
        raise Conflict(message)
    pair = _pair(kid)
    bounds = {"tenants": tenants, "verbs": verbs, "principals": principals, "roles": roles}
    known["keys"].append({**_public(pair), **{name: value for name, value in bounds.items() if value}})
    _write_new(private, pair)
    _replace(public, known)
    if session.as_json:
        session.output.document({"kid": kid, "private": str(private), "public": str(public)})
    else:
        session.output.line(f"{private}: the private key {kid!r}; whoever has it can sign")
        session.output.line(f"{public}: trusts {', '.join(str(each['kid']) for each in known['keys'])}")


def _pair(kid: str) -> dict[str, Any]:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from jwt.algorithms import OKPAlgorithm

    made = OKPAlgorithm.to_jwk(Ed25519PrivateKey.generate(), as_dict=True)
    return {**made, "kid": kid, "alg": "EdDSA", "use": "sig"}


def _public(pair: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in pair.items() if name not in {"d", "key_ops"}}


def _known(path: Path) -> dict[str, Any]:
    from keepstep.signing import read_key_file

    if not path.exists():
        return {"keys": []}
    found = read_key_file("--public", str(path))
    if not isinstance(found, dict) or not isinstance(found.get("keys"), list):
        message = f"--public: {path} holds no JSON Web Key Set"
        raise InvalidSettings(message)
    return found


def _write_new(path: Path, value: dict[str, Any]) -> None:
    try:
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    except FileExistsError:
        message = f"--private: {path} is there already: a key is never written over"
        raise Conflict(message) from None
    except OSError as error:
        message = f"--private: {path} cannot be written: {error.strerror}"
        raise InvalidSettings(message) from None
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        json.dump(value, file, indent=2)
        file.write("\n")


def _replace(path: Path, value: dict[str, Any]) -> None:
    """Replace a file at once: a worker that reads it sees the old set or the new one."""
    beside = path.with_name(f".{path.name}.new")
    try:
        beside.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
        beside.replace(path)
    except OSError as error:
        message = f"--public: {path} cannot be written: {error.strerror}"
        raise InvalidSettings(message) from None
