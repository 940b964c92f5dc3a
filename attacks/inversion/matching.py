"""Gradients of a candidate batch, compared with those that were seen; and labels, which the last layer gives away."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import minimize
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy, one_hot

from attacks.inversion.gradients import Target
from fl_privacy import vector

Ints = NDArray[np.int64]


class Leak:
    """A target's gradients and how well a batch explains them, on the coordinates that were seen.

    `limit` is the norm that the protocol clips a gradient to: a public defence, applied to candidates as well.
    """

    def __init__(self, model: nn.Module, target: Target, limit: float | None = None) -> None:
        self.model, self.target, self.limit = deepcopy(model).double(), target, limit
        self.layout = vector.flatten(model)[1]
        self._weights = [self._tensors(sight.model) for sight in target.sights]
        self._kept = [torch.from_numpy(np.flatnonzero(s.seen)) for s in target.sights]
        wanted = [s.gradient[kept.numpy()] for s, kept in zip(target.sights, self._kept, strict=True)]
        self.wanted = torch.from_numpy(np.concatenate(wanted))
        self._size = self.wanted.square().sum().clamp_min(1e-30)

    def gradients(self, x: Tensor, y: Tensor) -> Tensor:
        """Those of the batch's mean loss at every model; `y` are the probabilities of the classes."""
        return torch.cat([self._gradient(w, x, y)[kept] for w, kept in zip(self._weights, self._kept, strict=True)])

    def squared(self, x: Tensor, y: Tensor) -> Tensor:
        """The squared error, relative to the square of what was seen."""
        error: Tensor = (self.gradients(x, y) - self.wanted).square().sum() / self._size
        return error

    def cosine(self, x: Tensor, y: Tensor) -> Tensor:
        """One less the cosine (Geiping et al. 2020)."""
        found = self.gradients(x, y)
        cosine: Tensor = (found @ self.wanted) / (found.norm() * self._size.sqrt() + 1e-30)
        return 1 - cosine

    def _gradient(self, weights: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        loss = cross_entropy(functional_call(self.model, weights, (x,)), y)
        made = torch.autograd.grad(loss, list(weights.values()), create_graph=torch.is_grad_enabled())
        flat = torch.cat([part.reshape(-1) for part in made])
        return flat if self.limit is None else flat * (self.limit / flat.norm().clamp_min(1e-30)).clamp_max(1)

    def _tensors(self, model: vector.Vector) -> dict[str, Tensor]:
        named = vector.unflatten(model, self.layout)
        return {name: torch.from_numpy(array.astype(np.float64)).requires_grad_() for name, array in named.items()}


def labels(leak: Leak, batch: int) -> Ints:
    """The classes of the batch, from the signs of the last layer's rows (iDLG; LLG, Wainakh et al. 2022, for several).

    A row is (p - y) times the activations, which are not negative: only a class of the batch has a negative one.
    """
    sights, rows = leak.target.sights, _last_layer(leak)
    found = [(sum(s.gradient[row].sum() for s in sights), sum(s.seen[row].sum() for s in sights)) for row in rows]
    sums = np.array([total / max(1, count) for total, count in found])
    impact = np.minimum(sums, 0).sum() / batch
    chosen = []
    for _ in range(batch):
        chosen.append(int(sums.argmin()))
        sums[chosen[-1]] -= impact
    return np.array(chosen)


def _last_layer(leak: Leak) -> list[Ints]:
    """The coordinates of each class: its row of the last linear layer, and its bias."""
    name, last = [(n, m) for n, m in leak.model.named_modules() if isinstance(m, nn.Linear)][-1]
    weight = np.arange(leak.layout.size)[leak.layout.slices[f"{name}.weight"]].reshape(last.weight.shape)
    bias = leak.layout.slices.get(f"{name}.bias")
    if bias is None:
        return list(weight)
    return list(np.column_stack([weight, np.arange(bias.start, bias.stop)]))


def certain(chosen: Ints, classes: int) -> Tensor:
    """These classes as probabilities."""
    return one_hot(torch.from_numpy(chosen), classes).double()


def descend(loss: Callable[[Tensor], Tensor], start: Tensor, steps: int) -> tuple[Tensor, float]:
    """L-BFGS from `start`: the best point, and its loss."""

    def value(flat: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        point = torch.from_numpy(flat.reshape(start.shape)).requires_grad_()
        found = loss(point)
        (slope,) = torch.autograd.grad(found, point)
        return float(found.detach()), slope.reshape(-1).numpy()

    options = {"maxiter": steps, "maxfun": 2 * steps, "maxcor": 50, "ftol": 1e-15, "gtol": 1e-12}
    found = minimize(value, start.reshape(-1).numpy(), jac=True, method="L-BFGS-B", options=options)
    return torch.from_numpy(found.x.reshape(start.shape)), float(found.fun)
