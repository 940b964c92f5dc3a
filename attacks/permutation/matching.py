"""Matching a closed model to another one that it was trained from: which position is which.

For each group the assignment minimises the squared distance of the two models, given the orders of all other groups;
as lengths do not change, it maximises the inner product.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from attacks.permutation.factors import Factors, Indices, Order
from fl_privacy.vector import Vector

SWEEPS = 50
Matcher = Callable[[Factors, Vector, Vector], dict[int, Indices]]


def published(factors: Factors, closed: Vector, earlier: Vector) -> dict[int, Indices]:
    """Section 7.6.1 of Tazza: each group alone, with everything else taken as it stands."""
    as_is = factors.unchanged()
    return {group: assigned(similarity(factors, closed, earlier, group, as_is)) for group in factors.moving}


def layered(factors: Factors, closed: Vector, earlier: Vector) -> dict[int, Indices]:
    """Layer by layer, from what does not move: each group by the weights to positions that are known by then.

    Classes stay in place, so it starts at the last layer.
    """
    known: dict[int, Indices] = {}
    while left := [group for group in factors.moving if group not in known]:
        group = max(left, key=lambda one: evidence(factors, one, known))
        known[group] = assigned(similarity(factors, closed, earlier, group, known))
    return known


def alternating(factors: Factors, closed: Vector, earlier: Vector) -> dict[int, Indices]:
    """From there one group after the other, by all weights, until none changes."""
    order = layered(factors, closed, earlier)
    for _ in range(SWEEPS):
        changed = False
        for group in factors.moving:
            found = assigned(similarity(factors, closed, earlier, group, order))
            changed |= not np.array_equal(found, order[group])
            order[group] = found
        if not changed:
            break
    return order


MATCHERS: dict[str, Matcher] = {"published": published, "layered": layered, "alternating": alternating}


def evidence(factors: Factors, group: int, known: Collection[int]) -> int:
    """How many weights per position of a group lead to known positions."""
    places = [place for place in factors.places(group) if usable(factors, *place, known)]
    return sum(int(np.prod(factors.shape(name))) for name, _ in places) // factors.size(group)


def usable(factors: Factors, name: str, at: int, known: Collection[int]) -> bool:
    """Whether all other factors of a tensor stand still or are known."""
    others = [group for place, group in enumerate(factors.groups[name]) if place != at]
    return all(group in known or group not in factors.moving for group in others)


def similarity(factors: Factors, closed: Vector, earlier: Vector, group: int, known: Order) -> NDArray[np.float64]:
    """By position of the closed and of the earlier model the inner product of their weights to known positions."""
    new, old, size = factors.tensors(closed), factors.tensors(earlier), factors.size(group)
    found = np.zeros((size, size))
    for name, at in factors.places(group):
        if not usable(factors, name, at, known):
            continue
        moved = old[name]
        for place, other in enumerate(factors.groups[name]):
            if place != at and other in known:
                moved = moved.take(known[other], axis=place)
        found += _rows(new[name], at) @ _rows(moved, at).T
    return found


def assigned(similar: NDArray[np.float64]) -> Indices:
    """Which column each row is, so that the sum is largest."""
    return np.asarray(linear_sum_assignment(similar, maximize=True)[1], np.int64)


def _rows(tensor: NDArray[np.float32], at: int) -> NDArray[np.float64]:
    return np.moveaxis(tensor, at, 0).reshape(tensor.shape[at], -1).astype(np.float64)
