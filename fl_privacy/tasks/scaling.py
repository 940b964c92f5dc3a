"""Columns to about the same size: by statistics of the site's own training records, or by published ones."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from fl_privacy.choices import Model

Scaling = Literal["local", "given", "none"]


class Statistics(Model):
    """What a number is scaled by: mean and standard deviation, or the ends of its range (to 0..1)."""

    mean: float | None = None
    std: float | None = Field(None, gt=0)
    min: float | None = None
    max: float | None = None

    @model_validator(mode="after")
    def _pairs(self) -> Statistics:
        if (self.mean is None) != (self.std is None) or (self.min is None) != (self.max is None):
            raise ValueError("one statistic alone was given; give mean and std, or min and max")
        if self.mean is not None and self.min is not None:
            raise ValueError("mean and min were given; give mean and std, or min and max")
        if self.min is not None and self.max is not None and self.min >= self.max:
            raise ValueError(f"min {self.min} is not below max {self.max}; correct one")
        return self

    @property
    def statistics(self) -> tuple[float, float] | None:
        """What is subtracted from a number, and what it is divided by."""
        if self.mean is not None and self.std is not None:
            return self.mean, self.std
        if self.min is not None and self.max is not None:
            return self.min, self.max - self.min
        return None


def standardise(x: NDArray[np.float64], train: NDArray[np.bool_]) -> NDArray[np.float32]:
    """Zero mean and unit variance on the training rows; a column that is constant there is only centred.

    Divided by a tiny number instead, one new value in a held-out row would outweigh all others.
    """
    seen = x[train]
    spread = seen.std(axis=0, ddof=1) if len(seen) > 1 else np.zeros(x.shape[1:])
    centred = x - seen.mean(axis=0)
    with np.errstate(over="ignore"):  # whoever makes records of it finds numbers that are not finite
        return np.asarray(centred / np.where(spread > 0, spread, 1.0), dtype=np.float32)
