"""Stage 3 of the Privacy Inference Attack: updates of the same site in several rounds, and a known site's presence."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Ints = NDArray[np.int64]
WINDOW = 10  # rounds before and after that hold the candidates: the closed world


def unit(vectors: Array) -> Array:
    """Every row at length 1; a row of zeros stays one."""
    lengths = np.linalg.norm(vectors, axis=-1, keepdims=True)
    return np.divide(vectors, lengths, out=np.zeros_like(vectors), where=lengths > 0)


def candidates(rounds: Ints) -> NDArray[np.bool_]:
    """Which updates may be linked with which: those of other rounds within the window."""
    apart = np.abs(rounds[:, None] - rounds[None, :])
    return (apart > 0) & (apart <= WINDOW)


def nearest(features: Array, rounds: Ints) -> Ints:
    """For each update the most similar candidate, by cosine; -1 where there is none."""
    allowed = candidates(rounds)
    similarity = np.where(allowed, unit(features) @ unit(features).T, -np.inf)
    return np.where(allowed.any(axis=1), similarity.argmax(axis=1), -1)


def presence(features: Sequence[Array], answered: Sequence[frozenset[str]]) -> tuple[list[str], Array, Array]:
    """Whether a site took part, told from the updates alone: sites, scores and truth-free mask, one row a later round.

    From the first half of the rounds, whose participants are known, a site's trace is the mean update of the rounds
    with it less that of the rounds without it. In a later round its score is the largest projection of a row on the
    trace; rows that are mixtures all have about the same.
    """
    half = len(features) // 2
    means = np.array([rows.mean(axis=0) for rows in features])
    known = sorted(set().union(*answered[:half]))
    traces = []
    for name in known:
        inside = np.array([name in names for names in answered[:half]])
        without = means[:half][~inside].mean(axis=0) if not inside.all() else np.zeros(means.shape[1])
        traces.append(means[:half][inside].mean(axis=0) - without)
    template = unit(np.array(traces))
    scores = np.array([(rows @ template.T).max(axis=0) for rows in features[half:]])
    usable = np.array([not all(name in names for names in answered[:half]) for name in known])
    return [n for n, u in zip(known, usable, strict=True) if u], scores[:, usable], np.arange(half, len(features))
