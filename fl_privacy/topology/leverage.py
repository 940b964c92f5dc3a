"""Proxies of structural leverage (Rangwala, Sinnott and Buyya 2026, Section V-E): how exposed a site's position is.

The paper proves none of them to bound the leverage of Definition V.1, except the group size asymptotically.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from fl_privacy.errors import FederationError

if TYPE_CHECKING:
    from fl_privacy.topology.graphs import Graph

Floats = NDArray[np.float64]
PER_DOUBLING = 2  # steps of the public grid of dataset sizes
ROUNDING = 1e-9


def group_sizes(groups: Sequence[Hashable]) -> Floats:
    """The number of sites in each site's group (proxy 1)."""
    sizes = Counter(groups)
    return np.array([sizes[group] for group in groups], dtype=np.float64)


def degrees(graph: Graph, n: int) -> Floats:
    """The degree of each site (proxy 2)."""
    return np.array([graph.degree(site) for site in range(n)], dtype=np.float64)


def dataset_sizes(records: Sequence[float]) -> Floats:
    """|D_i| over its mean (proxy 3)."""
    return normalised(records, "records")


def on_size_grid(records: int) -> int:
    """A size rounded up to the public grid 2^(k/2): what a site lets others know of its number of records.

    >>> [on_size_grid(n) for n in (199, 172, 30, 85)]
    [256, 182, 32, 91]
    """
    if isinstance(records, bool) or not isinstance(records, int | np.integer) or records < 1:
        raise FederationError(f"records: {records!r} is not a number of records; use an integer of 1 or more")
    step = math.floor(PER_DOUBLING * math.log2(records)) - 1
    while (value := math.ceil(2 ** (step / PER_DOUBLING) - ROUNDING)) < records:
        step += 1
    return value


def blended(parts: Mapping[str, tuple[float, Sequence[float] | Floats]]) -> Floats:
    """The weighted mean of proxies, each of mean 1; by name, its weight and its values."""
    weights = {name: weight for name, (weight, _) in parts.items()}
    for name, weight in weights.items():
        if not math.isfinite(weight) or weight < 0:
            raise FederationError(f"leverage.{name}: {weight!r} is not a weight; use a number of 0 or more")
    if not sum(weights.values()) > 0:
        raise FederationError("leverage: no proxy has a weight; give one a number above 0")
    if len({len(values) for _, values in parts.values()}) > 1:
        lengths = ", ".join(f"{name} {len(values)}" for name, (_, values) in parts.items())
        raise FederationError(f"leverage: the proxies have unequal lengths ({lengths}); give one value per site")
    total: Floats = np.sum([weight * normalised(values, name) for name, (weight, values) in parts.items()], axis=0)
    return normalised(total)


def normalised(values: Sequence[float] | Floats, name: str = "leverage") -> Floats:
    """The values over their mean."""
    checked = valid(values, name)
    if not checked.any():
        raise FederationError(f"{name}: all values are 0 and have no mean to divide by; give one a positive number")
    return checked / (checked.mean() or 1.0)


def valid(values: Sequence[float] | Floats, name: str = "leverage", sites: Sequence[str] | None = None) -> Floats:
    """As an array; raises unless every value is a number of 0 or more."""
    try:
        found = np.array(values, dtype=np.float64)
    except (TypeError, ValueError):
        raise FederationError(f"{name}: not a list of numbers; give one number per site") from None
    if found.ndim != 1 or not found.size:
        raise FederationError(f"{name}: shape {found.shape} given; give a list with one number per site")
    wrong = np.flatnonzero(~(np.isfinite(found) & (found >= 0)))
    if wrong.size:
        at = int(wrong[0])
        fix = "is not a finite number of 0 or more; correct it"
        raise FederationError(f"{name}: {found[at]:g} of {name_of(at, sites)} {fix}")
    return found


def name_of(at: int, sites: Sequence[str] | None) -> str:
    """A site for people: its name if there is one."""
    return f"site {at}" if sites is None or at >= len(sites) else repr(sites[at])
