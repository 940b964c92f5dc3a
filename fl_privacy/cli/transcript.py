"""Reading and verifying transcripts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from fl_privacy.errors import FederationError

from .common import Json, RunPath, app, out

commands = typer.Typer(help="Read and verify what a run recorded.", no_args_is_help=True)
app.add_typer(commands, name="transcript")


@commands.command()
def verify(
    run: RunPath,
    ca: Annotated[
        Path | None,
        typer.Option(help="The authority's certificate; default: .RUN.ca.pem or pki/ca.pem beside the run."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Check every digest, chain and signature of a run."""
    from fl_privacy.transcript import verify as check
    from fl_privacy.transcript.run import anchor

    run = run.resolve()
    own = anchor(run)  # for a run across machines or containers; runs of the local engine share one authority
    found = ca or (own if own.exists() else run.parent / "pki" / "ca.pem")
    if not found.exists():
        raise FederationError(f"ca: {found} not found; give the authority's certificate with --ca")
    report = check(run, found.read_bytes())
    if as_json:
        print(json.dumps({"ok": report.ok, "findings": [vars(finding) for finding in report.findings]}))
    else:
        for finding in report.findings:
            out.print(str(finding), highlight=False, soft_wrap=True, markup=False)
    if not report.ok:
        raise typer.Exit(1)


@commands.command()
def show(run: RunPath, as_json: Json = False) -> None:
    """Show what a run recorded: status, metrics, and what each observer saw."""
    from fl_privacy.ops.view import score
    from fl_privacy.transcript import open_run

    opened = open_run(run)
    views: dict[str, dict[str, Any]] = {}
    for name in opened.observers:
        view = opened.view(name)
        arrays = view.round(view.rounds[-1]).arrays if view.rounds else {}
        views[name] = {"rounds": len(view.rounds), "arrays": {k: list(a.shape) for k, a in arrays.items()}}
    manifest = opened.manifest
    if as_json:
        print(
            json.dumps(
                {"run": manifest["run"], "status": manifest["status"], "views": views, "metrics": opened.metrics}
            )
        )
        return
    out.print(f"{manifest['run']}: {manifest['status']}, made {manifest['created']}", highlight=False)
    for row in opened.metrics:
        out.print(f"  round {row['round']:>3}  {score(row)}  loss {row['loss']:.4f}", highlight=False)
    for name, seen in views.items():
        shapes = ", ".join(f"{k} {tuple(shape)}" for k, shape in seen["arrays"].items()) or "no array"
        out.print(f"  {name} saw {seen['rounds']} rounds: {shapes} each", highlight=False)
