"""Texts of policies that are refused, with their line, and those that are not."""

from __future__ import annotations

from functools import partial

import pytest

from keepstep.errors import InvalidInput, PolicyError, by_code
from keepstep.runtime.policies import Policies
from tests.unit.policy_samples import CALL, PERMIT, decided, permit_when, permits, write

KNOWN = "@id, @approve, @quorum, @self_approval, @expires, @mask, @limit"


@pytest.fixture
def load(tmp_path):
    """Load policies from texts by file name, or from one text."""

    def load_texts(text=None, *, clock=None, **texts):
        write(tmp_path, text, **texts)
        return Policies.load(tmp_path, **({} if clock is None else {"clock": clock}))

    return load_texts


@pytest.fixture
def decide(tmp_path):
    """Return what one text says of `CALL` with other arguments or other facts."""
    return partial(decided, tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (PERMIT + "permit(principal, action, resource)\nwhen { context.tenant = };", "a.cedar:3: unexpected token `}`"),
        (
            PERMIT + "permit(principal, action, resource)\nwhen { foo bar }\nunless { 1 };",
            "a.cedar:3: unexpected token `bar`",
        ),
        ("permit(principal, action, resource)\n\n" + PERMIT, "a.cedar:3: unexpected token `@`"),
        (PERMIT + "permit(principal, action, resource)\n", "a.cedar:2: unexpected end of input"),
        (PERMIT + 'permit(principal, action, resource)\nwhen { "a\nb };\n' + PERMIT, "a.cedar:3: invalid token"),
        (
            PERMIT + "permit(principal,\nakshun, resource);",
            "a.cedar:3: found an invalid variable in the policy scope: akshun",
        ),
        ("\n\nallow(principal, action, resource);", "a.cedar:3: invalid policy effect: allow"),
        (
            'permit(principal, action, resource) when {\n"; // x\n" == "" ||\ncontext.a.lesThan(3) };',
            "a.cedar:4: `lesThan` is not a valid method",
        ),
        ('@id("a")\n@id("b")\npermit(principal, action, resource);', "a.cedar:2: duplicate annotation: @id"),
        (PERMIT + "\n;", "a.cedar:3: unexpected token `;`"),
        (PERMIT + PERMIT, "a.cedar:2: a.cedar:1 has the id 'all', too: an id names one"),
        (
            "permit(principal == ?principal, action, resource);",
            "a.cedar:1: the policy is a template (?principal, ?resource): nothing fills it in, so write what is meant",
        ),
        (
            '@id("p") @aprove("x") permit(principal, action, resource);',
            "a.cedar:1: policy 'p' has @aprove: known are " + KNOWN,
        ),
        (
            '\n@note("x") permit(principal, action, resource);',
            "a.cedar:2: the policy has @note: known are " + KNOWN,
        ),
        (
            '@id("p") @approve("x") forbid(principal, action, resource);',
            "a.cedar:1: policy 'p' forbids, and @approve belongs to what is permitted",
        ),
        (
            '@id("p") @quorum("2") permit(principal, action, resource);',
            "a.cedar:1: policy 'p' has @quorum without @approve, whose number of people it is",
        ),
        (
            '@id("p") @self_approval("false") permit(principal, action, resource);',
            "a.cedar:1: policy 'p' has @self_approval without @approve, whose rule it is",
        ),
        (
            '@id("p") @expires("2d") permit(principal, action, resource);',
            "a.cedar:1: policy 'p' has @expires without @approve, whose time it is",
        ),
        (
            '@limit("2/s") permit(principal, action, resource);',
            "a.cedar:1: the policy has @limit without @id, under which calls are counted",
        ),
        (
            '@id("p") @approve("a,,b") permit(principal, action, resource);',
            "a.cedar:1: policy 'p' has an empty name in @approve(\"a,,b\")",
        ),
        (
            '@id("") permit(principal, action, resource);',
            "a.cedar:1: the policy has a bad @id: @id must be 1 to 200 printable characters, not ''",
        ),
        (
            "@id permit(principal, action, resource);",
            "a.cedar:1: the policy has a bad @id: @id must be 1 to 200 printable characters, not None",
        ),
        (
            '@id("p") @approve("a\\nb") permit(principal, action, resource);',
            "a.cedar:1: policy 'p' has a bad @approve: a role must be 1 to 200 printable characters, not 'a\\nb'",
        ),
    ],
)
def test_a_bad_text_is_refused_with_its_line(load, text, message):
    with pytest.raises(PolicyError) as refused:
        load(text)
    assert refused.value.message == message
    assert isinstance(refused.value, InvalidInput)
    assert by_code(refused.value.code) is PolicyError


@pytest.mark.parametrize("quorum", ["0", "101", "-1", "two", "", "1.0", "9" * 5000, "²"])
def test_a_bad_quorum_is_refused(load, quorum):
    with pytest.raises(PolicyError, match="has a bad @quorum: how many must approve, 1 to 100"):
        load(permits(f'@approve @quorum("{quorum}")'))


@pytest.mark.parametrize(
    "rule", ['@self_approval("true")', '@self_approval("no")', "@self_approval", '@self_approval("")']
)
def test_a_policy_can_only_forbid_self_approval(load, rule):
    """What the deployment's setting forbids, no policy allows; and what is misspelt must not look like a rule."""
    with pytest.raises(PolicyError, match=r'has a bad @self_approval: only @self_approval\("false"\) says something'):
        load(permits(f"@approve {rule}"))


@pytest.mark.parametrize("expires", ["0s", "2", "d", "2w", "-2d", "1.5h", "2 d", "", "9999999s"])
def test_a_bad_expiry_is_refused(load, expires):
    with pytest.raises(PolicyError, match="has a bad @expires: a number and s, m, h or d"):
        load(permits(f'@approve @expires("{expires}")'))


@pytest.mark.parametrize("mask", ["", "a b", "a.b", "1a", "a,"])
def test_a_bad_mask_is_refused(load, mask):
    with pytest.raises(PolicyError, match="@mask"):
        load(permits(f'@mask("{mask}")'))


@pytest.mark.parametrize("limit", ["", "20", "20/w", "0/h", "20/h/h", "20 / h", "20/0h", "-1/h"])
def test_a_bad_limit_is_refused(load, limit):
    with pytest.raises(PolicyError, match="has a bad @limit: calls per s, m, h or d"):
        load(permits(f'@limit("{limit}")'))


@pytest.mark.parametrize(
    ("head", "condition", "what"),
    [
        (
            "principal, action, resource",
            'resource.rsk == "high"',
            "asks resource.rsk: resource has version, risk, scopes",
        ),
        (
            "principal, action, resource",
            "resource has scope",
            "asks resource.scope: resource has version, risk, scopes",
        ),
        ("principal, action, resource", "principal has role", "asks principal.role: principal has tenant"),
        (
            "principal, action, resource",
            "context.amount == 1",
            "asks context.amount: context has arguments, tenant, thread, node",
        ),
        (
            "principal, action, resource",
            "context has amount",
            "asks context.amount: context has arguments, tenant, thread, node",
        ),
        (
            "principal, action, resource",
            "[1].contains(context.amount)",
            "asks context.amount: context has arguments, tenant, thread, node",
        ),
        (
            "principal, action, resource",
            'resource.risk == "hihg"',
            'compares resource.risk with "hihg": a risk is low, medium, high',
        ),
        (
            "principal, action, resource",
            '"LOW" != resource.risk',
            'compares resource.risk with "LOW": a risk is low, medium, high',
        ),
        (
            "principal, action, resource",
            'resource == Tol::"x"',
            "names the type Tol: known are Agent, Action, Tool, Number, Bytes",
        ),
        (
            "principal, action, resource",
            "context.arguments.x is Nmber",
            "names the type Nmber: known are Agent, Action, Tool, Number, Bytes",
        ),
        (
            "principal, action, resource",
            'action == Action::"cal"',
            'names Action::"cal": the only action is Action::"call"',
        ),
        (
            'principal, action == Action::"cal", resource',
            "true",
            'names Action::"cal": the only action is Action::"call"',
        ),
        (
            'principal, action in [Action::"call", Action::"x"], resource',
            "true",
            'names Action::"x": the only action is Action::"call"',
        ),
        (
            'principal == Tool::"x", action, resource',
            "true",
            "says Tool of principal, which is always of the type Agent",
        ),
        ('principal, action, resource in Tol::"x"', "true", "says Tol of resource, which is always of the type Tool"),
        ("principal is Agnt, action, resource", "true", "says Agnt of principal, which is always of the type Agent"),
        (
            'principal, action, resource is Tool in Tol::"x"',
            "true",
            "says Tol of resource, which is always of the type Tool",
        ),
    ],
)
def test_a_name_that_is_never_given_is_refused(load, head, condition, what):
    with pytest.raises(PolicyError) as refused:
        load(f"forbid({head}) when {{ {condition} }};")
    assert refused.value.message == f"a.cedar:1: the policy {what}"


def test_names_in_arguments_are_free(decide):
    assert (
        decide(permit_when("context.arguments.risk == 1 && context.arguments has rsk"), {"risk": 1, "rsk": 2}).verdict
        == "allow"
    )


def test_comments_and_texts_may_hold_anything(load):
    policies = load(
        '// a "quote; and more\npermit(principal, action, resource) // ; "\nwhen { context.thread != "; // \\" ;" };\n'
        '  // the end ;"\n@id("b")\nforbid(principal, action, resource) when { context.thread == "x" }; // "'
    )
    assert [(each.id, each.line) for each in policies.listed] == [("a.cedar:2", 2), ("b", 5)]
    assert policies.decide(CALL).policies == ("a.cedar:2",)


def test_files_that_cannot_be_read_are_refused(tmp_path):
    folder = tmp_path / "policies"
    with pytest.raises(PolicyError, match=r"policies: No such file or directory: KEEPSTEP_POLICIES must name"):
        Policies.load(folder)
    folder.mkdir()
    with pytest.raises(PolicyError, match=r"there must be 1 to 1000 files \*\.cedar, there are 0"):
        Policies.load(folder)
    (folder / "a.cedar").write_bytes(b"// \n// \xff")
    with pytest.raises(PolicyError, match=r"^a\.cedar:2: is not UTF-8 text$"):
        Policies.load(folder)
    (folder / "a.cedar").write_bytes(b"/" * (1024 * 1024 + 1))
    with pytest.raises(PolicyError, match=r"^a\.cedar: is larger than 1048576 bytes$"):
        Policies.load(folder)


def test_a_folder_without_any_policy_denies_everything(decide):
    assert decide("// none yet").verdict == "deny"


def test_other_and_hidden_files_of_a_folder_are_left_alone(load, tmp_path):
    (tmp_path / "tests.toml").write_text("x")
    (tmp_path / ".a.cedar").write_text("x")
    (tmp_path / "a.cedar~").write_text("x")
    assert [each.id for each in load(PERMIT).listed] == ["all"]


def test_one_file_can_be_all(load, tmp_path):
    load(PERMIT)
    assert Policies.load(tmp_path / "a.cedar").decide(CALL).policies == ("all",)
    assert Policies.load(str(tmp_path / "a.cedar")).version == Policies.load(tmp_path).version
