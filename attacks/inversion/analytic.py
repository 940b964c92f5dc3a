"""The record itself, where the first layer is linear: its gradient is an outer product with the record."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import nn

from attacks.inversion.gradients import Sight
from attacks.inversion.matching import Leak

SWEEPS = 50
Array = NDArray[np.float64]


def applies(model: nn.Module) -> bool:
    """Whether nothing but a reshape comes before the first linear layer, and it has a bias."""
    first = next((m for m in model.modules() if not isinstance(m, nn.Sequential | nn.Flatten | nn.Identity)), None)
    return isinstance(first, nn.Linear) and first.bias is not None


def recover(leak: Leak, shape: tuple[int, ...]) -> Array:
    """The record of a batch of one, from the first layer of every round; its mean where nothing tells."""
    found = np.stack([_one(leak, sight) for sight in leak.target.sights])
    told = np.isfinite(found)
    mean = np.where(told, found, 0.0).sum(axis=0) / np.maximum(told.sum(axis=0), 1)
    known = told.any(axis=0)
    return np.where(known, mean, mean[known].mean() if known.any() else 0.5).reshape(shape)


def _one(leak: Leak, sight: Sight) -> Array:
    name, layer = next((n, m) for n, m in leak.model.named_modules() if isinstance(m, nn.Linear))
    weight, bias = (leak.layout.slices[f"{name}.{part}"] for part in ("weight", "bias"))
    size = tuple(layer.weight.shape)
    return rank_one(
        sight.gradient[weight].reshape(size), sight.seen[weight].reshape(size), sight.gradient[bias], sight.seen[bias]
    )


def rank_one(
    outer: Array, seen: NDArray[np.bool_], errors: Array, errors_seen: NDArray[np.bool_], sweeps: int = SWEEPS
) -> Array:
    """x of outer = errors x^T, by alternating least squares over the entries that were seen; nan where none tells.

    An error that was not seen follows from its row, once some of x is known.
    """
    known = errors_seen & (errors != 0)
    errors = np.where(known, errors, 0.0)
    x = np.full(outer.shape[1], np.nan)
    for _ in range(sweeps):
        here = seen & known[:, None]
        weight = (here * errors[:, None] ** 2).sum(axis=0)
        x = np.divide((here * outer * errors[:, None]).sum(axis=0), weight, out=x, where=weight > 0)
        told = seen & np.isfinite(x)
        filled = np.where(np.isfinite(x), x, 0.0)
        weight = (told * filled**2).sum(axis=1)
        free = ~errors_seen & (weight > 0)
        errors = np.divide((told * outer * filled).sum(axis=1), weight, out=errors, where=free)
        if (known | free).sum() == known.sum() and np.isfinite(x).all():
            break
        known = known | free
    return x
