"""Records in memory: one data set, and its split into training and held-out records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fl_privacy.errors import DataError


@dataclass(frozen=True)
class Dataset:
    """Records `x`, their labels `y` and, where the data come from several centres, the centre of each."""

    x: NDArray[np.float32]
    y: NDArray[np.int64]
    site: NDArray[np.int64] | None = None

    def __post_init__(self) -> None:
        if len(self.x) != len(self.y) or (self.site is not None and len(self.site) != len(self.y)):
            raise DataError(f"dataset: {len(self.x)} records, {len(self.y)} labels; give a label (and a site) for each")

    def __len__(self) -> int:
        return len(self.y)

    def take(self, indices: NDArray[np.int64] | Sequence[int]) -> Dataset:
        """A copy of the records at `indices`, in that order."""
        rows = np.asarray(indices, dtype=np.int64)
        return Dataset(self.x[rows], self.y[rows], None if self.site is None else self.site[rows])


@dataclass(frozen=True)
class Split:
    """A task's data: what sites train on, and what nobody trains on."""

    train: Dataset
    test: Dataset
    classes: int
    shape: tuple[int, ...]
    sites: tuple[str, ...] = ()


def scale(pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Bytes to 0..1, without a float64 copy in between."""
    scaled: NDArray[np.float32] = np.multiply(pixels, np.float32(1 / 255), dtype=np.float32)
    return scaled
