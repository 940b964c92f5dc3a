"""Noise on the counts of a site: the Gaussian mechanism, rounded to whole numbers, which is post-processing."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from fl_privacy.dp import gaussian
from fl_privacy.dp.noise import standard_normal
from fl_privacy.errors import FederationError
from fl_privacy.scores.form import Form, Ints, Tally

FINEST = 2**12  # largest unit: means and losses are rounded to its inverse
PRECISE = 2**21  # a float32 sample times this is still precise to a quarter


def _as_they_are(values: Ints, records: int) -> Ints:
    return values


def _mean(values: Ints, records: int) -> Ints:
    """Rounded down: the norm must not grow."""
    return values // max(1, records)


@dataclass(frozen=True)
class Bound:
    """How far the counts of neighbours can be apart, in norms of one record's counts."""

    adjacency: str
    factor: float
    normalise: Callable[[Ints, int], Ints]
    shows_records: bool  # how many there are


# A record is added or removed. A site is replaced by another: it gives the mean over its records, whose norm is at most
# a record's; two vectors without negative entries are at most sqrt(2) times that apart.
BOUNDS = {
    "record": Bound("add-or-remove", 1.0, _as_they_are, True),
    "site": Bound("replace", math.sqrt(2), _mean, False),
}


def bounded(unit: str | None, adjacency: str | None) -> bool:
    """Whether neighbours of this kind have counts that are a known distance apart."""
    return unit in BOUNDS and BOUNDS[unit].adjacency == adjacency


@dataclass(frozen=True)
class Noise:
    """The noise of one evaluation: for the protected unit, a budget, and a form whose losses are clipped."""

    form: Form
    protects: str
    multiplier: float  # of the sensitivity; the ledger's noise

    @classmethod
    def of(cls, classes: int, clip: float, protects: str, epsilon: float, delta: float) -> Noise:
        """All parties get the same form from the same config."""
        multiplier = gaussian.sigma(epsilon, delta)
        coarsest = Form(classes, clip)
        room = PRECISE / (multiplier * BOUNDS[protects].factor * math.sqrt(coarsest.parts))
        if room < 1:
            raise FederationError(f"evaluate.epsilon: {epsilon:g} is too small for useful counts; raise it or omit it")
        return cls(Form(classes, clip, min(FINEST, 1 << int(room).bit_length() - 1)), protects, multiplier)

    @property
    def deviation(self) -> float:
        """Standard deviation of the noise on every number."""
        sensitivity = BOUNDS[self.protects].factor * self.form.unit * math.sqrt(self.form.parts)
        return self.multiplier * sensitivity

    def add(self, tally: Tally, key: bytes) -> Tally:
        """The noised tally; `key` is single-use."""
        noise = np.rint(standard_normal(self.form.length, key).astype(np.float64) * self.deviation)
        shown = BOUNDS[self.protects].normalise(tally.numbers, int(tally.records))
        return Tally(self.form, shown + noise.astype(np.int64))
