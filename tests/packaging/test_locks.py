"""What is installed next year is what is installed today: the locks are complete, agree, and name no machine."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

pytestmark = pytest.mark.packaging

ROOT = Path(__file__).parents[2]
LOCKS = ("run", "dev", "build", "examples")


def read(name: str) -> str:
    return (ROOT / "requirements" / f"{name}.lock").read_text()


def pins(name: str) -> dict[str, tuple[Requirement, frozenset[str]]]:
    """Each locked package: its requirement and the digests that may be installed."""
    found = {}
    for entry in read(name).replace("\\\n", " ").splitlines():
        requirement, *hashes = entry.split("--hash=")
        parsed = Requirement(requirement.strip())
        found[canonicalize_name(parsed.name)] = (parsed, frozenset(part.strip() for part in hashes))
    return found


def wanted(groups: list[str]) -> list[Requirement]:
    """What pyproject.toml asks for: the dependencies, and those of some dependency groups."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    asked = list(project["project"]["dependencies"])
    todo = list(groups)
    while todo:
        for line in project["dependency-groups"][todo.pop()]:
            if isinstance(line, dict):
                todo.append(line["include-group"])
            else:
                asked.append(line)
    return [Requirement(line) for line in asked]


@pytest.mark.parametrize("name", LOCKS)
def test_each_package_is_pinned_with_digests(name):
    locked = pins(name)
    assert locked
    for requirement, digests in locked.values():
        assert re.fullmatch(r"==[^*,]+", str(requirement.specifier)), requirement
        assert digests, requirement
        assert all(re.fullmatch(r"sha256:[0-9a-f]{64}", digest) for digest in digests), requirement


@pytest.mark.parametrize("name", LOCKS)
def test_a_lock_names_no_index_and_no_path(name):
    for line in read(name).splitlines():
        assert re.fullmatch(r"[a-z0-9.-]+==\S+( ; [^/\\]+)? \\|    --hash=sha256:[0-9a-f]{64}( \\)?", line), line


@pytest.mark.parametrize(("name", "groups"), [("run", []), ("dev", ["dev"])])
def test_a_lock_has_what_the_project_asks_for(name, groups):
    locked = pins(name)
    for requirement in wanted(groups):
        pinned, _digests = locked[canonicalize_name(requirement.name)]
        (version,) = (specifier.version for specifier in pinned.specifier)
        assert requirement.specifier.contains(version), requirement


@pytest.mark.parametrize("name", ["run", "build", "examples"])
def test_tests_run_what_is_deployed(name):
    dev = pins("dev")
    assert {package: pin for package, pin in pins(name).items() if dev.get(package) != pin} == {}
