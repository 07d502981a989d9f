"""Calls and policies that the tests of policies share."""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal

from keepstep.runtime.policies import Policies, PolicyRequest

CALL = PolicyRequest(
    tenant="acme",
    graph="refunds",
    thread="order-81",
    run="r1",
    node="pay",
    tool="send_payment",
    version="2",
    risk="high",
    scopes=("payments", "bank"),
    arguments={"amount": Decimal("120.00")},
)
PERMIT = '@id("all") permit(principal, action, resource);\n'


def write(folder, text=None, **texts):
    """Write policies into a folder: one text, or texts by file name."""
    for name, each in ({"a": text} if text is not None else texts).items():
        (folder / f"{name}.cedar").write_text(each, encoding="utf-8")


def decided(folder, text, arguments=None, **facts):
    """Return what one text says of `CALL` with other arguments or other facts."""
    write(folder, text)
    return Policies.load(folder).decide(
        replace(CALL, **facts, **({} if arguments is None else {"arguments": arguments}))
    )


def permit_when(condition):
    return f'@id("p") permit(principal, action, resource) when {{ {condition} }};'


def forbid_when(condition):
    return f'{PERMIT}@id("f") forbid(principal, action, resource) when {{ {condition} }};'


def permits(*annotations):
    return "\n".join(
        f'@id("p{number}") {each} permit(principal, action, resource);' for number, each in enumerate(annotations)
    )
