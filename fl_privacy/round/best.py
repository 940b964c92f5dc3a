"""The best round so far by the federation's metric, and whether it is too long ago to continue."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from fl_privacy.errors import FederationError

if TYPE_CHECKING:
    from fl_privacy.config import Stop


FACTS = ("round", "seconds", "updates", "bytes", "records")  # of a line of metrics.jsonl, what is no measure


def measured(row: Mapping[str, Any]) -> dict[str, float]:
    """The measures of a line of metrics.jsonl."""
    found = {name: value for name, value in row.items() if name not in FACTS}
    return {name: value for name, value in found.items() if isinstance(value, float) and math.isfinite(value)}


class Best:
    """Sees every evaluated round, also one whose metrics come a round late. The initial model is no candidate."""

    def __init__(self, stop: Stop) -> None:
        self._stop = stop
        self.round: int | None = None
        self._value = math.nan

    def see(self, round: int, metrics: Mapping[str, Any]) -> None:
        """Take a round's metrics into account."""
        value = metrics.get(self._stop.metric)
        if value is None:
            measured = ", ".join(sorted(name for name, found in metrics.items() if found is not None))
            raise FederationError(f"stop.metric: {self._stop.metric!r} is not measured here; use one of {measured}")
        if round and math.isfinite(value) and (self.round is None or self._stop.is_better(value, self._value)):
            self.round, self._value = round, value

    def recall(self, rows: Iterable[Mapping[str, Any]], done: int) -> None:
        """On a resumed run: the metrics of the rounds up to `done`, of a repeated round the last ones."""
        found = {row["round"]: row for row in rows if row["round"] <= done}
        for round, row in sorted(found.items()):
            if row.get(self._stop.metric) is not None:  # a number that was not finite is written as null
                self.see(round, row)

    def over(self, done: int) -> str:
        """Why no round should follow after `done`; empty to continue."""
        patience = self._stop.patience
        if patience is None or done - (self.round or 0) < patience:
            return ""
        since = f"since round {self.round}" if self.round else "at all"
        return f"{self._stop.metric} has not improved {since}, and stop.patience is {patience}"

    def to_json(self) -> dict[str, Any] | None:
        """For the manifest."""
        if self.round is None:
            return None
        return {"round": self.round, "metric": self._stop.metric, "value": self._value}
