"""Signed commands: whose word is taken, and whose is not."""

from __future__ import annotations

import base64
import json
import os
import time

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from typer.testing import CliRunner

from keepstep import errors
from keepstep.cli.program import app
from keepstep.cli.relay import command_of
from keepstep.signing import Signer
from keepstep.tasks import messages
from keepstep.tasks.tokens import TrustedKeys

DECIDE = {"v": 1, "verb": "decide", "id": "c1", "tenant": "acme", "approval": "a", "verdict": "approve", "by": "anna"}
START = {"v": 1, "verb": "start", "id": "c2", "tenant": "acme", "graph": "g", "thread": "t", "input": {"n": 2**70}}


def new_key(folder, kid, *options):
    arguments = ["new-key", kid, "--private", str(folder / f"{kid}.jwk"), "--public", str(folder / "trusted.jwks")]
    ran = CliRunner().invoke(app, [*arguments, *options])
    assert ran.exit_code == 0, ran.output
    return folder / f"{kid}.jwk"


@pytest.fixture
def pair(tmp_path):
    """A key that may do anything."""
    return new_key(tmp_path, "shop")


@pytest.fixture
def signer(pair):
    return Signer.load(str(pair), audience="keepstep")


def keys(folder, **options):
    options = {"audience": "keepstep", "backlog_seconds": 100.0, **options}
    return TrustedKeys(str(folder / "trusted.jwks"), **options)


def received(message, trusted, **options):
    return messages.receive(json.dumps(message).encode(), size_max=10**6, keys=trusted, **options)


def claims(**changes):
    now = int(time.time())
    made = {"sub": "anna", "aud": "keepstep", "jti": "c1", "iat": now, "exp": now + 60, "command": DECIDE}
    return {name: value for name, value in {**made, **changes}.items() if value is not None}


def encoded(pair, claims, *, kid="shop", algorithm="EdDSA"):
    key = jwt.PyJWK(json.loads(pair.read_text()), algorithm).key
    return {"v": 1, "jwt": jwt.encode(claims, key, algorithm=algorithm, headers={"kid": kid})}


def test_a_signed_command_is_its_principals(tmp_path, signer):
    message = signer.signed(DECIDE, principal="anna", roles=["finance"])
    assert set(message) == {"v", "jwt"}
    command, principal = received(message, keys(tmp_path), accept_unsigned=False)
    assert isinstance(command, messages.Decide)
    assert command.by == "anna"
    assert (principal.name, principal.roles, principal.kid) == ("anna", ("finance",), "shop")
    assert principal.is_among(["finance", "boss"])
    assert principal.is_among(["anna"])
    assert not principal.is_among(["boss"])
    command, _ = received(signer.signed(START, principal="shop"), keys(tmp_path))
    assert (command.by, command.input) == ("shop", {"n": 2**70})


def test_the_identity_is_the_tokens(tmp_path, signer):
    with pytest.raises(errors.Forbidden, match="names somebody else than its token"):
        received(signer.signed({**DECIDE, "by": "boss"}, principal="eve"), keys(tmp_path))


def test_a_command_that_names_nobody_is_its_principals(tmp_path, pair):
    unnamed = claims(command={**START, "id": "c1", "by": None})
    assert received(encoded(pair, unnamed), keys(tmp_path)).command.by == "anna"


def test_an_unsigned_command_is_refused_where_signed_ones_are_wanted(tmp_path, pair):
    with pytest.raises(errors.Unauthenticated, match="it is not signed"):
        received(DECIDE, keys(tmp_path), accept_unsigned=False)
    assert received(DECIDE, keys(tmp_path)).principal is None


def test_a_signed_command_is_not_half_believed_where_no_key_is_trusted(signer):
    with pytest.raises(errors.Unauthenticated, match="trusts no keys"):
        received(signer.signed(DECIDE, principal="anna"), None)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"aud": "elsewhere"}, "not meant for this deployment"),
        ({"aud": None}, "'aud' is missing"),
        ({"jti": None}, "'jti' is missing"),
        ({"exp": None}, "'exp' is missing"),
        ({"iat": None}, "'iat' is missing"),
        ({"sub": None}, "'sub' is missing"),
        ({"sub": ""}, "sub names who wants it"),
        ({"jti": "c9"}, "jti is not the command's id"),
        ({"command": None}, "'command' .* is missing"),
        ({"command": "decide"}, "'command' .* is missing"),
        ({"exp": 1_000_000_000}, "its time is over"),
        ({"iat": 4_000_000_000}, "signed in the future"),
        ({"exp": "tomorrow"}, "seconds since 1970"),
        ({"exp": True}, "seconds since 1970"),
        ({"exp": float("inf")}, "seconds since 1970"),
        ({"exp": float("nan")}, "seconds since 1970"),
        ({"exp": 10**400}, "seconds since 1970"),
        ({"iat": float("nan")}, "seconds since 1970"),
        ({"roles": "finance"}, "roles must be a list"),
        ({"roles": [1]}, "roles must be a list"),
    ],
)
def test_claims_that_do_not_hold(tmp_path, pair, changes, text):
    with pytest.raises(errors.Unauthenticated, match=text):
        received(encoded(pair, claims(**changes)), keys(tmp_path))


def test_a_backlog_is_not_refused(tmp_path, pair):
    late = claims(exp=int(time.time()) - 90, iat=int(time.time()) - 4000)
    assert received(encoded(pair, late), keys(tmp_path)).principal.name == "anna"


def test_a_token_that_was_changed_is_refused(tmp_path, signer):
    token = signer.signed(DECIDE, principal="anna")["jwt"]
    head, body, signature = token.split(".")
    inside = json.loads(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4)))
    inside["sub"] = inside["command"]["by"] = "boss"
    other = base64.urlsafe_b64encode(json.dumps(inside).encode()).rstrip(b"=").decode()
    for forged in (f"{head}.{other}.{signature}", f"{head}.{body}.", "no token", "", 7, None, "a.b.c"):
        with pytest.raises(errors.Unauthenticated):
            received({"v": 1, "jwt": forged}, keys(tmp_path))


def test_another_key_under_a_trusted_id_is_refused(tmp_path, pair):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    with pytest.raises(errors.Unauthenticated, match="not that of key 'shop'"):
        received(encoded(new_key(elsewhere, "shop"), claims()), keys(tmp_path))
    with pytest.raises(errors.Unauthenticated, match="no trusted key"):
        received(encoded(pair, claims(), kid="nobody"), keys(tmp_path))


@pytest.mark.parametrize("algorithm", ["none", "HS256"])
def test_the_algorithm_is_the_keys_and_not_the_tokens(tmp_path, pair, algorithm):
    public = json.loads((tmp_path / "trusted.jwks").read_text())["keys"][0]["x"]
    secret = None if algorithm == "none" else public.encode()
    token = jwt.encode(claims(), secret, algorithm=algorithm, headers={"kid": "shop"})
    with pytest.raises(errors.Unauthenticated):
        received({"v": 1, "jwt": token}, keys(tmp_path))


def test_a_key_is_trusted_with_its_tenants_and_verbs_only(tmp_path):
    bounded = new_key(tmp_path, "bounded", "--for-tenant", "acme", "--for-verb", "start")
    signer = Signer.load(str(bounded), audience="keepstep")
    assert received(signer.signed(START, principal="shop"), keys(tmp_path)).command.tenant == "acme"
    with pytest.raises(errors.Forbidden, match="not trusted with this tenant"):
        received(signer.signed({**START, "tenant": "other"}, principal="shop"), keys(tmp_path))
    with pytest.raises(errors.Forbidden, match="not trusted with this verb: its verbs in trusted_keys say"):
        received(signer.signed(DECIDE, principal="anna"), keys(tmp_path))


def test_a_key_speaks_for_its_principals_and_gives_its_roles_only(tmp_path):
    bounded = new_key(tmp_path, "bounded", "--for-principal", "anna", "--for-role", "finance", "--for-role", "legal")
    signer = Signer.load(str(bounded), audience="keepstep")
    _, principal = received(signer.signed(DECIDE, principal="anna", roles=["finance"]), keys(tmp_path))
    assert principal.roles == ("finance",)
    with pytest.raises(errors.Forbidden, match="not trusted with this role"):
        received(signer.signed(DECIDE, principal="anna", roles=["finance", "boss"]), keys(tmp_path))
    with pytest.raises(errors.Forbidden, match="not trusted with this principal"):
        received(signer.signed({**DECIDE, "by": "finance"}, principal="finance"), keys(tmp_path))


def test_what_a_signed_command_says_is_checked_as_ever(tmp_path, signer):
    for command, error in (
        ({**DECIDE, "verdict": "maybe"}, errors.InvalidMessage),
        ({**DECIDE, "v": 2}, errors.InvalidMessage),
        ({**DECIDE, "v": True}, errors.InvalidMessage),
        ({**DECIDE, "v": 1.0}, errors.InvalidMessage),
        ({**DECIDE, "more": 1}, errors.InvalidMessage),
    ):
        with pytest.raises(error):
            received(signer.signed(command, principal="anna"), keys(tmp_path))
    message = signer.signed(DECIDE, principal="anna") | {"by": "boss"}
    with pytest.raises(errors.InvalidMessage, match="v and jwt, nothing else"):
        received(message, keys(tmp_path))


@pytest.mark.parametrize("algorithm", ["ES256", "RS256", "PS256", "HS256"])
def test_other_algorithms(tmp_path, algorithm):
    if algorithm == "HS256":
        made = {"kty": "oct", "k": base64.urlsafe_b64encode(os.urandom(32)).rstrip(b"=").decode()}
        public = made
    elif algorithm == "ES256":
        key = ec.generate_private_key(ec.SECP256R1())
        made = jwt.algorithms.ECAlgorithm.to_jwk(key, as_dict=True)
        public = jwt.algorithms.ECAlgorithm.to_jwk(key.public_key(), as_dict=True)
    else:
        key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        made = jwt.algorithms.RSAAlgorithm.to_jwk(key, as_dict=True)
        public = jwt.algorithms.RSAAlgorithm.to_jwk(key.public_key(), as_dict=True)
    named = {"kid": "k", "alg": algorithm}
    (tmp_path / "k.jwk").write_text(json.dumps({**made, **named}))
    (tmp_path / "trusted.jwks").write_text(json.dumps({"keys": [{**public, **named}]}))
    message = Signer.load(str(tmp_path / "k.jwk"), audience="keepstep").signed(DECIDE, principal="anna")
    assert received(message, keys(tmp_path)).principal.name == "anna"


def test_keys_are_read_again_when_the_file_changes_and_kept_when_it_breaks(tmp_path, pair, monkeypatch):
    monkeypatch.setattr("keepstep.tasks.tokens._LOOK_SECONDS", 0.0)
    trusted = keys(tmp_path)
    other = Signer.load(str(new_key(tmp_path, "other")), audience="keepstep")
    assert received(other.signed(DECIDE, principal="anna"), trusted).principal.kid == "other"
    (tmp_path / "trusted.jwks").write_text("{broken")
    assert received(other.signed(DECIDE, principal="anna"), trusted).principal.kid == "other"
    known = {
        "keys": [{"kid": "x", "alg": "EdDSA", "kty": "OKP", "crv": "Ed25519", "x": json.loads(pair.read_text())["x"]}]
    }
    (tmp_path / "trusted.jwks").write_text(json.dumps(known))
    with pytest.raises(errors.Unauthenticated, match="no trusted key"):
        received(other.signed(DECIDE, principal="anna"), trusted)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "is not JSON"),
        ("[]", "must hold a JSON Web Key Set"),
        ('{"keys": []}', "must hold a JSON Web Key Set"),
        ('{"keys": [{"kty": "OKP"}]}', "a kid of its own"),
        ('{"keys": [{"kid": "a", "kty": "OKP", "crv": "Ed25519", "x": "!"}]}', "key 'a' cannot be used for EdDSA"),
        ('{"keys": [{"kid": "a", "kty": "OKP", "alg": "none"}]}', "its alg must be one of"),
        ('{"keys": [{"kid": "a", "kty": "oct", "alg": "HS256", "k": "c2hvcnQ"}]}', "less than 32 bytes"),
        ('{"keys": [{"kid": "a", "kty": "OKP", "crv": "Ed25519", "x": "A", "d": "canary"}]}', "is a private key"),
        ('{"keys": [{"kid": "a", "kty": "OKP", "tenant": ["acme"]}]}', "'tenant' bounds nothing; 'tenants' is a list"),
        ('{"keys": [{"kid": "a", "kty": "OKP", "verb": "start"}]}', "'verb' bounds nothing; 'verbs' is a list"),
        (f'{{"keys": [{{"kid": "a", "kty": "RSA", "n": "{"_" * 170}8", "e": "AQAB"}}]}}', "1024 bits; RSA needs 2048"),
    ],
)
def test_a_file_of_keys_that_cannot_be_used_is_refused(tmp_path, text, told):
    (tmp_path / "trusted.jwks").write_text(text)
    with pytest.raises(errors.InvalidSettings, match=told) as refused:
        keys(tmp_path)
    assert "canary" not in str(refused.value)
    assert "c2hvcnQ" not in str(refused.value)


def test_a_public_key_signs_nothing(tmp_path, pair):
    public = json.loads((tmp_path / "trusted.jwks").read_text())["keys"][0]
    (tmp_path / "public.jwk").write_text(json.dumps(public))
    for path, told in (("public.jwk", "holds a public key"), ("nowhere.jwk", "cannot be read")):
        with pytest.raises(errors.InvalidSettings, match=told):
            Signer.load(str(tmp_path / path), audience="keepstep")


def test_a_key_is_never_written_over(tmp_path, pair):
    before = pair.read_text()
    assert oct(pair.stat().st_mode & 0o777) == "0o600"
    arguments = ["new-key", "again", "--private", str(pair), "--public", str(tmp_path / "trusted.jwks")]
    ran = CliRunner().invoke(app, arguments)
    assert isinstance(ran.exception, errors.Conflict)
    assert pair.read_text() == before
    arguments = ["new-key", "shop", "--private", str(tmp_path / "b"), "--public", str(tmp_path / "trusted.jwks")]
    assert isinstance(CliRunner().invoke(app, arguments).exception, errors.Conflict)
    assert not (tmp_path / "b").exists()


def test_what_a_refused_start_asked_for_is_told_of_a_signed_one_too(signer):
    signed = signer.signed(START, principal="shop")
    assert command_of(signed) == command_of(START) == START
    for broken in ("", "a.b.c", "a.e30.c", "a.W10.c"):
        assert command_of({"v": 1, "jwt": broken}) == {}
