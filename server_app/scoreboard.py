"""The lines of metrics.jsonl: what each round took, and how good its model is, once that is known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fl_privacy.ops.log import Log
from fl_privacy.round.best import Best
from fl_privacy.scores.metrics import Scores
from fl_privacy.transcript import RunWriter


class Scoreboard:
    """One line per round, in order. Where sites evaluate, the scores of a round come with the next one."""

    def __init__(self, run: RunWriter, log: Log, kept: Sequence[Mapping[str, Any]], best: Best) -> None:
        """`kept` are the lines of an interrupted run; `best` sees all scores."""
        self._run, self._log, self._best = run, log, best
        self._lines = {int(line["round"]) for line in kept}
        best.recall(kept)
        self._waiting: dict[int, dict[str, Any]] = {}
        self.scores: dict[int, Scores] = {}  # of every model that was evaluated since this server started

    def has(self, round: int) -> bool:
        """Whether a round's line is written: it is not evaluated again."""
        return round in self._lines

    def done(self, round: int, facts: Mapping[str, Any]) -> None:
        """A round is over; its line waits for its scores."""
        self._waiting[round] = dict(facts)

    def score(self, round: int, found: Scores | None) -> None:
        """Write a round's line, with its scores if there are any. A resumed run does not write one twice."""
        facts = self._waiting.pop(round, {})
        if self.has(round):
            return
        self._lines.add(round)
        scored = found or Scores()
        if found is not None:
            self.scores[round] = found
            self._best.see(round, found.numbers())
        self._run.metric({"round": round, **scored.line(), **facts})
        self._log("evaluated", run=self._run.run, round=round, **scored.numbers(), **facts)
