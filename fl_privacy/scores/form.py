"""The counts of one evaluation: which there are, and how they travel as one vector of fixed length.

All arithmetic on vectors is modulo 2^64: sums over sites are exact, and additive shares are uniform.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from fl_privacy.errors import FederationError, require

Counts = NDArray[np.uint64]  # a vector of counts, a sum of such vectors, or a share of one
Ints = NDArray[np.int64]

LONGEST = 2**16  # numbers in a vector
MOST_CLASSES = 128  # with a confusion matrix and score histograms
HISTOGRAMS = 2**13  # numbers in all exact score histograms together, unless there are very many classes
FEWEST_BINS, NOISY_BINS = 64, 32  # per score histogram; noise adds up over bins, so few are better then
CONFIDENCES = 15  # bins of confidence for the calibration error
LIMB, LIMBS = 32, 3  # an exact loss is three numbers of 32 bits, the last one its fraction; each is summed
MASK = 2**LIMB - 1


@dataclass(frozen=True)
class Form:
    """What is counted for so many classes (0: a forecast).

    Exact: a record adds 1 to a count, and losses are summed to 2^-32. With `clip`, for noise: a record adds `unit`, and
    losses are clipped and rounded to `clip / unit`.
    """

    classes: int
    clip: float | None = None
    unit: int = 1

    def __post_init__(self) -> None:
        if self.classes < 0 or self.classes == 1 or self.length > LONGEST:
            raise FederationError(f"classes: {self.classes} cannot be counted; evaluate at the server")

    @property
    def has_matrix(self) -> bool:
        return 0 < self.classes <= MOST_CLASSES

    @property
    def scored(self) -> range:
        """The classes with a score histogram: for two classes, one histogram says it all."""
        return range(1, 2) if self.classes == 2 else range(self.classes if self.has_matrix else 0)

    @cached_property
    def bins(self) -> int:
        if self.clip is not None:
            return NOISY_BINS
        room = HISTOGRAMS // (2 * max(1, len(self.scored)))
        return max(FEWEST_BINS, 1 << room.bit_length() - 1)

    @cached_property
    def blocks(self) -> dict[str, tuple[int, ...]]:
        """Counts and sums by name, in the order of the vector."""
        found: dict[str, tuple[int, ...]] = {"records": (1,)}
        if self.classes:
            # By true and predicted class; for very many classes only the records of each class, and the correct ones.
            found["classes"] = (self.classes, self.classes if self.has_matrix else 2)
            found["calibration"] = (CONFIDENCES, 3)  # records, correct ones, sum of confidences
            found["scores"] = (len(self.scored), 2, self.bins)  # of other classes, of the class
        return found | dict.fromkeys(self.sums, (LIMBS if self.clip is None else 1,))

    @property
    def sums(self) -> tuple[str, ...]:
        """Losses and errors, which are summed."""
        return ("loss",) if self.classes else ("loss", "squared", "absolute")

    @property
    def parts(self) -> int:
        """To how many numbers one record adds, at most `unit` to each."""
        of_classes = (1 if self.has_matrix else 2) + 3 + len(self.scored) if self.classes else 0
        return 1 + of_classes + len(self.sums)

    @cached_property
    def length(self) -> int:
        return sum(map(math.prod, self.blocks.values()))

    @property
    def confidence(self) -> int:
        """A confidence of 1 in the calibration counts."""
        return 2**20 if self.clip is None else self.unit

    def limit(self, name: str) -> float | None:
        """The largest loss or error that counts; a squared error, and so a forecast's loss, may be `clip` squared."""
        if self.clip is None:
            return None
        return self.clip if self.classes or name == "absolute" else self.clip**2


@dataclass(frozen=True)
class Tally:
    """The counts and sums of one site, or of all sites together."""

    form: Form
    numbers: Ints

    @classmethod
    def of(cls, form: Form, vector: Counts) -> Tally:
        """From a vector that came over the wire."""
        fits = vector.shape == (form.length,) and vector.dtype == np.uint64
        require(fits, f"counts: {vector.size} numbers, but this task has {form.length}")
        return cls(form, vector.view(np.int64))

    @property
    def vector(self) -> Counts:
        """The numbers as they travel."""
        return self.numbers.view(np.uint64)

    @property
    def records(self) -> float:
        return float(self.numbers[0]) / self.form.unit

    def block(self, name: str) -> Ints:
        """One block of counts."""
        start = 0
        for other, shape in self.form.blocks.items():
            size = math.prod(shape)
            if other == name:
                return self.numbers[start : start + size].reshape(shape)
            start += size
        raise KeyError(name)

    def mean(self, name: str) -> float:
        """The sum of losses or errors `name`, per record."""
        limbs, limit = self.block(name), self.form.limit(name)
        if limit is not None:
            return float(limbs[0]) * limit / self.form.unit / self.records
        total = sum(int(limb) << LIMB * i for i, limb in enumerate(limbs))
        return total / (1 << LIMB) / self.records
