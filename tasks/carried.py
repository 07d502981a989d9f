"""Which graphs a worker carries: those at module level of the modules and files it was given."""

from __future__ import annotations

import importlib
import importlib.util
import linecache
import sys
import sysconfig
import traceback
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

from keepstep.errors import GraphError
from keepstep.runtime.compiled import CompiledGraph
from keepstep.runtime.graph import Graph

Key = tuple[str, str]
"""A graph's name and version."""


_FRAMES_MAX = 10
_LIBRARIES = tuple(
    str(Path(sysconfig.get_path(kind)).resolve()) for kind in ("stdlib", "platstdlib", "purelib", "platlib")
)


class CannotImport(GraphError):
    """A module or file with graphs cannot be imported."""

    frames: tuple[str, ...] = ()
    """Where in the user's own code, outermost first: `agent.py:3 in <module>: import nosuch`."""


def load(sources: Iterable[str]) -> dict[Key, CompiledGraph]:
    """Import modules (`package.module`) and files (`agent.py`); return their graphs, compiled.

    Raises `GraphError` for a source that cannot be imported or holds no graph, for two graphs of one name and version,
    and for graphs that do not hold together: all of those in one message; `CannotImport` for an error inside a source's
    own code.
    """
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    found: dict[Key, tuple[Graph, str]] = {}
    for source in dict.fromkeys(sources):
        graphs = [value for value in vars(_import(source)).values() if isinstance(value, Graph)]
        if not graphs:
            message = f"{source}: there is no Graph at module level"
            raise GraphError(message)
        for graph in graphs:
            known, where = found.setdefault((graph.name, graph.version), (graph, source))
            if known is not graph:
                message = f"graph {graph.name!r} version {graph.version!r} is defined in {where} and again in {source}"
                raise GraphError(message)
    if not found:
        message = "no graphs: name the modules or files that define them (keepstep worker MODULE…, or KEEPSTEP_GRAPHS)"
        raise GraphError(message)
    return _compiled(found)


def _compiled(found: dict[Key, tuple[Graph, str]]) -> dict[Key, CompiledGraph]:
    compiled: dict[Key, CompiledGraph] = {}
    problems: list[str] = []
    for key, (graph, source) in found.items():
        try:
            compiled[key] = graph.compile()
        except GraphError as error:
            problems.append(f"{source}: {error.message}")
    if problems:
        raise GraphError("; ".join(problems))
    return compiled


def _import(source: str) -> ModuleType:
    try:
        return _imported(source)
    except GraphError:
        raise
    except (Exception, SystemExit) as error:
        text = " ".join(str(error).split()) or "no message"
        message = f"{source} cannot be imported: {type(error).__name__}: {text}"
        refused = CannotImport(message)
        refused.frames = tuple(_users_frames(error))
        raise refused from error


def _users_frames(error: BaseException) -> list[str]:
    """Return where in the user's code an import failed; in libraries only if it is nowhere else."""
    mine: list[str] = []
    libraries: list[str] = []
    for frame, line in traceback.walk_tb(error.__traceback__):
        module = frame.f_globals.get("__name__", "")
        file = frame.f_code.co_filename
        if file.startswith("<") or module.partition(".")[0] in {"keepstep", "importlib"}:
            continue
        path = Path(file)
        shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
        where = f"{shown}:{line} in {frame.f_code.co_name}: {linecache.getline(file, line).strip()}"
        (libraries if str(path.resolve()).startswith(_LIBRARIES) else mine).append(where)
    return (mine or libraries)[-_FRAMES_MAX:]


def _imported(source: str) -> ModuleType:
    if source.endswith(".py") or "/" in source:
        return _from_file(Path(source).resolve(), source)
    try:
        return importlib.import_module(source)
    except ModuleNotFoundError as error:
        if error.name is not None and (source == error.name or source.startswith(f"{error.name}.")):
            message = f"{source}: there is no module of that name (looked in {Path.cwd()} and on the Python path)"
            raise GraphError(message) from None
        raise


def _from_file(path: Path, source: str) -> ModuleType:
    if not path.is_file():
        message = f"{source}: there is no such file"
        raise GraphError(message)
    # As `python agent.py` would: its neighbours can be imported.
    folder = str(path.parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    known = sys.modules.get(path.stem)
    if known is not None and getattr(known, "__file__", None) == str(path):
        return known
    # A name that is taken stays whose it is: `store.py` must not stand in for somebody's package `store`.
    name = path.stem if known is None and path.stem.isidentifier() else f"keepstep_graphs_{abs(hash(str(path)))}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        message = f"{source}: not a Python file"
        raise GraphError(message)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
