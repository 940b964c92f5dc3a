"""Reading and verifying transcripts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from fl_privacy.errors import FederationError

from .common import Json, RunName, RunsDir, app, show as tell

commands = typer.Typer(help="Read and verify what a run recorded.", no_args_is_help=True)
app.add_typer(commands, name="transcript")


@commands.command()
def verify(
    run: RunName,
    runs_dir: RunsDir = Path("runs"),
    ca: Annotated[
        Path | None,
        typer.Option(help="The authority's certificate; default: .RUN.ca.pem or pki/ca.pem beside the run."),
    ] = None,
    head: Annotated[
        str | None, typer.Option(help="The head that `up` or `train` printed at the run's end.", show_default=False)
    ] = None,
    as_json: Json = False,
) -> None:
    """Check every digest, chain and signature of a run."""
    from fl_privacy.ops.runs import find
    from fl_privacy.transcript import verify as check

    path = find(run, runs_dir).resolve()
    report = check(path, _authority(path, ca), head and head.strip().lower())
    found = {"ok": report.ok, "findings": [vars(finding) for finding in report.findings]}
    tell(found, as_json, map(str, report.findings))
    if not report.ok:
        raise typer.Exit(1)


@commands.command()
def pin(
    run: RunName,
    keys: Annotated[Path, typer.Option(help="The server's folder of key.pem, cert.pem and ca.pem.")],
    runs_dir: RunsDir = Path("runs"),
    as_json: Json = False,
) -> None:
    """Sign the heads of views that were copied into a run after it ended."""
    from fl_privacy.identity.keyring import Keyring
    from fl_privacy.identity.pki import load_key
    from fl_privacy.ops.runs import find
    from fl_privacy.transcript.pin import pin as sign

    own = Keyring(keys)
    _, certificate, authority = own.read()
    done = sign(find(run, runs_dir).resolve(), load_key(own.key_file), certificate, authority)
    lines = [*(f"pinned {where}" for where in done.places), f"head   {done.head}"]
    tell({"pinned": done.places, "head": done.head}, as_json, lines)


@commands.command()
def evidence(
    run: RunName,
    runs_dir: RunsDir = Path("runs"),
    ca: Annotated[
        Path | None,
        typer.Option(help="The authority's certificate; default: .RUN.ca.pem or pki/ca.pem beside the run."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Judge again who tampered in void attempts of route mixes, from what sites and mixes signed."""
    from fl_privacy.config import Federation
    from fl_privacy.ops.runs import find
    from fl_privacy.routes.convicted import convicted
    from fl_privacy.transcript import open_run

    path = find(run, runs_dir).resolve()
    opened = open_run(path)
    found = convicted(opened, Federation.of(opened.manifest["config"], f"{path}: config"), _authority(path, ca))
    lines = [f"round {one.round}: {verdict}" for one in found for verdict in one.verdicts]
    told = [
        {"round": one.round, "attempt": one.attempt, "verdicts": [verdict._asdict() for verdict in one.verdicts]}
        for one in found
    ]
    tell({"void": told}, as_json, lines or ["no attempt was void"])


def _authority(path: Path, given: Path | None) -> bytes:
    """The certificate to verify a run with."""
    from fl_privacy.transcript.run import authority_of

    found = given or authority_of(path)
    if not found.exists():
        raise FederationError(f"ca: {found} not found; give the authority's certificate with --ca")
    return found.read_bytes()


@commands.command()
def show(run: RunName, runs_dir: RunsDir = Path("runs"), as_json: Json = False) -> None:
    """Show what a run recorded: status, metrics, and what each observer saw."""
    from fl_privacy.config.guarantee import stated
    from fl_privacy.ops.runs import find
    from fl_privacy.ops.view import score
    from fl_privacy.transcript import open_run
    from fl_privacy.transcript.run import changes_of

    opened = open_run(find(run, runs_dir))
    views: dict[str, dict[str, Any]] = {}
    for name in opened.observers:
        view = opened.view(name)
        arrays = view.round(view.rounds[-1]).arrays if view.rounds else {}
        views[name] = {"rounds": len(view.rounds), "arrays": {k: list(a.shape) for k, a in arrays.items()}}
    manifest, terms = opened.manifest, stated(opened.manifest, str(opened.path))
    lines = [f"{manifest['run']}: {manifest['status']}, made {manifest['created']}"]
    unstated = "guarantee: not stated (made by an older version)"
    lines += [f"  {line}" for line in ((unstated,) if terms is None else terms.lines())]
    lines += [f"  changed {line}" for line in changes_of(manifest, opened.path)]
    lines += [f"  round {row['round']:>3}  {score(row)}  loss {row['loss']:.4f}" for row in opened.metrics]
    for name, seen in views.items():
        shapes = ", ".join(f"{k} {tuple(shape)}" for k, shape in seen["arrays"].items()) or "no array"
        lines.append(f"  {name} saw {seen['rounds']} rounds: {shapes} each")
    facts = {key: manifest.get(key) for key in ("run", "status", "rounds", "digest", "changes", "guarantee")}
    tell({**facts, "views": views, "metrics": opened.metrics}, as_json, lines)
