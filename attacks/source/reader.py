"""The federation's model, asked about records: outputs, losses, and what its last linear layer gets."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from attacks.common.attack import Unsuitable
from attacks.common.auxiliary import clip_of
from fl_privacy import vector
from fl_privacy.config import Federation
from fl_privacy.dp import ldp
from fl_privacy.tasks.data import Dataset
from fl_privacy.tasks.making import task_of
from fl_privacy.tasks.train import fit, outputs_of
from fl_privacy.tasks.workload import how_of, model_of, recipe_of

Vector = NDArray[np.float32]
Array = NDArray[np.float64]
NEAR = 1e-3  # of the largest output: float32 rounding


class Head(NamedTuple):
    """Where the weights and biases of the last linear layer are; `columns[o, i]` is that of input i for class o."""

    layer: nn.Linear
    columns: NDArray[np.int64]  # (classes, inputs), the bias as the last input if there is one


class Reader:
    """One model in memory, loaded with one vector of parameters after another."""

    def __init__(self, federation: Federation) -> None:
        self._model, self._how = model_of(federation), how_of(task_of(federation))
        self._recipe, self._clip = recipe_of(federation), clip_of(federation)
        self.layout = vector.flatten(self._model)[1]
        self.head = head_of(self._model, self.layout)

    def outputs(self, model: Vector, records: Dataset) -> tuple[Array, Array]:
        """The model's output and loss for every record."""
        vector.load(self._model, model, self.layout)
        outputs, losses = outputs_of(self._model, records, loss=self._how.loss)
        return outputs.numpy().astype(np.float64), losses.numpy().astype(np.float64)

    def losses(self, outputs: Array, records: Dataset) -> Array:
        """The losses of outputs that were computed by other means."""
        made = self._how.loss(torch.from_numpy(outputs), torch.from_numpy(records.y), "none")
        return np.asarray(made.numpy(), np.float64)

    def inputs(self, model: Vector, records: Dataset) -> Array:
        """What the last linear layer gets for every record, and a 1 for its bias."""
        head, found = self.last(), list[Tensor]()
        hook = head.layer.register_forward_pre_hook(lambda _, given: found.append(given[0].detach().clone()))
        try:
            outputs, _ = self.outputs(model, records)
        finally:
            hook.remove()
        made = torch.cat(found).numpy().astype(np.float64)
        if head.columns.shape[1] > made.shape[1]:
            made = np.column_stack([made, np.ones(len(made))])
        expected = made @ model[head.columns].astype(np.float64).T
        if expected.shape != outputs.shape or np.abs(expected - outputs).max() > NEAR * max(1, np.abs(outputs).max()):
            raise Unsuitable("task.model: its last linear layer does not make its outputs; R_L and R_P need that")
        return made

    def last(self) -> Head:
        if self.head is None:
            raise Unsuitable("task.model: it has no linear layer at the end; R_L and R_P need one")
        return self.head

    def trained(self, start: Vector, records: Dataset, seed: int) -> Vector:
        """The update that a site with these records would make, by the public protocol; clipped, without noise."""
        vector.load(self._model, start, self.layout)
        fit(self._model, records, self._recipe, seed, how=self._how)
        update = np.asarray(vector.flatten(self._model)[0] - start, np.float32)
        return update if self._clip is None else ldp.clip(update, self._clip)


def head_of(model: nn.Module, layout: vector.Layout) -> Head | None:
    """The last linear layer, if it has the last parameters of the vector."""
    found = [(name, layer) for name, layer in model.named_modules() if isinstance(layer, nn.Linear)]
    if not found:
        return None
    name, layer = found[-1]
    columns = _places(layout, f"{name}.weight").reshape(layer.out_features, layer.in_features)
    if layer.bias is not None:
        columns = np.column_stack([columns, _places(layout, f"{name}.bias")])
    return Head(layer, columns) if columns.max() == layout.size - 1 else None


def _places(layout: vector.Layout, name: str) -> NDArray[np.int64]:
    part = layout.slices[name]
    return np.arange(part.start, part.stop)


def right(outputs: Array, labels: NDArray[Any]) -> int:
    """How many records are classified correctly."""
    return int((outputs.argmax(axis=1) == labels).sum())
