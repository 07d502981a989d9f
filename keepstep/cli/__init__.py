"""The `keepstep` command. Importing this loads nothing: each command imports what it needs, so that help is quick."""

from __future__ import annotations

import sys
from typing import NoReturn


def main() -> NoReturn:
    """Run the command line of this process and end it with the exit code."""
    from keepstep.cli.program import run

    sys.exit(run(sys.argv[1:]))
