"""What makes a function a command: the options that every command has, and the session it is given.

The options of a deployment stand before or after the command's name, whichever comes to mind first; after it wins.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

from keepstep.cli.session import OutputClosed, Session

_F = TypeVar("_F", bound=Callable[..., None])

DEPLOYMENT = "Deployment"

Database = Annotated[
    str | None,
    typer.Option(
        "--database",
        metavar="URL",
        rich_help_panel=DEPLOYMENT,
        help="SQLAlchemy URL of the database. Else KEEPSTEP_DATABASE, else sqlite:///.keepstep/keepstep.db.",
    ),
]
Broker = Annotated[
    str | None,
    typer.Option(
        "--broker",
        metavar="URL",
        rich_help_panel=DEPLOYMENT,
        help="URL of the broker. Else KEEPSTEP_BROKER, else file://.keepstep/broker.",
    ),
]
Tenant = Annotated[
    str | None,
    typer.Option(
        "--tenant",
        metavar="NAME",
        rich_help_panel=DEPLOYMENT,
        help="The tenant whose threads are meant. Else KEEPSTEP_TENANT, else default.",
    ),
]
Json = Annotated[
    bool,
    typer.Option("--json", rich_help_panel="Output", help="Print one JSON document, for programs."),
]
_Confirm = Annotated[
    bool,
    typer.Option(
        "--confirm/--no-confirm",
        rich_help_panel="Output",
        help="Wait until a worker has accepted the command, or return when the broker has it.",
    ),
]
_ConfirmSeconds = Annotated[
    float,
    typer.Option(
        "--confirm-timeout",
        metavar="SECONDS",
        min=0.1,
        rich_help_panel="Output",
        help="How long to wait for the broker, and for a worker's word.",
    ),
]
CONFIRM_SECONDS = 10.0

app = typer.Typer(
    name="keepstep",
    rich_markup_mode="rich",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"]},
)


def command(
    name: str,
    *,
    panel: str,
    example: str,
    reads: bool = False,
    sends: bool = False,
    has_tenant: bool = True,
    has_json: bool = True,
    group: typer.Typer = app,
) -> Callable[[_F], _F]:
    """Make a command of a function `(session, *, …)`; its docstring is the help, `example` stands below it.

    `reads`: it needs the database. `sends`: it sends a message and takes a worker's word for it.
    """
    shared: list[inspect.Parameter] = []
    if reads:
        shared.append(_parameter("database", Database, None))
    if sends:
        shared.append(_parameter("broker", Broker, None))
    if has_tenant:
        shared.append(_parameter("tenant", Tenant, None))
    if sends:
        shared.append(_parameter("confirm", _Confirm, default=True))
        shared.append(_parameter("confirm_seconds", _ConfirmSeconds, CONFIRM_SECONDS))
    if has_json:
        shared.append(_parameter("as_json", Json, default=False))

    def decorate(function: _F) -> _F:
        hints = get_type_hints(function, include_extras=True)
        own = [
            parameter.replace(annotation=hints[parameter.name], kind=inspect.Parameter.KEYWORD_ONLY)
            for parameter in list(inspect.signature(function).parameters.values())[1:]
        ]
        context = _parameter("context", typer.Context, inspect.Parameter.empty)

        def run(*, context: typer.Context, **given: Any) -> None:
            options = {parameter.name: given.pop(parameter.name) for parameter in shared}
            session = (context.obj or Session()).refined(**options)
            try:
                function(session, **given)
                sys.stdout.flush()
            except BrokenPipeError as error:
                raise OutputClosed from error

        parameters = [context, *own, *shared]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # typer reads it
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        help_text = _unwrapped(function.__doc__ or "")
        group.command(
            name,
            rich_help_panel=panel,
            help=help_text,
            short_help=help_text.partition(". ")[0].partition("\n")[0].rstrip("."),
            epilog="\n\n".join(["[dim]Example:[/dim]", *(f"  {escape(line)}" for line in example.splitlines())]),
        )(run)
        EXAMPLES[name if group is app else f"{group.info.name} {name}"] = example
        return function

    return decorate


EXAMPLES: dict[str, str] = {}
"""Each command's example, for docs/cli.md."""


def escape(text: str) -> str:
    """Return `text` as it stands where Rich looks for markup."""
    return text.replace("[", r"\[")


def _unwrapped(docstring: str) -> str:
    """Return a docstring's paragraphs, one line each: the terminal wraps them."""
    paragraphs = inspect.cleandoc(docstring).split("\n\n")
    return escape("\n\n".join(" ".join(paragraph.split("\n")) for paragraph in paragraphs))


def _parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default)
