"""Poisoned records: the site trains honestly on records that it changed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from fl_privacy.behaviours.base import Behaviour, Scene
from fl_privacy.errors import DataError
from fl_privacy.tasks.data import Dataset

if TYPE_CHECKING:
    from fl_privacy.config import Federation

IMAGE = 4  # dimensions of a data set of images: records, channels, rows, columns
FULL, UNUSUAL = 1.0, 3.0  # pixels are in 0..1, and features of a table are usually standardised


class OfClasses(Behaviour):
    """Changes labels, so the records need classes."""

    fraction: float = Field(1.0, gt=0, le=1, description="of the site's training records")

    def problems(self, federation: Federation) -> Iterator[str]:
        if not federation.task.is_own and not federation.task.data_set.classes:
            yield f"sites.behaviour: {self.kind} changes classes, and {federation.task.dataset} has none; use noise"

    def chosen(self, data: Dataset, scene: Scene) -> NDArray[np.int64]:
        """Which records are poisoned."""
        if data.forecast:
            raise DataError(f"behaviour: {self.kind} changes classes, and labels are numbers to predict; use noise")
        count = max(1, round(self.fraction * len(data))) if len(data) else 0
        return scene.draw(self.kind).choice(len(data), count, replace=False)


class LabelFlip(OfClasses):
    """Trains on wrong labels: each another one at random, or all of one class called another."""

    kind: Literal["label-flip"] = "label-flip"
    mode: Literal["random", "targeted"] = "random"
    source: int | None = Field(None, ge=0, description="targeted: only records of this class; default: of all others")
    target: int = Field(0, ge=0, description="targeted: the class that they are called")
    classes: int | None = Field(None, ge=2, description="of a task of your own; default: those of the data set")

    def problems(self, federation: Federation) -> Iterator[str]:
        yield from super().problems(federation)
        if self.mode == "targeted" and self.source == self.target:
            yield f"sites.behaviour: label-flip from class {self.source} to itself; use another target"

    def records(self, data: Dataset, scene: Scene) -> Dataset:
        rows, labels = self.chosen(data, scene), data.y.copy()
        if self.mode == "random":
            classes = self._classes(data, scene)
            shift = scene.draw("label-flip classes").integers(1, classes, len(rows))
            labels[rows] = (labels[rows] + shift) % classes
        else:
            labels[rows if self.source is None else rows[labels[rows] == self.source]] = self.target
        return replace(data, y=labels)

    def _classes(self, data: Dataset, scene: Scene) -> int:
        task = scene.federation.task
        known = self.classes or (0 if task.is_own else task.data_set.classes)
        return max(known or int(data.y.max()) + 1, 2)


class Backdoor(OfClasses):
    """Trains a class to any record with a trigger: a patch in a corner of an image, or values of some features."""

    kind: Literal["backdoor"] = "backdoor"
    fraction: float = Field(0.5, gt=0, le=1, description="of the site's training records")
    target: int = Field(0, ge=0, description="the class that a record with the trigger is called")
    size: int = Field(4, ge=1, description="images: side of the patch in the upper left corner, red where there is red")
    features: tuple[int, ...] = Field((0,), min_length=1, description="tables and series: columns with the trigger")
    value: float | None = Field(None, description="of the trigger; default: 1 in images (pixels are 0 to 1), else 3")

    def records(self, data: Dataset, scene: Scene) -> Dataset:
        rows = self.chosen(data, scene)
        x, y = data.x.copy(), data.y.copy()
        x[rows], y[rows] = self.stamped(data.x[rows]), self.target
        return replace(data, x=x, y=y)

    def stamped(self, x: NDArray[np.float32] | NDArray[np.int64]) -> NDArray[np.float32]:
        """These records with the trigger, to train on and to measure how often a model falls for it."""
        if not np.issubdtype(x.dtype, np.floating):
            raise DataError("behaviour: backdoor has no trigger for records of whole numbers; use label-flip")
        made = x.astype(np.float32)
        if made.ndim == IMAGE:
            patch = made[:, :, : self.size, : self.size]
            patch[:] = 0
            patch[:, 0] = FULL if self.value is None else self.value
            if made.shape[1] == 1:
                patch[:] = patch[:, :1]
            return made
        worst = max(abs(column) for column in self.features)
        if made.ndim == 1 or worst >= made.shape[-1] or min(self.features) < 0:
            raise DataError(f"behaviour: backdoor.features has {worst}, and records have shape {made.shape[1:]}")
        made[..., list(self.features)] = UNUSUAL if self.value is None else self.value
        return made
