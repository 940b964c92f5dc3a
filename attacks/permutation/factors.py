"""A model's tensors as products of what may move: one axis per group of positions, whatever the architecture.

An `Order` says for each group that moves where each of its positions comes from, as a rule does: position p of a model
in that order has what is at position `order[group][p]` of the other model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from attacks.common.attack import Unsuitable
from fl_privacy.steps.permute.rule import Rules
from fl_privacy.vector import Layout, Vector

Indices = NDArray[np.int64]
Order = Mapping[int, Indices]
Tensors = Mapping[str, NDArray[np.float32]]


@dataclass(frozen=True)
class Factors:
    """The groups that move in a model, and the tensors that they move in."""

    rules: Rules
    layout: Layout

    def __post_init__(self) -> None:
        for group in self.moving:
            if self.rules.groups[group].count > 1:
                name = self.rules.groups[group].name
                raise Unsuitable(
                    f"permute: {name} has an order per head or gate; this attack matches one order per axis"
                )
        if not self.moving:
            raise Unsuitable("permute: nothing of this model moves; there is no order to find")

    @cached_property
    def moving(self) -> tuple[int, ...]:
        used = {part.group for axes in self.rules.tensors.values() for axis in axes for part in axis}
        return tuple(sorted(group for group in used if not self.rules.groups[group].fixed))

    @cached_property
    def inputs(self) -> frozenset[int]:
        """The groups of positions of a record."""
        return frozenset(part.group for _, axis in self.rules.inputs for part in axis) & frozenset(self.moving)

    @cached_property
    def hidden(self) -> frozenset[int]:
        return frozenset(self.moving) - self.inputs

    @cached_property
    def groups(self) -> dict[str, tuple[int, ...]]:
        """The groups of each tensor in which something moves, one per factor of its axes."""
        found = {
            entry.name: tuple(part.group for axis in self.rules.tensors.get(entry.name, ()) for part in axis)
            for entry in self.layout.entries
        }
        return {name: groups for name, groups in found.items() if set(groups) & set(self.moving)}

    def size(self, group: int) -> int:
        return self.rules.groups[group].size

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(part.size for axis in self.rules.tensors[name] for part in axis)

    def tensors(self, model: Vector) -> Tensors:
        """What moves of a model, each tensor with one axis per factor."""
        return {name: model[self.layout.slices[name]].reshape(self.shape(name)) for name in self.groups}

    def unchanged(self) -> dict[int, Indices]:
        return {group: np.arange(self.size(group)) for group in self.moving}

    def places(self, group: int) -> list[tuple[str, int]]:
        """Where a group moves: tensor and axis."""
        return [(name, at) for name, groups in self.groups.items() for at, one in enumerate(groups) if one == group]

    def moved(self, model: Vector, order: Order) -> Vector:
        """A model brought into an order."""
        made = model.copy()
        for name, groups in self.groups.items():
            tensor = model[self.layout.slices[name]].reshape(self.shape(name))
            for at, group in enumerate(groups):
                tensor = tensor.take(order[group], axis=at) if group in order else tensor
            made[self.layout.slices[name]] = tensor.reshape(-1)
        return made

    def order_of(self, coordinates: Indices) -> dict[int, Indices]:
        """The order of each group, from where every coordinate of a model comes from."""
        found = {}
        for group in self.moving:
            name, at = self.places(group)[0]
            shape, part = self.shape(name), self.layout.slices[name]
            sources = np.unravel_index(coordinates[part] - part.start, shape)[at].reshape(shape)
            line = tuple(slice(None) if axis == at else 0 for axis in range(len(shape)))
            found[group] = sources[line].astype(np.int64)
        return found


def inverse(order: Order) -> dict[int, Indices]:
    return {group: np.argsort(source) for group, source in order.items()}


def after(order: Order, earlier: Order) -> dict[int, Indices]:
    """The order of a model relative to a third one, by its order relative to an earlier model and that model's."""
    return {group: earlier[group][source] for group, source in order.items()}


def between(order: Order, earlier: Order) -> dict[int, Indices]:
    """The order of one model relative to another, by the orders of both relative to a third."""
    return {group: np.argsort(earlier[group])[source] for group, source in order.items()}
