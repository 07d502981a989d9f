"""How an exception is told: its text without values that it only quotes, and where it came from."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from pathlib import Path

from pydantic import ValidationError

import keepstep
import keepstep.runtime
import keepstep.store

_MESSAGE_CHARACTERS_MAX = 4000
# Where this package is installed; in a development tree its parts are folders beside each other.
_PACKAGE_FOLDERS = tuple(
    f"{Path(str(part.__file__)).parent}{os.sep}" for part in (keepstep, keepstep.runtime, keepstep.store)
)


def text_of(error: BaseException, mask: Callable[[str], str] = str) -> str:
    """Return an exception's text, bounded, and of a validation error without the values that it quotes.

    `mask` takes secrets out of it, before it is cut: half a secret would not be found.
    """
    if isinstance(error, ValidationError):
        problems = error.errors(include_url=False, include_context=False, include_input=False)
        text = "; ".join(f"{'.'.join(map(str, each['loc'])) or error.title}: {each['msg']}" for each in problems)
    else:
        try:
            text = str(error)
        except Exception:  # noqa: BLE001  a text that cannot be made must not hide the error
            text = "(its text could not be made)"
    return mask(text)[:_MESSAGE_CHARACTERS_MAX]


def place_of(error: BaseException) -> str:
    """Return where an exception was raised in code that is not Keepstep's: `agent.py:17 in assess`, else nothing."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(_PACKAGE_FOLDERS)]
    return f"{Path(own[-1].filename).name}:{own[-1].lineno} in {own[-1].name}" if own else ""
