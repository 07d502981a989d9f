"""The longest files of tests come first, and each is one that there is."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

from tests.order import LONGEST, pytest_collection_modifyitems

ROOT = Path(__file__).parents[2]


def test_every_file_that_comes_first_is_one():
    assert [path for path in LONGEST if not (ROOT / path).is_file()] == []
    assert len(set(LONGEST)) == len(LONGEST)


def test_the_longest_come_first_and_nothing_else_is_moved():
    names = [
        "tests/a.py::one",
        f"{LONGEST[1]}::two",
        "tests/a.py::three",
        f"{LONGEST[0]}::four[x]",
        f"{LONGEST[1]}::five",
    ]
    items = [SimpleNamespace(nodeid=name) for name in names]
    pytest_collection_modifyitems(items)
    assert [item.nodeid for item in items] == [names[3], names[1], names[4], names[0], names[2]]
