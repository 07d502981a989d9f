"""What a call costs at the database: statements and transactions, as docs/tools.md says."""

from __future__ import annotations

import pytest

from keepstep import effect, tool
from keepstep.store.engine import Store, Transaction
from tests.steps.agents import acts

ALL = '@id("all") permit(principal, action, resource);'
MASKED = '@id("all") @mask("order") permit(principal, action, resource);'


@pytest.fixture
def counted(monkeypatch):
    """Count what is sent to the database: (statements, transactions)."""
    seen = {"statements": 0, "transactions": 0}
    # Pauses of tools are read once a second, whatever is called: not a cost of a call.
    monkeypatch.setattr("keepstep.runtime.rates._READ_AGAIN_SECONDS", 1e9)

    def counting(kind, name, *counts):
        original = getattr(kind, name)

        def counted(self, *args, **kwargs):
            for each in counts:
                seen[each] += 1
            return original(self, *args, **kwargs)

        monkeypatch.setattr(kind, name, counted)

    counting(Store, "rows", "statements", "transactions")
    for name in ("rows", "run"):
        counting(Transaction, name, "statements")
    counting(Store, "transaction", "transactions")
    return seen


def called(kind):
    """Return what calls something of this kind."""
    if kind.startswith("effect"):

        @effect(idempotent="idempotent" in kind)
        def pay_effect(order):
            return order

        return lambda ctx, order: ctx.effect(pay_effect, order)

    @tool(idempotent="idempotent" in kind, rate="1000/s" if "rate" in kind else None)
    def pay(order: str) -> str:
        return order

    if "prepared" in kind:

        @pay.prepare(idempotent=True)
        def _(order):
            """Prepare nothing."""

    return lambda ctx, order: ctx.call(pay, {"order": order})


COSTS = [
    ("effect, idempotent", None, (2, 1)),
    ("effect", None, (3, 2)),
    ("tool, idempotent", None, (3, 1)),
    ("tool", None, (4, 2)),
    ("tool, rate", None, (5, 3)),
    ("tool, prepared", None, (6, 3)),
    ("tool, idempotent, prepared", None, (6, 3)),
    ("tool, idempotent", ALL, (3, 1)),
    ("tool", ALL, (4, 2)),
    ("tool", MASKED, (6, 3)),
]


@pytest.mark.parametrize(("kind", "policies", "expected"), COSTS)
def test_what_a_call_costs(served, counted, tmp_path, kind, policies, expected):
    options = {}
    if policies is not None:
        (tmp_path / "p.cedar").write_text(policies)
        options["policies"] = str(tmp_path / "p.cedar")
    call, costs = called(kind), []

    def body(ctx):
        call(ctx, "first")  # what a process reads once, it reads now
        before = dict(counted)
        for number in range(10):
            call(ctx, str(number))
        costs.append(tuple((counted[name] - before[name]) / 10 for name in ("statements", "transactions")))

    d = served(acts(body), **options)
    d.start()
    assert d.drain() == "done"
    assert costs == [expected]
