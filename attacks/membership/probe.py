"""What a model says about single records: their losses, and the gradients by which they pull at it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from fl_privacy import vector
from fl_privacy.config import Federation
from fl_privacy.dp.per_record import gradients
from fl_privacy.tasks.data import Dataset
from fl_privacy.tasks.making import task_of
from fl_privacy.tasks.train import few_threads, outputs_of
from fl_privacy.tasks.workload import how_of, model_of

Vector = NDArray[np.float32]
Array = NDArray[np.float64]
MOST_NUMBERS = 2**24  # gradient entries held at once


class Probe:
    """The federation's model, asked about records."""

    def __init__(self, federation: Federation) -> None:
        self._model, self._loss = model_of(federation), how_of(task_of(federation)).loss
        self._layout = vector.flatten(self._model)[1]
        self._names = [name for name, weight in self._model.named_parameters() if weight.requires_grad]

    @property
    def parameters(self) -> int:
        return self._layout.size

    def losses(self, model: Vector, records: Dataset) -> Array:
        """The loss of every record."""
        vector.load(self._model, model, self._layout)
        return outputs_of(self._model, records, loss=self._loss)[1].numpy().astype(np.float64)

    def gradients(self, model: Vector, records: Dataset) -> Iterator[Vector]:
        """The gradient of every record's own loss, some records at a time; 0 at coordinates that are not trained."""
        vector.load(self._model, model, self._layout)
        self._model.eval()
        size, slices = max(1, MOST_NUMBERS // self.parameters), self._layout.slices
        x, y = torch.from_numpy(records.x), torch.from_numpy(records.y)
        for few, labels in zip(torch.split(x, size), torch.split(y, size), strict=True):
            found = np.zeros((len(labels), self.parameters), np.float32)
            with few_threads(self._model):
                made = gradients(self._model, few, labels, self._loss)
            for name, gradient in zip(self._names, made, strict=True):
                found[:, slices[name]] = gradient.detach().flatten(1).numpy()
            yield found
