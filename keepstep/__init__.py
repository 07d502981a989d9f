"""Keepstep: a durable runtime for AI agents on Celery and PostgreSQL.

The names below load on first use, so that a producer service which only sends messages imports neither SQLAlchemy nor
the runtime.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from keepstep.client import Client, Receipt
    from keepstep.errors import (
        AnswerLost,
        CallCancelled,
        CallDenied,
        CallRefused,
        CallRejected,
        CallTimeout,
        ChildFailed,
        RateLimited,
        SecretNotFound,
        ToolArguments,
        UnknownTool,
    )
    from keepstep.runtime.children import Child, ChildResult
    from keepstep.runtime.context import AsyncContext, Context
    from keepstep.runtime.effects import NOT_DONE, effect
    from keepstep.runtime.graph import END, START, Goto, Graph, Send
    from keepstep.runtime.models import ModelReply
    from keepstep.runtime.policy import Retry
    from keepstep.runtime.reader import Reader
    from keepstep.runtime.secrets import Secret
    from keepstep.runtime.state import add, append
    from keepstep.runtime.tools import Tool, tool
    from keepstep.runtime.waits import Decision, Signal

__version__ = "0.1.0"

_HOMES = {
    "Client": "keepstep.client",
    "Receipt": "keepstep.client",
    "Child": "keepstep.runtime.children",
    "AnswerLost": "keepstep.errors",
    "ChildFailed": "keepstep.errors",
    "ChildResult": "keepstep.runtime.children",
    "AsyncContext": "keepstep.runtime.context",
    "Context": "keepstep.runtime.context",
    "NOT_DONE": "keepstep.runtime.effects",
    "effect": "keepstep.runtime.effects",
    "END": "keepstep.runtime.graph",
    "START": "keepstep.runtime.graph",
    "Goto": "keepstep.runtime.graph",
    "Graph": "keepstep.runtime.graph",
    "Send": "keepstep.runtime.graph",
    "ModelReply": "keepstep.runtime.models",
    "Retry": "keepstep.runtime.policy",
    "RateLimited": "keepstep.errors",
    "Reader": "keepstep.runtime.reader",
    "Secret": "keepstep.runtime.secrets",
    "SecretNotFound": "keepstep.errors",
    "CallCancelled": "keepstep.errors",
    "CallDenied": "keepstep.errors",
    "CallRefused": "keepstep.errors",
    "CallRejected": "keepstep.errors",
    "CallTimeout": "keepstep.errors",
    "ToolArguments": "keepstep.errors",
    "UnknownTool": "keepstep.errors",
    "Tool": "keepstep.runtime.tools",
    "tool": "keepstep.runtime.tools",
    "add": "keepstep.runtime.state",
    "append": "keepstep.runtime.state",
    "Decision": "keepstep.runtime.waits",
    "Signal": "keepstep.runtime.waits",
}

__all__ = [
    "END",
    "NOT_DONE",
    "START",
    "AnswerLost",
    "AsyncContext",
    "CallCancelled",
    "CallDenied",
    "CallRefused",
    "CallRejected",
    "CallTimeout",
    "Child",
    "ChildFailed",
    "ChildResult",
    "Client",
    "Context",
    "Decision",
    "Goto",
    "Graph",
    "ModelReply",
    "RateLimited",
    "Reader",
    "Receipt",
    "Retry",
    "Secret",
    "SecretNotFound",
    "Send",
    "Signal",
    "Tool",
    "ToolArguments",
    "UnknownTool",
    "add",
    "append",
    "effect",
    "tool",
]


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        message = f"module 'keepstep' has no attribute {name!r}"
        raise AttributeError(message)
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
