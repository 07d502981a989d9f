"""`python -m keepstep` is the `keepstep` command."""

from __future__ import annotations

from keepstep.cli import main

if __name__ == "__main__":
    main()
