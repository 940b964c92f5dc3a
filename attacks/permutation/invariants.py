"""What hidden orders cancel in, for models of linear layers: only the order of the inputs is left in it.

The product of all weights, class by input, and moments of what training changes in the first layer. A gradient of that
layer is a sum of records, each times what came back to a hidden unit; summed over units, its second moment is that of
the records, weighted.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from attacks.permutation.factors import Factors, Indices
from fl_privacy.vector import Vector

Array = NDArray[np.float64]


class Step(NamedTuple):
    """A model, and what training at one site made of it, in the same order."""

    before: Vector
    trained: Vector
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


def invariants(factors: Factors, steps: Iterable[Step]) -> Invariants:
    """Of a whole run, in the order that its steps are brought to."""
    names = linear(factors)
    (group,) = factors.inputs
    size, product = factors.size(group), np.zeros((0, 0))
    moment = np.zeros((size, size))
    for step in steps:
        back = np.argsort(step.inputs)
        change = (_weights(factors, step.trained, names[0]) - _weights(factors, step.before, names[0]))[:, back]
        moment += change.T @ change
        product = _product(factors, step.trained, names)[:, back]
    return Invariants(product, moment)


def _weights(factors: Factors, model: Vector, name: str) -> Array:
    (shape,) = (entry.shape for entry in factors.layout.entries if entry.name == name)
    return model[factors.layout.slices[name]].reshape(shape).astype(np.float64)


def _product(factors: Factors, model: Vector, names: tuple[str, ...]) -> Array:
    """W_out ... W_1, less the mean of all classes, which no output depends on."""
    found = _weights(factors, model, names[0])
    for name in names[1:]:
        found = _weights(factors, model, name) @ found
    return np.asarray(found - found.mean(axis=0), np.float64)
