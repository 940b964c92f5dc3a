"""Stage 1 of the Privacy Inference Attack: an epsilon-aware denoiser (IntraShuffler, Section 5.0.2).

Clean updates of sites of the same kind lie near few directions; noise lies in all of them. Of all maps that are linear
in the noisy update and may depend on epsilon, the one with the least squared error over pairs of clean and noisy
updates is Wiener's: the components along the principal directions, each shrunk by signal / (signal + noise).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from attacks.common.observed import Observation

Matrix = NDArray[np.float32]
Array = NDArray[np.float64]

DIRECTIONS = 256
LEADING = 32  # directions that a classifier of few examples can bear
NEGLIGIBLE = 1e-6  # of the strongest direction's energy: below it is float32 rounding


@dataclass(frozen=True)
class Denoiser:
    """Principal directions of clean updates (columns), the energy of each, and the noise variance by label."""

    directions: Matrix
    energy: Array
    noise: dict[str, float]

    def __call__(self, rows: Matrix, tier: str) -> Array:
        """The denoised rows as components along the directions: cosines and distances are those of the vectors."""
        return self.shrink(np.asarray(rows @ self.directions, np.float64), self.noise[tier])

    def shrink(self, components: Array, noise: float) -> Array:
        return components * (self.energy / (self.energy + noise))

    def likelihood(self, rows: Matrix, tier: str) -> float:
        """How likely rows are under the denoiser's model, up to a constant that no rearrangement of them changes."""
        noise = max(self.noise[tier], float(np.finfo(np.float32).tiny))
        along = (np.asarray(rows @ self.directions, np.float64) ** 2).sum(axis=0)
        across = float((rows.astype(np.float64) ** 2).sum()) - along.sum()
        return -float((along / (self.energy + noise)).sum()) - max(0.0, float(across)) / noise

    def vectors(self, components: Array) -> Matrix:
        """Components back as updates."""
        return components.astype(np.float32) @ self.directions.T


def learn(clean: Matrix, seen: list[Observation]) -> Denoiser:
    """The denoiser from clean auxiliary updates (one per row), and the noise that the labels of a run stand for."""
    gram = np.asarray(clean @ clean.T, np.float64)
    values, mixtures = np.linalg.eigh(gram)
    strongest = np.argsort(values)[::-1][:DIRECTIONS]
    strongest = strongest[values[strongest] > NEGLIGIBLE * values[-1]]
    directions = clean.T @ (mixtures[:, strongest] / np.sqrt(values[strongest])).astype(np.float32)
    return Denoiser(directions, values[strongest] / len(clean), _noise(directions, seen))


def _noise(directions: Matrix, seen: list[Observation]) -> dict[str, float]:
    """Variance by label, from what lies across the directions: right for every mechanism, also in merged buckets."""
    found: dict[str, list[float]] = {}
    for one in seen:
        across = (one.rows.astype(np.float64) ** 2).sum(axis=1) - ((one.rows @ directions) ** 2).sum(axis=1)
        for tier, energy in zip(one.tiers, across, strict=True):
            found.setdefault(tier, []).append(max(0.0, energy) / max(1, one.rows.shape[1] - directions.shape[1]))
    return {tier: float(np.mean(energies)) for tier, energies in found.items()}
