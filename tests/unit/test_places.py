"""Places on the disk: what this user cannot write to is told before anything is begun."""

from __future__ import annotations

import os

import pytest

from keepstep import places
from keepstep.errors import InvalidSettings
from keepstep.settings import load


@pytest.fixture
def unwritable(monkeypatch):
    """Make one path unwritable: root, as whom tests may run, is refused nothing."""
    refused = []
    allowed = os.access
    monkeypatch.setattr("os.access", lambda path, mode: os.fspath(path) not in refused and allowed(path, mode))
    return lambda path: refused.append(os.fspath(path))


def test_a_folder_that_can_be_made_or_written_to_is_none_of_its_business(tmp_path):
    places.check(load())
    (tmp_path / ".keepstep").mkdir()
    places.check(load())
    places.check(load(database="postgresql://x/y", broker="redis://x"))
    assert list((tmp_path / ".keepstep").iterdir()) == []


def test_a_working_folder_without_write_permission(tmp_path, unwritable):
    unwritable(tmp_path)
    with pytest.raises(InvalidSettings) as raised:
        places.check(load())
    assert raised.value.message == (
        f".keepstep cannot be made in {tmp_path}: permission denied. Let this user write there, or set "
        "KEEPSTEP_DATABASE and KEEPSTEP_BROKER"
    )
    assert places.broker_problem("file:///") is None


def test_a_file_that_is_read_only(tmp_path, unwritable):
    (tmp_path / "keep.db").touch()
    unwritable("keep.db")
    assert places.database_problem("sqlite:///keep.db") == (
        "keep.db cannot be written to: permission denied. Let this user write it, or set KEEPSTEP_DATABASE"
    )


def test_a_folder_that_is_read_only(tmp_path, unwritable):
    (tmp_path / "spool").mkdir()
    unwritable(tmp_path / "spool")
    assert places.broker_problem("file://spool") == (
        f"{tmp_path}/spool cannot be written to: permission denied. Let this user write there, or set "
        "KEEPSTEP_DATABASE and KEEPSTEP_BROKER"
    )


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("sqlite:///a/b.db", "a/b.db"),
        ("sqlite:////a/b.db?timeout=3", "/a/b.db"),
        ("sqlite://", None),
        ("sqlite:///:memory:", None),
        ("postgresql://h/d", None),
    ],
)
def test_the_file_of_a_url(url, name):
    found = places.sqlite_file(url)
    assert (None if found is None else str(found)) == name
