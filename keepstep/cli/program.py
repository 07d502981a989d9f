"""The program: its commands put together, and how it ends.

Exit codes: 0 done, 1 the thing failed, 2 the call was wrong; 130 after Ctrl+C, 141 when whoever read the output left.
"""

from __future__ import annotations

import os
import re
import sys
import traceback
from collections.abc import Sequence
from io import TextIOWrapper
from typing import Annotated

import typer
from typer.main import get_command

from keepstep import __version__
from keepstep.cli import (
    approvals,
    control,
    doctor,
    effects,
    events,
    keys,
    limits,
    policy,
    questions,
    relay,
    schedules,
    schema,
    show,
    start,
    threads,
    worker,
)
from keepstep.cli.command import Broker, Database, Json, Tenant, app
from keepstep.cli.session import OutputClosed, Session
from keepstep.errors import InvalidInput, KeepstepError

__all__ = ["app", "run"]

EXIT_FAILED, EXIT_WRONG_CALL, EXIT_INTERRUPTED, EXIT_OUTPUT_CLOSED = 1, 2, 130, 141

# Imported for the commands that they define; help lists those in this order.
_COMMANDS = {
    worker: ["worker"],
    relay: ["relay"],
    start: ["start"],
    threads: ["threads", "history", "state"],
    show: ["show"],
    events: ["events"],
    effects: ["effects", "resolve"],
    questions: ["approvals"],
    approvals: ["approve", "reject", "answer", "request-changes", "delegate"],
    control: ["signal", "pause", "resume", "cancel", "retry"],
    limits: ["limit"],
    doctor: ["doctor"],
    keys: ["new-key"],
    schedules: [],
    policy: [],
    schema: [],
}
_ORDER = [name for names in _COMMANDS.values() for name in names]
app.registered_commands.sort(key=lambda each: _ORDER.index(each.name or ""))
# To the last `@`: a password with an `@` or a `/` in it, which should have been quoted, must not show either.
_PASSWORD = re.compile(r"(?<=://)([^/@\s:]*):\S*@")


def _print_version(wanted: bool) -> None:  # noqa: FBT001  typer's signature
    if wanted:
        typer.echo(f"keepstep {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    context: typer.Context,
    *,
    database: Database = None,
    broker: Broker = None,
    tenant: Tenant = None,
    as_json: Json = False,
    version: Annotated[  # noqa: ARG001  its callback does it
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Durable AI agents: run workers, start threads, see what they do, decide what they ask.

    Settings come from options, else KEEPSTEP_… in the environment, else keepstep.toml; the defaults need no server.
    """
    context.obj = Session(database=database, broker=broker, tenant=tenant, as_json=as_json)


def run(arguments: Sequence[str]) -> int:
    """Run a command line; return its exit code. Errors are one line on standard error, never a traceback of ours."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            # What a node stored may be no Unicode text; showing it must not fail.
            stream.reconfigure(errors="backslashreplace")
    as_json = "--json" in arguments
    try:
        code = get_command(app).main(args=list(arguments), prog_name="keepstep", standalone_mode=False)
    except KeepstepError as error:
        return _failed(error, as_json=as_json)
    except typer.TyperException as error:
        return _wrong_call(error, as_json=as_json)
    except OutputClosed:
        # Nobody reads; at exit the interpreter would complain about what is left in the buffer.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_OUTPUT_CLOSED
    except (KeyboardInterrupt, typer.Abort):
        return EXIT_INTERRUPTED
    except Exception as error:  # noqa: BLE001  the last resort: without frames' variables and without passwords
        return _unexpected(error, as_json=as_json)
    except SystemExit as error:  # of a help text that nobody reads to its end
        return error.code if isinstance(error.code, int) else EXIT_FAILED
    return code if isinstance(code, int) else 0


def _failed(error: KeepstepError, *, as_json: bool) -> int:
    from keepstep.cli.output import print_error

    print_error(error.code, _PASSWORD.sub(r"\1:***@", error.message), as_json=as_json)
    return EXIT_WRONG_CALL if isinstance(error, InvalidInput) else EXIT_FAILED


def _unexpected(error: Exception, *, as_json: bool) -> int:
    """Say where our own mistake is."""
    from keepstep.cli.output import console, print_error, visible

    frames = traceback.format_list(traceback.extract_tb(error.__traceback__)[-5:])
    console(to_errors=True).print(visible("".join(frames)), style="dim", end="", soft_wrap=True)
    text = _PASSWORD.sub(r"\1:***@", f"unexpected {type(error).__name__}: {error}")
    print_error("internal", text, as_json=as_json)
    return EXIT_FAILED


def _wrong_call(error: typer.TyperException, *, as_json: bool) -> int:
    from keepstep.cli.output import console, print_error

    if type(error).__name__ == "NoArgsIsHelpError":  # its message is the help, which has been printed
        return EXIT_WRONG_CALL
    text = getattr(error, "format_message", error.__str__)()
    print_error("usage", text, as_json=as_json)
    context = getattr(error, "ctx", None)
    if context is not None:
        console(to_errors=True).print(f"help: {context.command_path} --help", style="dim")
    return EXIT_WRONG_CALL
