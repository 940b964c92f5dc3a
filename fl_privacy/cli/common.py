"""What all commands share: the program, consoles, common arguments."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console

from fl_privacy import __version__
from fl_privacy.visible import visible

INTERRUPTED = 130

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    suggest_commands=False,  # click suggests them already
    pretty_exceptions_enable=False,
)

out = Console()
err = Console(stderr=True)

Config = Annotated[Path, typer.Argument(help="The federation's YAML.", show_default=False)]
RunName = Annotated[str, typer.Argument(metavar="RUN", help="A run: its name or its folder.", show_default=False)]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]
RunsDir = Annotated[Path, typer.Option("--runs-dir", help="Where runs are kept.")]
Init = Annotated[
    Path | None, typer.Option("--init", help="Model to start from: .safetensors or .pt.", show_default=False)
]
DataDir = Annotated[
    Path | None, typer.Option("--data-dir", envvar="FL_PRIVACY_DATA", help="Data folder, for tasks that need one.")
]


def say(line: str, console: Console = out) -> None:
    """One line as it is: nothing in it is markup or controls the terminal, which is never too narrow for it.

    Lines quote files of runs that somebody else may have written.
    """
    console.print(visible(line), highlight=False, markup=False, soft_wrap=True)


def show(found: Any, as_json: bool, lines: Iterable[str]) -> None:
    """What was found, as JSON for machines or as lines for people."""
    if as_json:
        print(json.dumps(found), flush=True)
        return
    for line in lines:
        say(line)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"fl-privacy {__version__}")
        raise typer.Exit


@app.callback()
def program(
    version: Annotated[bool, typer.Option("--version", help="Print the version.", callback=_version, is_eager=True)] = (
        False
    ),
) -> None:
    """Private federated learning, and attacks that measure what leaks."""


def interrupt(*_: object) -> NoReturn:
    """As a handler of SIGTERM: a terminated command cleans up like an interrupted one."""
    raise KeyboardInterrupt
