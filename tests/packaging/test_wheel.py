"""The wheel holds one package, and a user's modules of the same bare names stand beside it undisturbed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.packaging

ROOT = Path(__file__).parents[2]
FOLDERS = {"keepstep": "keepstep", "store": "keepstep/store", "runtime": "keepstep/runtime", "tasks": "keepstep/tasks"}

AGENT = """
from typing import Annotated, TypedDict

import runtime
import store
import store.orders
import tasks
from keepstep import END, START, Graph, Send, append


class Order(TypedDict):
    number: int
    prices: Annotated[list[int], append]
    total: int


graph = Graph("orders", state=Order)


@graph.node
def split(state, ctx):
    return {}


@graph.node
def price(state, ctx):
    return {"prices": store.orders.price(state["item"])}


@graph.node
def add(state, ctx):
    return {"total": tasks.total(state["prices"])}


graph.edge(START, "split")
graph.route("split", lambda state: [Send("price", {"item": n}) for n in range(state["number"])], to=["price"])
graph.edge("price", "add")
graph.edge("add", END)

if __name__ == "__main__":
    import json
    import sys

    import keepstep.runtime.graph
    import keepstep.store.engine

    names = ["store", "runtime", "tasks", "keepstep", "keepstep.runtime.graph", "keepstep.store.engine"]
    finished = graph.run({"number": 3})
    print(json.dumps({
        "state": dict(getattr(finished, "state", finished)),
        "version": runtime.VERSION,
        "files": {name: sys.modules[name].__file__ for name in names},
    }))
"""


def package_files() -> set[str]:
    """Every file of the four folders, by its path in the installed package."""
    return {
        f"{package}/{path.relative_to(ROOT / folder).as_posix()}"
        for folder, package in FOLDERS.items()
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy: a build/ folder left in the tree would put its stale files into it."""
    source = tmp_path_factory.mktemp("source")
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, source)
    out = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "--wheel-dir", out, source], check=True, timeout=100)
    (built,) = out.glob("keepstep-*.whl")
    return built


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh environment with the wheel in it; the dependencies are those of this environment."""
    folder = tmp_path_factory.mktemp("fresh") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True, timeout=60)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, wheel], check=True, timeout=60)
    # A path in a .pth file stands after the environment's own packages, and .pth files in that path are not read: so
    # an editable install of Keepstep over there stays unseen.
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
    (packages / "dependencies.pth").write_text(f"{sysconfig.get_path('purelib')}\n{sysconfig.get_path('platlib')}\n")
    return folder


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A user's project whose own modules are named like our folders."""
    folder = tmp_path / "project"
    (folder / "store").mkdir(parents=True)
    (folder / "store" / "__init__.py").write_text("")
    (folder / "store" / "orders.py").write_text("def price(item):\n    return (item + 1) * 100\n")
    (folder / "runtime.py").write_text('VERSION = "the user\'s own"\n')
    (folder / "tasks.py").write_text("def total(prices):\n    return sum(prices)\n")
    (folder / "agent.py").write_text(AGENT)
    return folder


def run(command: list[object], folder: Path) -> str:
    """Run a program as a user would: nothing of this run's Python settings reaches it."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PYTEST"))}
    done = subprocess.run(command, cwd=folder, env=clean, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_wheel_holds_the_package_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert {name for name in names if ".dist-info/" not in name} == package_files()
    assert {name.split("/")[0] for name in names} == {"keepstep", f"{wheel.name.split('-py3')[0]}.dist-info"}


def test_every_package_of_the_tree_is_listed():
    setup = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    in_tree = {Path(name).parent.as_posix().replace("/", ".") for name in package_files() if name.endswith(".py")}
    assert sorted(setup["packages"]) == sorted(in_tree)
    assert setup["package-dir"] == {package.replace("/", "."): folder for folder, package in FOLDERS.items()}


def test_folders_with_code_are_packages():
    folders = {name.rpartition("/")[0] for name in package_files() if name.endswith(".py")}
    assert [folder for folder in sorted(folders) if f"{folder}/__init__.py" not in package_files()] == []


def test_a_graph_runs_beside_modules_of_the_same_names(environment, project):
    shown = json.loads(run([environment / "bin" / "python", "agent.py"], project))
    assert shown["state"] == {"number": 3, "prices": [100, 200, 300], "total": 600}
    assert shown["version"] == "the user's own"
    files = {name: Path(file) for name, file in shown["files"].items()}
    assert files["store"] == project / "store" / "__init__.py"
    assert files["runtime"] == project / "runtime.py"
    assert files["tasks"] == project / "tasks.py"
    for name in ("keepstep", "keepstep.runtime.graph", "keepstep.store.engine"):
        assert files[name].is_relative_to(environment), name


def test_a_producer_loads_neither_database_nor_runtime(environment, project):
    code = (
        "import sys, json, keepstep; keepstep.Client; "
        "print(json.dumps(sorted({'sqlalchemy', 'alembic', 'psycopg2', 'celery', 'keepstep.runtime', 'keepstep.store', "
        "'keepstep.tasks'} & set(sys.modules))))"
    )
    assert json.loads(run([environment / "bin" / "python", "-c", code], project)) == []


def test_the_command_is_installed(environment, project):
    assert "worker" in run([environment / "bin" / "keepstep", "--help"], project)
