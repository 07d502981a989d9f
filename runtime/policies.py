"""Policies: which tool an agent may call with which arguments, who must approve it, what goes with it.

Policies are Cedar texts that an operator writes (docs/policies.md). What is not permitted is denied, and so is what a
policy could not be evaluated for: an error is never taken for a policy that does not match.
"""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import structlog

from keepstep.errors import PolicyError
from keepstep.runtime import policytexts, policyvalues
from keepstep.runtime.policytexts import Policy

log = structlog.get_logger("keepstep.step")

Risk = Literal["low", "medium", "high"]
Verdict = Literal["allow", "deny", "approve"]

_LOOK_SECONDS = 1.0
_ENTITIES_MAX = 1024
_NAMED_MAX = 3
_EVALUATING = re.compile(r"error while evaluating policy `policy([0-9]+)`: (.*)", re.DOTALL)


@dataclass(frozen=True)
class PolicyRequest:
    """A tool call that is about to be made. `arguments` are by name, as the tool's types have them."""

    tenant: str
    graph: str
    thread: str
    run: str
    node: str
    tool: str
    version: str
    risk: Risk
    scopes: tuple[str, ...]
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class Obligations:
    """What goes with a call that is allowed, or allowed once it is approved."""

    to: tuple[str, ...] = ()
    """The roles that may approve; empty: anybody."""
    quorum: int = 1
    """How many different people must approve."""
    self_approval: bool = True
    """Whether who started the run may be one of them."""
    expires_seconds: float | None = None
    """How long the approval stays open; None: for good."""
    mask: tuple[str, ...] = ()
    """The arguments that are not to be shown or kept in the open."""
    limits: tuple[tuple[str, str], ...] = ()
    """Rates (`20/h`), each with the id of the policy that sets it, under which calls are counted."""


@dataclass(frozen=True)
class PolicyDecision:
    """What the policies say of a call."""

    verdict: Verdict
    policies: tuple[str, ...] = ()
    """The ids of those that decided: all that permit, or all that forbid, or those that could not be evaluated."""
    obligations: Obligations = field(default_factory=Obligations)
    version: str = ""
    """The digest of the policies' texts; empty when none are configured."""
    reason: str = ""
    """For people. It names policies and arguments, never an argument's value."""


class Policies:
    """The policies of a deployment: `Policies.load(path)` once in a process, from then on one `decide` for each call.

    Changed files are taken in without a restart. Threads may share it, and a child process may go on with it.
    """

    def __init__(self, path: Path | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._clock = clock
        self._seen: object = None
        self._book: _Book | None = None
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._look_at = clock() + _LOOK_SECONDS
        if path is not None:
            self._seen = _fingerprint(path)
            self._book = _Book(path)

    @classmethod
    def load(cls, path: str | Path, *, clock: Callable[[], float] = time.monotonic) -> Policies:
        """Return the policies of a folder or file; of the empty text `NO_POLICIES`, which allow everything.

        Raises `PolicyError` naming file and line, or the extra that is not installed. `clock`: seconds that only grow.
        """
        return cls(Path(path).absolute(), clock) if str(path) else NO_POLICIES

    @property
    def version(self) -> str:
        """The digest of the policies' texts; empty when none are configured."""
        return self._book.version if self._book else ""

    @property
    def listed(self) -> tuple[Policy, ...]:
        """The policies in the order of their texts."""
        return self._book.policies if self._book else ()

    def decide(self, request: PolicyRequest) -> PolicyDecision:
        """Return what the policies say of a call. It never raises: what cannot be judged is denied, with the reason."""
        if self._path is not None and self._clock() >= self._look_at:
            self._look()
        book = self._book
        return _NOT_CONFIGURED if book is None else book.decide(request)

    def _look(self) -> None:
        """Take in what was changed; a version that is broken is told and left out, the one before it stays."""
        if self._process != os.getpid():  # a fork may have copied a lock that nobody here will ever release
            self._process, self._lock = os.getpid(), threading.Lock()
        if self._path is None or not self._lock.acquire(blocking=False):
            return  # another thread looks
        try:
            self._look_at = self._clock() + _LOOK_SECONDS
            seen = _fingerprint(self._path)
            if seen == self._seen:
                return
            self._seen = seen
            try:
                self._book = _Book(self._path)
            except PolicyError as error:
                log.warning("policies_kept_old", reason=error.message, version=self.version)
            else:
                log.info("policies_taken", policies=len(self.listed), version=self.version)
        finally:
            self._lock.release()


def _fingerprint(path: Path) -> object:
    """Return what differs when the files of policies differ."""
    try:
        stats = [(each.name, each.stat()) for each in policytexts.files(path)]
    except OSError as error:
        return error.errno
    return [(name, each.st_mtime_ns, each.st_size, each.st_ino) for name, each in stats]


class _Book:
    """One version of the policies, parsed."""

    def __init__(self, path: Path) -> None:
        texts = policytexts.read(path)
        self.policies = texts.policies
        self.version = texts.version
        # Cedar names policies by their place: policy0, policy1, …
        self._set = policytexts.cedar().PolicySet.from_str("\n".join(texts.statements))
        self._mask = _joined(each.mask for each in texts.policies)

    def decide(self, request: PolicyRequest) -> PolicyDecision:
        try:
            answer = self._ask(request)
        except policyvalues.Inexpressible as error:
            return self._denied((), f"the policies cannot judge the call: {error}")
        except ValueError as error:  # names that are no Unicode text, or a bug: in no case an allowed call
            log.warning("policies_not_asked", tool=request.tool, error=type(error).__name__)
            return self._denied((), "the policies could not be asked about the call")
        found = answer.diagnostics
        determining = [self.policies[place] for place in sorted(int(name[len("policy") :]) for name in found.reasons)]
        if found.errors:
            return self._failed(determining, found.errors)
        if not answer.allowed:
            who = f"{request.graph} to call {request.tool}"
            ids = tuple(each.id for each in determining)
            return self._denied(ids, f"forbidden by {_named(ids)}" if ids else f"no policy permits {who}")
        return self._permitted(determining)

    def _ask(self, request: PolicyRequest) -> Any:
        context = {
            "arguments": policyvalues.record(request.arguments),
            "tenant": request.tenant,
            "thread": request.thread,
            "node": request.node,
        }
        asked = {
            "principal": {"type": "Agent", "id": request.graph},
            "action": {"type": "Action", "id": "call"},
            "resource": {"type": "Tool", "id": request.tool},
            "context": json.dumps(context),
        }
        entities = _entities(
            request.graph, request.tenant, request.tool, request.version, request.risk, tuple(request.scopes)
        )
        return policytexts.cedar().is_authorized(asked, self._set, entities)

    def _permitted(self, permits: Sequence[Policy]) -> PolicyDecision:
        approving = [each for each in permits if each.approve is not None]
        expiries = [each.expires_seconds for each in approving if each.expires_seconds is not None]
        obligations = Obligations(
            to=_joined(each.approve or () for each in approving),
            quorum=max((each.quorum for each in approving), default=1),
            self_approval=all(each.self_approval for each in approving),
            expires_seconds=min(expiries, default=None),
            mask=_joined(each.mask for each in permits),
            limits=tuple((each.limit, each.id) for each in permits if each.limit is not None),
        )
        ids = tuple(each.id for each in permits)
        if not approving:
            return PolicyDecision("allow", ids, obligations, self.version, f"permitted by {_named(ids)}")
        whom = ", ".join(obligations.to) or "anybody"
        reason = f"{_named([each.id for each in approving])} asks for approval by {whom}"
        if obligations.quorum > 1:
            reason += f", {obligations.quorum} of them"
        if not obligations.self_approval:
            reason += ", not by who started the run"
        return PolicyDecision("approve", ids, obligations, self.version, reason)

    def _failed(self, determining: Sequence[Policy], errors: Sequence[str]) -> PolicyDecision:
        """Deny since policies could not be evaluated; one that forbids has decided all the same."""
        failed: dict[int, str] = {}
        for error in errors:
            found = _EVALUATING.fullmatch(error)
            if found is None:
                return self._denied((), "the policies could not be asked about the call")
            failed[int(found[1])] = _why(found[2])
        forbidding = tuple(each.id for each in determining if each.effect == "forbid")
        failures = [f"{self.policies[place].id} could not be evaluated: {failed[place]}" for place in sorted(failed)]
        more = len(failures) - _NAMED_MAX
        said = failures[:_NAMED_MAX] + ([f"and {more} more"] if more > 0 else [])
        if forbidding:
            said.insert(0, f"forbidden by {_named(forbidding)}")
        return self._denied(forbidding or tuple(self.policies[place].id for place in sorted(failed)), "; ".join(said))

    def _denied(self, policies: tuple[str, ...], reason: str) -> PolicyDecision:
        # Which permit would have applied is not known, so whatever any of them masks is masked.
        return PolicyDecision("deny", policies, Obligations(mask=self._mask), self.version, reason)


@lru_cache(maxsize=_ENTITIES_MAX)
def _entities(graph: str, tenant: str, tool: str, version: str, risk: str, scopes: tuple[str, ...]) -> Any:
    """Return the caller and the tool as Cedar has them: parsing them costs a third of a decision."""
    attributes = {"version": version, "risk": risk, "scopes": scopes}
    described = [
        {"uid": {"type": "Agent", "id": graph}, "attrs": {"tenant": tenant}, "parents": []},
        {"uid": {"type": "Tool", "id": tool}, "attrs": attributes, "parents": []},
    ]
    return policytexts.cedar().Entities.from_json_str(json.dumps(described))


def _joined(names: Iterable[Iterable[str]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for each in names for name in each))


def _named(ids: Sequence[str]) -> str:
    more = len(ids) - _NAMED_MAX
    return ", ".join(ids[:_NAMED_MAX]) + (f" and {more} more" if more > 0 else "")


# Cedar's messages quote what the arguments hold, which may be nobody's business: only what is known to quote the
# policy's own words is passed on.
_REASONS: tuple[tuple[re.Pattern[str], str], ...] = (
    (
        re.compile(r"record does not have the attribute `([^`]*)`.*", re.DOTALL),
        r"there is no \1 (ask whether there is one first: context.arguments has \1)",
    ),
    (
        re.compile(r"type error: expected ([^,]*), got \(entity of type `Number`\).*", re.DOTALL),
        r"it needs \1, and the number is none: a decimal has at most 4 places, and all numbers 64 bits",
    ),
    (re.compile(r"type error: (expected [^,]*, got [^,;\n]*).*", re.DOTALL), r"\1"),
    (re.compile(r".*does not (?:exist|have the attribute).*", re.DOTALL), "what it asks has no parts"),
    (re.compile(r"integer overflow.*", re.DOTALL), "a sum, difference or product is over 64 bits"),
    (re.compile(r"error while evaluating `(\w+)` extension function.*", re.DOTALL), r"\1(…) was given what is none"),
)


def _why(error: str) -> str:
    for pattern, said in _REASONS:
        found = pattern.fullmatch(error)
        if found is not None:
            return found.expand(said)
    return "Cedar gave up on it"


_NOT_CONFIGURED = PolicyDecision("allow", reason="no policies are configured")
NO_POLICIES = Policies(None)
"""Allows everything."""
