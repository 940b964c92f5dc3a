"""Every inversion attack on every target: with the coordinates that were seen, and with the others taken for zeros."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attacks.common.attack import Unsuitable
from attacks.common.auxiliary import clip_of
from attacks.common.knowledge import Knowledge
from attacks.inversion import analytic, latent, pixels
from attacks.inversion.gradients import Target, batch_of, check_batch, filled, sums, targets
from attacks.inversion.matching import Leak, certain, labels
from attacks.inversion.priors import Priors, learn
from fl_privacy.errors import DataError
from fl_privacy.tasks.data import Dataset
from fl_privacy.tasks.train import few_threads
from fl_privacy.tasks.workload import model_of
from fl_privacy.transcript.read import View

MOST = 16  # targets
Pictures = NDArray[np.float64]  # (targets, batch, channels, height, width)


@dataclass(frozen=True)
class Case:
    """One target, and what the attacks share."""

    leak: Leak
    shape: tuple[int, ...]  # of the batch
    classes: int
    y: Tensor  # the labels that iDLG infers
    priors: Priors | None
    generator: torch.Generator


Method = Callable[[Case], Tensor]


def _analytic(case: Case) -> Tensor:
    return torch.from_numpy(analytic.recover(case.leak, case.shape))


def _with_prior(attack: Callable[..., Tensor], case: Case) -> Tensor:
    return attack(case.leak, case.shape, case.y, case.priors, case.generator)


METHODS: dict[str, Method] = {
    "dlg": lambda c: pixels.dlg(c.leak, c.shape, c.classes, c.generator),
    "idlg": lambda c: pixels.idlg(c.leak, c.shape, c.y, c.generator),
    "inverting": lambda c: pixels.inverting(c.leak, c.shape, c.y, c.generator),
    "rog": partial(_with_prior, latent.rog),
    "ggl": partial(_with_prior, latent.ggl),
    "analytic": _analytic,
}
LEARNED = ("rog", "ggl")


@dataclass(frozen=True)
class Findings:
    """Reconstructions by method: of the attacker that knows its mask, and of one that matches zeros (if it differs)."""

    targets: tuple[Target, ...]
    pictures: Mapping[str, Pictures]
    zeros: Mapping[str, Pictures]
    labels: NDArray[np.int64]  # (targets, batch)
    blind: tuple[Pictures, ...]  # guesses without a gradient
    priors: Priors | None


def examine(views: Mapping[str, View], knowledge: Knowledge, seed: int, methods: Sequence[str]) -> Findings:
    """The attacks on the first targets of a run."""
    federation, shape = knowledge.federation, _shape(knowledge)
    records_of_one = batch_of(federation)  # whatever was seen
    chosen = tuple(_targets(views, knowledge)[:MOST])
    batch = records_of_one * max(1, len(chosen[0].sites))
    check_batch(batch)
    model, classes, records = model_of(federation), federation.task.data_set.classes, _records(knowledge)
    usable = [m for m in methods if _usable(m, records, batch == 1 and analytic.applies(model))]
    priors = None
    if records is not None and set(usable) & set(LEARNED):
        knowledge.progress("training priors on held-out records")
        priors = learn(records, classes, seed)
    clip, rate = clip_of(federation), federation.task.train.lr
    limit = None if clip is None else clip / rate
    inferred = np.stack([labels(Leak(model, target, limit), batch) for target in chosen])

    def invert(method: str, number: int, target: Target) -> Pictures:
        knowledge.progress(f"{method} on update {number + 1} of {len(chosen)}")
        generator = torch.Generator().manual_seed(_seed(seed, number, list(METHODS).index(method)))
        y = certain(inferred[number], classes)
        case = Case(Leak(model, target, limit), (batch, *shape), classes, y, priors, generator)
        return np.asarray(METHODS[method](case).detach().clamp(0, 1))

    def by_method(seen: Sequence[Target]) -> dict[str, Pictures]:
        return {m: np.stack([invert(m, number, target) for number, target in enumerate(seen)]) for m in usable}

    with few_threads(model):
        pictures = by_method(chosen)
        zeros = {} if all(t.whole for t in chosen) else by_method([filled(t) for t in chosen])
    return Findings(chosen, pictures, zeros, inferred, _blind(records, (len(chosen), batch, *shape), seed), priors)


def _targets(views: Mapping[str, View], knowledge: Knowledge) -> list[Target]:
    """Single updates; where the server gets a sum, the updates of a cohort together."""
    federation = knowledge.federation
    server = views.get("server")
    if server is None or federation.route.shows != "sum":
        return targets(views, federation)
    found = sums(server, federation, knowledge.models)
    return [target for target in found if len(target.sites) == len(found[0].sites)]


def _shape(knowledge: Knowledge) -> tuple[int, ...]:
    task = knowledge.federation.task
    if task.is_own or len(task.data_set.shape) != 3 or not task.data_set.classes:
        raise Unsuitable(f"task: inversion needs images with classes, not {task.label!r}; use digits, mnist or cifar10")
    return task.data_set.shape


def _records(knowledge: Knowledge) -> Dataset | None:
    """The attacker's own records, if anybody outside the federation has such records."""
    try:
        return knowledge.auxiliary.records
    except DataError:
        return None


def _seed(*numbers: int) -> int:
    return int(np.random.SeedSequence(numbers).generate_state(1)[0])


def _usable(method: str, records: Dataset | None, linear: bool) -> bool:
    return linear if method == "analytic" else records is not None or method not in LEARNED


def _blind(records: Dataset | None, shape: tuple[int, ...], seed: int) -> tuple[Pictures, ...]:
    """Guesses without a gradient: the mean of the attacker's records, and some of them; else grey, and noise."""
    rng = np.random.default_rng(seed)
    if records is None:
        return np.full(shape, 0.5), rng.random(shape)
    drawn = records.x[rng.integers(len(records), size=shape[:2])]
    return np.broadcast_to(records.x.mean(axis=0), shape).astype(np.float64), drawn.astype(np.float64)
