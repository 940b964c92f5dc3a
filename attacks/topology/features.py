"""Features of what was seen of every site's updates, round by round: the paper's, and stronger ones.

The paper's are norms, norms by layer, cosines with neighbours and trends (Section IV). Where the paper has parameters,
these are updates, with the norm of the parameters beside them: everybody knows the model they start from. Norms hardly
say which class a site has, so `raw` keeps directions: the values of a small tensor, or a random projection of a large
one, less the mean over the sites, which says nothing about one of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from fl_privacy.vector import Layout, Vector

Array = NDArray[np.float64]
Ints = NDArray[np.int64]
PROJECTED = 16  # numbers that are kept of a tensor
STREAM = 0x5441_4449
TINY = 1e-12


@dataclass(frozen=True)
class Features:
    """A row per site: of its parameters as in the paper, of its neighbours' too, and raw."""

    published: Array
    lateral: Array  # cosines with neighbours: they need the graph, and are no part of A1
    raw: Array


class Sketch:
    """A fixed random projection of every tensor to few numbers (a count sketch); small tensors stay as they are."""

    def __init__(self, layout: Layout) -> None:
        rng = np.random.default_rng(STREAM)
        self._slices = list(layout.slices.values())
        self._bins = [rng.integers(0, PROJECTED, part.stop - part.start) for part in self._slices]
        self._signs = [rng.choice([-1.0, 1.0], part.stop - part.start) for part in self._slices]

    def __call__(self, rows: NDArray[np.float32]) -> Array:
        found = []
        for part, bins, signs in zip(self._slices, self._bins, self._signs, strict=True):
            piece = rows[:, part]
            if piece.shape[1] > PROJECTED:
                piece = np.stack([np.bincount(bins, signs * row, PROJECTED) for row in piece])
            found.append(np.asarray(piece, np.float64))
        return np.concatenate(found, axis=1)


@dataclass
class Book:
    """Takes the rounds one by one, so that no more than one round of updates is in memory."""

    layout: Layout
    near: list[Ints]
    _sketch: Sketch = field(init=False)
    _rounds: list[Array] = field(default_factory=list)
    _lateral: list[Array] = field(default_factory=list)
    _raw: list[Array] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._sketch = Sketch(self.layout)

    def add(self, model: Vector, rows: NDArray[np.float32], there: NDArray[np.bool_]) -> None:
        """A round: the model before it, and what was seen of every site's update (0 at coordinates nobody saw)."""
        layers = [np.linalg.norm(rows[:, part], axis=1) for part in self.layout.slices.values()]
        norm = np.linalg.norm(rows, axis=1)
        cosines = _cosines(rows, norm)
        others = (cosines.sum(axis=1) - 1) / max(1, there.sum() - 1)
        last = np.linalg.norm(model + rows, axis=1)
        found = np.stack([norm, last, others, *layers], axis=1).astype(np.float64)
        beside = [float(cosines[i, near].mean()) if len(near) else 0.0 for i, near in enumerate(self.near)]
        mean = rows[there].mean(axis=0) if there.any() else np.zeros_like(model)
        raw = self._sketch(rows - mean)
        found[~there], raw[~there] = np.nan, np.nan
        self._rounds.append(found)
        self._lateral.append(np.where(there, beside, np.nan)[:, None])
        self._raw.append(raw)

    def features(self) -> Features:
        """Of all rounds so far."""
        rounds, lateral, raw = np.stack(self._rounds), np.stack(self._lateral), np.stack(self._raw)
        norms = rounds[:, :, 0]
        trend = [_mean(norms), _spread(norms), _slope(norms), norms[-1], rounds[-1, :, 1]]
        flat = np.moveaxis(rounds, 0, 1).reshape(rounds.shape[1], -1)
        beside = np.moveaxis(lateral, 0, 1).reshape(lateral.shape[1], -1)
        return Features(
            np.concatenate([flat, np.stack(trend, axis=1)], axis=1),
            np.concatenate([beside, _mean(lateral)], axis=1),
            np.concatenate([_mean(raw), raw[0]], axis=1),
        )


def _cosines(rows: NDArray[np.float32], norm: NDArray[np.floating]) -> Array:
    unit = rows / np.maximum(norm, TINY)[:, None]
    return np.asarray(unit @ unit.T, np.float64)


def _mean(values: Array) -> Array:
    """Over the rounds in which a site was seen."""
    there = np.isfinite(values)
    return np.asarray(np.where(there, values, 0.0).sum(axis=0) / np.maximum(there.sum(axis=0), 1))


def _spread(values: Array) -> Array:
    return np.sqrt(np.maximum(_mean(values**2) - _mean(values) ** 2, 0.0))


def _slope(values: Array) -> Array:
    """Of the least-squares line through a site's norms."""
    time = np.where(np.isfinite(values), np.arange(len(values), dtype=np.float64)[:, None], np.nan)
    centred = time - _mean(time)
    return np.asarray(_mean(centred * values) / np.maximum(_mean(centred**2), TINY))
