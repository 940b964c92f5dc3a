"""Taking a shuffled bucket apart: whole updates put together again, and the least noisy site picked by its variance.

An answer is a choice: entry (r, c) names the received row whose value at coordinate c belongs to reconstructed row r.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from attacks.denoiser import Denoiser, Matrix

Choice = NDArray[np.int64]
STEPS = 8
# Rows whose energies differ by more than this many standard deviations of equal Gaussian noise were left whole.
WHOLE = 6.0


def reassemble(rows: Matrix, tier: str, denoiser: Denoiser, templates: Matrix) -> Choice:
    """Alternate between denoised rows and the assignment of every coordinate's values that fits them best.

    The best assignment of n numbers to n predictions is by rank. It starts from the rows as they came (right for a weak
    shuffle) and from templates (clean auxiliary updates); what is more coherent in the end is kept.
    """
    received = np.argsort(rows, axis=0)
    best, most = np.tile(np.arange(len(rows))[:, None], rows.shape[1]), -np.inf
    centre = rows.mean(axis=0)
    for start in (rows, centre + templates - templates.mean(axis=0)):
        guess = start
        for step in range(STEPS):
            if step or start is not rows:
                choice = _by_rank(received, guess)
            else:
                choice = best
            built = np.take_along_axis(rows, choice, axis=0)
            guess = denoiser.vectors(denoiser(built - centre, tier)) + centre
            coherent = float(((built - centre) @ denoiser.directions).astype(np.float64).__pow__(2).sum())
            if coherent > most:
                best, most = choice, coherent
    return best


def _by_rank(received: Choice, predicted: Matrix) -> Choice:
    """The k-th smallest value to the row with the k-th smallest prediction, in every column."""
    choice = np.empty_like(received)
    np.put_along_axis(choice, np.argsort(predicted, axis=0), received, axis=0)
    return choice


def least_noisy(rows: Matrix) -> Choice:
    """The site with the largest budget of its bucket (one row of choices): its values are nearest the middle.

    Where rows are whole their energies tell directly.
    """
    centred = rows - np.median(rows, axis=0)
    energies = (centred.astype(np.float64) ** 2).mean(axis=1)
    spread = (energies.max() - energies.min()) / energies.mean()
    if spread > WHOLE * np.sqrt(2 / rows.shape[1]):
        return np.full((1, rows.shape[1]), int(energies.argmin()))
    return np.abs(rows).argmin(axis=0)[None, :]
