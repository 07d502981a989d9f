"""The journal as an undo sees it: the effect that it undoes, and the undo itself, which stands beside it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from keepstep.errors import EffectPending, StepError
from keepstep.runtime.effects import EffectDeclaration, annotated_types, declaration_of, result_type, wants_key
from keepstep.runtime.journal import Call, Journal, Lookup, Recorded
from keepstep.runtime.secretbook import by_reference
from keepstep.store import effects as journal
from keepstep.store.effects import EffectKey
from keepstep.store.errortext import error_text
from keepstep.store.undoing import SUFFIX, Undoable


class UndoJournal(Journal):
    """The journal of one attempt to undo an effect: the rows are those of the effect's node run."""

    def check_course(self, *, before: str) -> None:  # noqa: ARG002  as in `Journal`
        """Raise what blocks the undo. Nothing else that the node run did is asked for again: its run has failed."""
        if self._blocked is not None:
            raise self._blocked

    # --- the effect -------------------------------------------------------------------------------------------------

    def begun(self, found: Undoable, function: Callable[..., Any], given: Mapping[str, Any]) -> Recorded | Lookup:
        """Return an effect of the failed run as it happened, or how to ask whether it did.

        Raises `EffectUnknown` when nobody but a person can tell.
        """
        call = self._call_of(found, found.call, declaration_of(function), function)
        call = replace(call, asking=_asking(call.declared, function, given, found.key))
        known = self._known().get(found.call)
        if known is None or known.state not in (journal.DONE, journal.INTENT):
            message = f"effect {found.key} is not what it was when its undo began"
            raise StepError(message)
        begun = self._begun(call)
        if isinstance(begun, Call):
            message = f"effect {found.name!r} ({found.key}) is declared idempotent now, and has no outcome"
            raise StepError(message)
        return begun

    def not_happened(self, lookup: Lookup) -> None:
        """Record that an effect has not happened, so that there is nothing to undo.

        Raises `EffectPending` while it still may.
        """
        left = lookup.found.seconds_left + lookup.call.declared.settling_seconds
        if left > 0:
            message = f"effect {lookup.found.name!r} has not happened and still may: asked again in {left:.0f} s"
            raise EffectPending(message, seconds=left)
        text = error_text({"code": "not_done", "message": "it had not happened when its run failed"})
        self._store.patiently(
            lambda: journal.finish(self._store, lookup.found.nonce, lookup.call.key, state=journal.FAILED, error=text)
        )

    # --- the undo ---------------------------------------------------------------------------------------------------

    def begin_undo(
        self, found: Undoable, undo: Callable[..., Any], named: Mapping[str, Any], asking: Mapping[str, Any]
    ) -> Recorded | Lookup | Call:
        """Record that an effect is about to be undone; what an earlier attempt left decides, as for any effect.

        `named` is what the undo is called with, `asking` what its lookup is. Every undo has an intent, so that a person
        can say what came of it; an idempotent one is called again.
        """
        declared = declaration_of(undo)
        call = self._call_of(found, f"{found.call}{SUFFIX}", replace(declared, idempotent=False), undo)
        call = replace(
            call,
            # A person who says that it is undone need not say what it returned.
            returns=None,
            arguments=self._codec.encode(
                by_reference({name: value for name, value in named.items() if name != "idempotency_key"}),
                path=f"${declared.name}",
            ),
            asking=((), asking),
        )
        known = self._known().get(call.key.call)
        is_again = known is not None and known.state == journal.INTENT and declared.idempotent
        return self._kept_under_way(call, lambda: self._intended(call) if is_again else self._begun(call))

    def _call_of(self, found: Undoable, id_: str, declared: EffectDeclaration, function: Callable[..., Any]) -> Call:
        codec = self._codec.including(*annotated_types(function))
        key = EffectKey(self._fence.thread_id, found.step, found.run, id_)
        # An undo is known by what it undoes; its function may take other arguments since the last attempt.
        return Call(key, declared, bytes(found.arguments_digest), codec, {}, returns=result_type(function))


def _asking(
    declared: EffectDeclaration, function: Callable[..., Any], given: Mapping[str, Any], key: str
) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """Return the arguments, positional and named, with which the outside is asked about an effect.

    By name where the lookup has these names, else in the order in which the effect takes them.
    """
    lookup = declared.lookup
    if lookup is None:
        return (), {}
    extra = {"idempotency_key": key} if wants_key(lookup) else {}
    names: list[str] = []
    with suppress(TypeError, ValueError):
        takes = inspect.signature(lookup).parameters
        takes_any = any(each.kind is each.VAR_KEYWORD for each in takes.values())
        if takes_any or all(name in takes for name in given):
            return (), {**given, **extra}
        names = [
            each.name for each in inspect.signature(function).parameters.values() if each.kind is not each.KEYWORD_ONLY
        ]
    positional = [given[name] for name in names if name in given]
    rest = {name: value for name, value in given.items() if name not in names and name != "*"}
    return (*positional, *given.get("*", ())), {**rest, **extra}
