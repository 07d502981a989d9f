"""The gateway: the one way out for tools. Read `Gateway.call` from the top.

Arguments are checked, policies asked, people asked when policies say so; then the tool gets its secrets and waits for
its turn, and what it does is journaled and audited. Every line may be the last one of an attempt: the next attempt
comes the same way again, and finds in the journal and among the waits what is done and said already.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from keepstep.errors import (
    CallCancelled,
    CallDenied,
    CallRefused,
    CallRejected,
    EffectConflict,
    EffectGivenUp,
    NodeTimeout,
    PolicyError,
    PutOff,
    StaleLease,
    ThreadBlocked,
    ToolArguments,
    Unavailable,
    UnknownTool,
)
from keepstep.runtime.faults import text_of
from keepstep.runtime.journal import Call, Journal, may_have_happened
from keepstep.runtime.performing import ASKED, Doing, Procedure, once
from keepstep.runtime.place import Place
from keepstep.runtime.policies import Policies, PolicyRequest
from keepstep.runtime.policy import NO_RETRY, Retry
from keepstep.runtime.rates import Rate, Rates
from keepstep.runtime.rulings import ALLOW, APPROVE, DENY, FAILED, REJECTED, Hearing, Ruling, shown
from keepstep.runtime.secretbook import SecretBook, taken
from keepstep.runtime.secrets import Secret
from keepstep.runtime.throttling import retry_after
from keepstep.runtime.toolarguments import Arguments
from keepstep.runtime.tools import Phase, Tool
from keepstep.runtime.waits import Decision, Question, WaitBook
from keepstep.store import effects as stored
from keepstep.store.effects import EffectState

MASKED = "(masked)"
"""Stands for an argument that policies mask, in what people see and edit."""
REFUSED_CALLS_MAX = 20
"""So often a call that the outside refuses as one too many is made before the node gets the error."""
_ROUNDS_MAX = 10
_POLICIES_SECONDS = 10.0
_FINISHING = Retry()
# What ends an attempt, or says what a person did: none of it is a failure of the call.
_NOT_OF_THE_CALL = (ThreadBlocked, PutOff, StaleLease, Unavailable, NodeTimeout, EffectGivenUp, EffectConflict)


@dataclass(frozen=True, slots=True)
class _Admitted:
    """A call that may be made: with these arguments, under this ruling, as these people said."""

    arguments: dict[str, Any]
    ruling: Ruling
    decision: Decision | None = None
    asked: Mapping[str, Any] | None = None
    """The arguments that people were asked about, when they edited them."""


class _Failed(Exception):
    """A call has failed for good, by the error that it is raised from."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error


@dataclass(frozen=True, slots=True)
class Gateway:
    """The way out of one attempt of a node run."""

    place: Place
    journal: Journal
    waits: WaitBook
    secrets: SecretBook
    rates: Rates
    policies: Callable[[], Policies]
    """Raises `PolicyError` while they cannot be read."""
    tools: Mapping[str, Tool[..., Any]]
    """Those of the node's graph, by name."""
    retry_in_place_seconds_max: float

    def call(self, named: Tool[..., Any] | str, given: object, key: str | None) -> Procedure[Any]:
        """Call a tool once, however often the node runs; return its result.

        Raises what `Context.call` says.
        """
        tool = self.tool(named)
        arguments = tool.arguments.checked(given)
        with self._heard(tool, arguments, key) as hearing:
            yield ASKED
            ruling, is_fresh = self._first_ruling(tool, hearing, arguments)
            if tool.prepare_phase is not None:
                return (yield from self._in_two_phases(tool, tool.prepare_phase, hearing, ruling, arguments))
            admitted = self._admitted(tool, hearing, ruling, arguments, is_fresh=is_fresh)
            try:
                return (yield from self._executed(tool, hearing, admitted))
            except _Failed as failed:
                raise failed.error from failed.error.__cause__

    def _in_two_phases(
        self, tool: Tool[..., Any], prepare: Phase, hearing: Hearing, ruling: Ruling, arguments: dict[str, Any]
    ) -> Procedure[Any]:
        """Prepare, ask, execute, commit; or cancel what was prepared."""
        returned = yield from self._prepared(tool, prepare, hearing, arguments)
        prepared = arguments
        try:
            prepared = _fitting(tool, returned, arguments)
            admitted = self._admitted(tool, hearing, ruling, prepared, is_fresh=False)
        except (CallRefused, CallCancelled):
            yield from self._finished(tool, tool.cancel_phase, hearing, prepared)
            raise
        except ToolArguments as error:
            yield from self._cancelled(tool, hearing, ruling, prepared, error)
        try:
            result = yield from self._executed(tool, hearing, admitted)
        except _Failed as failed:
            yield from self._cancelled(tool, hearing, ruling, prepared, failed.error)
        outcome = {"result": result} if tool.commit_phase is not None and "result" in tool.commit_phase.takes else {}
        yield from self._finished(tool, tool.commit_phase, hearing, {**admitted.arguments, **outcome})
        return result

    def _cancelled(
        self, tool: Tool[..., Any], hearing: Hearing, ruling: Ruling, prepared: dict[str, Any], error: Exception
    ) -> Procedure[NoReturn]:
        """Cancel what was prepared, for good; nothing is cancelled of what was executed, or may have been."""
        if self._is_settled(hearing.call):
            raise error from error.__cause__
        reason = text_of(error, self.journal.masker.text)
        if ruling.verdict != FAILED:
            # Written down first: what is cancelled is not executed any more, whatever fits or works by then.
            hearing.add(replace(ruling, verdict=FAILED, reason=reason), "call_cancelled")
        yield from self._finished(tool, tool.cancel_phase, hearing, prepared)
        raise _cancelled(tool, reason) from error

    # --- 1. which tool, which call ---

    def tool(self, named: Tool[..., Any] | str) -> Tool[..., Any]:
        """Return a tool, or that of the graph's which has the name; raise `UnknownTool` naming those it has."""
        if isinstance(named, Tool):
            return named
        found = self.tools.get(named) if isinstance(named, str) else None
        if found is None:
            known = ", ".join(self.tools) or "none: give Graph(…, tools=[…])"
            message = f"the graph has no tool {named!r:.80} (known: {known})"
            raise UnknownTool(message)
        return found

    @contextlib.contextmanager
    def _heard(self, tool: Tool[..., Any], arguments: dict[str, Any], key: str | None) -> Iterator[Hearing]:
        call = self.journal.identify(tool.execution, (), arguments, key)
        try:
            yield Hearing(self.journal, tool, call, self.place.thread)
        finally:
            self.journal.release(call)

    # --- 2. policies ---

    def _first_ruling(self, tool: Tool[..., Any], hearing: Hearing, arguments: dict[str, Any]) -> tuple[Ruling, bool]:
        """Return the first ruling, and whether it is of this moment; raise `CallDenied` when it denies."""
        ruling = hearing.next()
        if ruling is not None:
            is_fresh = False
        elif self._is_settled(hearing.call) or self._is_prepared(tool, hearing):
            ruling, is_fresh = Ruling(ALLOW), False  # nothing was asked of it
        else:
            ruling, is_fresh = self._ruled(tool, arguments), True
            # That a call may simply be made is not kept: it is made now, or judged again.
            if ruling.verdict != ALLOW or ruling.mask or (ruling.version and tool.prepare_phase is not None):
                self._record(hearing, ruling)
        if ruling.verdict == DENY:
            raise _denied(tool, ruling)
        return ruling, is_fresh

    def _ruled(self, tool: Tool[..., Any], arguments: dict[str, Any]) -> Ruling:
        place = self.place
        try:
            policies = self.policies()
        except PolicyError as error:
            message = f"tool {tool.name!r} is not called while the policies cannot be read: {error.message}"
            self.journal.put_off(message, _POLICIES_SECONDS)
        decision = policies.decide(
            PolicyRequest(
                tenant=place.tenant,
                graph=place.agent,
                thread=place.thread,
                run=place.run,
                node=place.node,
                tool=tool.name,
                version=tool.version,
                risk=tool.risk,
                scopes=tool.scopes,
                arguments=arguments,
            )
        )
        return Ruling.of(decision, tool)

    def _record(self, hearing: Hearing, ruling: Ruling) -> None:
        hearing.add(ruling, "call_denied" if ruling.verdict == DENY else None)

    def _is_prepared(self, tool: Tool[..., Any], hearing: Hearing) -> bool:
        phase = tool.prepare_phase
        return phase is not None and self.journal.state(f"{phase.declared.name}:{hearing.suffix}") is not None

    def _is_settled(self, call: Call) -> bool:
        """Tell whether a call was made, or may have been: nobody is asked about it any more."""
        known = self.journal.state_of(call)
        return known is not None and (known.state != stored.FAILED or may_have_happened(known))

    # --- 3. people ---

    def _admitted(
        self, tool: Tool[..., Any], hearing: Hearing, ruling: Ruling, arguments: dict[str, Any], *, is_fresh: bool
    ) -> _Admitted:
        """Return a call as it may be made, when all that the policies ask for is given; they are asked once more then.

        Raises `CallDenied`, `CallRejected`, `CallCancelled`; `Parked` while people have not decided.
        """
        _check_open(tool, ruling)
        approved: list[Ruling] = []
        admitted = _Admitted(arguments, ruling)
        for _ in range(_ROUNDS_MAX):
            if ruling.verdict == APPROVE and not any(each.covers(ruling) for each in approved):
                ended = hearing.ahead()
                if ended is not None and ended.verdict == FAILED:  # before anybody was asked
                    raise _cancelled(tool, ended.reason)
                before = admitted
                admitted = self._approved(tool, hearing, ruling, before.arguments)
                # Who approved something else has not approved this.
                approved = [ruling] if admitted.asked is not None else [*approved, ruling]
                if before.asked is not None:  # edited before, and approved as it was then: edited all the same
                    admitted = replace(admitted, asked=before.asked)
                is_fresh = False
            following = hearing.next()
            if following is None:
                if is_fresh or self._is_settled(hearing.call):
                    return admitted
                following = self._ruled(tool, admitted.arguments)
                if following.verdict == ALLOW and approved and not any(map(following.is_of_version, approved)):
                    following = approved[-1].once_more(following)  # what was approved is another version
                is_enough = any(each.covers(following) for each in approved)
                if following.verdict == ALLOW or (following.verdict == APPROVE and is_enough):
                    return replace(admitted, ruling=following)
                self._record(hearing, following)
            _check_open(tool, following)
            ruling, is_fresh = following, False
        message = f"tool {tool.name!r}: every approval of this call was edited into one that needs another"
        raise CallDenied(message, reason=message)

    def _approved(self, tool: Tool[..., Any], hearing: Hearing, ruling: Ruling, arguments: dict[str, Any]) -> _Admitted:
        digest = self.journal.amended(hearing.call, tool.execution, arguments).digest.hex()
        mask = tuple(name for name in ruling.mask if name in arguments)
        seen = shown(arguments, mask, MASKED)
        question = Question(
            "approve",
            f"Call {tool.name}?",
            seen,
            context={
                "tool": tool.name,
                "version": ruling.tool_version,
                "risk": tool.risk,
                "scopes": list(tool.scopes),
                "policies": list(ruling.policies),
                "reason": ruling.reason,
                "digest": digest,
            },
            to=ruling.to,
            quorum=ruling.quorum,
            self_approval=ruling.self_approval,
            expires=ruling.expires_seconds,
            schema=_editable(tool.arguments, mask),
            bound={
                "tool": tool.name,
                # Not the tool's by now: another version gets a ruling of its own, unless the call was made.
                "version": ruling.tool_version,
                "call": hearing.call.key.call,
                "arguments": digest,
                # Whom it was asked of is part of the answer: a ruling that asks others gets one of its own.
                "ruling": hearing.number,
            },
        )
        decision = self.waits.decide(question)
        said = {"approval": decision.approval, "by": decision.by}
        if not decision.approved:
            verdict = decision.verdict if decision.verdict in ("expired", "request_changes") else "reject"
            detail = {**said, "verdict": verdict, "arguments": digest}
            hearing.add(replace(ruling, verdict=REJECTED), "call_rejected", detail)
            raise _rejected(tool, decision, verdict)
        if decision.arguments is seen:
            return _Admitted(arguments, ruling, decision)
        edited = {
            name: arguments[name] if name in mask and value == MASKED else value
            for name, value in decision.arguments.items()
        }
        try:
            return _Admitted(tool.arguments.checked(edited), ruling, decision, arguments)
        except ToolArguments as error:
            message = f"{decision.by} approved arguments of their own, and {error.message}"
            raise ToolArguments(message) from None

    # --- 4. to 8. secrets, rate, call, journal, audit ---

    def _executed(self, tool: Tool[..., Any], hearing: Hearing, admitted: _Admitted) -> Procedure[Any]:
        call, ruling, decision = hearing.call, admitted.ruling, admitted.decision
        if admitted.asked is not None or tool.prepare_phase is not None:
            call = self.journal.amended(call, tool.execution, admitted.arguments)
        detail: dict[str, Any] = {"arguments": call.digest.hex(), "edited": admitted.asked is not None}
        if decision is not None:
            detail |= {"approval": decision.approval, "by": decision.by}
        if admitted.asked is not None:
            detail["asked"] = shown(admitted.asked, ruling.mask, MASKED)
            detail["ran"] = shown(admitted.arguments, ruling.mask, MASKED)
        call = _kept_masked(hearing, tool.execution, call, admitted.arguments)
        call = replace(call, audit=hearing.audit("call", hearing.key, ruling, detail))
        limits = [(tool.name, tool.rate), *((f"{tool.name}/{name}", Rate.parse(text)) for text, name in ruling.limits)]
        return (
            yield from self._performed(
                tool, tool.execution, call, admitted.arguments, retry=tool.retry or NO_RETRY, limits=limits
            )
        )

    def _prepared(
        self, tool: Tool[..., Any], prepare: Phase, hearing: Hearing, arguments: dict[str, Any]
    ) -> Procedure[Any]:
        try:
            return (yield from self._handled(tool, prepare, hearing, arguments, tool.retry or NO_RETRY))
        except _Failed as failed:
            raise failed.error from failed.error.__cause__

    def _finished(
        self, tool: Tool[..., Any], phase: Phase | None, hearing: Hearing, arguments: dict[str, Any]
    ) -> Procedure[None]:
        """Commit or cancel, where the tool does: tried again until it is done, or the node gets its error."""
        if phase is None:
            return
        known = self.journal.state(f"{phase.declared.name}:{hearing.suffix}")
        if known is not None and known.state == stored.DONE:
            # Done is done, also when a later release reads what was prepared in another way.
            self.journal.release(self.journal.identify(phase, (), arguments, hearing.suffix))
            return
        try:
            yield from self._handled(tool, phase, hearing, arguments, tool.retry or _FINISHING)
        except _Failed as failed:
            raise failed.error from failed.error.__cause__

    def _handled(
        self, tool: Tool[..., Any], phase: Phase, hearing: Hearing, arguments: dict[str, Any], retry: Retry
    ) -> Procedure[Any]:
        """Call one of the functions around the execution: an effect of its own, in the place of the call."""
        call = self.journal.identify(phase, (), arguments, hearing.suffix)
        call = _kept_masked(hearing, phase, call, arguments)
        try:
            return (yield from self._performed(tool, phase, call, arguments, retry=retry, limits=[(tool.name, None)]))
        finally:
            self.journal.release(call)

    def _performed(
        self,
        tool: Tool[..., Any],
        phase: Phase,
        call: Call,
        arguments: Mapping[str, Any],
        *,
        retry: Retry,
        limits: Sequence[tuple[str, Rate | None]],
    ) -> Procedure[Any]:
        """Call a function of the tool, or return its recorded result; raise `_Failed` when it failed for good."""
        if self._is_recorded(call):
            return (yield from once(self.journal, self.journal.open(call), Doing(phase.function)))
        secrets = self._secrets(tool)
        if secrets:  # which the journal did not know when it took the arguments
            call.codec.encode(dict(arguments), path=f"${call.declared.name}")
        doing = Doing(phase.function, (), dict(arguments), tool.timeout_seconds)
        known = self.journal.state_of(call)
        is_begun = known is not None and known.state == stored.INTENT
        begin = self.journal.open
        while True:
            if not is_begun:  # what was begun has had its turn
                self._wait_for_turn(tool, limits)
            before = self.journal.state_of(call)
            try:
                return (yield from _with_secrets(once(self.journal, begin(call), doing), secrets))
            except _NOT_OF_THE_CALL:
                raise
            except Exception as error:  # noqa: BLE001  a tool may raise anything
                time.sleep(self._seconds_until_again(tool, call, before, error, retry))
            is_begun, begin = False, self.journal.reopen

    def _is_recorded(self, call: Call) -> bool:
        known = self.journal.state_of(call)
        return known is not None and known.state in (stored.DONE, stored.GIVEN_UP)

    def _secrets(self, tool: Tool[..., Any]) -> dict[str, Secret]:
        return {name: self.secrets.resolve(ref) for name, ref in tool.secrets.items()}

    def _wait_for_turn(self, tool: Tool[..., Any], limits: Sequence[tuple[str, Rate | None]]) -> None:
        for name, rate in limits:
            seconds = self.rates.take(self.place.tenant, name, rate)
            if seconds > 0:
                of = "" if rate is None else f" over {rate}"
                message = f"tool {tool.name!r} is not to be called{of} now: called in {seconds:.0f} s"
                self.journal.put_off(message, seconds)

    def _seconds_until_again(
        self, tool: Tool[..., Any], call: Call, before: EffectState | None, error: Exception, retry: Retry
    ) -> float:
        """Return how long to wait before a call that failed is made again.

        Raises `_Failed` when it is not made again, `PutOff` when it is and not soon.
        """
        known = self.journal.state_of(call)
        if known is None or known is before or known.state != stored.FAILED:
            raise error  # nothing was called, or what came of it could not be recorded: that is no failure of the call
        seconds = retry_after(error, known.calls)
        if seconds is not None:
            self.rates.hold_off(self.place.tenant, tool.name, seconds)
            if known.calls >= REFUSED_CALLS_MAX:
                raise _Failed(error) from error
            self.journal.put_off(f"tool {tool.name!r} was called too often: called again in {seconds:.0f} s", seconds)
        if not retry.allows(error, known.calls):
            raise _Failed(error) from error
        seconds = retry.wait(known.calls, random.random)
        if seconds > self.retry_in_place_seconds_max:
            reason = f"{type(error).__name__}: {text_of(error, self.journal.masker.text)[:300]}"
            message = f"tool {tool.name!r} failed ({known.calls} of {retry.attempts} calls: {reason})"
            self.journal.put_off(f"{message}: called again in {seconds:.0f} s", seconds)
        return seconds


def _fitting(tool: Tool[..., Any], returned: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments as `prepare` returned them; raise `ToolArguments` when they are not the tool's."""
    if returned is None:
        return arguments
    try:
        return tool.arguments.checked(returned)
    except ToolArguments as error:
        message = f"what {tool.name}.prepare returned is not what is to be executed: {error.message}"
        raise ToolArguments(message) from None


def _with_secrets(procedure: Procedure[Any], secrets: Mapping[str, Secret]) -> Procedure[Any]:
    """Hand on what a procedure asks for, with those of the secrets that each function takes."""
    with contextlib.closing(procedure):
        try:
            doing = next(procedure)
            while True:
                try:
                    result = yield replace(doing, named={**doing.named, **taken(doing.function, secrets)})
                except Exception as error:  # noqa: BLE001  the procedure decides what becomes of it
                    doing = procedure.throw(error)
                else:
                    doing = procedure.send(result)
        except StopIteration as end:
            return end.value


def _kept_masked(hearing: Hearing, phase: Phase, call: Call, arguments: Mapping[str, Any]) -> Call:
    """Return a call whose arguments are kept as people may see them, unless an undo will need them as they were."""
    if not hearing.mask or call.arguments is None or phase.declared.undo_name is not None:
        return call
    return replace(call, arguments=call.codec.encode(shown(arguments, hearing.mask, MASKED)))


def _editable(arguments: Arguments, mask: Sequence[str]) -> dict[str, Any]:
    """Return the schema of what approvers may make of the arguments; what they cannot see may stay as it is."""
    schema = arguments.json_schema
    return {**schema, "properties": {**schema.get("properties", {}), **{name: {} for name in mask}}}


def _check_open(tool: Tool[..., Any], ruling: Ruling) -> None:
    """Raise what an earlier attempt has ended the call with."""
    if ruling.verdict == DENY:
        raise _denied(tool, ruling)
    if ruling.verdict == FAILED:
        raise _cancelled(tool, ruling.reason)


def _denied(tool: Tool[..., Any], ruling: Ruling) -> CallDenied:
    message = f"tool {tool.name!r} was not called: {ruling.reason or 'the policies forbid it'}"
    return CallDenied(message, policies=ruling.policies, reason=ruling.reason)


def _rejected(tool: Tool[..., Any], decision: Decision, verdict: str) -> CallRejected:
    if verdict == "expired":
        message = f"tool {tool.name!r} was not called: nobody approved it in time"
    else:
        why = f": {decision.comment}" if decision.comment else ""
        did = "asks for changes" if verdict == "request_changes" else "rejected it"
        message = f"tool {tool.name!r} was not called: {decision.by} {did}{why}"
    return CallRejected(message, verdict=verdict, by=decision.by, comment=decision.comment)


def _cancelled(tool: Tool[..., Any], reason: str) -> CallCancelled:
    message = f"the call of tool {tool.name!r} failed and what it had prepared is cancelled: {reason}"
    return CallCancelled(message, reason=reason)
