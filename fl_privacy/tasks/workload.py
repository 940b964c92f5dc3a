"""A federation's task in memory: a site's data, the model, and the flat vector of its parameters."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from fl_privacy import vector
from fl_privacy.errors import DataError, FederationError
from fl_privacy.scores.form import Form, Tally
from fl_privacy.scores.tally import tally
from fl_privacy.tasks import code, members, models
from fl_privacy.tasks.data import Dataset, Parts
from fl_privacy.tasks.forward import TRIED, Forward, misfit
from fl_privacy.tasks.making import classes_of, task_of
from fl_privacy.tasks.measures import own_measures
from fl_privacy.tasks.records import parts_of
from fl_privacy.tasks.task import Task, own
from fl_privacy.tasks.train import How, Loss, Metrics, Recipe, evaluate, fit, loss_of, outputs_of

if TYPE_CHECKING:
    from fl_privacy.config import Federation

Fit = Callable[..., Any]  # (model, data, recipe, device=..., how=...): trains the model in place
Check = Callable[[nn.Module, Dataset, Loss], None]  # (model, some records, loss)


class Measured(NamedTuple):
    """What a model does on some records."""

    outputs: Tensor
    labels: Tensor
    losses: Tensor

    def tally(self, form: Form) -> Tally:
        """The counts of these records."""
        return tally(form, self.outputs.numpy(), self.labels.numpy(), self.losses.numpy())


class Workload:
    """One model in memory, which the sites of a process use in turn."""

    def __init__(self, federation: Federation, data_dir: Path | None = None) -> None:
        # One thread: sums are the same on every engine, and several sites share the machine's cores.
        torch.set_num_threads(1)
        self.federation, self._folder, self._checked = federation, data_dir, set[Check]()
        self.seconds = 0.0  # that the last update took, whichever site's
        self.task = task_of(federation)
        self.model = model_of(federation)
        self.initial, self.layout = vector.flatten(self.model)
        self.recipe, self.how = recipe_of(federation), how_of(self.task)
        self._parts = lru_cache(maxsize=1024)(self._read)

    def loaded(self) -> Workload:
        """The same, with a benchmark's records in memory, which forks of this process then share."""
        if not self.federation.task.by_site:
            self.site_data(self.federation.site_names[0])
        return self

    def site_data(self, site: str) -> Dataset:
        """The training records of one site."""
        return self._parts(site).train

    def held_out(self, site: str) -> Dataset:
        """The records of one site that no model is trained on."""
        return self._parts(site).held_out

    def _read(self, site: str) -> Parts:
        """The site's own folder, or where it has none the run's."""
        folder = self.federation.site(site).data or self._folder
        with self.theirs(f"data of site {site!r}", "data"):
            if self.federation.task.is_own and folder is None and self.task.needs_data:
                raise DataError(f"data: {site} has no folder; set `data` (for a kit, in kit.yaml) or --data-dir")
            found = parts_of(self.task.data(site, folder), code.place(self.task, "data"))  # type: ignore[arg-type]
        if self.federation.task.is_own:
            self._check_labels(found.train)
            self._check_labels(found.held_out)
        return found

    def check_model(self, records: Dataset) -> None:
        """Refuse a task whose model cannot take its records, at the line of `model`."""
        if self.federation.task.is_own:
            with self.theirs("model"):
                problem = misfit(self.model, records, self._classes)
            if problem:
                raise code.TaskError(f"{code.place(self.task, 'model')}: model(): {problem}")
            self.check_losses(self.measured(self.initial, records.take(range(min(TRIED, len(records)))), "cpu"))

    def check_losses(self, found: Measured) -> None:
        """Refuse a task whose new model has no finite loss: no learning rate helps."""
        broken = int((~torch.isfinite(found.losses)).sum())
        if broken:
            of = f"of the new model is not finite for {broken} of {len(found.losses)} records; check outputs and loss"
            raise code.TaskError(f"{code.place(self.task, 'loss')}: loss {of}")

    def _check_labels(self, records: Dataset) -> None:
        largest = 0 if records.forecast or not len(records) else int(records.y.max())
        if largest and 0 < self._classes <= largest:
            fix = f"use labels from 0 to {self._classes - 1}, or correct the model or `classes` of the task"
            where = code.place(self.task, "data")
            raise DataError(f"{where}: label {largest} is out of range: the model has {self._classes} outputs; {fix}")

    @cached_property
    def _classes(self) -> int:
        return classes_of(self.federation)

    def update(
        self,
        start: NDArray[np.float32],
        data: Dataset,
        site: str,
        round: int,
        device: str = "cpu",
        private: Fit | None = None,
    ) -> NDArray[np.float32]:
        """Train from `start` on a site's records, with `private` if given, and return the difference."""
        began = time.monotonic()
        vector.load(self.model, start, self.layout)
        train = private or partial(fit, seed=training_seed(self.federation.seed, site, round))
        with self.theirs("training"):
            train(self.model, data, self.recipe, device=device, how=self.how)
        trained, _ = vector.flatten(self.model)
        self.seconds = time.monotonic() - began
        return np.subtract(trained, start, out=trained)

    def alone(self, data: Dataset, site: str, epochs: int, device: str) -> NDArray[np.float32]:
        """A model trained on a site's records only, from the initial one and with the federation's recipe."""
        vector.load(self.model, self.initial, self.layout)
        recipe, seed = replace(self.recipe, epochs=epochs, proximal=0.0), training_seed(self.federation.seed, site, 0)
        with self.theirs("training"):
            fit(self.model, data, recipe, seed, device, how=self.how)
        return vector.flatten(self.model)[0]

    def outputs(self, model: NDArray[np.float32], x: NDArray[np.float32]) -> NDArray[np.float32]:
        """What a model answers to any records."""
        return self._forward(model, x)

    @cached_property
    def _forward(self) -> Forward:
        return Forward(self.federation)

    def example(self, site: str) -> Tensor:
        """A few records of a site, as the model takes them."""
        return torch.from_numpy(self.site_data(site).x[:TRIED].copy())

    def measured(self, model: NDArray[np.float32], data: Dataset, device: str) -> Measured:
        """Evaluate a model on these records, of which there may be none."""
        labels = torch.from_numpy(data.y)
        if not len(data):
            return Measured(torch.empty(0), labels, torch.empty(0))
        vector.load(self.model, model, self.layout)
        with self.theirs("evaluation"):
            outputs, losses = outputs_of(self.model, data, device, self.how.loss)
        return Measured(outputs, labels, losses)

    def further(self, found: Measured) -> dict[str, float | None]:
        """The task's own measures."""
        with self.theirs("metrics", "metrics"):
            returned = self.task.metrics(found.outputs, found.labels)
        try:
            return own_measures(returned)
        except (FederationError, TypeError, ValueError) as error:
            raise code.TaskError(f"{code.place(self.task, 'metrics')}: metrics: {error}") from None

    def once(self, check: Check, data: Dataset) -> None:
        """Check the model with some records, once for all sites of a process."""
        if check not in self._checked:
            with self.theirs("model"):
                check(self.model, data, self.how.loss)
            self._checked.add(check)

    def evaluate(self, model: NDArray[np.float32]) -> Metrics:
        """Accuracy (or RMSE) and loss on the held-out records of all sites, where one party has them all."""
        vector.load(self.model, model, self.layout)
        return self.scored(self.test)

    def scored(self, records: Dataset) -> Metrics:
        """How the model in memory does on these records."""
        with self.theirs("evaluation"):
            return evaluate(self.model, records, loss=self.how.loss)

    @cached_property
    def test(self) -> Dataset:
        """The held-out records of all sites."""
        held_out = getattr(self.task, "held_out", None)
        if held_out is None:
            raise DataError("evaluate: the server has no data of this task; use evaluate: sites")
        found: Dataset = held_out(self._folder)
        return found

    @contextmanager
    def theirs(self, what: str, method: str = "model") -> Iterator[None]:
        """Errors in a task's own code are reported as such, where none of its lines was reached at this method."""
        if not self.federation.task.is_own:
            yield
            return
        with code.theirs(code.place(self.task, method), what, type(self.task).__module__):
            yield


def model_of(federation: Federation) -> nn.Module:
    """The federation's model; needs no data."""
    task, label = task_of(federation), federation.task.label
    if not federation.task.is_own:
        return task.model()
    where = code.place(task, "model") if own(task, "model") else members.where(type(task), "model", label)
    with code.theirs(where, "model", type(task).__module__):
        made = models.seeded(task.model, federation.seed)
        if not isinstance(made, nn.Module):
            raise code.TaskError(f"{where}: model gave {type(made).__name__}; return an nn.Module")
        if not any(weight.requires_grad for weight in made.parameters()):
            raise code.TaskError(f"{where}: the model has no parameters to train")
        for name, weight in made.named_parameters():
            if isinstance(weight, UninitializedParameter):
                raise code.TaskError(f"{where}: {name} of the new model has no size yet; use a layer that is not lazy")
            if weight.dtype != torch.float32:
                raise code.TaskError(f"{where}: {name} of the new model is {weight.dtype}; use float32")
        for name, tensor in made.state_dict().items():
            if isinstance(tensor, Tensor) and not torch.isfinite(tensor).all():
                fix = "initialise it; a constant buffer needs persistent=False"
                raise code.TaskError(f"{where}: {name} of the new model is not finite; {fix}")
    return made


def how_of(task: Task) -> How:
    """How the task trains: what it brings itself, and our defaults for the rest."""

    def loss(outputs: Tensor, targets: Tensor, reduction: str) -> Tensor:
        each = task.loss(outputs, targets)
        if not isinstance(each, Tensor) or each.shape != targets.shape[:1]:
            gave = f"shape {tuple(each.shape)}" if isinstance(each, Tensor) else type(each).__name__
            where = code.place(task, "loss")
            raise code.TaskError(f'{where}: loss gave {gave}; return one loss per record (reduction="none")')
        reduced = {"mean": each.mean, "sum": each.sum}.get(reduction)
        return each if reduced is None else reduced()

    made = loss if own(task, "loss") else loss_of

    def optimizer(weights: Sequence[nn.Parameter]) -> Any:
        chosen = task.optimizer(weights)
        if chosen is not None and not all(callable(getattr(chosen, name, None)) for name in ("step", "zero_grad")):
            where = code.place(task, "optimizer")
            raise code.TaskError(f"{where}: optimizer gave {type(chosen).__name__}; return a torch optimiser, or None")
        return chosen

    def augment(records: Tensor) -> Tensor:
        changed = task.augment(records)
        if not isinstance(changed, Tensor) or changed.shape[:1] != records.shape[:1]:
            gave = f"shape {tuple(changed.shape)}" if isinstance(changed, Tensor) else type(changed).__name__
            where = code.place(task, "augment")
            raise code.TaskError(f"{where}: augment gave {gave}; return as many records as it got ({len(records)})")
        return changed

    return How(made, augment, optimizer, own(task, "augment"))


def layout_of(federation: Federation) -> vector.Layout:
    """The layout of the federation's model."""
    return vector.flatten(model_of(federation))[1]


def recipe_of(federation: Federation) -> Recipe:
    """How every site trains."""
    return Recipe(**federation.task.train.model_dump(), proximal=federation.combine.proximal)


def training_seed(seed: int, site: str, round: int) -> int:
    """The seed for a site's batch order in a round: different per site, and the same on every engine."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{site}/{round}".encode()).digest()[:7], "big")
