"""What README and docs show is run as it stands there."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from keepstep.settings import Settings
from keepstep.store.status import TRANSITIONS

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
NEEDS_A_BROKER = "Client("


def blocks(page: Path) -> list[str]:
    """Return a page's Python examples in order."""
    return re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


EXAMPLES = [
    pytest.param(block, id=f"{page.name}-{number}")
    for page in PAGES
    for number, block in enumerate(blocks(page), 1)
    if NEEDS_A_BROKER not in block
]


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run an example as a module of its own, as a reader who saved it would."""

    def run_block(block: str) -> ModuleType:
        file = tmp_path / "documented_example.py"
        file.write_text(block, encoding="utf-8")
        spec = importlib.util.spec_from_file_location(file.stem, file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, file.stem, module)
        spec.loader.exec_module(module)
        return module

    return run_block


@pytest.mark.parametrize("block", EXAMPLES)
def test_an_example_runs(run, block):
    before = set(vars(ModuleType("empty")))
    assert set(vars(run(block))) - before


def test_the_readme_graph_does_what_the_readme_says(run):
    graph = run(blocks(ROOT / "README.md")[0]).graph

    assert graph.run({"order": "7", "amount": 120}, decisions=[True]) == {
        "order": "7",
        "amount": 120,
        "status": "paid 120 for 7",
    }
    assert graph.run({"order": "7", "amount": 120}, decisions=[False])["status"] == "rejected"


def test_every_link_in_the_documentation_leads_somewhere():
    dead = [
        f"{page.name}: {target}"
        for page in [*PAGES, ROOT / "ARCHITECTURE.md"]
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8"))
        if not (page.parent / target).exists()
    ]
    assert dead == []


def test_every_file_the_map_names_exists():
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:store|runtime|tasks|keepstep|tests)/[\w./]*)", text))
    missing = {
        path for path in named if not any((ROOT / name).exists() for name in (path, f"{path.rpartition('.')[0]}.py"))
    }
    assert missing == set()


def test_every_setting_is_documented_with_its_default():
    text = (ROOT / "docs" / "operating.md").read_text(encoding="utf-8")
    documented = dict(re.findall(r"^\| `(\w+)` \| (\S.*?) \|", text, flags=re.MULTILINE))

    shown = {
        name: "none" if field.default in ((), "") else f"`{field.default}`"
        for name, field in Settings.model_fields.items()
    }
    assert {name: documented.get(name) for name in shown} == shown


def test_the_drawing_of_the_statuses_is_the_table():
    text = (ROOT / "docs" / "operating.md").read_text(encoding="utf-8")
    drawn = re.findall(r"^    (\w+) --> (\w+): (.*)$", text, flags=re.MULTILINE)

    assert drawn == [(old, new, why) for old, follows in TRANSITIONS.items() for new, why in follows.items()]


def test_every_schedule_names_a_test_that_there_is():
    text = (ROOT / "docs" / "schedules.md").read_text(encoding="utf-8")
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text)

    assert len(named) > 30
    missing = [
        f"{file}::{name}" for file, name in named if f"\ndef {name}(" not in (ROOT / file).read_text(encoding="utf-8")
    ]
    assert missing == []
