"""Data sets by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from fl_privacy.errors import DataError
from fl_privacy.tasks import cifar10, digits, heart_disease, lcl, mnist
from fl_privacy.tasks.data import Split

DATASETS: dict[str, Callable[[Path | None], Split]] = {
    "digits": digits.load,
    "mnist": mnist.load,
    "cifar10": cifar10.load,
    "heart-disease": heart_disease.load,
    "lcl": lcl.load,
}


def load(name: str, data_dir: Path | None = None) -> Split:
    """The named data; `data_dir` (default: FL_PRIVACY_DATA) has one folder per data set. Nothing is downloaded."""
    if name not in DATASETS:
        raise DataError(f"task.dataset: {name!r} is unknown; use one of {', '.join(DATASETS)}")
    return DATASETS[name](data_dir)
