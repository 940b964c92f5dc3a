"""The synthetic set of source inference (Hu et al. 2021): a random linear classifier labels Gaussian records."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import numpy as np
from pydantic import Field

from fl_privacy.tasks.data import Dataset, Split
from fl_privacy.tasks.dataset import Benchmark

RECORDS, HELD_OUT = 100_000, 20_000
DECAY = 1.2  # feature j has variance j^-1.2


class Synthetic(Benchmark):
    """80,000 training and 20,000 held-out records of 60 features in 10 classes, made by seed."""

    needs_data: ClassVar[bool] = False
    record: ClassVar[tuple[int, ...]] = (60,)
    labels: ClassVar[int] = 10
    train: ClassVar[int] = RECORDS - HELD_OUT

    alpha: float = Field(2.0, gt=0, le=1e3, description="standard deviation of the classifier's weights and biases")
    beta: float = Field(0.0, ge=-1e3, le=1e3, description="mean of every feature")
    seed: int = Field(0, ge=0, lt=2**63, description="of the records; the federation's seed deals them out")

    def load(self, folder: Path | None = None) -> Split:
        rng = np.random.default_rng(self.seed)
        (features,), classes = self.record, self.labels
        weights, biases = rng.normal(0, self.alpha, (features, classes)), rng.normal(0, self.alpha, classes)
        spread = np.arange(1, features + 1) ** (-DECAY / 2)
        x = self.beta + spread * rng.standard_normal((RECORDS, features))
        whole = Dataset(x.astype(np.float32), (x @ weights + biases).argmax(axis=1))
        test, train = np.arange(HELD_OUT), np.arange(HELD_OUT, RECORDS)
        return Split(whole.take(train), whole.take(test), self.classes, self.shape)
