"""The best round so far by the federation's metric, and whether it is too long ago to continue."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

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
        self._seen = 0  # the last evaluated round

    def see(self, round: int, metrics: Mapping[str, Any]) -> None:
        """Take a round's metrics into account."""
        value = metrics.get(self._stop.metric)
        if value is None:  # under noise it may have no meaning for once
            self._stop.check(name for name, found in metrics.items() if found is not None)
            return
        self._seen = max(self._seen, round)
        if round and math.isfinite(value) and (self.round is None or self._stop.is_better(value, self._value)):
            self.round, self._value = round, value

    def recall(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """The rounds of a resumed run; a number that was not finite is written as null."""
        for row in rows:
            if row.get(self._stop.metric) is not None:
                self.see(row["round"], row)

    def over(self) -> str:
        """Why no further round should follow; empty to continue."""
        patience = self._stop.patience
        if patience is None or self._seen - (self.round or 0) < patience:
            return ""
        since = f"since round {self.round}" if self.round else "at all"
        return f"{self._stop.metric} has not improved {since}, and stop.patience is {patience}"

    def to_json(self) -> dict[str, Any] | None:
        """For the manifest."""
        if self.round is None:
            return None
        return {"round": self.round, "metric": self._stop.metric, "value": self._value}
