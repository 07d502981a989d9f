"""Who may decide: a worker that trusts keys takes their word, refuses anybody else's, and changes nothing then."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

import keepstep
from keepstep import errors
from keepstep.cli.program import app
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
    assert deployment.query("SELECT actor, action FROM keepstep_audit ORDER BY id") == [
        ("starts", "start"),
        ("bob", "decide"),
    ]


def test_who_is_asked_by_name_needs_no_role(signed):
    deployment, client = signed
    with client("shop") as shop:
        shop.start("asked", "a", {})
        shop.approve(opened(deployment), by="anna")
    deployment.ended("a")
