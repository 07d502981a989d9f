"""Who may decide: a worker that trusts keys takes their word, refuses anybody else's, and changes nothing then."""

from __future__ import annotations

import json
import time

import jwt
import kombu
import pytest
from cryptography.hazmat.primitives.asymmetric import ed25519
from typer.testing import CliRunner

import keepstep
from keepstep import broker, errors
from keepstep.cli.program import app
from keepstep.ids import new_id
from tests.worker.deployment import eventually


@pytest.fixture
def signed(deployment, tmp_path):
    """A deployment that takes signed commands only, and how to send one with a key."""
    trusted = tmp_path / "trusted.jwks"
    for kid, options in (("shop", []), ("starts", ["--for-verb", "start"])):
        arguments = ["new-key", kid, "--private", str(tmp_path / f"{kid}.jwk"), "--public", str(trusted), *options]
        assert CliRunner().invoke(app, arguments).exit_code == 0
    deployment.worker(KEEPSTEP_TRUSTED_KEYS=str(trusted))

    def client(kid, **options):
        key = "" if kid is None else str(tmp_path / f"{kid}.jwk")
        settings = deployment.settings.model_copy(update={"signing_key": key})
        return keepstep.Client(settings=settings, confirm=True, timeout=20, **options)

    return deployment, client


def opened(deployment):
    """Return the id of the one open approval."""
    found = eventually(lambda: deployment.query("SELECT id FROM keepstep_approval WHERE status = 'open'"))
    return found[0][0]


def test_only_the_word_of_who_is_asked_decides(signed):
    deployment, client = signed
    with client("starts") as starts, client(None) as unsigned, client("shop", roles=["intern"]) as eve:
        with pytest.raises(errors.Unauthenticated, match="not signed"):
            unsigned.start("asked", "a", {})
        starts.start("asked", "a", {})
        approval = opened(deployment)
        before = deployment.query("SELECT status, version FROM keepstep_thread")
        with pytest.raises(errors.Unauthenticated, match="not signed"):
            unsigned.approve(approval, by="boss")
        with pytest.raises(errors.Forbidden, match="not trusted with this verb"):
            starts.approve(approval, by="boss")
        with pytest.raises(errors.Forbidden, match=r"asks finance, anna: eve is none of them .*roles=\[…\]"):
            eve.approve(approval, by="eve")
    assert deployment.query("SELECT status, version FROM keepstep_thread") == before
    assert opened(deployment) == approval
    with client("shop", roles=["finance"]) as finance:
        finance.approve(approval, by="bob")
    deployment.ended("a")
    audit = deployment.query("SELECT actor, action FROM keepstep_audit ORDER BY id")
    assert [row for row in audit if row[1] != "refused"] == [("starts", "start"), ("bob", "decide")]


def forged(deployment, approval, *, subject, says, key):
    """Put a decision into the queue whose token somebody has made up, or whose `by` is not its subject; tell its id."""
    now, id_ = int(time.time()), new_id()
    command = {"v": 1, "verb": "decide", "id": id_, "tenant": "default", "approval": approval, "verdict": "approve"}
    claims = {"sub": subject, "aud": "keepstep", "jti": id_, "iat": now, "exp": now + 60, "roles": ["finance"]}
    token = jwt.encode({**claims, "command": {**command, "by": says}}, key, algorithm="EdDSA", headers={"kid": "shop"})
    settings = deployment.settings
    with broker.connection(settings.broker, commands=True, queue=settings.queue) as connection:
        queue = broker.commands_queue(settings.broker, settings.queue)(connection.channel())
        queue.declare()
        kombu.Producer(connection.channel(), auto_declare=False).publish(
            json.dumps({"v": 1, "jwt": token}).encode(),
            exchange="",
            routing_key=queue.name,
            content_type="application/json",
            content_encoding="utf-8",
            correlation_id=id_,
            delivery_mode="persistent",
        )
    return id_


def test_a_word_that_does_not_count_leaves_the_question_open_and_stands_in_the_audit(signed, tmp_path):
    """By who is not asked, by a key that may not, unsigned, forged, in another's name: each can be told afterwards."""
    deployment, client = signed
    shop = jwt.PyJWK(json.loads((tmp_path / "shop.jwk").read_text()), "EdDSA").key
    with client("starts") as starts, client("shop", roles=["intern"]) as intern, client(None) as unsigned:
        starts.start("asked", "a", {})
        approval = opened(deployment)
        before = deployment.query("SELECT status, version FROM keepstep_thread")
        with pytest.raises(errors.NotAsked):
            intern.approve(approval, by="eve")
        with pytest.raises(errors.Forbidden):
            starts.approve(approval, by="boss")
        with pytest.raises(errors.Unauthenticated):
            unsigned.approve(approval, by="boss")
    forged(deployment, approval, subject="boss", says="boss", key=ed25519.Ed25519PrivateKey.generate())
    forged(deployment, approval, subject="eve", says="boss", key=shop)
    refused = eventually(
        lambda: len(found := deployment.query(_REFUSED)) == 5 and found, what="the audit of what was refused"
    )
    told = [(actor, json.loads(detail)) for actor, detail in refused]
    assert [(actor, detail["code"], detail.get("by")) for actor, detail in told] == [
        ("eve", "not_asked", "eve"),
        ("unknown", "key_not_trusted", "boss"),
        ("unknown", "unauthenticated", "boss"),
        ("unknown", "unauthenticated", "boss"),
        ("eve", "forbidden", "boss"),
    ]
    assert {(detail["approval"], detail["verdict"]) for _, detail in told} == {(approval, "approve")}
    assert deployment.query("SELECT status, version FROM keepstep_thread") == before
    assert opened(deployment) == approval
    assert deployment.query("SELECT count(*) FROM keepstep_decision") == [(0,)]
    if broker.kind_of(deployment.settings.broker) == "amqp":
        assert kept_by_rabbitmq(deployment) == 5
    with client("shop", roles=["finance"]) as finance:
        finance.approve(approval, by="bob")
    deployment.ended("a")
    assert deployment.query('SELECT "by" FROM keepstep_decision') == [("bob",)]


_REFUSED = "SELECT actor, detail FROM keepstep_audit WHERE action = 'refused' ORDER BY id"


def kept_by_rabbitmq(deployment):
    """Return how many commands stand in the queue of those that were refused: they can be looked at there, whole."""
    settings = deployment.settings
    with broker.connection(settings.broker, commands=True, queue=settings.queue) as connection:
        kept = broker.rejected_queue(settings.queue)(connection.channel())
        return eventually(lambda: (count := kept.queue_declare(passive=True).message_count) == 5 and count)


def test_who_is_asked_by_name_needs_no_role(signed):
    deployment, client = signed
    with client("shop") as shop:
        shop.start("asked", "a", {})
        shop.approve(opened(deployment), by="anna")
    deployment.ended("a")
