"""What the server reads of a run: its own view, round by round, and nothing of the truth."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from attacks.common.attack import Unsuitable
from fl_privacy.errors import TranscriptError
from fl_privacy.transcript.events import Farewell, Invited
from fl_privacy.transcript.read import View

Matrix = NDArray[np.float32]


@dataclass(frozen=True)
class Observation:
    """One round: the model that was sent, the rows that came back, their labels, and who was invited."""

    round: int
    model: NDArray[np.float32]
    rows: Matrix
    tiers: tuple[str, ...]
    invited: frozenset[str]

    def buckets(self) -> list[NDArray[np.int64]]:
        """Rows of the same label: the server cannot tell more of what was mixed with what."""
        tiers = np.array(self.tiers)
        return [np.flatnonzero(tiers == tier) for tier in sorted(set(self.tiers), key=budget)]


def budget(tier: str) -> float:
    """A label as the epsilon it stands for; an update without one has no noise."""
    return float(tier) if tier else float("inf")


def invited(views: Mapping[str, View], round: int) -> tuple[str, ...]:
    """Who was asked to take part in a round, if one of these parties knows it."""
    names = {
        event.name
        for view in views.values()
        if round in view.rounds
        for event in view.events(round)
        if isinstance(event, Invited)
    }
    return tuple(sorted(names))


def observe(view: View) -> list[Observation]:
    """All rounds of a view; an error if it holds no updates to attack."""
    rounds = [n for n in view.rounds if not any(isinstance(event, Farewell) for event in view.events(n))]
    seen = [_one(view, number) for number in rounds]
    if not seen:
        raise TranscriptError(f"{view.folder}: holds no round; let the run finish one first")
    return seen


def as_received(rows: Matrix) -> NDArray[np.int64]:
    """The row that each value stands in: a choice of values that rearranges nothing."""
    return np.tile(np.arange(len(rows))[:, None], rows.shape[1])


def _one(view: View, number: int) -> Observation:
    arrays, tiers = view.round(number)
    if "updates" not in arrays or "model" not in arrays:
        raise Unsuitable(
            f"{view.folder}: round {number} has no updates; this attack needs a run with route server or shuffler"
        )
    rows = arrays["updates"]
    labels = tuple(str(tier) for tier in tiers) if len(tiers) == len(rows) else ("",) * len(rows)
    names = frozenset(event.name for event in view.events(number) if isinstance(event, Invited))
    return Observation(number, arrays["model"], rows, labels, names)
