"""Taking a shuffled bucket apart: whole updates put together again, and the least noisy site picked by its variance.

An answer is a choice: entry (r, c) names the received row whose value at coordinate c belongs to reconstructed row r.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from attacks.privacy_inference.denoiser import Denoiser, Matrix

Choice = NDArray[np.int64]
STEPS = 8
TRIES = 8
WHOLE = 6.0  # standard deviations beyond what blind mixing gives
TINY = float(np.finfo(np.float32).tiny)


def coherence(rows: Matrix, tier: str, denoiser: Denoiser, rng: np.random.Generator) -> float:
    """How much likelier rows are as they came than mixed blindly, in standard deviations; 0 after a good shuffle."""
    centred = rows - rows.mean(axis=0)
    tries = [np.take_along_axis(centred, blind(rng, rows.shape), axis=0) for _ in range(TRIES)]
    found = [denoiser.likelihood(mixed, tier) for mixed in tries]
    return (denoiser.likelihood(centred, tier) - float(np.mean(found))) / max(float(np.std(found, ddof=1)), TINY)


def whole(found: Sequence[float]) -> bool:
    """Whether the coherences of several buckets together say that rows came whole, or in large pieces."""
    return bool(found) and sum(found) / np.sqrt(len(found)) > WHOLE


def reassemble(rows: Matrix, tier: str, denoiser: Denoiser, templates: Matrix) -> Choice:
    """Alternate between denoised rows and the assignment of every coordinate's values that fits them best.

    It starts from templates (clean auxiliary updates). The best assignment of n numbers to n predictions is by rank.
    """
    centred, received = rows - rows.mean(axis=0), np.argsort(rows, axis=0)
    choice = _by_rank(received, templates - templates.mean(axis=0))
    best, most = choice, -np.inf
    for _ in range(STEPS):
        built = np.take_along_axis(centred, choice, axis=0)
        likely = denoiser.likelihood(built, tier)
        if likely <= most:
            break
        best, most = choice, likely
        choice = _by_rank(received, denoiser.vectors(denoiser(built, tier)))
    return best


def blind(rng: np.random.Generator, shape: tuple[int, ...]) -> Choice:
    """Every column in an order of its own."""
    return np.argsort(rng.random(shape), axis=0)


def _by_rank(received: Choice, predicted: Matrix) -> Choice:
    """The k-th smallest value to the row with the k-th smallest prediction, in every column."""
    choice = np.empty_like(received)
    np.put_along_axis(choice, np.argsort(predicted, axis=0), received, axis=0)
    return choice


def least_noisy(rows: Matrix) -> Choice:
    """The site with the largest budget of its bucket (one row of choices): its values are nearest the middle.

    Where rows are whole their energies tell directly.
    """
    energies = (rows.astype(np.float64) ** 2).mean(axis=1)
    spread = (energies.max() - energies.min()) / max(float(energies.mean()), TINY)
    if spread > WHOLE * np.sqrt(2 / rows.shape[1]):
        return np.full((1, rows.shape[1]), int(energies.argmin()))
    nearest: Choice = np.abs(rows).argmin(axis=0)
    return nearest[None, :]
