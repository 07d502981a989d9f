"""Errors as the database's text columns hold them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def error_text(error: Mapping[str, Any]) -> str:
    r"""Return an error, {code, message, …}, as the database's text columns hold it.

    JSON with everything outside ASCII escaped: a NUL, which PostgreSQL refuses in text, stands as `\u0000`, and half a
    surrogate pair as `\ud83d`.
    """
    return json.dumps(error, ensure_ascii=True, default=str)
