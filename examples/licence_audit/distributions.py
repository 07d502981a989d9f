"""What is installed in this environment, and what each distribution says about its licence."""

from __future__ import annotations

import re
from collections.abc import Iterable
from importlib.metadata import (
    Distribution,
    PackageMetadata,
    PackageNotFoundError,
    PackagePath,
    distribution,
    distributions,
)

from examples.licence_audit import licences
from examples.licence_audit.licences import Evidence, LicenceFile

_LICENCE_FILE = re.compile(r"^(un)?licen[cs]e|^copying|licen[cs]e(\.(txt|md|rst))?$", re.IGNORECASE)
_CODE = (".py", ".pyc", ".pyi", ".so")
_TEXT_CHARACTERS_MAX = 200_000
_NAME_CHARACTERS_MAX = 200
"""A `License` field longer than this is not a licence's name but its text."""


def installed() -> list[str]:
    """Return the names of the distributions of this environment, each once, in alphabetical order."""
    names: dict[str, str] = {}
    for found in distributions():
        name = found.metadata["Name"]
        if name:  # a broken installation leaves metadata without one behind
            names.setdefault(re.sub(r"[-_.]+", "-", name).lower(), name)
    return [names[key] for key in sorted(names)]


def evidence_of(name: str) -> Evidence:
    """Return what an installed distribution says about its licence; one that is gone by now says nothing."""
    try:
        found = distribution(name)
    except PackageNotFoundError:
        return Evidence(name, "not installed")
    metadata = found.metadata
    free_text = _first(metadata, "License").strip()
    files = _licence_files(found)
    if len(free_text) > _NAME_CHARACTERS_MAX or "\n" in free_text:
        files.insert(0, LicenceFile("the License field", licences.of_text(free_text)))
        free_text = ""
    return Evidence(
        name,
        metadata["Version"],
        _first(metadata, "License-Expression") or None,
        free_text if free_text.upper() not in {"", "UNKNOWN"} else None,
        [each for each in metadata.get_all("Classifier") or [] if each.startswith("License ::")],
        files,
    )


def _first(metadata: PackageMetadata, name: str) -> str:
    return next(iter(metadata.get_all(name) or ()), "")


def _licence_files(found: Distribution) -> list[LicenceFile]:
    """Return the licence files of a distribution: its own ones first, then those of what it bundles."""
    paths = [path for path in found.files or () if _LICENCE_FILE.search(path.name) and path.suffix not in _CODE]
    files = [
        LicenceFile(_shown(path), licences.of_text(text), bundled=_is_bundled(path)) for path, text in _texts(paths)
    ]
    return sorted(files, key=lambda file: (file.bundled, file.path))


def _texts(paths: Iterable[PackagePath]) -> Iterable[tuple[PackagePath, str]]:
    for path in paths:
        try:
            with open(path.locate(), encoding="utf-8", errors="replace") as file:  # noqa: PTH123  no Path by its type
                yield path, file.read(_TEXT_CHARACTERS_MAX)
        except OSError:  # listed, and deleted since
            continue


def _is_bundled(path: PackagePath) -> bool:
    """Tell whether a licence file is that of a part: own ones stand on top, those of parts keep the parts' folders."""
    folder, *rest = path.parts[:-1] or ("",)
    if folder.endswith((".dist-info", ".egg-info")):
        return rest not in ([], ["licenses"], ["license_files"])
    return bool(folder)


def _shown(path: PackagePath) -> str:
    return "/".join(
        part for part in path.parts if not part.endswith((".dist-info", ".egg-info")) and part != "licenses"
    )
