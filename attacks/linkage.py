"""Stage 3 of the Privacy Inference Attack: updates of the same site in several rounds, and a known site's presence."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Ints = NDArray[np.int64]
WINDOW = 10  # rounds before and after that hold the candidates: the closed world


def unit(vectors: Array) -> Array:
    """Every row at length 1; a row of zeros stays one."""
    lengths = np.linalg.norm(vectors, axis=-1, keepdims=True)
    made: Array = np.divide(vectors, lengths, out=np.zeros_like(vectors), where=lengths > 0)
    return made


def candidates(rounds: Ints) -> NDArray[np.bool_]:
    """Which updates may be linked with which: those of other rounds within the window."""
    apart = np.abs(rounds[:, None] - rounds[None, :])
    allowed: NDArray[np.bool_] = (apart > 0) & (apart <= WINDOW)
    return allowed


def nearest(features: Array, rounds: Ints) -> Ints:
    """For each update the most similar candidate, by cosine; -1 where there is none."""
    allowed = candidates(rounds)
    similarity = np.where(allowed, unit(features) @ unit(features).T, -np.inf)
    return np.where(allowed.any(axis=1), similarity.argmax(axis=1), -1)


def presence(
    rows: Sequence[Array], invited: Sequence[frozenset[str]], mine: Callable[[int, str], Ints]
) -> tuple[list[str], Array, Ints]:
    """How much every later round looks as if a site were in it: sites, scores (rounds, sites), and the rounds.

    The participants of the first half are known. A site's trace is the pair of rows, from two rounds it was in, that
    resemble each other most; a later round's score is the largest cosine of a row with the trace. `mine(round, site)`
    are the rows that the site's public budget allows to be its own.
    """
    half = len(rows) // 2
    units = [unit(found) for found in rows]
    names, traces = [], []
    for name in sorted(set().union(*invited[:half])):
        there = [t for t in range(half) if name in invited[t] and len(mine(t, name))]
        if len(there) > 1:
            names.append(name)
            traces.append(_trace([units[t][mine(t, name)] for t in there]))
    later = np.arange(half, len(rows))
    scores = np.full((len(later), len(names)), -1.0)
    for at, t in enumerate(later):
        for column, name in enumerate(names):
            if len(own := mine(int(t), name)):
                scores[at, column] = (units[t][own] @ traces[column]).max()
    return names, scores, later


def _trace(groups: list[Array]) -> Array:
    """Mean of the two rows of different groups with the largest cosine."""
    best, found = -np.inf, groups[0][0]
    for i, one in enumerate(groups):
        for two in groups[i + 1 :]:
            cosines = one @ two.T
            r, c = np.unravel_index(cosines.argmax(), cosines.shape)
            if cosines[r, c] > best:
                best, found = cosines[r, c], one[r] + two[c]
    return np.asarray(unit(found[None])[0])
