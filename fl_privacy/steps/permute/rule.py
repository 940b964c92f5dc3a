"""A permutation rule: drawn for the groups of a model from a secret, and applied to vectors and records.

Position p of a permuted axis has what was at position `source[p]`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from types import ModuleType

import numpy as np
from numpy.typing import NDArray

from fl_privacy import kernels
from fl_privacy.crypto import keys
from fl_privacy.crypto.stream import Words
from fl_privacy.errors import FederationError
from fl_privacy.kernels import gather_numpy
from fl_privacy.shuffle import layer
from fl_privacy.shuffle.draws import MAX_ROWS
from fl_privacy.vector import Layout, Vector

Indices = NDArray[np.int64]
PURPOSE = "tazza"


@dataclass(frozen=True)
class Part:
    """One factor of an axis: a group by number, which moves per index of other factors of the same axis."""

    group: int
    size: int
    over: tuple[int, ...] = ()  # places of these factors in the axis


Parts = tuple[Part, ...]


@dataclass(frozen=True)
class Kind:
    """One group: how many positions, how many permutations it has, and whether it moves at all.

    `slots` are permutations that it shares with other groups: (first permutation, number, group).
    """

    name: str
    size: int
    count: int = 1
    fixed: bool = False
    slots: tuple[tuple[int, int, int], ...] = ()


@dataclass(frozen=True)
class Rules:
    """What may move in a model: groups, the axes of its tensors, and the axes of a record, some of them as one."""

    groups: tuple[Kind, ...]
    tensors: dict[str, tuple[Parts, ...]]
    inputs: tuple[tuple[int, Parts], ...]  # (how many axes of a record, their parts)

    @cached_property
    def moving(self) -> int:
        """How many parameters are on an axis that moves."""
        return sum(prod(map(_size, axes)) for axes in self.tensors.values() if any(map(self.moves, axes)))

    def moves(self, axis: Parts) -> bool:
        return any(not self.groups[part.group].fixed for part in axis)

    @property
    def hides_input(self) -> bool:
        """Whether any position of a record moves."""
        return any(self.moves(axis) for _, axis in self.inputs)

    def draw(self, secret: bytes, run: str, round: int) -> Rule:
        """The rule of a round: HKDF over the secret gives each group a key, the key its permutations."""
        drawn: dict[int, Indices] = {}
        for number in range(len(self.groups)):
            self._draw(number, secret, run, round, drawn)
        tensors = {name: tuple(self._source(axis, drawn) for axis in axes) for name, axes in self.tensors.items()}
        return Rule(tensors, tuple((count, self._source(axis, drawn)) for count, axis in self.inputs))

    def _draw(self, number: int, secret: bytes, run: str, round: int, drawn: dict[int, Indices]) -> Indices:
        if number not in drawn:
            kind = self.groups[number]
            if kind.fixed:
                made = np.tile(np.arange(kind.size), (kind.count, 1))
            else:
                key = keys.derive(secret, run, round, "", f"{PURPOSE} {number}")
                made = permutations(kind.size, kind.count, key)
            for first, count, other in kind.slots:
                made[first : first + count] = self._draw(other, secret, run, round, drawn)
            drawn[number] = made
        return drawn[number]

    def _source(self, axis: Parts, drawn: dict[int, Indices]) -> Indices | None:
        """Where each position of an axis comes from; None if it stays as it is."""
        if not self.moves(axis):
            return None
        sizes = [part.size for part in axis]
        at = np.unravel_index(np.arange(prod(sizes)), sizes)
        found: dict[int, Indices] = {}
        while len(found) < len(axis):
            for place, part in enumerate(axis):
                if place not in found and all(outer in found for outer in part.over):
                    row = np.zeros(len(at[0]), np.int64)
                    for outer in part.over:
                        row = row * axis[outer].size + found[outer]
                    found[place] = drawn[part.group][row, at[place]]
        return np.ravel_multi_index([found[place] for place in range(len(axis))], sizes).astype(np.int64)


def _size(axis: Parts) -> int:
    return prod(part.size for part in axis)


@dataclass(frozen=True)
class Rule:
    """One drawn rule: where every position of every axis comes from; None where an axis stays as it is."""

    tensors: dict[str, tuple[Indices | None, ...]]
    inputs: tuple[tuple[int, Indices | None], ...]

    @cached_property
    def inverse(self) -> Rule:
        tensors = {name: tuple(map(_inverse, axes)) for name, axes in self.tensors.items()}
        return Rule(tensors, tuple((count, _inverse(axis)) for count, axis in self.inputs))

    def apply(self, vector: Vector, layout: Layout, out: Vector | None = None) -> Vector:
        """A model, gradient or update, permuted; a new vector, unless there is one for it."""
        if vector.shape != (layout.size,):
            raise FederationError(f"vector: shape {vector.shape} does not fit a layout of {layout.size} parameters")
        kernel = kernels.pick("gather", vector.size)
        out = np.empty_like(vector) if out is None else out
        if out.shape != vector.shape or np.shares_memory(out, vector):
            raise FederationError(f"out: shape {out.shape} for a vector of {vector.shape}; pass another vector like it")
        for entry in layout.entries:
            part = layout.slices[entry.name]
            axes = self.tensors.get(entry.name, (None,) * len(entry.shape))
            if len(axes) != len(entry.shape) or any(
                axis is not None and len(axis) != size for axis, size in zip(axes, entry.shape, strict=True)
            ):
                raise FederationError(f"layout: {entry.name} of shape {entry.shape} is not the rule's; derive it again")
            gather(vector[part], out[part], entry.shape, axes, kernel)
        return out

    def records(self, x: NDArray[np.float32]) -> NDArray[np.float32]:
        """Records with their positions permuted, as the permuted model takes them."""
        made, axis = x, 1
        for count, source in self.inputs:
            if source is not None:
                shape = made.shape
                flat = made.reshape(*shape[:axis], -1, *shape[axis + count :])
                made = np.take(flat, source, axis=axis).reshape(shape)
            axis += count
        return made


def _inverse(source: Indices | None) -> Indices | None:
    if source is None:
        return None
    back = np.empty_like(source)
    back[source] = np.arange(len(source))
    return back


def gather(
    source: Vector,
    out: Vector,
    shape: Sequence[int],
    axes: Sequence[Indices | None],
    kernel: ModuleType = gather_numpy,
) -> None:
    """out[i, j, ...] = source[axes[0][i], axes[1][j], ...], with what stays in place copied in one piece."""
    moved = [place for place, axis in enumerate(axes) if axis is not None]
    if not moved or not source.size:
        np.copyto(out, source)
        return
    place = moved[-1]
    first, second = axes[moved[0]], axes[place]
    if len(moved) == 1:
        first = np.arange(prod(shape[:place]))
    elif moved != [0, 1]:  # no layer of ours
        whole = source.reshape(shape)
        for at, axis in enumerate(axes):
            whole = whole if axis is None else whole.take(axis, axis=at)
        out[:] = whole.reshape(-1)
        return
    kernel.gather(source, out, first, second, prod(shape[place + 1 :]))


def permutations(size: int, count: int, key: bytes) -> Indices:
    """`count` independent, exactly uniform permutations."""
    if size <= MAX_ROWS:
        return layer.permutations(size, count, key)
    return np.stack([shuffled(size, Words(key, stream=number)) for number in range(count)])


def shuffled(size: int, words: Words) -> Indices:
    """Fisher-Yates; of 64-bit words, those that would make a smaller number likelier are drawn again."""
    order = np.arange(size)
    drawn = words.take(size + size % 2).copy().tolist()
    for last in range(size - 1, 0, -1):
        word = drawn[last]
        while word >= 2**64 - 2**64 % (last + 1):
            word = int(words.take(2)[0])
        other = word % (last + 1)
        order[last], order[other] = order[other], order[last]
    return order
