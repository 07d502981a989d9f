"""The catalogue of mutants fits the code as it is now, so that a change to a guarded line is noticed at once."""

from __future__ import annotations

import ast

import pytest

from tests.mutants.catalogue import MUTANTS, ROOT


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: f"{mutant.guard}: {mutant.name}")
def test_a_mutant_fits_the_code(mutant):
    assert ast.dump(ast.parse(mutant.text())) != ast.dump(ast.parse((ROOT / mutant.file).read_text()))
    assert bool(mutant.tests) is not bool(mutant.seeds)
    for test in mutant.tests:
        if test.startswith("tests/"):
            path, _, name = test.partition("::")
            assert f"def {name.partition('[')[0]}" in (ROOT / path).read_text()


def test_every_rule_has_a_mutant():
    assert {mutant.guard for mutant in MUTANTS} >= {
        "the fence",
        "the fence's row lock",
        "the nonce's randomness",
        "the inbox at parking",
        "intent, then call",
        "the divergence check",
        "the command's late acknowledgement",
        "the join under the lock",
    }
