"""The texts of policies: read, taken apart, checked. What is wrong is told with its file and line.

Cedar says what is wrong with a text but not where, so the text is cut into its policies here.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import NamedTuple, NoReturn

from keepstep.errors import InvalidInput, PolicyError
from keepstep.ids import checked_name
from keepstep.runtime import policynames

SUFFIX = ".cedar"
_FILE_BYTES_MAX = 1024 * 1024
_FILES_MAX = 1000
_QUORUM_MAX = 100
_VERSION_LENGTH = 16
_UNIT_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_LENGTH = re.compile(r"([1-9][0-9]{0,5})([smhd])")
_LIMIT = re.compile(r"[1-9][0-9]{0,8}/(?:[1-9][0-9]{0,5})?[smhd]")
_ARGUMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,199}")
# A text in quotes (one that is not closed goes to the end), a comment, the end of a policy, anything else.
_TOKEN = re.compile(r'"(?:\\.|[^"\\])*"?|//[^\n]*|;|\s+|[^"/;\s]+|/', re.DOTALL)
_CUT_SHORT = "unexpected end of input"
_SYNTAX = ("unexpected ", "invalid token")


@dataclass(frozen=True)
class Policy:
    """One policy, with what its annotations oblige to."""

    id: str
    """Its `@id`, else `file.cedar:line`, with `.2` for the second of a line."""
    effect: str
    """`permit` or `forbid`."""
    file: str
    line: int
    approve: tuple[str, ...] | None = None
    """The roles that must approve; empty: anybody; None: no approval is needed."""
    quorum: int = 1
    self_approval: bool = True
    """Whether who started the run may approve."""
    expires_seconds: float | None = None
    mask: tuple[str, ...] = ()
    limit: str | None = None


class Texts(NamedTuple):
    """Policies that were read and found right."""

    policies: tuple[Policy, ...]
    """In the order of their files' names and, in a file, of its lines."""
    statements: tuple[str, ...]
    """The text of each."""
    version: str
    """A digest of the files' names and texts."""


class _Statement(NamedTuple):
    file: str
    line: int
    name: str
    text: str


def cedar() -> ModuleType:
    """Return Cedar's bindings; raise `PolicyError` naming the extra when they are not installed."""
    try:
        import cedarpy  # noqa: PLC0415  an extra: only deployments with policies need it
    except ImportError:
        message = "policies are configured, and Cedar is not installed: pip install 'keepstep[policy]'"
        raise PolicyError(message) from None
    return cedarpy


def files(path: Path) -> list[Path]:
    """Return the files of policies at a path: itself, or a folder's `*.cedar`, by name; raise `OSError`."""
    if not path.is_dir():
        path.stat()
        return [path]
    return sorted(each for each in path.iterdir() if each.name.endswith(SUFFIX) and not each.name.startswith("."))


def read(path: Path) -> Texts:
    """Read and check the policies at a path; raise `PolicyError` naming file and line. Nothing of them is kept then."""
    try:
        sources = [(each.name, _source(each)) for each in files(path)]
    except OSError as error:
        message = f"{path}: {error.strerror}: KEEPSTEP_POLICIES must name a folder or a file of Cedar policies"
        raise PolicyError(message) from None
    if not sources or len(sources) > _FILES_MAX:
        message = f"{path}: there must be 1 to {_FILES_MAX} files {'*' + SUFFIX}, there are {len(sources)}"
        raise PolicyError(message)
    statements = [each for name, source in sources for each in _statements(name, source)]
    policies = tuple(_policy(each) for each in statements)
    _refuse_duplicates(policies)
    digest = hashlib.sha256(json.dumps(sources).encode()).hexdigest()
    return Texts(policies, tuple(each.text for each in statements), digest[:_VERSION_LENGTH])


def _source(path: Path) -> str:
    with path.open("rb") as file:
        data = file.read(_FILE_BYTES_MAX + 1)
    if len(data) > _FILE_BYTES_MAX:
        message = f"{path.name}: is larger than {_FILE_BYTES_MAX} bytes"
        raise PolicyError(message)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        message = f"{path.name}:{line}: is not UTF-8 text"
        raise PolicyError(message) from None


def _refuse_duplicates(policies: Sequence[Policy]) -> None:
    seen: dict[str, Policy] = {}
    for each in policies:
        other = seen.setdefault(each.id, each)
        if other is not each:
            message = f"{each.file}:{each.line}: {other.file}:{other.line} has the id {each.id!r}, too: an id names one"
            raise PolicyError(message)


# --- taking apart -----------------------------------------------------------------------------------------------------


def _statements(file: str, source: str) -> Iterator[_Statement]:
    """Cut a file into its policies: each ends with a semicolon, which stands nowhere else but in texts and comments."""
    start: int | None = None
    line = on_line = 0

    def cut(start: int, end: int) -> _Statement:
        nonlocal line, on_line
        begins = source.count("\n", 0, start) + 1
        line, on_line = begins, on_line + 1 if begins == line else 1
        name = f"{file}:{line}" if on_line == 1 else f"{file}:{line}.{on_line}"
        return _Statement(file, line, name, source[start:end].rstrip())

    for token in _TOKEN.finditer(source):
        text = token.group()
        if start is None and not text.isspace() and not text.startswith("//"):
            start = token.start()
        if text == ";" and start is not None:
            yield cut(start, token.end())
            start = None
    if start is not None:
        yield cut(start, len(source))


def _problem(text: str) -> str | None:
    """Return what Cedar says is wrong with a text."""
    try:
        cedar().PolicySet.from_str(text)
    except ValueError as error:
        return str(error)
    return None


def _line_of(text: str, problem: str) -> int:
    """Return in which line of a policy's text, from 0, a problem of it is."""
    if problem.startswith(_SYNTAX):
        # The shortest beginning that is wrong, rather than just not at its end, ends with what is wrong.
        line = 0
        for start, end in _segments(text):
            line = text.count("\n", 0, start)
            begun = text[:end]
            # Where Cedar reads on after what is wrong, it is told of that only when there is an end.
            if _problem(begun) not in (None, _CUT_SHORT) or _problem(f"{begun};") == problem:
                return line
        return line
    named = re.findall(r"`([^`]+)`", problem) or [problem.rpartition(": ")[2]]
    at = text.rfind(named[0])
    return text.count("\n", 0, at) if at >= 0 else 0


def _segments(text: str) -> Iterator[tuple[int, int]]:
    """Cut a text behind each line that does not end inside quotes."""
    start = 0
    for token in _TOKEN.finditer(text):
        if "\n" in token.group() and not token.group().startswith('"'):
            yield start, token.end()
            start = token.end()
    yield start, len(text)


# --- one policy -------------------------------------------------------------------------------------------------------


def _policy(statement: _Statement) -> Policy:
    problem = _problem(statement.text)
    if problem is not None:
        line = statement.line + _line_of(statement.text, problem)
        message = f"{statement.file}:{line}: {problem}"
        raise PolicyError(message)
    parsed = json.loads(cedar().policies_to_json_str(statement.text))
    if parsed["templates"]:
        _refuse(statement, "is a template (?principal, ?resource): nothing fills it in, so write what is meant")
    if len(parsed["staticPolicies"]) != 1:
        _refuse(statement, "is not one policy")
    [tree] = parsed["staticPolicies"].values()
    for misnamed in policynames.misnamed(tree):
        _refuse(statement, misnamed)
    return _Annotations(statement, tree["effect"], tree.get("annotations", {})).policy()


def _refuse(statement: _Statement, what: str, identity: str | None = None) -> NoReturn:
    shown = "the policy" if identity is None else f"policy {identity!r}"
    message = f"{statement.file}:{statement.line}: {shown} {what}"
    raise PolicyError(message)


@dataclass(frozen=True)
class _Annotations:
    """What a policy's annotations say; what they must not say is refused."""

    statement: _Statement
    effect: str
    given: dict[str, str | None]

    @cached_property
    def id(self) -> str | None:
        found = self.given.get("id")
        if "id" not in self.given:
            return None
        try:
            return checked_name("@id", found)
        except InvalidInput as error:
            _refuse(self.statement, f"has a bad @id: {error.message}")

    def refuse(self, what: str) -> NoReturn:
        _refuse(self.statement, what, self.id)

    def policy(self) -> Policy:
        for name in self.given:
            if name not in _ANNOTATIONS:
                self.refuse(f"has @{name}: known are {', '.join(f'@{each}' for each in _ANNOTATIONS)}")
            if name != "id" and self.effect == "forbid":
                self.refuse(f"forbids, and @{name} belongs to what is permitted")
        for name in ("quorum", "self_approval", "expires"):
            if name in self.given and "approve" not in self.given:
                self.refuse(f"has @{name} without @approve, whose {_ANNOTATIONS[name]} it is")
        if "limit" in self.given and self.id is None:
            self.refuse("has @limit without @id, under which calls are counted")
        return Policy(
            id=self.id or self.statement.name,
            effect=self.effect,
            file=self.statement.file,
            line=self.statement.line,
            approve=self._roles() if "approve" in self.given else None,
            quorum=self._quorum(),
            self_approval=self._self_approval(),
            expires_seconds=self._expires(),
            mask=self._mask(),
            limit=self._limit(),
        )

    def _names(self, annotation: str) -> tuple[str, ...]:
        """Return the names, separated by commas, that an annotation lists, each once."""
        text = self.given[annotation] or ""
        names = [name.strip() for name in text.split(",")] if text.strip() else []
        if "" in names:
            self.refuse(f"has an empty name in @{annotation}({json.dumps(text)})")
        return tuple(dict.fromkeys(names))

    def _roles(self) -> tuple[str, ...]:
        names = self._names("approve")
        try:
            return tuple(checked_name("a role", name) for name in names)
        except InvalidInput as error:
            self.refuse(f"has a bad @approve: {error.message}")

    def _mask(self) -> tuple[str, ...]:
        if "mask" not in self.given:
            return ()
        names = self._names("mask")
        if not names or not all(map(_ARGUMENT.fullmatch, names)):
            self.refuse('has a bad @mask: it lists names of arguments, like @mask("card,iban")')
        return names

    def _quorum(self) -> int:
        text = self.given.get("quorum", "1") or ""
        # The length first: Python refuses to read a number of thousands of digits.
        is_number = text.isascii() and text.isdecimal() and len(text) <= len(str(_QUORUM_MAX))
        number = int(text) if is_number else 0
        if not 1 <= number <= _QUORUM_MAX:
            self.refuse(f"has a bad @quorum: how many must approve, 1 to {_QUORUM_MAX}")
        return number

    def _self_approval(self) -> bool:
        # A policy asks for more than the deployment's setting, never for less.
        if self.given.get("self_approval", "false") != "false":
            self.refuse('has a bad @self_approval: only @self_approval("false") says something')
        return "self_approval" not in self.given

    def _expires(self) -> float | None:
        if "expires" not in self.given:
            return None
        seconds = length_seconds(self.given["expires"] or "")
        if seconds is None:
            self.refuse('has a bad @expires: a number and s, m, h or d, like @expires("2d")')
        return seconds

    def _limit(self) -> str | None:
        text = self.given.get("limit")
        if "limit" in self.given and not _LIMIT.fullmatch(text or ""):
            self.refuse('has a bad @limit: calls per s, m, h or d, like @limit("20/h") or @limit("5/10m")')
        return text


_ANNOTATIONS = {
    "id": "name",
    "approve": "roles",
    "quorum": "number of people",
    "self_approval": "rule",
    "expires": "time",
    "mask": "arguments",
    "limit": "rate",
}


def length_seconds(text: str) -> float | None:
    """Return how long `90s`, `15m`, `12h` or `2d` is, in seconds; None when it is not written like that."""
    found = _LENGTH.fullmatch(text)
    return None if found is None else float(int(found[1]) * _UNIT_SECONDS[found[2]])
