"""Attacks that search few dimensions: ROG (a small image, enhanced afterwards) and GGL (a generator's code)."""

from __future__ import annotations

import torch
from torch import Tensor

from attacks.inversion.matching import Leak, descend
from attacks.inversion.priors import FACTOR, LATENT, Priors, blurred, enlarged

STEPS, STARTS = 150, 2
UNLIKELY = 1e-4  # the weight of a code's square


def rog(leak: Leak, shape: tuple[int, ...], y: Tensor, priors: Priors, generator: torch.Generator) -> Tensor:
    """The small image whose enlargement explains the gradient, enhanced (Yue et al. 2023)."""
    batch, channels, *side = shape
    small = torch.rand(
        (batch, channels, *(length // FACTOR for length in side)), generator=generator, dtype=torch.float64
    )
    found, _ = descend(lambda point: leak.squared(enlarged(point, tuple(side)), y), small, STEPS)
    return priors.enhancer(enlarged(found, tuple(side)).clamp(0, 1))  # type: ignore[no-any-return]


def rog_best(x: Tensor, priors: Priors) -> Tensor:
    """What ROG makes of the right small image."""
    return priors.enhancer(blurred(x))  # type: ignore[no-any-return]


def ggl(leak: Leak, shape: tuple[int, ...], y: Tensor, priors: Priors, generator: torch.Generator) -> Tensor:
    """The generator's image that explains the gradient as the defence leaves it (Li et al. 2022)."""
    tried = [
        descend(
            lambda code: leak.squared(priors.generator(code, y), y) + UNLIKELY * code.square().mean(),
            torch.randn((shape[0], LATENT), generator=generator, dtype=torch.float64),
            STEPS,
        )
        for _ in range(STARTS)
    ]
    return priors.generator(min(tried, key=lambda one: one[1])[0], y)  # type: ignore[no-any-return]


def ggl_best(x: Tensor, y: Tensor, priors: Priors) -> Tensor:
    """The generator's nearest image of the right class."""
    start = torch.zeros((len(x), LATENT), dtype=torch.float64)
    code, _ = descend(lambda code: (priors.generator(code, y) - x).square().mean(), start, 2 * STEPS)
    return priors.generator(code, y)  # type: ignore[no-any-return]
