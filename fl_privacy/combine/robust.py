"""Rules that bear some poisoned updates, as pure functions of the rows (one update each).

The coordinate-wise ones (median, trimmed mean) give the same bits for every order of the rows; for the others the
caller sorts the rows first if that matters. Distances and sums are in float64.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from fl_privacy.combine.mean import check_matrix
from fl_privacy.errors import FederationError
from fl_privacy.vector import Vector

PIECE = 2**16  # columns worked on at a time: temporaries stay small
TINY = 1e-12  # relative: where Weiszfeld's weights 1/distance would overflow

Matrix = NDArray[np.float32]
Doubles = NDArray[np.float64]


def median(rows: Matrix) -> Vector:
    """The middle value of every column, or the mean of the two middle ones (Yin et al. 2018, Option I)."""
    return _middle(rows, (len(rows) - 1) // 2)


def trimmed_mean(rows: Matrix, fraction: float) -> Vector:
    """The mean of every column without the `fraction` largest and smallest of its values (Yin et al. 2018, II)."""
    return _middle(rows, math.floor(fraction * len(rows)))


def krum(rows: Matrix, f: int) -> Vector:
    """The row with the smallest sum of squared distances to its n - f - 2 nearest others (Blanchard et al. 2017)."""
    chosen: Vector = rows[multi_krum_rows(rows, f, 1)[0]].copy()
    return chosen


def multi_krum(rows: Matrix, f: int, chosen: int | None = None) -> Vector:
    """The mean of the `chosen` rows with the smallest scores of Krum; by default n - f - 2, those it calls safe."""
    return _mean(rows[multi_krum_rows(rows, f, chosen)])


def multi_krum_rows(rows: Matrix, f: int, chosen: int | None = None) -> list[int]:
    """Which rows Multi-Krum averages, best first; of equal scores the earlier row."""
    check_matrix(rows)
    count = len(rows)
    _enough("krum", count, f, 2 * f + 3)
    wanted = count - f - 2 if chosen is None else chosen
    if not 1 <= wanted <= count:
        raise FederationError(f"chosen: {wanted} of {count} rows; use 1 to {count}")
    return _by_score(squared_distances(rows), f)[:wanted]


def bulyan(rows: Matrix, f: int) -> Vector:
    """Krum picks n - 2f rows one by one; of these, the mean per column of the n - 4f values nearest to the median.

    El Mhamdi et al. 2018. When fewer than f + 3 rows are left to pick from, the one nearest neighbour counts.
    """
    check_matrix(rows)
    _enough("bulyan", len(rows), f, 4 * f + 3)
    distances, left, picked = squared_distances(rows), list(range(len(rows))), list[int]()
    while len(picked) < len(rows) - 2 * f:
        best = left[_by_score(distances[np.ix_(left, left)], f)[0]]
        left.remove(best)
        picked.append(best)
    return _nearest_to_median(rows[picked], len(rows) - 4 * f)


def geometric_median(rows: Matrix, iterations: int = 100, tolerance: float = 1e-7) -> Vector:
    """The point with the smallest sum of distances to the rows, by Weiszfeld's algorithm (Pillutla et al. 2022).

    Distances below TINY times the spread of the rows count as that much. It ends when a step is below `tolerance`
    times the spread.
    """
    check_matrix(rows)
    centre: Doubles = rows.mean(axis=0, dtype=np.float64)
    spread = float(_distances(rows, centre).max())
    if spread == 0:
        return centre.astype(np.float32)
    for _ in range(iterations):
        closeness = 1 / np.maximum(_distances(rows, centre), TINY * spread)
        following = _combination(rows, closeness / closeness.sum())
        step = float(np.linalg.norm(following - centre))
        centre = following
        if step <= tolerance * spread:
            break
    return centre.astype(np.float32)


def centred_clipping(rows: Matrix, centre: Vector, radius: float, iterations: int = 3) -> Vector:
    """v <- v + mean_i (x_i - v) min(1, radius / |x_i - v|), from the last result (Karimireddy et al. 2021, Eq. 5)."""
    check_matrix(rows)
    if centre.shape != rows.shape[1:]:
        raise FederationError(f"centre: shape {centre.shape} does not fit rows of {rows.shape[1]} columns")
    around: Doubles = centre.astype(np.float64)
    for _ in range(iterations):
        kept = _shrunk(_distances(rows, around), radius) / len(rows)
        around = _combination(rows, kept) + (1 - kept.sum()) * around
    return around.astype(np.float32)


def norm_bounding(rows: Matrix, bound: float | None = None) -> Matrix:
    """The rows, those longer than `bound` scaled down to it (Sun et al. 2019); by default, the median of the norms."""
    check_matrix(rows)
    norms = _distances(rows, np.zeros(rows.shape[1]))
    limit = float(np.median(norms)) if bound is None else bound
    shrunk: Matrix = rows * _shrunk(norms, limit)[:, None].astype(np.float32)
    return shrunk


def fltrust(rows: Matrix, trusted: Vector) -> Vector:
    """sum_i TS_i |g_0| g_i / |g_i| over sum_i TS_i, TS_i = max(0, cos(g_i, g_0)) (Cao et al. 2021, Eq. 2 to 4).

    Zero if no row points the trusted way.
    """
    check_matrix(rows)
    if trusted.shape != rows.shape[1:]:
        raise FederationError(f"trusted: shape {trusted.shape} does not fit rows of {rows.shape[1]} columns")
    norms, length = _distances(rows, np.zeros(rows.shape[1])), _norm(trusted)
    products = sum((rows[:, part].astype(np.float64) @ trusted[part] for part in _parts(rows)), np.zeros(len(rows)))
    sizes = norms * length
    scores = np.maximum(np.divide(products, sizes, out=np.zeros(len(rows)), where=sizes > 0), 0)
    if not scores.any():
        return np.zeros(rows.shape[1], np.float32)
    scaled = np.divide(scores * length, norms, out=np.zeros(len(rows)), where=norms > 0)
    return _combination(rows, scaled / scores.sum()).astype(np.float32)


def squared_distances(rows: Matrix) -> Doubles:
    """|x_i - x_j|^2 of all pairs of rows; relative to the first row, so that a common offset costs no digits."""
    products = np.zeros((len(rows), len(rows)))
    for part in _parts(rows):
        piece = rows[:, part].astype(np.float64)
        piece -= piece[0].copy()
        products += piece @ piece.T
    sizes = products.diagonal()
    found: Doubles = np.maximum(sizes[:, None] + sizes[None, :] - 2 * products, 0)
    np.fill_diagonal(found, 0)
    return found


def _by_score(distances: Doubles, f: int) -> list[int]:
    """The rows by Krum's score, smallest first."""
    count = len(distances)
    neighbours = min(max(count - f - 2, 1), count - 1)
    scores = np.sort(distances, axis=1)[:, 1 : 1 + neighbours].sum(axis=1)  # the first is its distance to itself
    return [int(row) for row in np.argsort(scores, kind="stable")]


def _nearest_to_median(rows: Matrix, kept: int) -> Vector:
    """The mean per column of the `kept` values nearest to its median; of equally near ones the smaller."""
    out = np.empty(rows.shape[1], np.float32)
    for part in _parts(rows):
        values = np.sort(rows[:, part], axis=0).astype(np.float64)
        away = np.abs(values - np.median(values, axis=0))
        nearest = np.argsort(away, axis=0, kind="stable")[:kept]
        out[part] = np.take_along_axis(values, nearest, axis=0).mean(axis=0)
    return out


def _middle(rows: Matrix, dropped: int) -> Vector:
    """The mean of every sorted column without `dropped` values at each end."""
    check_matrix(rows)
    out = np.empty(rows.shape[1], np.float32)
    for part in _parts(rows):
        out[part] = np.sort(rows[:, part], axis=0)[dropped : len(rows) - dropped].mean(axis=0, dtype=np.float64)
    return out


def _mean(rows: Matrix) -> Vector:
    mean: Vector = rows.mean(axis=0, dtype=np.float64).astype(np.float32)
    return mean


def _combination(rows: Matrix, weights: Doubles) -> Doubles:
    """The weighted sum of the rows."""
    out = np.empty(rows.shape[1])
    for part in _parts(rows):
        out[part] = weights @ rows[:, part].astype(np.float64)
    return out


def _distances(rows: Matrix, point: Doubles) -> Doubles:
    """From each row to the point."""
    squares = np.zeros(len(rows))
    for part in _parts(rows):
        away = rows[:, part] - point[part]
        squares += np.einsum("ij,ij->i", away, away)
    distances: Doubles = np.sqrt(squares)
    return distances


def _norm(vector: Vector) -> float:
    return float(_distances(vector[None], np.zeros(vector.size))[0])


def _shrunk(distances: Doubles, radius: float) -> Doubles:
    """min(1, radius / distance)."""
    return np.divide(radius, distances, out=np.ones(len(distances)), where=distances > radius)


def _parts(rows: Matrix) -> Iterator[slice]:
    return (slice(first, first + PIECE) for first in range(0, rows.shape[1], PIECE))


def _enough(rule: str, count: int, f: int, least: int) -> None:
    if f < 0 or count < least:
        raise FederationError(f"f: {rule} bears {f} poisoned updates among at least {least}, and has {count}; lower f")
