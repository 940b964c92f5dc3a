"""Real machines: checks before a start."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from fl_privacy.config import Federation
from fl_privacy.errors import FederationError

from .common import Config, DataDir, Json, RunsDir, app, out


@app.command()
def preflight(
    config: Config,
    runs_dir: RunsDir = Path("runs"),
    data_dir: DataDir = None,
    listen: Annotated[list[str] | None, typer.Option(help="host:port that a role here will listen on.")] = None,
    keys: Annotated[Path | None, typer.Option(help="Folder with key.pem, cert.pem and ca.pem.")] = None,
    peer: Annotated[list[str] | None, typer.Option(help="host:port of a role to reach with --keys.")] = None,
    as_json: Json = False,
) -> None:
    """Check ports, certificates, disk, data and device, with a fix for each failure."""
    from fl_privacy.launch import preflight as checks

    if peer and keys is None:
        raise FederationError("peer: needs --keys, the folder whose certificate it is to be reached with")
    found = checks.run(Federation.load(config), runs_dir, data_dir, listen or [], keys, peer or [])
    if as_json:
        print(json.dumps({"ok": all(c.ok for c in found), "checks": [vars(c) for c in found]}))
    else:
        for check in found:
            mark = "[green]ok  [/]" if check.ok else "[red]FAIL[/]"
            out.print(
                f"{mark} {check.name:<12} {check.detail}" + (f"\n     fix: {check.fix}" if check.fix else ""),
                highlight=False,
            )
    if not all(check.ok for check in found):
        raise typer.Exit(2)
