"""Four eyes: a policy says how many different people approve a call, and that none of them has started the run."""

from __future__ import annotations

import json
import time
from types import SimpleNamespace

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ed25519
from jwt.algorithms import OKPAlgorithm

from keepstep import END, START, Graph, tool
from keepstep.errors import AlreadyCounted, CallRejected, Forbidden, NotAsked, SelfApproval
from keepstep.ids import new_id
from keepstep.runtime import commands, superstep
from keepstep.runtime.principals import Principal
from keepstep.store import errands
from keepstep.tasks import messages
from keepstep.tasks.tokens import TrustedKeys
from tests.commands import defaults
from tests.steps.agents import Outside, State, acts

POLICY = '@id("pay") {annotations} permit(principal, action, resource);'
TWO_OF_FINANCE = '@approve("finance") @quorum("2") @self_approval("false")'
PAID = {"order": "7"}


@pytest.fixture
def outside():
    return Outside()


@pytest.fixture
def paying(deploy, tmp_path, outside):
    """A run that eve has started and that asks whether to pay; what the policy obliges to is the test's."""

    def opened(annotations, **options):
        policies = tmp_path / "p.cedar"
        policies.write_text(POLICY.format(annotations=annotations))

        @tool("pay", idempotent=True)
        def pay(order: str) -> str:
            outside.calls.append(order)
            return "paid"

        def body(ctx):
            try:
                return ctx.call(pay, PAID)
            except CallRejected as rejected:
                return f"{rejected.verdict} by {rejected.by}"

        d = deploy(acts(body), policies=str(policies), **options)
        d.start(by="eve")
        assert d.drain() == "waiting"
        return d

    return opened


def says(d, by, verdict="approve", *, roles=("finance",), **fields):
    """Have a signed word accepted."""
    said = {**defaults("decide"), "verdict": verdict, "by": by, "approval": d.approvals()[0].id, **fields}
    message = SimpleNamespace(verb="decide", id=new_id(), tenant="default", **said)
    accepted = commands.accept(d.worker, message, Principal(by, tuple(roles), "key"))
    d.queue += accepted.nudges
    return accepted


def test_two_different_people_approve_and_the_call_is_made_once(paying, outside):
    d = paying(TWO_OF_FINANCE)
    asked = d.approvals()[0]
    assert (asked.to, asked.quorum, asked.self_approval, asked.started_by) == (["finance"], 2, False, "eve")
    says(d, "anna")
    assert (d.drain(), outside.calls) == ("waiting", [])
    says(d, "bob")
    assert (d.drain(), outside.calls) == ("done", ["7"])


def test_one_person_counts_once(paying, outside):
    d = paying(TWO_OF_FINANCE)
    assert says(d, "anna").duplicate is False
    assert says(d, "anna").duplicate is True
    with pytest.raises(AlreadyCounted, match=r"anna has decided .* otherwise before: one person counts once"):
        says(d, "anna", comment="really")
    assert len(d.reader.decisions(d.approvals()[0].id)) == 1
    assert (d.drain(), outside.calls) == ("waiting", [])


def test_who_started_the_run_neither_approves_nor_chooses_who_does(paying, outside):
    """However lax the deployment's own setting is."""
    d = paying(TWO_OF_FINANCE, self_approval=True)
    before = d.dump()
    rule = r"neither approve, answer nor delegate it \(self_approval = false, policies pay\)"
    needs = "It needs: 2 different people of finance, nobody who started the run"
    with pytest.raises(SelfApproval, match=f"^eve has started the run .* {rule}. {needs}$"):
        says(d, "eve")
    with pytest.raises(SelfApproval, match=rule):
        says(d, "eve", "delegate", to=["mallory"])
    assert d.dump() == before
    for each in ("anna", "bob"):
        says(d, each)
    assert (d.drain(), outside.calls) == ("done", ["7"])


def test_a_delegate_of_somebody_else_who_started_the_run_does_not_approve_either(paying, outside):
    d = paying('@approve("finance") @self_approval("false")')
    says(d, "anna", "delegate", to=["eve"])
    with pytest.raises(SelfApproval):
        says(d, "eve", roles=())
    assert (d.drain(), outside.calls) == ("waiting", [])


def test_who_started_the_run_may_take_it_back(paying, outside):
    d = paying(TWO_OF_FINANCE)
    says(d, "eve", "reject")
    assert (d.drain(), outside.calls, d.values()["log"]) == ("done", [], ["reject by eve"])


def test_who_is_not_asked_does_not_count(paying):
    d = paying(TWO_OF_FINANCE)
    with pytest.raises(NotAsked, match="asks finance: mallory is none of them"):
        says(d, "mallory", roles=["intern"])
    assert issubclass(NotAsked, Forbidden)


@pytest.mark.parametrize(
    "second",
    [
        pytest.param(("anna", ("finance",)), id="who-delegated"),
        pytest.param(("carol", ()), id="another-delegate"),
    ],
)
def test_those_who_share_one_place_count_once(paying, outside, second):
    """Somebody who hands her place to others, or to several, does not become two people."""
    d = paying(TWO_OF_FINANCE)
    says(d, "anna", "delegate", to=["bob", "carol"])
    says(d, "bob", roles=())
    by, roles = second
    with pytest.raises(
        AlreadyCounted, match=r"bob has approved .* in the place of anna.*: it needs 2 different people"
    ):
        says(d, by, roles=roles)
    with pytest.raises(AlreadyCounted):
        says(d, "anna", "delegate", to=["dave"])
    assert (d.drain(), outside.calls) == ("waiting", [])
    says(d, "dora")
    assert (d.drain(), outside.calls) == ("done", ["7"])
    details = [json.loads(row.detail) for row in d.reader.audit("t") if row.action == "decide"]
    assert [each.get("in_the_place_of") for each in details] == [None, "anna", None]


def test_a_delegate_who_is_asked_anyway_speaks_for_themself(paying, outside):
    d = paying(TWO_OF_FINANCE)
    says(d, "anna", "delegate", to=["bob"])
    says(d, "bob")
    says(d, "anna")
    assert (d.drain(), outside.calls) == ("done", ["7"])


def test_a_place_that_is_handed_on_twice_is_one(paying, outside):
    d = paying(TWO_OF_FINANCE)
    says(d, "anna", "delegate", to=["bob"])
    says(d, "bob", "delegate", roles=(), to=["carol"])
    says(d, "carol", roles=())
    with pytest.raises(AlreadyCounted, match=r"carol has approved .* in the place of anna"):
        says(d, "anna")
    assert (d.drain(), outside.calls) == ("waiting", [])


def test_one_rejection_ends_what_a_quorum_had_begun(paying, outside):
    d = paying(TWO_OF_FINANCE)
    says(d, "anna")
    says(d, "bob", "reject")
    assert (d.drain(), outside.calls, d.values()["log"]) == ("done", [], ["reject by bob"])
    assert [each.status for each in d.approvals(None)] == ["rejected"]


def test_a_rule_that_becomes_stricter_asks_anew(paying, outside, tmp_path):
    """Who has approved under a rule that eve's own word would have satisfied has not approved under the other."""
    d = paying('@approve("finance")')
    says(d, "eve")
    (tmp_path / "p.cedar").write_text(POLICY.format(annotations='@approve("finance") @self_approval("false")'))
    d.worker = d.worker_of(pid=2)
    assert (d.drain(), outside.calls) == ("waiting", [])
    with pytest.raises(SelfApproval):
        says(d, "eve")
    says(d, "anna")
    assert (d.drain(), outside.calls) == ("done", ["7"])


def test_the_rule_holds_for_what_a_child_asks(deploy, tmp_path, outside):
    policies = tmp_path / "p.cedar"
    policies.write_text(POLICY.format(annotations='@approve @self_approval("false")'))

    @tool("pay", idempotent=True)
    def pay(order: str) -> str:
        outside.calls.append(order)
        return "paid"

    child = acts(lambda ctx: ctx.call(pay, PAID), name="child")
    parent = Graph("parent", state=State)

    @parent.node
    def lead(state, ctx):
        ctx.join(ctx.spawn(child))
        return {"log": ["joined"]}

    parent.edge(START, "lead")
    parent.edge("lead", END)
    d = deploy(parent, child, policies=str(policies))
    d.start(by="eve")
    assert d.drain() == "waiting"
    with pytest.raises(SelfApproval):
        says(d, "eve")
    says(d, "anna")
    assert (d.drain(), outside.calls) == ("done", ["7"])


def test_one_signed_subject_counts_once_whatever_its_commands_and_keys_call_it(paying, outside, tmp_path):
    """The name is the token's: one that the command says is the same, or the command is refused."""
    private = {kid: ed25519.Ed25519PrivateKey.generate() for kid in ("desk", "phone")}
    public = [
        {**json.loads(OKPAlgorithm.to_jwk(each.public_key())), "kid": kid, "alg": "EdDSA"}
        for kid, each in private.items()
    ]
    (tmp_path / "trusted.jwks").write_text(json.dumps({"keys": public}))
    trusted = TrustedKeys(str(tmp_path / "trusted.jwks"), audience="keepstep", backlog_seconds=0.0)
    d = paying(TWO_OF_FINANCE)

    def sends(subject, kid, **fields):
        now, id_ = int(time.time()), new_id()
        command = {"v": 1, "verb": "decide", "id": id_, "tenant": "default", "verdict": "approve"}
        command |= {"approval": d.approvals()[0].id, **fields}
        claims = {"sub": subject, "aud": "keepstep", "jti": id_, "iat": now, "exp": now + 60, "roles": ["finance"]}
        token = jwt.encode({**claims, "command": command}, private[kid], algorithm="EdDSA", headers={"kid": kid})
        body = json.dumps({"v": 1, "jwt": token}).encode()
        received = messages.receive(body, size_max=100_000, keys=trusted, accept_unsigned=False)
        accepted = commands.accept(d.worker, received.command, received.principal)
        d.queue += accepted.nudges
        return accepted

    assert sends("anna", "desk").duplicate is False
    assert sends("anna", "phone").duplicate is True
    assert sends("anna", "desk", by="anna").duplicate is True
    with pytest.raises(Forbidden, match="names somebody else"):
        sends("anna", "desk", by="bob")
    with pytest.raises(Forbidden, match="names somebody else"):
        sends("eve", "desk", by="anna")
    with pytest.raises(SelfApproval):
        sends("eve", "phone")
    assert [each["by"] for each in d.reader.decisions(d.approvals()[0].id)] == ["anna"]
    assert (d.drain(), outside.calls) == ("waiting", [])
    sends("bob", "desk")
    assert (d.drain(), outside.calls) == ("done", ["7"])


def test_a_child_that_is_started_late_is_the_requesters_of_the_run_that_spawned_it(deploy, monkeypatch):
    monkeypatch.setattr(superstep.children, "attended", lambda _runtime, nudges: list(nudges))  # its process died
    child, parent = Graph("child", state=State), Graph("parent", state=State)
    child.node(lambda _state, ctx: ctx.approve("Pay?") and None, name="pay")
    parent.node(lambda _state, ctx: ctx.spawn("child", {}, thread="c") and None, name="begin")
    for graph, node in ((child, "pay"), (parent, "begin")):
        graph.edge(START, node)
        graph.edge(node, END)
    d = deploy(parent, child, self_approval=False)
    errand = []

    def work():
        while d.queue:
            nudge = d.queue.pop(0)
            if nudge.kind == "child":
                errand.append(nudge)
            else:
                d.work(nudge)

    for starter in ("alice", "bob"):
        d.start(by=starter)
        work()
    d.queue += errands.run(d.store, errand[0])
    work()
    [asked] = d.approvals()
    assert asked.started_by == "alice"
    with pytest.raises(SelfApproval):
        d.decide("approve", by="alice", approval=asked.id)
    d.decide("approve", by="bob", approval=asked.id)
