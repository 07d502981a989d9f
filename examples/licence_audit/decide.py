"""A producer of its own: decides an approval by one message, knowing nothing but the broker.

KEEPSTEP_BROKER=file://… python -m examples.licence_audit.decide APPROVAL approve --by dana --accept certifi,pip
"""

from __future__ import annotations

import argparse
import sys
import time

from keepstep import Client
from keepstep.errors import KeepstepError

_CONFIRM_SECONDS = 20.0


def main() -> int:
    """Send the decision; return 0 when a worker has accepted it, 1 when it was refused or nobody answered."""
    parser = argparse.ArgumentParser(prog="python -m examples.licence_audit.decide", description=__doc__)
    parser.add_argument("approval", help="its id")
    parser.add_argument("verdict", choices=("approve", "reject"))
    parser.add_argument("--by", required=True, help="who decides")
    parser.add_argument("--accept", help="the packages that are accepted, comma-separated; without it those asked for")
    parser.add_argument("--comment")
    chosen = parser.parse_args()
    arguments = None if chosen.accept is None else {"accept": [name for name in chosen.accept.split(",") if name]}
    started = time.monotonic()
    try:
        with Client(timeout=_CONFIRM_SECONDS) as client:
            receipt = client.decide(
                chosen.approval, chosen.verdict, by=chosen.by, arguments=arguments, comment=chosen.comment
            )
            receipt.accepted(_CONFIRM_SECONDS)
    except KeepstepError as error:
        print(f"{error.code}: {error.message}", file=sys.stderr)
        return 1
    print(f"command {receipt.id} accepted in {1000 * (time.monotonic() - started):.0f} ms")
    return 0


if __name__ == "__main__":
    sys.exit(main())
