"""Real machines: start kits, preflight checks, serving a role, a run across machines."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from fl_privacy.errors import FederationError

from .common import Config, DataDir, Init, Json, RunsDir, app, err, interrupt, out, show
from .run import print_result, resumable

if TYPE_CHECKING:
    from fl_privacy.deploy.engines.follow import Result

KitPath = Annotated[Path, typer.Argument(help="A start kit's folder.", show_default=False)]


@app.command()
def provision(
    config: Config,
    out_dir: Annotated[Path, typer.Option("--out", help="Folder for the kits, one subfolder each.")] = Path("kits"),
    pki: Annotated[
        Path | None, typer.Option(help="The authority's folder, or just its ca.pem, which kits get.")
    ] = None,
    sign: Annotated[bool, typer.Option("--sign", help="Make and sign all keys here, for trials.")] = False,
    services: Annotated[bool, typer.Option("--compose", help="Address roles by their compose services.")] = False,
    data: Annotated[Path | None, typer.Option(help="Data folder to set in the kits.")] = None,
    runs: Annotated[Path, typer.Option(help="Where the server's kit keeps runs.")] = Path("runs"),
    as_json: Json = False,
) -> None:
    """Write one start kit per party of a federation; existing kits keep their keys and state."""
    from fl_privacy.config import Federation
    from fl_privacy.deploy.engines import compose
    from fl_privacy.deploy.kits import kit_files
    from fl_privacy.deploy.kits.kit import Folder
    from fl_privacy.deploy.kits.provision import Choices, provision as write
    from fl_privacy.identity.anchor import Anchor
    from fl_privacy.identity.pki import Authority
    from fl_privacy.routes.base import check_engine

    federation = Federation.load(config)
    check_engine(federation.route, "kits")
    wanted = None
    if services:
        federation, wanted = compose.addressed(federation), compose.mounted(federation, out_dir)
    authority = None if pki is None else Authority.open(pki) if sign else Anchor.read(pki)
    choices = Choices(data=data, runs=runs, named_data=sign and not services)
    made = write(federation, out_dir, authority, sign, choices, wanted)
    kept = [str(file) for path in made for file in kit_files.kept(Folder.open(path))]
    lines = [f"{len(made)} kits are in {out_dir}; each has a README.md for its machine", *_kept(kept)]
    lines += [] if sign else ["next           in each kit: fl-privacy pki request KIT"]
    show({"federation": federation.name, "kits": [str(path) for path in made], "kept": kept}, as_json, lines)


def _kept(files: list[str]) -> list[str]:
    return [f"kept           {file}: edited by hand; delete it to have it written again" for file in files]


@app.command()
def refresh(kit: KitPath, as_json: Json = False) -> None:
    """Write a kit's compose file and systemd unit again after a change in kit.yaml; files edited by hand are kept."""
    from fl_privacy.deploy.kits import kit_files
    from fl_privacy.deploy.kits.kit import Folder

    folder = Folder.open(kit)
    try:
        kit_files.write(folder)
    except OSError as error:
        why = f"{error.filename}: {error.strerror}"
        raise FederationError(f"kit {kit}: {why}; make it writable or free space") from None
    kept = [str(file) for file in kit_files.kept(folder)]
    lines = _kept(kept) or [f"compose.yml and the unit in {kit} match kit.yaml"]
    show({"kit": str(folder.path), "kept": kept}, as_json, lines)


@app.command()
def preflight(
    target: Annotated[Path, typer.Argument(help="The federation's YAML, or a kit's folder.", show_default=False)],
    runs_dir: RunsDir = Path("runs"),
    data_dir: DataDir = None,
    listen: Annotated[list[str] | None, typer.Option(help="host:port that a role will listen on here.")] = None,
    keys: Annotated[Path | None, typer.Option(help="Folder with key.pem, cert.pem and ca.pem.")] = None,
    peer: Annotated[list[str] | None, typer.Option(help="host:port of a role to connect to with --keys.")] = None,
    as_json: Json = False,
) -> None:
    """Check names, clock, ports, certificates, disk, data and device; each failure comes with a fix."""
    from fl_privacy.deploy.preflight import checks as checks

    if target.is_dir():
        from fl_privacy.deploy.kits.kit import Folder
        from fl_privacy.deploy.preflight.of_kit import run as check_kit

        if listen or keys or peer:
            raise FederationError("listen, keys, peer: are already in the kit; leave them out")
        found = check_kit(Folder.open(target))
    else:
        from fl_privacy.config import Federation

        if peer and keys is None:
            raise FederationError("peer: needs --keys, the folder with the certificate to connect with")
        found = checks.run(Federation.load(target), runs_dir, data_dir, listen or [], keys, peer or [])
    show({"ok": all(c.ok for c in found), "checks": [vars(c) for c in found]}, as_json, ())
    for check in () if as_json else found:
        mark = "[red]FAIL[/]" if not check.ok else "[yellow]WARN[/]" if check.fix else "[green]ok  [/]"
        fix = "" if not check.fix else f"; {check.fix}" if check.ok else f"\n     fix: {check.fix}"
        detail = check.detail.replace("\n", "\n     ")
        out.print(f"{mark} {check.name:<12} {escape(detail + fix)}", highlight=False, soft_wrap=True)
    if not all(check.ok for check in found):
        raise typer.Exit(2)


@app.command()
def serve(
    kit: KitPath,
    until: Annotated[Path | None, typer.Option(help="Stop when this file exists.", show_default=False)] = None,
    device: Annotated[str | None, typer.Option(help="A site's device, instead of the kit's.")] = None,
    trial: Annotated[
        bool, typer.Option("--trial", help="You run all sites yourself, on this machine: they need no policy.")
    ] = False,
) -> None:
    """Run a kit's role in the foreground until SIGTERM."""
    from fl_privacy.deploy.kits.kit import Folder
    from fl_privacy.deploy.kits.serve import serve as run

    folder = Folder.open(kit, device, trial)
    if folder.role.starts_runs:
        raise FederationError(f"kit {kit}: belongs to the server; start runs with fl-privacy train {kit}")
    run(folder, until)


@app.command()
def train(
    kit: KitPath,
    fresh: Annotated[bool, typer.Option("--new", help="Start a new run even if one is unfinished.")] = False,
    run: Annotated[str | None, typer.Option(help="Name of a new run; default: federation and time.")] = None,
    init: Init = None,
    copy_to: Annotated[Path | None, typer.Option(help="Folder for a copy of the run.", show_default=False)] = None,
    done: Annotated[Path | None, typer.Option(help="File to write when the command ends.", show_default=False)] = None,
    as_json: Json = False,
) -> None:
    """Run a federation across machines from the server's kit; resumes an interrupted run."""
    from fl_privacy.deploy.kits.kit import Folder
    from fl_privacy.deploy.kits.train import train as start
    from fl_privacy.deploy.running import progress

    signal.signal(signal.SIGTERM, interrupt)
    try:
        folder = Folder.open(kit)
        with resumable(), progress(folder.federation, err if as_json else out) as view:
            result = start(folder, fresh, run, view, init)
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
        why = f"{target} is full, or user {os.getuid()} may not write to it"
        print(f"{why}; to copy the run out of the container:", flush=True)
        print(f"  docker compose cp server:{result.path} runs/", flush=True)
        print(f"  docker compose cp server:{anchor(Path(result.path))} runs/", flush=True)
