"""Secrets: where references lead, what shows one (nothing), and what is masked."""

from __future__ import annotations

import base64
import copy
import json
import os
import pickle  # noqa: TID251  what is tested is that it refuses
import re
import sys
from dataclasses import dataclass
from decimal import Decimal
from typing import NamedTuple
from urllib.parse import quote

import msgspec
import pytest
from pydantic import BaseModel

from keepstep import settings
from keepstep.errors import InvalidInput, InvalidSettings, NotStorable, SecretNotFound, SecretUnavailable
from keepstep.runtime.codec import Codec, TypeRegistry
from keepstep.runtime.masking import Masker
from keepstep.runtime.secretbook import GuardedCodec, SecretBook, by_reference
from keepstep.runtime.secrets import FILE_BYTES_MAX, Secret, SecretSource

TEXT = 'sk-live/51+Ä "quoted"'
SECRET = Secret(TEXT, "env:KEY")


def resolved(ref, provider="", tenant="acme"):
    return SecretSource(provider).resolve(ref, tenant).reveal()


# --- where references lead ---


def test_a_variable_of_the_environment(monkeypatch):
    monkeypatch.setenv("PAYMENTS_KEY", TEXT)
    assert resolved("env:PAYMENTS_KEY") == TEXT


@pytest.mark.parametrize(
    ("content", "text"), [("abc\n", "abc"), ("abc\r\n", "abc"), ("a\nb\n\n", "a\nb\n"), ("x", "x")]
)
def test_a_file_without_its_last_line_break(tmp_path, content, text):
    file = tmp_path / "key"
    file.write_bytes(content.encode())
    (tmp_path / "link").symlink_to(file)  # as mounted secrets are
    assert resolved(f"file:{file}") == text
    assert resolved(f"file:{tmp_path}/link") == text


@pytest.mark.parametrize(
    ("ref", "kind", "says"),
    [
        ("env:NOT_SET_ANYWHERE", SecretNotFound, "no such variable"),
        ("env:EMPTY", SecretNotFound, "it is empty"),
        ("env:NOT_TEXT", SecretNotFound, "not UTF-8"),
        ("env:A=B", InvalidInput, "a variable's name"),
        ("env:", InvalidInput, "a variable's name"),
        ("file:key", InvalidInput, "must be absolute"),
        ("file:/run/../etc/shadow", InvalidInput, r"without \.\."),
        ("file:{folder}/missing", SecretNotFound, "No such file"),
        ("file:{folder}", SecretNotFound, "no regular file"),
        ("file:{folder}/pipe", SecretNotFound, "no regular file"),
        ("file:{folder}/large", SecretNotFound, f"larger than {FILE_BYTES_MAX} bytes"),
        ("file:{folder}/binary", SecretNotFound, "not UTF-8"),
        ("file:{folder}/empty", SecretNotFound, "it is empty"),
        ("payments/key", SecretNotFound, "secrets_provider"),
        ("", InvalidInput, "reference"),
        (None, InvalidInput, "reference"),
    ],
)
def test_what_leads_to_nothing_is_named(tmp_path, monkeypatch, ref, kind, says):
    monkeypatch.setenv("EMPTY", "")
    monkeypatch.setitem(os.environb, b"NOT_TEXT", b"top\xffsecret")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "large").write_bytes(b"x" * (FILE_BYTES_MAX + 1))
    (tmp_path / "binary").write_bytes(b"top\xffsecret")
    (tmp_path / "empty").write_bytes(b"\n")
    named = ref.format(folder=tmp_path) if isinstance(ref, str) else ref
    with pytest.raises(kind, match=says) as raised:
        resolved(named)
    assert type(raised.value) is kind
    assert repr(named) in raised.value.message
    assert "top" not in raised.value.message


PROVIDER = """
from keepstep.errors import SecretNotFound

def known(tenant, name):
    return f"{name} of {tenant}"

def nothing(tenant, name):
    return None

def unknown(tenant, name):
    raise SecretNotFound("hunter2")

def broken(tenant, name):
    raise ConnectionError("hunter2")

def number(tenant, name):
    return 5

async def late(tenant, name):
    return "x"

value = 5
"""


@pytest.fixture
def vault(tmp_path, monkeypatch):
    (tmp_path / "vault_of_test.py").write_text(PROVIDER)
    (tmp_path / "broken_vault_of_test.py").write_text("raise RuntimeError('hunter2')")
    monkeypatch.syspath_prepend(tmp_path)
    yield "vault_of_test"
    for name in ("vault_of_test", "broken_vault_of_test"):
        sys.modules.pop(name, None)


def test_a_provider_is_asked_for_the_tenants_secret(vault):
    assert resolved("payments/key", f"{vault}:known") == "payments/key of acme"
    assert resolved("vault:payments", f"{vault}:known", tenant="other") == "vault:payments of other"


@pytest.mark.parametrize(
    ("function", "kind", "says"),
    [
        ("nothing", SecretNotFound, "has none of that name"),
        ("unknown", SecretNotFound, "has none of that name"),
        ("broken", SecretUnavailable, "raised ConnectionError"),
        ("number", SecretNotFound, "returned int, not text"),
        ("late", InvalidSettings, "not a plain function"),
        ("value", InvalidSettings, "not a plain function"),
        ("missing", InvalidSettings, "not a plain function"),
    ],
)
def test_what_a_provider_does_wrong_is_told_without_its_words(vault, function, kind, says):
    with pytest.raises(kind, match=says) as raised:
        resolved("payments/key", f"{vault}:{function}")
    assert "hunter2" not in raised.value.message
    assert raised.value.__context__ is None or raised.value.__suppress_context__
    assert raised.value.retryable is (kind is SecretUnavailable)


def test_a_provider_that_cannot_be_imported_is_told(vault):
    for module in ("broken_vault_of_test", "no_such_module_anywhere"):
        with pytest.raises(InvalidSettings, match=f"{module} could not be imported"):
            resolved("payments/key", f"{module}:known")


def test_the_provider_is_a_setting_of_one_form():
    assert settings.load(secrets_provider="my.vault:read").secrets_provider == "my.vault:read"
    for wrong in ("vault", "vault:", ":read", "vault:read()", "a b:c"):
        with pytest.raises(InvalidSettings, match="secrets_provider"):
            settings.load(secrets_provider=wrong)


# --- what shows one ---


@dataclass
class Holder:
    key: Secret


def test_nothing_but_reveal_shows_it():
    shown = [repr(SECRET), str(SECRET), f"{SECRET}", f"{SECRET!r:>40}", "%s %r" % (SECRET, SECRET), repr([SECRET])]  # noqa: UP031  one of the ways
    shown += [repr(Holder(SECRET)), format(SECRET, ">10"), repr({"key": SECRET})]
    for each in shown:
        assert "sk-live" not in each
        assert "***" in each
    assert repr(SECRET) == "Secret('env:KEY', ***)"
    assert not hasattr(SECRET, "__dict__")
    with pytest.raises(TypeError):
        json.dumps(SECRET)
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        with pytest.raises(NotStorable, match="'env:KEY'"):
            pickle.dumps(Holder(SECRET), protocol)
    assert copy.deepcopy(Holder(SECRET)).key.reveal() == copy.copy(SECRET).reveal() == TEXT


def test_equal_secrets_are_equal_and_have_no_hash():
    assert Secret(TEXT, "env:OTHER") == SECRET
    assert Secret("else", "env:KEY") != SECRET
    assert SECRET != TEXT
    with pytest.raises(TypeError):
        hash(SECRET)


@pytest.mark.parametrize("format_name", ["msgpack", "json"])
def test_the_codec_refuses_it_and_names_the_path(format_name):
    codec = Codec(TypeRegistry([Holder, Secret]), format=format_name, value_bytes_max=10_000)
    for value, path in [({"a": [1, SECRET]}, r"\$\.a\[1\]"), ({"h": Holder(SECRET)}, r"\$\.h\.key"), (SECRET, r"\$")]:
        with pytest.raises(NotStorable, match=rf"^{path}: the secret 'env:KEY' is never stored") as refused:
            codec.encode(value)
        assert "sk-live" not in refused.value.message


# --- masking ---


class Pair(NamedTuple):
    a: object
    b: object


@dataclass(frozen=True)
class Frozen:
    a: object
    b: object = None


class Model(BaseModel):
    a: object = None


class Packed(msgspec.Struct, frozen=True):
    a: object


MASKER = Masker([SECRET])
INNER = f"before {TEXT} after"


@pytest.mark.parametrize(
    ("value", "masked"),
    [
        (INNER, "before *** after"),
        (TEXT * 2, "***"),
        (INNER.encode(), b"before *** after"),
        (bytearray(INNER.encode()), bytearray(b"before *** after")),
        ({TEXT: 1, "a": [INNER, 2]}, {"***": 1, "a": ["before *** after", 2]}),
        ((1, (INNER,)), (1, ("before *** after",))),
        ({INNER}, {"before *** after"}),
        (frozenset({INNER}), frozenset({"before *** after"})),
        (Pair(1, INNER), Pair(1, "before *** after")),
        (Frozen([INNER], 2), Frozen(["before *** after"], 2)),
        (Model(a=INNER), Model(a="before *** after")),
        (Packed({"a": INNER}), Packed({"a": "before *** after"})),
        (ValueError(TEXT), "ValueError('***')"),
        (repr(TEXT), "'***'"),
        (json.dumps({"key": TEXT}), '{"key": "***"}'),
        (json.dumps({"key": TEXT}, ensure_ascii=False), '{"key": "***"}'),
        ("?key=" + quote(TEXT, safe=""), "?key=***"),
        ("?key=" + re.sub("%..", lambda each: each[0].lower(), quote(TEXT, safe="")), "?key=***"),
        (TEXT.encode().hex(), "***"),
        (base64.b64encode(TEXT.encode()).decode(), "***"),
        (base64.urlsafe_b64encode(TEXT.encode()), b"***"),
    ],
)
def test_a_value_is_masked_where_it_holds_a_secret(value, masked):
    found = MASKER.value(value)
    assert found == masked
    assert type(found) is type(masked)


@pytest.mark.parametrize("before", ["", "u", "us", "use", "user:"])
@pytest.mark.parametrize("after", ["", "x", "xy", "xyz"])
def test_a_secret_in_the_middle_of_a_base64_text_is_masked(before, after):
    for encode in (base64.b64encode, base64.urlsafe_b64encode):
        text = encode(f"{before}{TEXT}{after}".encode()).decode()
        masked = MASKER.text(f"Authorization: Basic {text}")
        assert "***" in masked
        assert len(masked.replace("***", "")) <= len("Authorization: Basic ") + len(before + after) * 4 // 3 + 8


def test_what_holds_no_secret_is_the_same_object():
    plain = ["text", b"data", bytearray(b"data"), {"a": [1, "b"]}, (1, 2), {1}, None, 5, True, Decimal(5), object()]
    for value in [*plain, Frozen("a"), Model(a="b"), SECRET, Holder(SECRET)]:
        assert MASKER.value(value) is value
    assert Masker().value(TEXT) is TEXT


def test_secrets_that_overlap_leave_nothing_of_each_other():
    masker = Masker([Secret("abcdef", "a"), Secret("defghi", "b"), Secret("aaaa", "c")])
    assert masker.text("xabcdefghix aaaaaaa") == "x***x ***"


def test_what_holds_itself_is_masked_without_end():
    value = [TEXT]
    value.append(value)
    assert MASKER.value(value) == ["***", "***"]
    deep = TEXT
    for _ in range(500):
        deep = [deep]
    assert "sk-live" not in repr(MASKER.value(deep))


def test_short_secrets_are_not_looked_for():
    masker = Masker([Secret("abc", "env:SHORT")])
    assert not masker
    assert masker.text("abc") == "abc"
    assert Masker([Secret("abcd", "env:LONGER")]).text("xabcdx") == "x***x"


@pytest.mark.parametrize("format_name", ["msgpack", "json"])
@pytest.mark.parametrize(
    ("value", "path"),
    [
        ({"a": {"b": [0, INNER]}}, "$.a.b[1]"),
        ({"a": INNER.encode()}, "$.a"),
        ({"a": {TEXT: 1}}, "$.a"),
        ({"a": {TEXT: [TEXT]}}, "$.a"),
        ({"a": Frozen(Frozen(1, INNER))}, "$.a.a.b"),
        ({"a": Pair(0, "Basic " + base64.b64encode(f"user:{TEXT}".encode()).decode())}, "$.a[1]"),
    ],
)
def test_a_guarded_codec_refuses_a_secrets_text_and_names_the_path(format_name, value, path):
    plain = Codec(TypeRegistry([Frozen, Pair]), format=format_name, value_bytes_max=10_000)
    codec = GuardedCodec(plain, Masker())
    assert codec.decode(codec.encode(value)) == value  # nothing resolved, nothing refused
    guarded = GuardedCodec(plain, MASKER).including(Packed)
    with pytest.raises(NotStorable) as refused:
        guarded.encode(value)
    assert refused.value.message.startswith(f"{path}: it holds the text of a secret")
    assert "sk-live" not in refused.value.message
    assert guarded.decode(guarded.encode({"a": 1})) == {"a": 1}


def test_an_attempt_resolves_a_reference_once(monkeypatch):
    monkeypatch.setenv("KEY", "first-text")
    book = SecretBook(SecretSource(), "acme")
    assert book.resolve("env:KEY").reveal() == "first-text"
    monkeypatch.setenv("KEY", "second-text")
    assert book.resolve("env:KEY").reveal() == "first-text"
    assert SecretBook(SecretSource(), "acme").resolve("env:KEY").reveal() == "second-text"
    assert book.masker.text("first-text second-text") == "*** second-text"


def test_a_secret_among_arguments_is_known_by_its_reference():
    assert by_reference({"key": SECRET, "amount": 5}) == {"key": {"secret": "env:KEY"}, "amount": 5}
