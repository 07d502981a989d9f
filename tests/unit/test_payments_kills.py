"""When the payments example kills what: spread over the work, of both kinds, the same for the same seed."""

from __future__ import annotations

import pytest

from examples.payments.killer import CHILD, WORKER, moments


@pytest.mark.parametrize("seed", range(20))
def test_kills_are_spread_over_the_first_three_quarters_of_the_work_and_of_both_kinds_in_turn(seed):
    planned = moments(seed, 6, 48)

    assert [(each.work - 2) // 5 for each in planned] == [0, 1, 2, 3, 4, 5]  # 34 of 36, in six parts
    assert [each.what for each in planned] in ([WORKER, CHILD] * 3, [CHILD, WORKER] * 3)
    assert all(0 <= each.seconds_later < 0.3 for each in planned)
    assert planned == moments(seed, 6, 48)


def test_seeds_differ_in_when_and_in_what_comes_first():
    assert len({tuple(each.work for each in moments(seed, 6, 48)) for seed in range(20)}) > 10
    assert {moments(seed, 1, 48)[0].what for seed in range(20)} == {WORKER, CHILD}


def test_nobody_is_killed_when_nobody_is_to_be():
    assert moments(7, 0, 48) == []
    assert len(moments(7, 3, 2)) == 3
