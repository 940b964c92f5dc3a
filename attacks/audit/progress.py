"""How far an audit is: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import time
from pathlib import Path

from rich import progress as bars
from rich.console import Console

from attacks.audit.matrix import Job
from fl_privacy.ops.tail import Tail
from fl_privacy.ops.view import State


class Progress:
    """Cells done, time gone and left, and the cell and round that is running."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar = bars.Progress(
            bars.MofNCompleteColumn(),
            bars.BarColumn(24),
            bars.TimeElapsedColumn(),
            bars.TextColumn("{task.fields[left]}"),
            bars.TextColumn("{task.description}"),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("", total=None, left="")
        self._tail: Tail | None = None
        self._state = State(0, 0)
        self._took: list[float] = []
        self._label = ""
        self.total = self.finished = self._left = 0

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def begin(self, total: int, missing: int) -> None:
        self.total, self.finished, self._left = total, total - missing, missing
        self._bar.update(self._task, total=total, completed=self.finished)
        if missing < total:
            self._say(f"{total - missing} of {total} are there already")

    def start(self, job: Job) -> None:
        self._tail, self._label = None, job.label
        self._state = State(job.federation.rounds, job.federation.cohort)
        self._describe("starting")
        if not self._console.is_terminal:
            left = self._remaining()
            number = f"{self.total - self._left + 1} of {self.total}"
            self._say(f"{job.label}: started ({number}{', ' if left else ''}{left})")

    def watch(self, run_dir: Path) -> None:
        """Called by the engine several times a second."""
        self._tail = self._tail or Tail(run_dir / "logs" / "server.log")
        for event in self._tail.poll():
            self._state.take(event)
        self._describe(f"round {self._state.round}/{self._state.rounds}" if self._state.round else "starting")

    def attacking(self) -> None:
        self._describe("attacking")

    def done(self, job: Job, seconds: float) -> None:
        self._took.append(seconds)
        self.finished += 1
        self._advance(f"{job.label}: done in {seconds:.1f} s")

    def failed(self, job: Job, reason: str) -> None:
        self._advance(f"{job.label}: failed: {reason}")

    def _advance(self, line: str) -> None:
        self._left -= 1
        self._bar.update(self._task, completed=self.total - self._left, left=self._remaining())
        self._say(line)

    def _remaining(self) -> str:
        if not self._took:
            return ""
        seconds = self._left * sum(self._took) / len(self._took)
        return f"about {time.strftime('%H:%M:%S', time.gmtime(seconds))} left"

    def _describe(self, phase: str) -> None:
        self._bar.update(self._task, description=f"{self._label}  {phase}", left=self._remaining())

    def _say(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)
