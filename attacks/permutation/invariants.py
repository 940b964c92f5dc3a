"""What hidden orders cancel in, for models of linear layers: only the order of the inputs is left in it.

The product of all weights, class by input, and moments of what training changes in the first layer. A gradient of that
layer is a sum of records, each times what came back to a hidden unit; summed over units, its second moment is that of
the records, weighted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from attacks.permutation.factors import Factors, Indices
from fl_privacy.errors import FederationError
from fl_privacy.vector import Vector

Array = NDArray[np.float64]


class Step(NamedTuple):
    """A round: a model, and what training at each site made of it, all in the same order."""

    before: Vector
    trained: Sequence[Vector]
    inputs: Indices  # where each input is in the order that all steps are brought to


@dataclass(frozen=True)
class Invariants:
    """By class and input the last product; by two inputs the second moment of changes of the first layer."""

    product: Array
    moment: Array


def linear(factors: Factors) -> tuple[str, ...]:
    """The weights of a model that is a chain of linear layers from its inputs to its classes; none for other models."""
    names = [entry.name for entry in factors.layout.entries if len(entry.shape) == 2]
    shapes = [entry.shape for entry in factors.layout.entries if len(entry.shape) == 2]
    flat = all(len(entry.shape) <= 2 for entry in factors.layout.entries)
    chained = all(before[0] == following[1] for before, following in pairwise(shapes))
    if len(factors.inputs) != 1 or not names or not flat or not chained:
        return ()
    (group,) = factors.inputs
    first = factors.rules.tensors[names[0]][1]
    return tuple(names) if [part.group for part in first] == [group] else ()


class Gathered:
    """The invariants of a run, one step after the other, in the order that all steps are brought to."""

    def __init__(self, factors: Factors) -> None:
        (group,) = factors.inputs
        self._factors, self._names = factors, linear(factors)
        self._moment = np.zeros((factors.size(group), factors.size(group)))
        self._last: Step | None = None

    def add(self, step: Step) -> None:
        first, self._last = self._names[0], step
        before, back = _weights(self._factors, step.before, first), np.argsort(step.inputs)
        for model in step.trained:
            change = (_weights(self._factors, model, first) - before)[:, back]
            self._moment += change.T @ change

    @property
    def found(self) -> Invariants:
        """Without a step there is nothing to find."""
        if self._last is None:
            raise FederationError("steps: none were added; add those of a round that has an earlier model")
        mean = np.asarray(np.mean(self._last.trained, axis=0, dtype=np.float64), np.float32)
        product = _product(self._factors, mean, self._names)
        return Invariants(product[:, np.argsort(self._last.inputs)], self._moment)


def invariants(factors: Factors, steps: Iterable[Step]) -> Invariants:
    """Those of a whole run."""
    gathered = Gathered(factors)
    for step in steps:
        gathered.add(step)
    return gathered.found


def _weights(factors: Factors, model: Vector, name: str) -> Array:
    (shape,) = (entry.shape for entry in factors.layout.entries if entry.name == name)
    return model[factors.layout.slices[name]].reshape(shape).astype(np.float64)


def _product(factors: Factors, model: Vector, names: tuple[str, ...]) -> Array:
    """W_out ... W_1, less the mean of all classes, which no output depends on."""
    found = _weights(factors, model, names[0])
    for name in names[1:]:
        found = _weights(factors, model, name) @ found
    return np.asarray(found - found.mean(axis=0), np.float64)
