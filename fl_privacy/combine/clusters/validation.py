"""Validation: how differently models answer to the same samples (Tazza, Section 5.4.1)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fl_privacy.combine.clusters.dbscan import dbscan

Doubles = NDArray[np.float64]
FARTHEST = 2.0  # the largest cosine distance
ORTHOGONAL = 1.0  # models this far apart have nothing in common
TINY = 1e-6  # models that are equal but for rounding


class Found(NamedTuple):
    """What the validation of a round's models found."""

    distances: Doubles
    eps: float
    labels: list[int]


def joined(outputs: Doubles) -> Doubles:
    """1 - cosine similarity of all outputs in one vector: as published. `outputs` is (models, senders, numbers)."""
    return _distances(outputs.reshape(len(outputs), 1, -1))[:, :, 0]


def median(outputs: Doubles) -> Doubles:
    """The median over the senders of samples of the cosine distance on theirs: a minority of them decides nothing."""
    made: Doubles = np.median(_distances(outputs), axis=2)
    return made


def centred(outputs: Doubles) -> Doubles:
    """Outputs (..., classes) without what all classes have in common, which changes no prediction."""
    return outputs - outputs.mean(axis=-1, keepdims=True) if outputs.shape[-1] > 1 else outputs


def reach(distances: Doubles, points: int, factor: float) -> float:
    """eps from the round itself: `factor` times the median, over models, of the distance at which each is a core point.

    Models become more alike as training converges. As long as most of them are honest, the median is between the
    distances of honest ones.
    """
    usable = [row for row in range(len(distances)) if (np.delete(distances[row], row) < FARTHEST).any()]
    if points < 2 or len(usable) < points:
        return TINY
    nearest = np.sort(distances[np.ix_(usable, usable)], axis=1)[:, points - 1]  # the first is the model itself
    return float(min(ORTHOGONAL, max(TINY, factor * np.median(nearest))))


def validate(
    outputs: NDArray[np.floating], points: int, factor: float, eps: float | None = None, published: bool = False
) -> Found:
    """Clusters of models by their outputs (models, senders, samples, numbers).

    A model whose outputs are not finite is as far from all others as can be.
    """
    count, senders = outputs.shape[:2]
    given = np.asarray(outputs, np.float64)
    finite = np.asarray(np.isfinite(given).all(axis=(1, 2, 3)))
    given = np.where(finite[:, None, None, None], given, 0.0)
    # cosines do not depend on the length, and squares of the largest floats overflow
    given /= np.maximum(np.abs(given).max(axis=(1, 2, 3), keepdims=True), np.finfo(np.float64).tiny)
    if published:
        distances = joined(given.reshape(count, senders, -1))
    else:
        distances = median(centred(given).reshape(count, senders, -1))
    distances[~finite, :] = distances[:, ~finite] = FARTHEST
    np.fill_diagonal(distances, 0.0)
    within = reach(distances, points, factor) if eps is None else eps
    return Found(distances, within, dbscan(distances, within, points))


def _distances(outputs: Doubles) -> Doubles:
    """1 - cosine similarity per sender, of outputs (models, senders, numbers). A zero vector is like no other."""
    norms = np.linalg.norm(outputs, axis=2, keepdims=True)
    units = outputs / np.where(norms > 0, norms, 1.0)
    made: Doubles = np.clip(1.0 - np.einsum("isc,jsc->ijs", units, units), 0.0, FARTHEST)
    return made
