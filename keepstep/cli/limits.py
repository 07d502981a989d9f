"""`keepstep limit`: how much of a graph or a tenant may run at once."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Literal

import typer

from keepstep.cli import values
from keepstep.cli.command import command
from keepstep.cli.control import By
from keepstep.cli.session import Session
from keepstep.errors import DatabaseUnavailable, InvalidInput
from keepstep.ids import checked_name

_NONE = "none"
_DIGITS_MAX = 10


@command(
    "limit",
    panel="Operate",
    reads=True,
    has_tenant=False,
    example="""\
keepstep limit
keepstep limit graph refunds 20
keepstep limit tenant acme none""",
)
def limit(
    session: Session,
    *,
    kind: Annotated[
        Literal["graph", "tenant"] | None,
        typer.Argument(metavar="graph|tenant", help="What the limit is of. Without arguments all limits are listed."),
    ] = None,
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="The graph's or the tenant's name.")] = None,
    most: Annotated[
        str | None,
        typer.Argument(metavar="MAX", help="How many steps and node runs may run at once; none takes the limit away."),
    ] = None,
    by: By = None,
) -> None:
    """Set or list limits on how many steps and node runs of a graph, or of a tenant, run at once over all workers.

    Workers heed it within a second; what runs already goes on. What waits under a limit holds no worker. A limit that
    is set here stands over the `running_max` of a graph's code.
    """
    from keepstep.store import limits, migrate, threads

    missing = session.missing_file()
    if missing is not None:
        message = f"there is no database yet at {missing}: a worker makes it, or: {session.hint('db upgrade')}"
        raise DatabaseUnavailable(message)
    with session.store() as store:
        migrate.check(store)
        if kind is None:
            _list(session, limits.all_limits(store), limits.taken(store))
            return
        if name is None or most is None:
            message = f"say which {kind} and how many: keepstep limit {kind} NAME MAX"
            raise InvalidInput(message)
        checked_name(kind, name)
        running_max = _count(most)
        with store.transaction() as transaction:
            limits.put(transaction, kind, name, running_max)
            detail = json.dumps({"kind": kind, "name": name, "running_max": running_max})
            threads.record_audit(
                transaction,
                tenant=session.settings.tenant,
                thread_id=None,
                actor=by or values.this_user(),
                action="limit",
                detail=detail,
            )
            carried = kind != "graph" or threads.version_carried(transaction, name) is not None
    if session.as_json:
        document = {"kind": kind, "name": name, "running_max": running_max}
        session.output.document(document | ({"carried": carried} if kind == "graph" else {}))
    elif running_max is None:
        session.output.line(f"{kind} {name}: no limit")
    else:
        session.output.line(f"{kind} {name}: at most {running_max} at once")
    if not carried and not session.as_json:
        session.output.line(f"no live worker carries a graph named {name!r}: is the name right?")


def _count(text: str) -> int | None:
    if text == _NONE:
        return None
    # The length first: Python refuses to read a number of thousands of digits.
    if not text.isdecimal() or len(text) > _DIGITS_MAX or not 1 <= int(text) <= 2**31 - 1:
        message = f"MAX: a whole number from 1 on, or {_NONE} (to stop a thread: keepstep pause)"
        raise InvalidInput(message)
    return int(text)


def _list(session: Session, found: Sequence[tuple[str, str, int]], taken: dict[str, int]) -> None:
    rows = [(kind, name, most, taken.get(f"{kind} {name}", 0)) for kind, name, most in found]
    if session.as_json:
        names = ("kind", "name", "running_max", "running")
        session.output.document([dict(zip(names, row, strict=True)) for row in rows])
    elif rows:
        session.output.table(("OF", "NAME", "MAX", "RUNNING"), [tuple(map(str, row)) for row in rows])
    else:
        session.output.line("no limits are set here; a graph's code may have a running_max of its own")
