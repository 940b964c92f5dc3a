"""What a tally says of a model. With noise a measure may be meaningless; it is then None, never an error."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_privacy.scores.form import Tally


@dataclass(frozen=True)
class Scores:
    """A model's results on held-out records; None: not of this task, or not known."""

    accuracy: float | None = None
    loss: float | None = None
    rmse: float | None = None
    balanced_accuracy: float | None = None
    auroc: float | None = None  # of the second of two classes; of more, the mean of each against the rest
    ece: float | None = None  # expected calibration error: |confidence - accuracy| over bins of confidence
    mae: float | None = None
    records: float | None = None
    confusion: list[list[float]] | None = None  # by true and predicted class

    def numbers(self) -> dict[str, Any]:
        """Accuracy, loss and RMSE, and whatever else is known except the confusion matrix."""
        usual = ("accuracy", "loss", "rmse")
        found = {name: value for name, value in vars(self).items() if name in usual or value is not None}
        found.pop("confusion", None)
        return found

    def line(self) -> dict[str, Any]:
        """All that is known, as a line of metrics.jsonl."""
        return self.numbers() | ({} if self.confusion is None else {"confusion": self.confusion})


def scores(tally: Tally) -> Scores:
    """The measures of a tally."""
    if tally.records < 0.5:  # none, or as good as none under noise
        return Scores()
    if not tally.form.classes:
        loss, squared, absolute = (tally.mean(name) for name in tally.form.sums)
        rmse = math.sqrt(squared) if squared >= 0 else None
        return Scores(loss=loss, rmse=rmse, mae=max(0.0, absolute), records=_plain(tally, "records")[0])
    return _of_classes(tally)


def _of_classes(tally: Tally) -> Scores:
    form, records, cells = tally.form, tally.records, tally.block("classes") / tally.form.unit
    support, correct = (cells.sum(axis=1), np.diag(cells)) if form.has_matrix else cells.T
    accuracy = _share(float(correct.sum()), records)
    recalls = [_share(float(right), float(all)) for right, all in zip(correct, support, strict=True) if all >= 0.5]
    areas = [area for histogram in tally.block("scores") if (area := auroc(histogram[1], histogram[0])) is not None]
    return Scores(
        accuracy=accuracy,
        loss=tally.mean("loss"),
        balanced_accuracy=_mean(recalls),
        auroc=_mean(areas),
        ece=_share(float(np.abs(_gaps(tally)).sum()), records),
        records=_plain(tally, "records")[0],
        confusion=_plain(tally, "classes") if form.has_matrix else None,
    )


def auroc(positive: NDArray[Any], negative: NDArray[Any]) -> float | None:
    """The area under the ROC curve from two histograms of scores; a pair in the same bin counts half.

    It differs from that of the scores themselves by at most half the share of such pairs.
    """
    own, other = np.maximum(positive, 0).astype(np.float64), np.maximum(negative, 0).astype(np.float64)
    pairs = own.sum() * other.sum()
    return float((own * (np.cumsum(other) - other / 2)).sum() / pairs) if pairs else None


def _gaps(tally: Tally) -> NDArray[np.float64]:
    """Correct predictions minus expected ones, in every bin of confidence."""
    _, correct, confidence = tally.block("calibration").T
    return np.asarray(correct / tally.form.unit - confidence / tally.form.confidence, np.float64)


def _plain(tally: Tally, name: str) -> Any:
    """A block of counts as lists of numbers: whole ones, unless they have noise."""
    block, unit = tally.block(name), tally.form.unit
    return (block if unit == 1 else (block / unit).round(3)).tolist()


def _share(part: float, whole: float) -> float:
    return min(1.0, max(0.0, part / whole))


def _mean(values: list[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None
