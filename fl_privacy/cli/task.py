"""Tasks of your own: a template, and a check outside any federation."""

from __future__ import annotations

import re
import sys
from contextlib import redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fl_privacy.errors import ConfigError

from .common import DataDir, Json, app, show

if TYPE_CHECKING:
    from fl_privacy.trial import Report

commands = typer.Typer(help="Write and check a task of your own.", no_args_is_help=True)
app.add_typer(commands, name="task")

TEMPLATE = Path(__file__).parent.parent / "tasks" / "template"


@commands.command()
def new(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the task and its folder.", show_default=False)],
    as_json: Json = False,
) -> None:
    """Write a commented template and a test for it into the folder NAME."""
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]{0,62}", name):
        raise ConfigError(f"name: {name!r} is not a valid name; use letters, digits, hyphens and underscores")
    folder = Path(name)
    if folder.exists():
        raise ConfigError(f"name: {folder} already exists; choose another name")
    folder.mkdir(parents=True)
    title = "".join(part.capitalize() for part in re.split("[-_]", name))
    for file in sorted(TEMPLATE.glob("*.template")):
        (folder / file.stem).write_text(file.read_text().replace("NAMETask", f"{title}Task").replace("NAME", name))
    lines = [f"wrote {folder}/task.py and {folder}/test_task.py", f"next           pytest {folder}"]
    show({"folder": str(folder)}, as_json, lines)


@commands.command()
def check(
    file: Annotated[Path, typer.Argument(help="The task's Python file, or a federation's YAML.", show_default=False)],
    data_dir: DataDir = None,
    site: Annotated[
        str, typer.Option(help="Whose records to read; default: the config's first site, or site-0 for a Python file.")
    ] = "",
    as_json: Json = False,
) -> None:
    """Train one round at one site, outside any federation; report shapes, time, memory and what looks wrong."""
    from fl_privacy.config import Federation
    from fl_privacy.trial import check as run

    if file.suffix in (".yaml", ".yml"):
        federation = Federation.load(file)
    else:
        name = site or "site-0"
        sites = [{"name": one} for one in (name, "other-1", "other-2")]
        federation = Federation.of({"sites": sites, "task": {"code": file.name}}, str(file), file.parent)
    with redirect_stdout(sys.stderr):  # what the task prints is no part of the report
        found = run(federation, site or federation.site_names[0], data_dir)
    show(asdict(found), as_json, _lines(found))


def _lines(found: Report) -> list[str]:
    kind = f"{found.classes} classes" if found.classes else "a number"
    scores = [" ".join(f"{name} {value}" for name, value in part.items()) for part in (found.before, found.after)]
    lines = [
        f"data           {found.records} training and {found.held_out} held-out records of shape {found.shape}, {kind}",
        f"model          {found.parameters:,} parameters",
        f"one epoch      {found.seconds_per_epoch:.2f} s, process at {found.megabytes:.0f} MB",
        f"held out       {scores[0]} before, {scores[1]} after one round"
        if found.held_out
        else "held out       nothing",
        f"dpsgd          {'not possible: ' + found.dpsgd if found.dpsgd else 'possible'}",
    ]
    if found.own:
        lines.insert(-1, "own measures   " + " ".join(f"{name} {_number(value)}" for name, value in found.own.items()))
    return lines + [f"warning        {warning}" for warning in found.warnings]


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4g}"
