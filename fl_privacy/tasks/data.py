"""Records in memory: one data set, and its split into training and held-out records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from fl_privacy.errors import DataError

# Class labels, or the values to forecast.
Labels = NDArray[np.int64] | NDArray[np.float32]


@dataclass(frozen=True)
class Dataset:
    """Records `x`, labels `y` (float32 for forecasts) and, if the data come from several centres, the centre."""

    x: NDArray[np.float32] | NDArray[np.int64]
    y: Labels
    site: NDArray[np.int64] | None = None

    def __post_init__(self) -> None:
        if len(self.x) != len(self.y) or (self.site is not None and len(self.site) != len(self.y)):
            raise DataError(f"dataset: {len(self.x)} records, {len(self.y)} labels; give each a label (and a site)")

    def __len__(self) -> int:
        return len(self.y)

    @property
    def forecast(self) -> bool:
        """Whether the labels are values to forecast, not classes."""
        return bool(np.issubdtype(self.y.dtype, np.floating))

    def take(self, indices: NDArray[np.int64] | Sequence[int]) -> Dataset:
        """A copy of the records at `indices`, in that order."""
        rows = np.asarray(indices, dtype=np.int64)
        return Dataset(self.x[rows], self.y[rows], None if self.site is None else self.site[rows])


@dataclass(frozen=True)
class Parts:
    """The records of one site: those it trains on, and those it holds out to evaluate models."""

    train: Dataset
    held_out: Dataset


@dataclass(frozen=True)
class Split:
    """A task's data: training records and held-out records; `classes` is 0 for forecasts."""

    train: Dataset
    test: Dataset
    classes: int
    shape: tuple[int, ...]
    sites: tuple[str, ...] = ()

    def first_sites(self, count: int) -> Split:
        """Only the first `count` of the data's natural sites."""
        if count >= len(self.sites):
            return self
        train, test = (half.take(_of_first_sites(half, count)) for half in (self.train, self.test))
        return replace(self, train=train, test=test, sites=self.sites[:count])


def _of_first_sites(data: Dataset, count: int) -> NDArray[np.int64]:
    if data.site is None:
        raise DataError("dataset: its records have no sites; every record needs one")
    return np.flatnonzero(data.site < count)


def pool(parts: Sequence[Dataset]) -> Dataset:
    """The records of all parts, concatenated."""
    x, y = np.concatenate([part.x for part in parts]), np.concatenate([part.y for part in parts])
    sites = [part.site for part in parts if part.site is not None]
    return Dataset(x, y, np.concatenate(sites) if sites else None)


def scale(pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Bytes to 0..1, without a float64 copy in between."""
    scaled: NDArray[np.float32] = np.multiply(pixels, np.float32(1 / 255), dtype=np.float32)
    return scaled
