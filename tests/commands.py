"""Commands as tests hand them to the runtime: what a sender need not say stands as the contract has it."""

from __future__ import annotations

from typing import Any

from keepstep.tasks.messages import MODELS


def defaults(verb: str, **own: Any) -> dict[str, Any]:
    """Return a command's fields that may be missing, with their defaults, and a test's own in their place."""
    fields = MODELS[verb].model_fields.items()
    return {name: field.default for name, field in fields if not field.is_required()} | own
