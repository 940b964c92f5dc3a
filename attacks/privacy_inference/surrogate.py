"""Stage 2 of the Privacy Inference Attack: attributes of a site, or of a whole bucket, from denoised updates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from attacks.privacy_inference.denoiser import LEADING, Denoiser

Array = NDArray[np.float64]
Labels = NDArray[np.int64]
COPIES = 4  # noisy versions of every auxiliary update
BUCKETS = 600  # made of auxiliary sites


@dataclass(frozen=True)
class Examples:
    """Auxiliary updates of several rounds along the denoiser's directions: (rounds, sites, directions)."""

    components: Array
    labels: Labels

    def noisy(self, noise: float, rng: np.random.Generator) -> Array:
        """With noise of this variance added: along orthonormal directions it is as large as along coordinates."""
        return self.components + rng.normal(0, np.sqrt(noise), self.components.shape)


def classifier() -> Any:
    """A linear one, of the leading directions: there are few examples."""
    return make_pipeline(StandardScaler(), LogisticRegression(C=0.1, max_iter=2000))


def attributes(examples: Examples, denoiser: Denoiser, tier: str, rng: np.random.Generator) -> Any:
    """A classifier of denoised updates of one label, relative to their round's mean: the noise is conditioned on."""
    noise, features, labels = denoiser.noise[tier], [], []
    for _ in range(COPIES):
        shrunk = denoiser.shrink(examples.noisy(noise, rng), noise)
        features.append((shrunk - shrunk.mean(axis=1, keepdims=True)).reshape(-1, shrunk.shape[2])[:, :LEADING])
        labels.append(np.tile(examples.labels, len(shrunk)))
    return classifier().fit(np.concatenate(features), np.concatenate(labels))


def composition(
    examples: Examples, denoiser: Denoiser, size: int, noise: float, classes: Sequence[int], rng: np.random.Generator
) -> Any:
    """Shares of each attribute in a bucket from the mean of its rows, which no shuffle inside the bucket changes."""
    rounds, sites, _ = examples.components.shape
    features, shares = [], []
    for _ in range(BUCKETS):
        when, members = rng.integers(rounds), rng.choice(sites, min(size, sites), replace=False)
        mean = examples.components[when, members].mean(axis=0)
        mean = mean + rng.normal(0, np.sqrt(noise / size), mean.shape)
        features.append(denoiser.shrink(mean, noise / size) - examples.components[when].mean(axis=0))
        shares.append([np.mean(examples.labels[members] == label) for label in classes])
    return make_pipeline(StandardScaler(), Ridge(alpha=100.0)).fit(np.array(features)[:, :LEADING], np.array(shares))
