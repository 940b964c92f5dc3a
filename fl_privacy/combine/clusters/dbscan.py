"""Density-based clusters (DBSCAN, Ester et al. 1996) from a matrix of distances."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fl_privacy.errors import FederationError

OUTLIER = -1


def dbscan(distances: NDArray[np.float64], eps: float, points: int) -> list[int]:
    """A cluster's number for each point, -1 for outliers.

    A core point has `points` points within `eps`, itself included. Core points within `eps` of each other share a
    cluster. Any other point belongs to the cluster of its nearest core point (of equally near ones, the first), if that
    is within `eps`; the original takes whichever cluster is found first, so its result depends on the order.
    """
    count = len(distances)
    if distances.shape != (count, count) or np.isnan(distances).any():
        raise FederationError(f"distances: shape {distances.shape}, or not a number; pass a square matrix")
    if points < 1 or not eps >= 0:
        raise FederationError(f"dbscan: eps {eps} and {points} points; use eps of at least 0 and 1 point or more")
    near = distances <= eps
    np.fill_diagonal(near, True)
    core = near.sum(axis=1) >= points
    labels = [OUTLIER] * count
    found = 0
    for start in range(count):
        if not core[start] or labels[start] != OUTLIER:
            continue
        ahead, labels[start] = [start], found
        while ahead:
            for other in np.flatnonzero(near[ahead.pop()] & core):
                if labels[other] == OUTLIER:
                    labels[other] = found
                    ahead.append(int(other))
        found += 1
    cores = np.flatnonzero(core)
    for point in np.flatnonzero(~core):
        reachable = cores[near[point, cores]]
        if len(reachable):
            labels[point] = labels[reachable[np.argmin(distances[point, reachable])]]
    return labels
