"""Stage 3 of the Privacy Inference Attack: updates of the same site in several rounds, and a known site's presence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Ints = NDArray[np.int64]
TRIES = 10  # blind traces, for the chance of a presence
WINDOW = 10  # rounds before and after that hold the candidates: the closed world


class Mine(Protocol):
    """The rows of a round that may be a site's own."""

    def __call__(self, round: int, site: str) -> Ints: ...


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
    allowed, units = candidates(rounds), unit(features)
    similarity = np.where(allowed, units @ units.T, -np.inf)
    return np.where(allowed.any(axis=1), similarity.argmax(axis=1), -1)


@dataclass(frozen=True)
class Presence:
    """How much later rounds (indices) look as if a site were in them: scores (rounds, sites), and with blind traces."""

    names: list[str]
    rounds: Ints
    scores: Array
    blind: Array  # (tries, rounds, sites)


def presence(
    rows: Sequence[Array], invited: Sequence[frozenset[str]], mine: Mine, rng: np.random.Generator
) -> Presence:
    """The participants of the first half are known.

    A site's trace is the row, of a round that it was in, which has the most likeness in the other rounds with it and
    the least in those without it. A later round's score is the largest cosine of a row with the trace.
    """
    half = len(rows) // 2
    units = [unit(found) for found in rows]
    likeness = [np.stack([(one @ other.T).max(axis=1) for other in units[:half]], axis=1) for one in units[:half]]
    names, traces = [], []
    for name in sorted(set().union(*invited[:half])):
        there = np.array([name in invited[t] for t in range(half)])
        if 1 < there.sum() < half:
            names.append(name)
            traces.append(_trace(units, likeness, there, partial(mine, site=name)))
    later = np.arange(half, len(rows))

    def scored(tried: Array) -> Array:
        found = [
            [(units[t][mine(round=int(t), site=n)] @ v).max() for n, v in zip(names, tried, strict=True)] for t in later
        ]
        return np.array(found).reshape(len(later), len(names))

    size = (TRIES, len(names), rows[0].shape[1])
    return Presence(
        names, later, scored(np.array(traces)), np.array([scored(tried) for tried in rng.normal(size=size)])
    )


def _trace(units: list[Array], likeness: list[Array], there: NDArray[np.bool_], mine: Callable[[int], Ints]) -> Array:
    """The row that tells the known rounds with a site best from those without it."""
    best, found = -np.inf, units[0][0]
    for t in np.flatnonzero(there):
        others = there & (np.arange(len(there)) != t)
        for row in mine(int(t)):
            told = likeness[t][row, others].mean() - likeness[t][row, ~there].mean()
            if told > best:
                best, found = told, units[t][row]
    return np.asarray(found)
