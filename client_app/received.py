"""The models that a site has when a run is over: the final one, and the best one that it saw."""

from __future__ import annotations

from pathlib import Path

from fl_privacy.models import kept
from fl_privacy.steps.base import At
from fl_privacy.vector import Layout, Vector

RECENT = 2  # models in memory: which round was best is known one round later where the sites evaluate


class Received:
    """Sees the model of every round that the site takes part in, and writes two of them at the farewell."""

    def __init__(self, state: Path | None, layout: Layout, best: bool = True) -> None:
        """Without `best` only the final model is kept: simulated sites share the memory of one process."""
        self._folder, self._layout, self._wants_best = state / "models" if state else None, layout, best
        self._run, self._recent = "", dict[int, Vector]()
        self._best: tuple[int, Vector] | None = None

    def see(self, at: At, model: Vector) -> None:
        """The model that a round starts from, or the final one at the farewell."""
        if self._folder is None:
            return
        if at.run != self._run:
            self._run, self._recent, self._best = at.run, {}, None
        round = at.farewell or at.round - 1
        if self._wants_best or at.best == at.farewell:
            self._recent[round] = model if at.farewell else model.copy()
            if at.best in self._recent and at.best:
                self._best = at.best, self._recent[at.best]
            self._recent = dict(sorted(self._recent.items())[-RECENT:])
        if at.farewell:
            kept.keep(self._folder, at.run, "last", at.farewell, model, self._layout)
            if self._best is not None and self._best[0] == at.best:
                kept.keep(self._folder, at.run, "best", *self._best, self._layout)
            self._recent, self._best = {}, None
