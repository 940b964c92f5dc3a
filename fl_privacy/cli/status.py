"""The status of a run."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from .common import Json, RunName, RunsDir, app, show

if TYPE_CHECKING:
    from fl_privacy.ops.status import Status


@app.command()
def status(run: RunName, runs_dir: RunsDir = Path("runs"), as_json: Json = False) -> None:
    """Show a run's state, round, score, time left, failed attempts, processes and budgets."""
    from fl_privacy.ops.runs import find
    from fl_privacy.ops.status import read

    found = read(find(run, runs_dir))
    show(asdict(found), as_json, _lines(found))


def _lines(found: Status) -> list[str]:
    lines = [f"{found.run}: {found.state}" + (f" ({found.reason})" if found.reason else "")]
    place = f"round {found.round}" + ("" if found.rounds is None else f" of {found.rounds}")
    score = [f"{name} {value:.4f}" for name, value in found.score.items()]
    lines.append("  ".join((place, *score, f"{found.bytes / 1e6:.1f} MB received")))
    if found.seconds_a_round is not None:
        left = "" if found.seconds_left is None else f", about {_duration(found.seconds_left)} left"
        lines.append(f"{found.seconds_a_round:.2f} s per round{left}")
    if found.attempt is not None and found.attempt > 1:
        lines.append(f"the open round is at attempt {found.attempt}")
    for failed in found.failed_attempts[-10:]:
        lines.append(f"round {failed['round']}, attempt {failed['attempt']} failed: {failed['reason']}")
    for process in found.processes:
        how = f"{process.rss / 1e6:.0f} MB" if process.alive else "exited"
        lines.append(f"{process.name} (pid {process.pid}, {how})" + (f": {process.last}" if process.last else ""))
    for budget in found.budgets:
        left = "no limit" if budget.left is None else f"{budget.left:.3f} left"
        lines.append(f"ledger {budget.site}: epsilon {budget.spent:.3f} spent, {left}")
    return lines


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"
