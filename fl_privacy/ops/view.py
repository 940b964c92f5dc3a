"""The live terminal view of a run: round, phase, sites answered, accuracy, bytes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from fl_privacy.ops.tail import Tail


def score(row: Mapping[str, Any]) -> str:
    """The score of a round's model: accuracy, or the RMSE of a forecast, if it was evaluated."""
    shown = [f"{name} {row[name]:.4f}" for name in ("accuracy", "rmse") if row.get(name) is not None]
    return shown[0] if shown else "not evaluated"


class State:
    """What the server's log, and the log of the first middleware if it is on this machine, say so far."""

    def __init__(self, rounds: int, cohort: int) -> None:
        self.rounds, self.cohort = rounds, cohort
        self.round, self.phase, self.answered, self.bytes = 0, "starting", 0, 0
        self.score = ""
        self.history: list[dict[str, Any]] = []
        self.notes: list[str] = []

    def supervising(self, event: dict[str, Any]) -> None:
        """An event of whoever restarts the processes of a run."""
        match event["event"]:
            case "fell":
                reason = f": {event['reason']}" if event.get("reason") else ""
                self.notes.append(f"{event['process']} exited{reason}; restarting it in {event['again_in']:g} s")
            case "submitted":
                self.notes.append(f"the run continues after round {event['after']}")

    def collecting(self, event: dict[str, Any]) -> None:
        """An event of the middleware."""
        if event["event"] == "accepted":
            self.answered, self.phase = int(event["count"]), "collecting"

    def take(self, event: dict[str, Any]) -> None:
        """An event of the server."""
        match event["event"]:
            case "waiting":
                self.phase = f"waiting for sites: {event.get('present', 0)} of {event.get('sites')} present"
            case "round":
                self.round, self.answered, self.phase = int(event["round"]), 0, "training"
            case "attempt-failed":
                self.phase = f"trying again: {event['reason']}"
            case "evaluated":
                self.history.append(event)
                self.score, self.bytes = score(event), self.bytes + int(event.get("bytes", 0))
                if event["round"] == self.round:  # not a round late, with the counts of sites
                    self.answered = int(event.get("updates", 0))
            case "farewell":
                self.answered, self.phase = 0, "farewell"
            case "completed" | "failed":
                self.phase = event["event"]


class View:
    """On a terminal one live line; elsewhere one line per round. `middleware` is the party whose log counts updates."""

    def __init__(self, rounds: int, cohort: int, middleware: str, console: Console) -> None:
        self.state = State(rounds, cohort)
        self._console, self._middleware = console, middleware
        self._tails: list[tuple[Tail, Callable[[dict[str, Any]], None]]] | None = None
        self._printed = self._noted = 0
        self._live = Live(console=console, refresh_per_second=8, transient=True) if console.is_terminal else None
        self._bar = Progress(TextColumn("round {task.completed}/{task.total}"), BarColumn(24))
        self._task = self._bar.add_task("", total=rounds)
        self._phase = ""
        self._began = time.monotonic()

    def __enter__(self) -> View:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def __call__(self, run_dir: Path) -> None:
        if self._tails is None:
            takers = {"server": self.state.take, self._middleware: self.state.collecting}
            takers["engine"] = self.state.supervising
            self._tails = [(Tail(run_dir / "logs" / f"{name}.log"), take) for name, take in takers.items()]
        for tail, take in self._tails:
            for event in tail.poll():
                take(event)
        if self._live:
            self._bar.update(self._task, completed=len([m for m in self.state.history if m["round"]]))
            self._live.update(self._line())
        self._print_rounds()

    def _line(self) -> Table:
        state, line = self.state, Table.grid(padding=(0, 2))
        answered = f"{state.answered}/{state.cohort} sites"
        line.add_row(self._bar, state.phase, answered, state.score, f"{state.bytes / 1e6:.1f} MB received")
        return line

    def _print_rounds(self) -> None:
        for note in self.state.notes[self._noted :]:
            self._console.print(note, highlight=False, markup=False, soft_wrap=True)
        self._noted = len(self.state.notes)
        for event in self.state.history[self._printed :]:
            text = f"round {event['round']:>3}  {score(event)}"
            if event.get("loss") is not None:
                text += f"  loss {event['loss']:.4f}"
            if event["round"] and "updates" in event:  # unknown if the server was started again since
                text += f"  {event['updates']} updates  {event['seconds']:.2f} s"
            self._console.print(text, highlight=False)
        self._printed = len(self.state.history)
        if not self._live and self.state.phase != self._phase and not self.state.history:
            self._phase = self.state.phase
            self._console.print(f"{time.monotonic() - self._began:5.1f} s  {self._phase}", highlight=False)
