"""An error raised while another is handled: the function's own says that its answer was lost, the node's does not."""

from __future__ import annotations

import pytest

from tests.steps.agents import AGAIN, acts


def breaks_off():
    raise TimeoutError


class Bank:
    """Cannot be read, and says of a payment what it is told to."""

    def __init__(self):
        self.payments = 0

    def pay(self, order):
        self.payments += 1
        message = "no such account"
        raise ValueError(message)

    def pay_over_the_net(self, order):
        self.payments += 1
        try:
            breaks_off()
        except TimeoutError:
            message = "the bank is out of order"
            raise ValueError(message)  # noqa: B904  as people write it


def after_a_failure(pay, asynchronous):
    """A body that pays while it handles an error of its own."""
    if asynchronous:

        async def pay_async(order):
            return pay(order)

        async def body_async(ctx):
            try:
                breaks_off()
            except TimeoutError:
                return await ctx.effect(pay_async, "7")

        return body_async

    def body(ctx):
        try:
            breaks_off()
        except TimeoutError:
            return ctx.effect(pay, "7")

    return body


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_what_the_node_was_handling_says_nothing_of_the_call(deploy, asynchronous):
    bank = Bank()
    d = deploy(acts(after_a_failure(bank.pay, asynchronous), retry=AGAIN, asynchronous=asynchronous))
    d.start()
    assert d.drain() == "failed"
    assert d.error == ("node_failed", "no such account")
    assert bank.payments == 3


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_what_the_function_was_handling_does(deploy, asynchronous):
    bank = Bank()
    d = deploy(acts(after_a_failure(bank.pay_over_the_net, asynchronous), retry=AGAIN, asynchronous=asynchronous))
    d.start()
    assert d.drain() == "blocked"
    assert d.error[0] == "effect_unknown"
    assert bank.payments == 1
