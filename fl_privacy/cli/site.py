"""A site in the background: start it, stop it, see its status."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fl_privacy.errors import FederationError

from .common import Json, app, say, show

commands = typer.Typer(help="Run a site in the background on this machine.", no_args_is_help=True)
app.add_typer(commands, name="site")

KitPath = Annotated[Path, typer.Argument(help="The site's start kit.", show_default=False)]


@commands.command()
def start(kit: KitPath, as_json: Json = False) -> None:
    """Check the kit, start the site and wait until it is up."""
    from fl_privacy.deploy.kits import background
    from fl_privacy.deploy.kits.kit import Folder

    _tell(background.start(Folder.open(kit)), as_json)


@commands.command()
def stop(kit: KitPath, as_json: Json = False) -> None:
    """Stop the site and all its processes."""
    from fl_privacy.deploy.kits import background
    from fl_privacy.deploy.kits.kit import Folder

    _tell(background.stop(Folder.open(kit)), as_json)


@commands.command()
def status(kit: KitPath, as_json: Json = False) -> None:
    """Show whether the site is up, what it does and what it has spent; exit code 1 if it is not up."""
    from fl_privacy.deploy.kits import background
    from fl_privacy.deploy.kits.kit import Folder

    found = background.status(Folder.open(kit))
    _tell(found, as_json)
    if found["state"] != "up":
        raise typer.Exit(1)


@commands.command("accept-task")
def accept_task(
    kit: KitPath,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask: you have read the code.")] = False,
    as_json: Json = False,
) -> None:
    """Show the task's code and what changed since the last accepted version, and accept it to run at this site."""
    from fl_privacy.deploy.kits.kit import Folder
    from fl_privacy.tasks import accepted

    folder = Folder.open(kit)
    task = folder.federation.task
    if not task.is_own or not folder.role.has_node:
        raise FederationError(f"kit {kit}: has no task code to accept; nothing to do")
    if not as_json:
        say(accepted.changes(folder.federation, folder.state) or accepted.text_of(folder.federation))
        say(f"{task.label}: sha256 {task.sha256}")
    if not yes and (as_json or not typer.confirm("Run this code at this site, with access to its data?")):
        raise FederationError("task: not accepted; nothing was changed (use --yes once you have read the code)")
    accepted.accept(folder.federation, folder.state)
    show({"task": task.label, "sha256": task.sha256, "accepted": True}, as_json, ["accepted"])


def _tell(found: dict[str, object], as_json: bool) -> None:
    show(found, as_json, (f"{key:<12} {value}" for key, value in found.items() if value not in (None, "", {})))
