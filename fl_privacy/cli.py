"""`fl-privacy`: run federations, check them before, read their transcripts after."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.table import Table

from fl_privacy.config import Federation
from fl_privacy.errors import FederationError

app = typer.Typer(
    help="Private federated learning, and the proof that it is private.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
transcript_app = typer.Typer(help="Read and verify what a run recorded.", no_args_is_help=True)
app.add_typer(transcript_app, name="transcript")

INTERRUPTED = 130

out = Console()
err = Console(stderr=True)

Config = Annotated[Path, typer.Argument(help="The federation's YAML.", show_default=False)]
RunPath = Annotated[Path, typer.Argument(help="A run folder.", show_default=False)]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]
RunsDir = Annotated[Path, typer.Option("--runs-dir", help="Where runs are kept.")]
DataDir = Annotated[
    Path | None, typer.Option("--data-dir", envvar="FL_PRIVACY_DATA", help="Data folder, for tasks that need one.")
]


class Engine(StrEnum):
    local = "local"
    simulation = "simulation"


@app.command()
def up(
    config: Config,
    engine: Annotated[Engine, typer.Option(help="Where the sites run.")] = Engine.local,
    runs_dir: RunsDir = Path("runs"),
    data_dir: DataDir = None,
    resume: Annotated[str | None, typer.Option(help="Name of an interrupted run to go on with.")] = None,
    as_json: Json = False,
) -> None:
    """Run a federation: live progress, then where the run is."""
    from fl_privacy.launch.engine import up as start
    from fl_privacy.launch.view import View

    federation = Federation.load(config)
    # A terminated run cleans up like an interrupted one.
    signal.signal(signal.SIGTERM, lambda *_: _interrupt())
    with View(federation.rounds, federation.cohort, err if as_json else out) as view:
        result = start(federation, str(engine), runs_dir, data_dir, resume, view)
    if as_json:
        print(result.to_json(), flush=True)
    elif result.status == "completed":
        _print_result(result)
    if result.status != "completed":
        raise FederationError(f"run {result.run} failed: {result.reason} (logs: {result.path}/logs)")


def _interrupt() -> NoReturn:
    raise KeyboardInterrupt


def _print_result(result: Any) -> None:
    from fl_privacy.dp import gaussian
    from fl_privacy.launch.view import score

    path = os.path.relpath(result.path)
    for row in result.ledgers:
        left = "no limit" if row["epsilon"] >= gaussian.LARGEST_EPSILON else f"{row['remaining']:.3f} left"
        out.print(
            f"ledger {row['site']}: epsilon {row['spent']:.3f} spent in {row['charges']} rounds, {left}, "
            f"delta {row['delta']:g} (unit: {row['unit']}, adjacency: {row['adjacency']})",
            highlight=False,
            soft_wrap=True,
        )
    out.print(
        f"\nfinal {score(vars(result))} after {result.rounds} rounds in {result.seconds:.1f} s",
        highlight=False,
    )
    out.print(f"the run is in  {path}", highlight=False, soft_wrap=True)
    out.print(f"try next       {_program()} transcript verify {path}", highlight=False, soft_wrap=True)


def _program() -> str:
    """How this shell can call us: by name in an active environment, by path without one."""
    active = os.environ.get("VIRTUAL_ENV") == sys.prefix or sys.prefix == sys.base_prefix
    return "fl-privacy" if active else os.path.relpath(Path(sys.executable).with_name("fl-privacy"))


@app.command()
def plan(config: Config, as_json: Json = False) -> None:
    """What a round will cost each party: messages, parameters, bytes."""
    from fl_privacy.tasks.workload import layout_of
    from fl_privacy.theory import recombination
    from fl_privacy.theory.budget import tiers
    from fl_privacy.theory.cost import per_round

    federation = Federation.load(config)
    parameters = layout_of(federation).size
    costs, budgets = per_round(federation, parameters), tiers(federation)
    space = recombination.of(federation, parameters)
    if as_json:
        rows = [{**vars(c), "bytes_in": c.bytes_in, "bytes_out": c.bytes_out} for c in costs]
        found = {"parameters": parameters, "rounds": federation.rounds, "per_round": rows, "recombination_log10": space}
        print(json.dumps({**found, "budgets": [vars(b) for b in budgets]}))
        return
    table = Table(
        title=f"{federation.name}: {parameters:,} parameters, {federation.rounds} rounds; one round, each party"
    )
    for column in ("party", "how many", "messages", "parameters in", "parameters out", "MB in", "MB out"):
        table.add_column(column, justify="left" if column == "party" else "right")
    for c in costs:
        sizes = f"{c.parameters_in:,}", f"{c.parameters_out:,}", f"{c.bytes_in / 1e6:,.3f}", f"{c.bytes_out / 1e6:,.3f}"
        table.add_row(c.party, str(c.count), f"{c.messages:g}", *sizes)
    out.print(table)
    for b in budgets:
        text = f"epsilon {b.epsilon:g} a round, {b.composed:.3f} after {federation.rounds} rounds: {b.sites} sites"
        warning = "; only one site has it, so its label names it" if b.sites == 1 else ""
        out.print(f"{text}, noise {b.scale:.4g} a parameter (unit: {b.unit}){warning}", highlight=False, soft_wrap=True)
    if space is not None:
        text = f"an update mixed with {federation.floor - 1} others can be put together in 10^{space:,.0f} ways"
        out.print(f"{text}, which hides it only together with noise", highlight=False, soft_wrap=True)


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


@app.command()
def attack(
    run: RunPath,
    names: Annotated[list[str] | None, typer.Argument(help="Attacks; default: all there are.")] = None,
    data_dir: DataDir = None,
    seeds: Annotated[int, typer.Option(help="How often each attack is repeated, for its interval.")] = 3,
    as_json: Json = False,
) -> None:
    """Replay attacks on a recorded run; the scores are printed and kept in the run's folder `attacks`."""
    from attacks import ATTACKS, replay

    with err.status("reading the run") as status:
        found = replay(run, names or list(ATTACKS), data_dir, seeds, status.update)
    (run / "attacks").mkdir(exist_ok=True)
    for name, scored in found.items():
        (run / "attacks" / f"{name}.json").write_text(json.dumps(scored, indent=1) + "\n")
    if as_json:
        print(json.dumps({"run": run.name, "attacks": found}))
        return
    for name, scored in found.items():
        table = Table(title=f"{name} on {run.name}: mean of {seeds}, and what chance gives")
        for column in ("measure", "value", "+-", "chance", "by budget"):
            table.add_column(column, justify="left" if column in ("measure", "by budget") else "right")
        for measure, m in scored["measures"].items():
            groups = "  ".join(f"{group}: {value:.3f}" for group, value in m["groups"].items())
            half = "" if m["half_interval"] is None else f"{m['half_interval']:.3f}"
            chance = "" if m["chance"] is None else f"{m['chance']:.3f}"
            table.add_row(measure, f"{m['value']:.3f}", half, chance, groups)
        out.print(table)


@app.command()
def audit(
    matrix: Annotated[Path, typer.Argument(help="The audit's YAML.", show_default=False)],
    out_dir: Annotated[
        Path | None, typer.Option("--out", help="Where results go; default: runs/audits/NAME.", show_default=False)
    ] = None,
    data_dir: DataDir = None,
    reduced: Annotated[bool, typer.Option("--reduced", help="The matrix's smaller audit.")] = False,
    keep_runs: Annotated[bool, typer.Option("--keep-runs", help="Keep the transcripts of new runs.")] = False,
    as_json: Json = False,
) -> None:
    """Run and attack every cell of a matrix: tables, figures and one JSON. A second call goes on where one ended."""
    from attacks.audit import report, results
    from attacks.audit.matrix import load
    from attacks.audit.progress import Progress
    from attacks.audit.run import Store, check, execute

    checked = load(matrix, reduced)
    check(checked, data_dir)
    folder = out_dir or Path("runs") / "audits" / checked.name
    signal.signal(signal.SIGTERM, lambda *_: _interrupt())
    progress, store = Progress(err if as_json else out), Store(folder / "cells")
    try:
        with progress:
            failures = execute(checked, store, folder, data_dir, keep_runs, progress)
    except KeyboardInterrupt:
        if progress.finished:
            report.write(folder, results.collect(checked, store, []))
        done = f"{progress.finished} of {progress.total} runs are done"
        print(f"{done}; the same command goes on with the rest", file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from None
    found = results.collect(checked, store, failures)
    report.write(folder, found)
    if as_json:
        keys = ("name", "runs", "seconds", "failures", "unknown_measures", "tables")
        print(json.dumps({"out": str(folder), **{key: found[key] for key in keys}}))
    else:
        for line in found["unknown_measures"]:
            out.print(f"not measured   {line}", highlight=False, soft_wrap=True, markup=False)
        for path in ("report.md", "results.json", "figures"):
            out.print(f"see            {folder / path}", highlight=False, soft_wrap=True)
    if failures:
        print(f"error: {len(failures)} runs failed; the same command tries them again", file=sys.stderr)
        raise typer.Exit(1)


@transcript_app.command()
def verify(
    run: RunPath,
    ca: Annotated[
        Path | None, typer.Option(help="The authority's certificate; default: pki/ca.pem beside the run.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Check every digest, chain and signature of a run."""
    from fl_privacy.transcript import verify as check

    anchor = ca or run.resolve().parent / "pki" / "ca.pem"
    if not anchor.exists():
        raise FederationError(f"ca: {anchor} is not there; give the authority's certificate with --ca")
    report = check(run, anchor.read_bytes())
    if as_json:
        print(json.dumps({"ok": report.ok, "findings": [vars(finding) for finding in report.findings]}))
    else:
        for finding in report.findings:
            out.print(str(finding), highlight=False, soft_wrap=True, markup=False)
    if not report.ok:
        raise typer.Exit(1)


@transcript_app.command()
def show(run: RunPath, as_json: Json = False) -> None:
    """What a run recorded: status, metrics, and what each observer saw."""
    from fl_privacy.launch.view import score
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


def main() -> None:
    """Exit codes: 0 done, 1 a transcript does not verify or an audit has failures, 2 to be mended, 130 interrupted."""
    sys.exit(_guarded(lambda: app(standalone_mode=False)))


def _guarded(command: Callable[[], Any]) -> int:
    import click

    try:
        code = command()
    except (FederationError, click.ClickException) as error:
        text = error.format_message() if isinstance(error, click.ClickException) else str(error)
        print("error: " + " ".join(text.split()), file=sys.stderr)
        return 2
    except (KeyboardInterrupt, click.Abort):
        code = INTERRUPTED
    except OSError as error:
        print(f"error: {error.filename or 'system'}: {error.strerror or error}", file=sys.stderr)
        return 2
    if code == INTERRUPTED:
        print("interrupted; everything that was started has been stopped", file=sys.stderr)
    return code if isinstance(code, int) else 0
