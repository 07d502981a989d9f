"""docs/policies.md: what it shows is what comes out, and what it lists is what there is."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from keepstep.cli.program import run
from keepstep.runtime import policynames, policytexts

PAGE = (Path(__file__).parents[2] / "docs" / "policies.md").read_text(encoding="utf-8")
SESSIONS = re.findall(r"^```console\n\$ keepstep (policy [^\n]*)\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)


def block(language):
    [found] = re.findall(rf"^```{language}\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)
    return found


def first_cells(heading):
    part = PAGE.partition(f"\n{heading}\n")[2].partition("\n## ")[0].partition("\n### ")[0]
    return re.findall(r"^\| `([^`]+)` \|", part, flags=re.MULTILINE)


def test_there_are_sessions():
    assert [command.split()[1] for command, _shown in SESSIONS] == ["check", "test", "test"]


@pytest.mark.parametrize(("command", "shown"), SESSIONS)
def test_a_command_prints_what_the_page_shows(command, shown, capsys):
    folder = Path("policies")
    folder.mkdir()
    (folder / "payments.cedar").write_text(block("cedar"), encoding="utf-8")
    (folder / "tests.toml").write_text(block("toml"), encoding="utf-8")
    assert run(shlex.split(command)) == 0
    assert capsys.readouterr().out == shown


def test_all_that_can_be_asked_is_listed():
    asked = {f"{variable}.{name}" for variable, names in policynames.ATTRIBUTES.items() for name in names}
    assert set(first_cells("## What can be asked")) == asked | {"principal", "action", "resource"}


def test_all_annotations_are_listed():
    listed = first_cells("## What a permission obliges to")
    assert [re.match(r"@(\w+)", each)[1] for each in listed] == list(policytexts._ANNOTATIONS)
