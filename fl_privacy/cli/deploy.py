"""Real machines: start kits, checks before a start, a role in the foreground, a run across machines."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fl_privacy.errors import FederationError

from .common import Config, DataDir, Json, RunsDir, app, interrupt, out
from .run import print_result, progress

if TYPE_CHECKING:
    from fl_privacy.deploy.engines.follow import Result

KitPath = Annotated[Path, typer.Argument(help="A start kit's folder.", show_default=False)]


@app.command()
def provision(
    config: Config,
    out_dir: Annotated[Path, typer.Option("--out", help="Where the kits go, one folder each.")] = Path("kits"),
    pki: Annotated[Path | None, typer.Option(help="The authority's folder; kits get its certificate.")] = None,
    sign: Annotated[bool, typer.Option("--sign", help="Make and sign all keys here, for trials.")] = False,
    services: Annotated[
        bool, typer.Option("--compose", help="Roles are dialled by the names that docker-compose.yml gives them.")
    ] = False,
    data: Annotated[Path | None, typer.Option(help="Data folder to write into the kits.")] = None,
    runs: Annotated[Path, typer.Option(help="Where the server's kit keeps runs.")] = Path("runs"),
    as_json: Json = False,
) -> None:
    """Write one start kit for every role of a federation; kits that are there keep their keys and state."""
    from fl_privacy.config import Federation
    from fl_privacy.deploy.engines import compose
    from fl_privacy.deploy.kits import kit_files
    from fl_privacy.deploy.kits.kit import Folder
    from fl_privacy.deploy.kits.provision import Choices
    from fl_privacy.deploy.kits.provision import provision as write
    from fl_privacy.identity.pki import Authority

    federation = Federation.load(config)
    wanted = None
    if services:
        federation, wanted = compose.addressed(federation), compose.mounted(federation, out_dir)
    authority = Authority.open(pki) if pki else None
    made = write(federation, out_dir, authority, sign, Choices(data=data, runs=runs), wanted)
    kept = [str(file) for path in made for file in kit_files.kept(Folder.open(path))]
    if as_json:
        print(json.dumps({"federation": federation.name, "kits": [str(path) for path in made], "kept": kept}))
        return
    out.print(f"{len(made)} kits are in {out_dir}; each has a README.md for its machine", highlight=False)
    _tell_kept(kept)
    if not sign:
        out.print("next           in each kit: fl-privacy pki request KIT", highlight=False)


def _tell_kept(files: list[str]) -> None:
    for file in files:
        text = f"kept           {file}: was changed by hand; delete it to have it written anew"
        out.print(text, highlight=False, soft_wrap=True, markup=False)


@app.command()
def refresh(kit: KitPath, as_json: Json = False) -> None:
    """Write a kit's compose file and systemd unit anew, after a change in kit.yaml; those changed by hand are kept."""
    from fl_privacy.deploy.kits import kit_files
    from fl_privacy.deploy.kits.kit import Folder

    folder = Folder.open(kit)
    try:
        kit_files.write(folder)
    except OSError as error:
        raise FederationError(
            f"kit {kit}: {error.filename}: {error.strerror}; make it writable, or make room"
        ) from None
    kept = [str(file) for file in kit_files.kept(folder)]
    if as_json:
        print(json.dumps({"kit": str(folder.path), "kept": kept}))
        return
    _tell_kept(kept)
    if not kept:
        out.print(f"compose.yml and the unit in {kit} are as kit.yaml says", highlight=False, soft_wrap=True)


@app.command()
def preflight(
    target: Annotated[Path, typer.Argument(help="The federation's YAML, or a kit's folder.", show_default=False)],
    runs_dir: RunsDir = Path("runs"),
    data_dir: DataDir = None,
    listen: Annotated[list[str] | None, typer.Option(help="host:port that a role here will listen on.")] = None,
    keys: Annotated[Path | None, typer.Option(help="Folder with key.pem, cert.pem and ca.pem.")] = None,
    peer: Annotated[list[str] | None, typer.Option(help="host:port of a role to reach with --keys.")] = None,
    as_json: Json = False,
) -> None:
    """Check names, clock, ports, certificates, disk, data and device, with a fix for each failure."""
    from fl_privacy.deploy.preflight import checks as checks

    if target.is_dir():
        from fl_privacy.deploy.kits.kit import Folder
        from fl_privacy.deploy.preflight.of_kit import run as check_kit

        if listen or keys or peer:
            raise FederationError("listen, keys, peer: are in the kit already; leave them out")
        found = check_kit(Folder.open(target))
    else:
        from fl_privacy.config import Federation

        if peer and keys is None:
            raise FederationError("peer: needs --keys, the folder whose certificate it is to be reached with")
        found = checks.run(Federation.load(target), runs_dir, data_dir, listen or [], keys, peer or [])
    if as_json:
        print(json.dumps({"ok": all(c.ok for c in found), "checks": [vars(c) for c in found]}))
    else:
        for check in found:
            mark = "[green]ok  [/]" if check.ok else "[red]FAIL[/]"
            fix = f"\n     fix: {check.fix}" if check.fix else ""
            out.print(f"{mark} {check.name:<12} {check.detail}{fix}", highlight=False, soft_wrap=True)
    if not all(check.ok for check in found):
        raise typer.Exit(2)


@app.command()
def serve(
    kit: KitPath,
    until: Annotated[Path | None, typer.Option(help="End when this file is there.", show_default=False)] = None,
    device: Annotated[str | None, typer.Option(help="A site's device, in place of the kit's.")] = None,
) -> None:
    """Run a kit's role here, in the foreground, until SIGTERM: SuperLink, shuffler, aggregator, evaluator or site."""
    from fl_privacy.deploy.kits.kit import Folder
    from fl_privacy.deploy.kits.serve import serve as run

    folder = Folder.open(kit, device)
    if folder.role.starts_runs:
        raise FederationError(f"kit {kit}: is the server's; runs are started with fl-privacy train {kit}")
    run(folder, until)


@app.command()
def train(
    kit: KitPath,
    anew: Annotated[bool, typer.Option("--new", help="Leave an unfinished run and start another.")] = False,
    run: Annotated[str | None, typer.Option(help="Name of a new run; default: by federation and time.")] = None,
    copy_to: Annotated[Path | None, typer.Option(help="Folder for a copy of the run.", show_default=False)] = None,
    done: Annotated[Path | None, typer.Option(help="File to write when all is over.", show_default=False)] = None,
    as_json: Json = False,
) -> None:
    """Run a federation across machines, from the server's kit; goes on with a run that was broken off."""
    from fl_privacy.deploy.kits.kit import Folder
    from fl_privacy.deploy.kits.train import train as start

    signal.signal(signal.SIGTERM, interrupt)
    try:
        folder = Folder.open(kit)
        with progress(folder.federation, as_json) as view:
            result = start(folder, anew, run, view)
        if as_json:
            print(result.to_json(), flush=True)
        elif result.status == "completed":
            print_result(result)
        if copy_to is not None:
            _copy(result, copy_to)
    finally:
        if done is not None:
            done.write_text("over\n")
    if result.status != "completed":
        raise FederationError(f"run {result.run} failed: {result.reason} (logs: {result.path}/logs)")


def _copy(result: Result, target: Path) -> None:
    from fl_privacy.deploy.kits.train import export
    from fl_privacy.transcript.run import anchor

    if export(result, target):
        print(f"and a copy in  {target}/{result.run}", flush=True)
    else:
        why = f"{target} is full, or not for user {os.getuid()} to write"
        print(f"{why}; to take the run out of the container:", flush=True)
        print(f"  docker compose cp server:{result.path} runs/", flush=True)
        print(f"  docker compose cp server:{anchor(Path(result.path))} runs/", flush=True)
