"""The list of runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from .common import Json, RunsDir, app, show

if TYPE_CHECKING:
    from fl_privacy.ops.runs import Summary

COLUMNS = ("run", "federation", "route", "rounds", "status", "score", "size", "date")


@app.command()
def runs(runs_dir: RunsDir = Path("runs"), as_json: Json = False) -> None:
    """List the runs, newest first: federation, route, rounds, status, score, size and date."""
    from fl_privacy.ops.runs import summaries

    found = summaries(runs_dir)
    show({"runs": [asdict(one) for one in found]}, as_json, _table(found))


def _table(found: list[Summary]) -> Iterator[str]:
    if not found:
        yield "no runs; start one with fl-privacy up CONFIG"
        return
    rows = [COLUMNS, *map(_row, found)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _row(one: Summary) -> tuple[str, ...]:
    rounds = f"{one.round}" if one.rounds is None else f"{one.round}/{one.rounds}"
    score = next((f"{name} {value:.4f}" for name, value in one.score.items()), "")
    date = one.created[:16].replace("T", " ")
    return one.run, one.federation, one.route, rounds, one.status, score, f"{one.size / 1e6:.1f} MB", date
