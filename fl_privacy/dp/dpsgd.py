"""DP-SGD (Abadi et al. 2016, Algorithm 1): local training that hides whether any single record took part."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from fl_privacy.crypto import keys
from fl_privacy.dp.noise import poisson_sample, standard_normal
from fl_privacy.dp.per_record import gradients, trainable
from fl_privacy.dp.sampled import Plan, Private
from fl_privacy.errors import FederationError
from fl_privacy.tasks.data import Dataset
from fl_privacy.tasks.train import How, Loss, Recipe, drawing, few_threads, loss_of, place

MOST_NUMBERS = 2**24  # gradient entries held at once: a large Poisson batch is processed in parts
BELOW = 1 - 1e-6  # rounded down slightly: the norm of a float32 gradient must not exceed the bound
TINY = torch.finfo(torch.float32).tiny  # smaller factors are imprecise: the norm could be twice the bound


def fit(
    model: nn.Module, data: Dataset, recipe: Recipe, private: Private, device: str = "cpu", how: How | None = None
) -> None:
    """Train the model in place. Every step derives its own keys for the batch and the noise."""
    if not len(data):
        raise FederationError("data: a site has no records to train on; use fewer sites or another partition")
    x, y = place(model, data, device)
    how = how or How()
    optimiser = how.optimiser(trainable(model), recipe)
    model.train()
    drawn = int.from_bytes(keys.derive(private.key, "dpsgd", 0, "", "draws")[:7], "big")
    with few_threads(model), drawing(drawn, x.device), torch.backends.cudnn.flags(enabled=False):
        for step in range(private.plan.steps):
            sample, noise = (keys.derive(private.key, "dpsgd", step, "", use) for use in ("sample", "noise"))
            rows = torch.from_numpy(poisson_sample(len(y), private.plan.rate, sample)).to(x.device)
            # Record by record: nothing that a task does to a batch may mix its records.
            changed = [how.augment(x[row : row + 1].clone()) for row in rows] if how.changes else []
            batch = torch.cat(changed) if changed else x[rows]
            total = clipped_sum(model, batch, y[rows], private.plan.clip, how.loss)
            optimiser.step(noisy_mean(total, private.plan, noise))


def clipped_sum(model: nn.Module, x: Tensor, y: Tensor, bound: float, loss: Loss = loss_of) -> list[Tensor]:
    """The sum of all records' gradients, each clipped to norm `bound` over the whole model; 0 for an empty batch."""
    weights = trainable(model)
    if math.isinf(bound) and len(y):
        whole = loss(model(x), y, "sum")
        return list(torch.autograd.grad(whole, weights, allow_unused=True, materialize_grads=True))
    total = [torch.zeros_like(weight).flatten() for weight in weights]
    size = max(1, MOST_NUMBERS // sum(weight.numel() for weight in weights))
    for first in range(0, len(y), size):
        found = gradients(model, x[first : first + size], y[first : first + size], loss)
        # A gradient that overflows counts as 0: one record must not be able to fail the round.
        each = [g.detach().flatten(1).nan_to_num(0.0, 0.0, 0.0) for g in found]
        norms = torch.stack([torch.linalg.vector_norm(g, dim=1, dtype=torch.float64) for g in each]).norm(dim=0)
        factors = (bound * BELOW / norms).clamp(max=1.0)
        factors = torch.where(factors < TINY, 0.0, factors)
        for part, g in zip(total, each, strict=True):
            part += factors.to(g.dtype) @ g
    return [part.view_as(weight) for part, weight in zip(total, weights, strict=True)]


def noisy_mean(total: list[Tensor], plan: Plan, key: bytes) -> list[Tensor]:
    """Add Gaussian noise of deviation noise * clip to every coordinate and divide by the expected batch size.

    Not by the actual size, which is as secret as the records. An empty batch gets the same noise.
    """
    if plan.noise:
        noise = torch.from_numpy(standard_normal(sum(part.numel() for part in total), key)).mul_(plan.noise * plan.clip)
        pieces = torch.split(noise.to(total[0].device), [part.numel() for part in total])
        total = [part + piece.view_as(part) for part, piece in zip(total, pieces, strict=True)]
    return [part / plan.batch for part in total]
