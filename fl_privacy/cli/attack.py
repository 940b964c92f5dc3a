"""Replaying attacks on recorded runs, and whole audits."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from .common import INTERRUPTED, DataDir, Json, RunName, RunsDir, app, err, interrupt, out, say


@app.command()
def attack(
    run: RunName,
    names: Annotated[list[str] | None, typer.Argument(help="Attacks; default: all that can read the views.")] = None,
    observer: Annotated[
        str, typer.Option(help="Whose views are read, as A,B where they collude; default: all the attack can use.")
    ] = "",
    runs_dir: RunsDir = Path("runs"),
    data_dir: DataDir = None,
    seeds: Annotated[int, typer.Option(help="How often each attack is repeated, for its interval.")] = 3,
    as_json: Json = False,
) -> None:
    """Replay attacks on a recorded run; the scores are printed and kept in the run's folder `attacks`."""
    from attacks.common.replay import keep, replay
    from fl_privacy.ops.runs import find

    path = find(run, runs_dir)
    observers = [name.strip() for name in observer.split(",") if name.strip()]
    with err.status("reading the run") as status:
        found = replay(path, names or (), data_dir, seeds, status.update, observers)
    keep(path, found)
    if as_json:
        print(json.dumps({"run": path.name, "attacks": found}))
        return
    for name, scored in found.items():
        seen_by = ", ".join(scored["observers"])
        table = Table(title=f"{name} on {path.name}, seen by {seen_by}: mean of {seeds}, and what chance gives")
        for column in ("measure", "value", "+-", "chance", "by group"):
            table.add_column(column, justify="left" if column in ("measure", "by group") else "right")
        for measure, m in scored["measures"].items():
            groups = "  ".join(f"{group}: {value:.3f}" for group, value in m["groups"].items())
            half = "" if m["half_interval"] is None else f"{m['half_interval']:.3f}"
            table.add_row(measure, f"{m['value']:.3f}", half, f"{m['chance']:.3f}", groups)
        out.print(table)
        for line in (*scored.get("notes", ()), *(f"see {path / picture}" for picture in scored.get("pictures", ()))):
            say(line)


@app.command()
def audit(
    matrix: Annotated[Path, typer.Argument(help="The audit's YAML.", show_default=False)],
    out_dir: Annotated[
        Path | None, typer.Option("--out", help="Where results go; default: runs/audits/NAME.", show_default=False)
    ] = None,
    data_dir: DataDir = None,
    reduced: Annotated[bool, typer.Option("--reduced", help="The matrix's smaller audit.")] = False,
    size: Annotated[str, typer.Option(help="One of the matrix's other sizes.")] = "",
    most: Annotated[
        int | None, typer.Option(min=1, help="Stop after so many new runs; the same command continues.")
    ] = None,
    keep_runs: Annotated[bool, typer.Option("--keep-runs", help="Keep the transcripts of new runs.")] = False,
    as_json: Json = False,
) -> None:
    """Run and attack every cell of a matrix: tables, figures and one JSON. A second call runs only what is missing."""
    from attacks.audit import report, results
    from attacks.audit.matrix import load
    from attacks.audit.progress import Progress
    from attacks.audit.run import Store, check, execute

    checked = load(matrix, reduced, size)
    check(checked, data_dir)
    folder = out_dir or Path("runs") / "audits" / checked.name
    signal.signal(signal.SIGTERM, interrupt)
    progress, store = Progress(err if as_json else out), Store(folder / "cells")
    try:
        with progress:
            failures = execute(checked, store, folder, data_dir, keep_runs, progress, most)
    except KeyboardInterrupt:
        if progress.finished:
            report.write(folder, results.collect(checked, store, []))
        done = f"{progress.finished} of {progress.total} runs are done"
        print(f"{done}; the same command continues with the rest", file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from None
    found = results.collect(checked, store, failures)
    report.write(folder, found)
    if as_json:
        keys = ("name", "runs", "seconds", "failures", "unknown_measures", "tables")
        print(json.dumps({"out": str(folder), **{key: found[key] for key in keys}}))
    else:
        for line in found["unknown_measures"]:
            say(f"not measured   {line}")
        for path in ("report.md", "results.json", "figures"):
            say(f"see            {folder / path}")
    if failures:
        print(f"error: {len(failures)} runs failed; the same command tries them again", file=sys.stderr)
        raise typer.Exit(1)
