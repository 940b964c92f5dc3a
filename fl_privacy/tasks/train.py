"""Local training of one site, and evaluation."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from fl_privacy.errors import FederationError
from fl_privacy.tasks import regularise
from fl_privacy.tasks.data import Dataset

EVALUATION_BATCH = 256  # larger ones leave the cache: LeNet-5 takes twice as long with 1024
SMALL_MODEL = 1_000_000
Outputs = NDArray[np.float32]

Progress = Callable[[int, float], None]
Loss = Callable[[Tensor, Tensor, str], Tensor]  # (outputs, labels, reduction: none, mean or sum)


class Diverged(FederationError):
    """Numbers became too large in training: the model, the learning rate or the records made them so."""


@dataclass(frozen=True)
class Recipe:
    """Local SGD; `proximal` is FedProx's mu (Li et al. 2020), 0 for FedAvg. The last four: see regularise.py."""

    epochs: int
    batch_size: int
    lr: float
    momentum: float = 0.0
    weight_decay: float = 0.0
    proximal: float = 0.0
    dropout: float = 0.0
    label_smoothing: float = 0.0
    crop: int | None = None
    instahide: int | None = None

    def __post_init__(self) -> None:
        for field in ("epochs", "batch_size", "lr"):
            if not getattr(self, field) > 0:
                raise FederationError(f"train.{field}: {getattr(self, field)} is not positive; raise it")
        for field in ("momentum", "weight_decay", "proximal", "dropout", "label_smoothing"):
            if not getattr(self, field) >= 0:
                raise FederationError(f"train.{field}: {getattr(self, field)} is negative; use 0 or more")


@dataclass(frozen=True)
class Metrics:
    """A model's results on held-out records: accuracy and cross-entropy, or RMSE and squared error for forecasts."""

    accuracy: float | None
    loss: float
    rmse: float | None = None

    @property
    def score(self) -> tuple[str, float]:
        """The headline measure with its name: accuracy or RMSE."""
        return ("rmse", math.sqrt(self.loss)) if self.accuracy is None else ("accuracy", self.accuracy)


def mean(found: Sequence[Metrics]) -> Metrics:
    """The mean of each measure over several models."""
    accuracies, rmses = ([v for m in found if (v := getattr(m, name)) is not None] for name in ("accuracy", "rmse"))
    loss = math.fsum(m.loss for m in found) / len(found)
    averages = (math.fsum(values) / len(values) if values else None for values in (accuracies, rmses))
    accuracy, rmse = averages
    return Metrics(accuracy, loss, rmse)


class Sgd:
    """SGD as in `torch.optim.SGD`, without the seconds that importing torch.optim takes.

    The proximal term mu/2 |w - w_global|^2 enters as its gradient, where w_global are the initial weights.
    """

    def __init__(self, weights: Sequence[Tensor], recipe: Recipe) -> None:
        self.weights, self.recipe = list(weights), recipe
        self.start = [w.detach().clone() for w in weights] if recipe.proximal else []
        self.velocity = [torch.zeros_like(w) for w in weights] if recipe.momentum else []

    @torch.no_grad()
    def step(self, gradients: list[Tensor]) -> None:
        recipe, weights = self.recipe, self.weights
        if recipe.weight_decay:
            gradients = list(torch._foreach_add(gradients, weights, alpha=recipe.weight_decay))
        if recipe.proximal:
            drift = torch._foreach_sub(weights, self.start)
            gradients = list(torch._foreach_add(gradients, drift, alpha=recipe.proximal))
        if recipe.momentum:
            torch._foreach_mul_(self.velocity, recipe.momentum)
            torch._foreach_add_(self.velocity, gradients)
            gradients = self.velocity
        torch._foreach_add_(weights, gradients, alpha=-recipe.lr)


def device(name: str) -> torch.device:
    """`cpu`, `cuda` or `cuda:N`, if this machine has it."""
    family, _, number = name.partition(":")
    if family not in ("cpu", "cuda") or (number and not number.isdecimal()):
        raise FederationError(f"device: {name!r} is unknown; use cpu, cuda or cuda:N")
    gpus = torch.cuda.device_count() if family == "cuda" else 0
    if family == "cuda" and int(number or 0) >= gpus:
        raise FederationError(f"device: {name!r} requested, but torch sees {gpus} GPUs; use cpu or another number")
    return torch.device(name)


def loss_of(outputs: Tensor, labels: Tensor, reduction: str = "mean") -> Tensor:
    """Cross-entropy for classes, squared error for forecasts."""
    if labels.is_floating_point():
        return mse_loss(outputs.squeeze(1), labels, reduction=reduction)
    return cross_entropy(outputs, labels, reduction=reduction)


class Torch:
    """An optimiser of torch's kind, which a task brings, behind the same step."""

    def __init__(self, weights: Sequence[nn.Parameter], optimiser: Any, recipe: Recipe) -> None:
        self.weights, self._optimiser, self._proximal = list(weights), optimiser, recipe.proximal
        self._start = [w.detach().clone() for w in weights] if recipe.proximal else []

    def step(self, gradients: list[Tensor]) -> None:
        if self._proximal:
            drift = torch._foreach_sub([w.detach() for w in self.weights], self._start)
            gradients = list(torch._foreach_add(gradients, drift, alpha=self._proximal))
        for weight, gradient in zip(self.weights, gradients, strict=True):
            weight.grad = gradient
        self._optimiser.step()
        self._optimiser.zero_grad(set_to_none=True)


@dataclass(frozen=True)
class How:
    """What a task may bring to local training: a loss, an optimiser and changes to a batch."""

    loss: Loss = loss_of
    augment: Callable[[Tensor], Tensor] = lambda records: records
    make_optimiser: Callable[[Sequence[nn.Parameter]], Any] = lambda weights: None

    changes: bool = False  # whether `augment` does anything
    hide: regularise.InstaHide | None = None

    def optimiser(self, weights: Sequence[nn.Parameter], recipe: Recipe) -> Sgd | Torch:
        made = self.make_optimiser(weights)
        return Sgd(weights, recipe) if made is None else Torch(weights, made, recipe)


@contextmanager
def few_threads(model: nn.Module) -> Iterator[None]:
    """Use one thread for a small model, then restore the setting.

    Its operations are too short to parallelise: a second thread gains nothing on an idle machine, makes the bits depend
    on the number of cores, and costs a factor of thirty when the processes of several sites compete for cores.
    """
    before = torch.get_num_threads()
    if sum(w.numel() for w in model.parameters()) < SMALL_MODEL:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def drawing(seed: int, where: torch.device) -> Iterator[None]:
    """What a task draws without a generator of its own (dropout, `augment`) follows from the seed; then restore."""
    gpus, before = ([where.index or 0] if where.type == "cuda" else []), (random.getstate(), np.random.get_state())
    with torch.random.fork_rng(devices=gpus):
        torch.default_generator.manual_seed(seed)
        for gpu in gpus:
            torch.cuda.default_generators[gpu].manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        try:
            yield
        finally:
            random.setstate(before[0])
            np.random.set_state(before[1])


def fit(
    model: nn.Module,
    data: Dataset,
    recipe: Recipe,
    seed: int,
    device: str = "cpu",
    progress: Progress | None = None,
    how: How | None = None,
) -> float:
    """Train the model in place and return the mean loss of the last epoch; `progress` gets each epoch and loss."""
    if not len(data):
        raise FederationError("data: a site has no records to train on; use fewer sites or another partition")
    x, y = place(model, data, device)
    how, weights = how or How(), [w for w in model.parameters() if w.requires_grad]
    optimiser = how.optimiser(weights, recipe)
    generator = torch.Generator().manual_seed(seed)
    how = _regularised(how, recipe, generator)
    model.train()
    loss = math.nan
    with few_threads(model), drawing(seed, x.device), regularise.dropout(model, recipe.dropout, generator):
        for epoch in range(recipe.epochs):
            order = torch.randperm(len(y), generator=generator).to(x.device)
            loss = _epoch(model, x, y, torch.split(order, recipe.batch_size), optimiser, how)
            if not math.isfinite(loss):
                raise Diverged(f"train.lr: with {recipe.lr} the loss became {loss} in epoch {epoch + 1}; lower it")
            if progress is not None:
                progress(epoch, loss)
    return loss


def _regularised(how: How, recipe: Recipe, draw: torch.Generator) -> How:
    """With smoothed labels, cropped images and encoded records, if the recipe says so."""
    if recipe.label_smoothing:
        how = replace(how, loss=regularise.smoothed(how.loss, recipe.label_smoothing))
    if recipe.crop is not None:
        how = replace(how, augment=regularise.cropped(how.augment, recipe.crop, draw))
    if recipe.instahide is not None:
        how = replace(how, hide=regularise.InstaHide(recipe.instahide, draw))
    return how


def _epoch(
    model: nn.Module, x: Tensor, y: Tensor, batches: Sequence[Tensor], optimiser: Sgd | Torch, how: How
) -> float:
    """One step per batch of rows; returns the mean loss."""
    total = torch.zeros((), device=x.device)
    for rows in batches:
        loss = batch_loss(model, x, y, rows, how)
        optimiser.step(list(torch.autograd.grad(loss, optimiser.weights, allow_unused=True, materialize_grads=True)))
        total += loss.detach() * len(rows)
    return float(total) / len(y)


def batch_loss(model: nn.Module, x: Tensor, y: Tensor, rows: Tensor, how: How) -> Tensor:
    """The mean loss of these rows; of records that InstaHide encodes, by the labels of all that are in them."""
    if how.hide is None:
        return how.loss(model(how.augment(x[rows])), y[rows], "mean")
    hidden = how.hide(x, rows, how.augment)
    outputs = model(hidden.records)
    pairs = zip(hidden.rows, hidden.parts, strict=True)
    return torch.stack([(part * how.loss(outputs, y[row], "none")).mean() for row, part in pairs]).sum()


def evaluate(model: nn.Module, data: Dataset, device: str = "cpu", loss: Loss = loss_of) -> Metrics:
    """Accuracy (or RMSE) and mean loss over all records."""
    if not len(data):
        raise FederationError("data: there are no records to evaluate on; use another partition")
    x, y = place(model, data, device)
    training, correct, total = model.training, 0, 0.0
    model.eval()
    with torch.no_grad(), few_threads(model):
        for batch, labels in zip(torch.split(x, EVALUATION_BATCH), torch.split(y, EVALUATION_BATCH), strict=True):
            outputs = model(batch.clone())  # a model may change its input in place
            correct += 0 if data.forecast else int((outputs.argmax(dim=1) == labels).sum())
            total += float(loss(outputs, labels, "sum"))
    model.train(training)
    mean_loss = total / len(data)
    if data.forecast:
        return Metrics(None, mean_loss, math.sqrt(mean_loss))
    return Metrics(correct / len(data), mean_loss)


def outputs_of(model: nn.Module, data: Dataset, device: str = "cpu", loss: Loss = loss_of) -> tuple[Tensor, Tensor]:
    """The model's output and loss for every record."""
    x, y = place(model, data, device)
    training, outputs, losses = model.training, [], []
    model.eval()
    with torch.no_grad(), few_threads(model):
        for batch, labels in zip(torch.split(x, EVALUATION_BATCH), torch.split(y, EVALUATION_BATCH), strict=True):
            outputs.append(model(batch.clone()))
            losses.append(loss(outputs[-1], labels, "none"))
    model.train(training)
    return torch.cat(outputs).cpu(), torch.cat(losses).cpu()


def place(model: nn.Module, data: Dataset, name: str) -> tuple[Tensor, Tensor]:
    """Move the model and the records to the device."""
    where = device(name)
    model.to(where)
    return torch.from_numpy(data.x).to(where), torch.from_numpy(data.y).to(where)
