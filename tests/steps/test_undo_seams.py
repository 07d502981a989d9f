"""Undoing where it meets other things: answers that are lost, secrets, artifacts, transactions."""

from __future__ import annotations

import pytest
from sqlalchemy import text

from keepstep import END, NOT_DONE, START, Graph, Secret, effect
from tests.steps.agents import State
from tests.steps.test_undo import due_now

SECRET = "s3cr3t-of-the-bank"


@pytest.fixture
def ledger(monkeypatch):
    """What was done outside, in order."""
    monkeypatch.setenv("BANK_KEY", SECRET)
    return []


def fails(body):
    """A graph whose only node does something and then fails."""
    graph = Graph("fails", state=State)

    @graph.node
    def node(state, ctx):
        body(ctx)
        message = "no passport"
        raise ValueError(message)

    graph.edge(START, "node")
    graph.edge("node", END)
    return graph


def breaks_off_once(ledger):
    """An undo whose answer is lost the first time that it is called."""

    def take_back(order: str) -> None:
        ledger.append(f"take back {order}")
        if ledger.count(f"take back {order}") == 1:
            message = "read timed out"
            raise TimeoutError(message)

    return take_back


def taking_back(ledger):
    def take_back(order: str) -> None:
        ledger.append(f"take back {order}")

    return take_back


def paying(ledger, undo):
    @effect(undo=undo)
    def pay(order: str) -> str:
        ledger.append(f"pay {order}")
        return "receipt"

    return pay


# --- lost answers -----------------------------------------------------------------------------------------------------


def test_an_idempotent_undo_whose_answer_is_lost_is_tried_again(deploy, ledger):
    pay = paying(ledger, effect(idempotent=True)(breaks_off_once(ledger)))
    d = deploy(fails(lambda ctx: ctx.effect(pay, "7")))
    d.start()
    assert d.drain() == "ready"
    assert d.error == ("undo_failed", "read timed out")
    assert due_now(d) == "failed"
    assert ledger == ["pay 7", "take back 7", "take back 7"]
    assert d.effects() == [("pay", "done", 1), ("take_back", "done", 2)]


def test_an_undo_whose_answer_is_lost_is_asked_about_before_it_is_called_again(deploy, ledger):
    answers = [NOT_DONE]

    def find(order: str):
        ledger.append(f"find {order}")
        return answers.pop()

    pay = paying(ledger, effect(lookup=find)(breaks_off_once(ledger)))
    d = deploy(fails(lambda ctx: ctx.effect(pay, "7")))
    d.start()
    assert d.drain() == "ready"
    assert ledger == ["pay 7", "take back 7", "find 7"]
    assert due_now(d) == "failed"
    assert ledger == ["pay 7", "take back 7", "find 7", "take back 7"]


def taken_back(order: str) -> str:
    return "taken back"


def test_an_undo_whose_answer_is_lost_and_found_is_not_called_again(deploy, ledger):
    pay = paying(ledger, effect(lookup=taken_back)(breaks_off_once(ledger)))
    d = deploy(fails(lambda ctx: ctx.effect(pay, "7")))
    d.start()
    assert d.drain() == "failed"
    assert ledger == ["pay 7", "take back 7"]
    assert [each.undone for each in d.reader.effects("t")] == ["undone", None]


@pytest.mark.parametrize(("outcome", "calls"), [("happened", 1), ("not_happened", 2), ("give_up", 1)])
def test_an_undo_whose_answer_is_lost_waits_for_a_persons_word(deploy, ledger, outcome, calls):
    pay = paying(ledger, breaks_off_once(ledger))
    d = deploy(fails(lambda ctx: ctx.effect(pay, "7")))
    d.start()
    assert d.drain() == "blocked"
    assert d.error[0] == "effect_unknown"
    assert ledger == ["pay 7", "take back 7"]
    (key,) = [each.effect.key for each in d.reader.unknown_effects()]
    d.send("resolve", effect=key, outcome=outcome)
    assert d.drain() == "failed"
    assert ledger == ["pay 7", *["take back 7"] * calls]


# --- secrets ----------------------------------------------------------------------------------------------------------


def test_an_undo_is_given_the_secret_that_the_effect_was_given(deploy, ledger):
    def take_back(order: str, token: Secret) -> None:
        ledger.append(f"take back {order} by {token.reveal()}")

    @effect(undo=take_back)
    def pay(order: str, token: Secret) -> str:
        ledger.append(f"pay {order} by {token.reveal()}")
        return "receipt"

    d = deploy(fails(lambda ctx: ctx.effect(pay, "7", token=ctx.secret("env:BANK_KEY"))))
    d.start()
    assert d.drain() == "failed"
    assert ledger == [f"pay 7 by {SECRET}", f"take back 7 by {SECRET}"]
    assert SECRET not in repr(d.dump())


def test_the_lookups_of_undoing_are_given_the_secret(deploy, ledger):
    def find(order: str, token: Secret) -> str:
        ledger.append(f"find {order} by {token.reveal()}")
        return "receipt"

    def find_taken_back(order: str, token: Secret) -> str:
        ledger.append(f"find what was taken back of {order} by {token.reveal()}")
        return "taken back"

    @effect(lookup=find_taken_back)
    def take_back(order: str, token: Secret) -> None:
        message = "read timed out"
        raise TimeoutError(message)

    @effect(undo=take_back, lookup=find)
    def pay(order: str, token: Secret) -> str:
        return "receipt"

    d = deploy(fails(lambda ctx: ctx.effect(pay, "7", token=ctx.secret("env:BANK_KEY"))))
    d.start()
    d.work(d.queue.pop(0))
    d.execute("UPDATE keepstep_effect SET state = 'intent', result = NULL")  # as if the process had died in between
    assert d.drain() == "failed"
    assert ledger == [f"find 7 by {SECRET}", f"find what was taken back of 7 by {SECRET}"]


def test_a_secret_that_an_undo_could_not_be_given_is_refused_before_the_call(deploy, ledger):
    def take_back(order: str) -> None:
        ledger.append(f"take back {order}")

    @effect(undo=take_back)
    def pay(order: str, token) -> str:
        ledger.append(f"pay {order}")
        return "receipt"

    d = deploy(fails(lambda ctx: ctx.effect(pay, "7", token=ctx.secret("env:BANK_KEY"))))
    d.start()
    assert d.drain() == "failed"
    assert d.error[0] == "not_storable"
    assert "$pay.token: it is a secret, and the effect has an undo" in d.error[1]
    assert (ledger, d.effects()) == ([], [])


def test_what_only_looks_like_a_secret_is_given_to_the_undo_as_it_is(deploy, ledger):
    given = {"secret": "env:BANK_KEY"}  # as a model may say it

    def take_back(order: dict) -> None:
        ledger.append(order)

    @effect(undo=take_back)
    def pay(order: dict) -> str:
        return "receipt"

    d = deploy(fails(lambda ctx: ctx.effect(pay, given)))
    d.start()
    assert d.drain() == "failed"
    assert ledger == [given]


# --- artifacts, transactions ------------------------------------------------------------------------------------------


def test_an_undo_is_given_arguments_and_a_result_that_are_artifacts(deploy, ledger):
    def take_back(order: str, result: str) -> None:
        ledger.append((len(order), len(result)))

    @effect(undo=take_back)
    def pay(order: str) -> str:
        return order * 2

    d = deploy(fails(lambda ctx: ctx.effect(pay, "a" * 300_000)))
    d.start()
    assert d.drain() == "failed"
    assert ledger == [(300_000, 600_000)]
    pay_row, undo_row = d.reader.effects("t")
    assert (pay_row.arguments_artifact is None, pay_row.artifact is None) == (False, False)
    assert undo_row.arguments_artifact is not None


def test_an_undo_whose_arguments_are_gone_is_not_called(deploy, ledger):
    pay = paying(ledger, effect(idempotent=True)(taking_back(ledger)))
    d = deploy(fails(lambda ctx: ctx.effect(pay, "a" * 300_000)))
    d.start()
    d.work(d.queue.pop(0))
    d.execute("DELETE FROM keepstep_artifact")
    assert d.drain() == "blocked"
    assert d.error[0] == "artifact_corrupt"
    assert len(ledger) == 1


def test_a_transaction_stands_when_the_effects_around_it_are_undone(deploy, ledger):
    pay = paying(ledger, taking_back(ledger))

    def body(ctx):
        ctx.effect(pay, "1")
        with ctx.transaction() as conn:
            conn.execute(text("CREATE TABLE booking (room integer)"))
        ctx.effect(pay, "2")

    d = deploy(fails(body))
    d.start()
    assert d.drain() == "failed"
    assert ledger == ["pay 1", "pay 2", "take back 2", "take back 1"]
    d.execute("INSERT INTO booking VALUES (12)")
