"""The places on the disk that the defaults need: a SQLite file, the file broker's folder. Refused early, in one line.

SQLite and the broker would say the same later, in their own words, and be taken for something that is away for a while.
"""

from __future__ import annotations

import os
from pathlib import Path

from keepstep.errors import InvalidSettings
from keepstep.filebroker import folder_of
from keepstep.settings import Settings

_WAY_OUT = "Let this user write there, or set"


def check(settings: Settings) -> None:
    """Raise `InvalidSettings` when this user cannot write where the settings put a database or a broker."""
    for problem in (database_problem(settings.database), broker_problem(settings.broker)):
        if problem is not None:
            raise InvalidSettings(problem)


def database_problem(url: str) -> str | None:
    """Return why this user cannot write to a SQLite file, in a sentence with the way out, or None."""
    path = sqlite_file(url)
    if path is None:
        return None
    if path.exists() and not os.access(path, os.R_OK | os.W_OK):
        return f"{path} cannot be written to: permission denied. Let this user write it, or set KEEPSTEP_DATABASE"
    return _folder_problem(path.parent)


def broker_problem(url: str) -> str | None:
    """Return why this user cannot write to a file broker's folder, in a sentence with the way out, or None."""
    if not url.startswith("file://"):
        return None
    try:
        return _folder_problem(Path(folder_of(url)))
    except ValueError:  # the broker itself says what is wrong with its URL
        return None


def sqlite_file(url: str) -> Path | None:
    """Return the file that a SQLite URL names, if it does."""
    scheme, _, rest = url.partition("://")
    name = rest.removeprefix("/").partition("?")[0]
    return None if not scheme.startswith("sqlite") or name in {"", ":memory:"} else Path(name)


def _folder_problem(folder: Path) -> str | None:
    there = folder.absolute()
    missing = None
    while not _exists(there):
        missing, there = there, there.parent
    if missing is None:
        if not there.is_dir() or os.access(there, os.W_OK | os.X_OK):
            return None
        return f"{there} cannot be written to: permission denied. {_WAY_OUT} KEEPSTEP_DATABASE and KEEPSTEP_BROKER"
    if os.access(there, os.W_OK | os.X_OK):
        return None
    return (
        f"{missing.name} cannot be made in {there}: permission denied. {_WAY_OUT} KEEPSTEP_DATABASE and KEEPSTEP_BROKER"
    )


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # a folder above that this user may not look into
        return False
