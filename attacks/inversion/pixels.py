"""Attacks that search all pixels: DLG, iDLG, and inverting gradients (cosine and total variation)."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from attacks.inversion.matching import Leak, descend

STEPS = 400  # of L-BFGS, per start
STARTS = 2  # until one explains the gradient
EXPLAINED = 1e-5  # of the gradient's square: what remains is rounding
SIGN_STEPS, SIGN_RATE = 400, 0.1
SMOOTHNESS = 1e-3


def dlg(leak: Leak, shape: tuple[int, ...], classes: int, generator: torch.Generator) -> Tensor:
    """Records and labels whose gradient is nearest (Zhu et al. 2019)."""
    batch, pixels = shape[0], math.prod(shape)

    def loss(point: Tensor) -> Tensor:
        return leak.squared(point[:pixels].view(shape), point[pixels:].view(batch, classes).softmax(dim=1))

    best = _best(loss, lambda: _normal(pixels + batch * classes, generator))
    return best[:pixels].view(shape)


def idlg(leak: Leak, shape: tuple[int, ...], y: Tensor, generator: torch.Generator) -> Tensor:
    """The same with the labels known (Zhao et al. 2020)."""
    return _best(lambda x: leak.squared(x, y), lambda: _normal(shape, generator))


def inverting(leak: Leak, shape: tuple[int, ...], y: Tensor, generator: torch.Generator) -> Tensor:
    """Smooth records in the gradient's direction, by Adam on signs (Geiping et al. 2020)."""
    x = torch.rand(shape, generator=generator, dtype=torch.float64).requires_grad_()
    mean, square = torch.zeros(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.float64)
    for step in range(1, SIGN_STEPS + 1):
        loss = leak.cosine(x, y) + SMOOTHNESS * variation(x)
        sign = torch.autograd.grad(loss, x)[0].sign()
        mean, square = 0.9 * mean + 0.1 * sign, 0.999 * square + 0.001 * sign.square()
        rate = SIGN_RATE * 0.1 ** (3 * step // SIGN_STEPS)
        change = rate * (mean / (1 - 0.9**step)) / ((square / (1 - 0.999**step)).sqrt() + 1e-8)
        x = (x.detach() - change).clamp(0, 1).requires_grad_()
    return x.detach()


def variation(x: Tensor) -> Tensor:
    """The mean absolute difference of neighbouring pixels."""
    return x.diff(dim=-1).abs().mean() + x.diff(dim=-2).abs().mean()


def _best(loss: Callable[[Tensor], Tensor], start: Callable[[], Tensor]) -> Tensor:
    """The best of several starts: the attacker sees which of them explains the gradient."""
    found, left = descend(loss, start(), STEPS)
    for _ in range(STARTS - 1):
        if left < EXPLAINED:
            break
        other, remains = descend(loss, start(), STEPS)
        if remains < left:
            found, left = other, remains
    return found


def _normal(shape: int | tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)
