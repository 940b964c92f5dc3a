"""The 8x8 digits bundled with scikit-learn, which need no data folder."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from fl_privacy.errors import DataError
from fl_privacy.tasks.data import Dataset, Split
from fl_privacy.tasks.dataset import Benchmark

HELD_OUT = 5
BRIGHTEST = 16


class Digits(Benchmark):
    """1,438 training and 359 held-out digits, scaled to 0..1."""

    needs_data: ClassVar[bool] = False
    record: ClassVar[tuple[int, ...]] = (1, 8, 8)
    labels: ClassVar[int] = 10
    train: ClassVar[int] = 1438

    def load(self, folder: Path | None = None) -> Split:
        table = bundled()
        x = (table[:, :-1] / np.float32(BRIGHTEST)).reshape(-1, *self.shape)
        y = table[:, -1].astype(np.int64)
        test = every_fifth(y)
        return Split(Dataset(x[~test], y[~test]), Dataset(x[test], y[test]), self.classes, self.shape)


def bundled() -> NDArray[np.float32]:
    """64 pixels and the label per row, read from the package file: importing sklearn.datasets takes over a second."""
    spec = find_spec("sklearn")
    for root in (spec.submodule_search_locations or []) if spec else []:
        path = Path(root, "datasets", "data", "digits.csv.gz")
        if path.exists():
            return np.loadtxt(path, delimiter=",", dtype=np.float32)
    raise DataError("digits: scikit-learn's bundled digits.csv.gz is missing; reinstall scikit-learn")


def every_fifth(y: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Every fifth record of each class: stratified, and independent of any random generator."""
    chosen = np.zeros(len(y), dtype=np.bool_)
    for label in np.unique(y):
        chosen[np.flatnonzero(y == label)[HELD_OUT // 2 :: HELD_OUT]] = True
    return chosen
