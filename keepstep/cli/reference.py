"""docs/cli.md, made from the commands themselves: `python -m keepstep.cli.reference > docs/cli.md`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from typer.main import get_command

from keepstep.cli.command import CONFIRM_SECONDS, EXAMPLES
from keepstep.cli.program import app

_INTRODUCTION = f"""# The command line

<!-- Made by `python -m keepstep.cli.reference` from keepstep/cli, which is the authority. Do not edit. -->

`keepstep COMMAND --help` shows each of these in the terminal; `python -m keepstep` is the same program.

## What all commands have in common

**Settings** come from the options `--database`, `--broker` and `--tenant` (before or after the command's name), else
from `KEEPSTEP_DATABASE`, `KEEPSTEP_BROKER`, `KEEPSTEP_TENANT` and the like in the environment, else from
`keepstep.toml` in the working folder. The defaults need no server: SQLite and a file broker in `.keepstep/`.

**Commands that send** (`start`, `approve`, `reject`, `answer`, `signal`, `pause`, `resume`, `cancel`, `retry`,
`state --set`, `schedule add` and the like) need the broker only. They return when a worker has accepted the message,
which means that its row is committed; after `--confirm-timeout` seconds ({CONFIRM_SECONDS:g} unless given) they fail
with `not_confirmed`, and the message stays in the queue. `--no-confirm` returns as soon as the broker has it. Where the
database can be reached, too, they say more: `approve`, `reject` and `answer` take the beginning of an id, `start` says
when its run has to wait for another, `retry` refuses what would stop at the same step limit, `state --set` shows the
values that it replaces and replaces no others. **Commands that look** need the database only.

**Values of `start` and `state --set`** (`key=value`) are sent as they are written, and the graph's state makes numbers,
dates and true or false of them: `amount=12.50` is the decimal 12.50, `zip=0081` a text where the state has a text. A
value that begins with `[`, `{{` or `"`, or is `null`, is JSON; `--input` and `--input-file` are JSON throughout.

**Output** is for people unless `--json` is given: then standard output is one JSON document and nothing else. Times in
it are ISO 8601 in UTC. What JSON cannot carry exactly is tagged, so that nothing is rounded:
`{{"$": "int", "v": "9007199254740993"}}`, `{{"$": "decimal", "v": "12.50"}}`, `{{"$": "Invoice", "v": {{…}}}}`.
Tables that are piped are neither cut nor coloured.

**Errors** are one line on standard error, `error: …`. With `--json` the document says it too:
`{{"error": {{"code": "not_found", "message": "…"}}}}`, with the codes of `keepstep.errors`, and `usage` for a call that
names no such command or option. No password of a URL is ever printed.

**Exit codes**

| code | meaning |
|---|---|
| 0 | done |
| 1 | the thing failed: something cannot be reached, no worker confirmed, the run that was waited for is not done |
| 2 | the call was wrong: no such thing, input that does not fit, a conflict; nothing was changed |
| 130 | Ctrl+C; a worker has let its running steps finish (SIGTERM does the same, with 0) |
| 141 | whoever read the output went away |
"""


def markdown() -> str:
    """Return docs/cli.md."""
    root = get_command(app)
    parts = [_INTRODUCTION, _options_table("Options of `keepstep` itself", root)]
    for path, command in _commands(root, "keepstep"):
        parts.append("\n".join(_described(path, command)))
    return "\n".join(parts)


def _commands(group: Any, path: str) -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        below = f"{path} {name}"
        if hasattr(command, "commands"):
            yield from _commands(command, below)
        else:
            yield below, command


def _described(path: str, command: Any) -> Iterator[str]:
    yield f"## {path}\n"
    yield f"{_plain(command.help)}\n"
    usage = " ".join([path, "[OPTIONS]", *(_usage(each) for each in _arguments(command))])
    yield f"```\n{usage}\n```\n"
    arguments = _arguments(command)
    if arguments:
        yield "| argument | meaning |\n|---|---|"
        for each in arguments:
            yield f"| `{_cell(each.metavar)}` | {_cell(_plain(each.help))} |"
        yield ""
    yield _options_table(None, command)
    yield f"Example:\n\n```console\n{_prompted(EXAMPLES[path.removeprefix('keepstep ')])}\n```\n"


def _arguments(command: Any) -> list[Any]:
    return [each for each in command.params if each.param_type_name == "argument"]


def _usage(argument: Any) -> str:
    name = f"{argument.metavar}..." if argument.nargs == -1 else str(argument.metavar)
    return name if argument.required else f"[{name}]"


def _options_table(title: str | None, command: Any) -> str:
    lines = [] if title is None else [f"## {title}\n"]
    lines += ["| option | meaning |", "|---|---|"]
    for each in command.params:
        if each.param_type_name == "option" and "--help" not in each.opts:
            lines.append(f"| {_names(each)} | {_cell(_meaning(each))} |")
    return "\n".join(lines) + "\n"


def _names(option: Any) -> str:
    value = "" if option.is_flag else f" {option.metavar}"
    names = sorted([*option.opts, *option.secondary_opts], key=lambda name: name.startswith("--"), reverse=True)
    return ", ".join(f"`{_cell(name + (value if name == names[0] else ''))}`" for name in names)


def _meaning(option: Any) -> str:
    default = getattr(option.default, "value", option.default)
    if default in (None, False, True) or callable(default):
        return _plain(option.help)
    return f"{_plain(option.help)} Default: `{default}`."


def _plain(text: str | None) -> str:
    return (text or "").replace(r"\[", "[")


def _cell(text: str) -> str:
    return text.replace("|", r"\|")


def _prompted(example: str) -> str:
    return "\n".join(f"$ {line}" for line in example.splitlines())


if __name__ == "__main__":
    sys.stdout.write(markdown())
