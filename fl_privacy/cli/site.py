"""A site in the background: start it, stop it, see its status."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .common import Json, app, show

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


def _tell(found: dict[str, object], as_json: bool) -> None:
    show(found, as_json, (f"{key:<12} {value}" for key, value in found.items() if value not in (None, "", {})))
