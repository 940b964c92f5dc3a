"""Shadow federations: the public protocol, run in this process on the attacker's own records.

A shadow site is trained by the code of a real one: the task's training, `privatise` with its noise, and the
federation's initial model. What is seen of it is cut down to what was seen of the target's sites (`Look`).

Every finished shadow federation is kept in a file, so an interrupted attack continues, and cells of an audit that
differ in nothing that a shadow depends on share theirs.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from attacks.topology import priors
from attacks.topology.features import Book, Features
from attacks.topology.looks import Look
from attacks.topology.positions import neighbours
from attacks.version import SUITE
from fl_privacy.config import Federation
from fl_privacy.steps.base import At, Seat
from fl_privacy.tasks import cache
from fl_privacy.tasks.data import Dataset
from fl_privacy.tasks.train import fit
from fl_privacy.tasks.workload import Workload, training_seed
from fl_privacy.vector import Vector

Array = NDArray[np.float64]
Matrix = NDArray[np.float32]
Starts = Sequence[Vector]  # the global model before every round
TUPLES = 200  # shadow sites that a corpus has at least
FEWEST, MOST = 4, 50  # shadow federations
RUN = "shadow"


@dataclass(frozen=True)
class Corpus:
    """Labelled shadow sites: features, positions (the number of the site whose place they have) and p_i."""

    features: Features
    place: NDArray[np.int64]
    p: Array


@dataclass(frozen=True)
class Plan:
    """What a corpus is made of.

    `adaptive` shadows start every round from the target's own models and have each site's own noise. Others train
    federations of their own, with the noise that all sites would have on average.
    """

    prior: str
    adaptive: bool = False

    @property
    def name(self) -> str:
        return f"{self.prior}-adaptive" if self.adaptive else self.prior


def corpus(
    plan: Plan,
    federation: Federation,
    proxy: Callable[[], Dataset],
    looks: Sequence[Look],
    starts: Starts,
    seed: int,
    progress: Callable[[str], None],
) -> Corpus:
    """All shadow federations of a plan, from the cache or made now."""
    count = max(FEWEST, min(MOST, -(-TUPLES // len(federation.sites))))
    label, found, made = _digest(plan, federation, looks, starts, seed), list[dict[str, Array]](), None
    for number in range(count):
        file = cache.path("shadow", f"{label}-{number}")
        kept = cache.read(file, NAMES)
        if kept is None:
            progress(f"topology, {plan.name} shadow federation {number + 1} of {count}")
            made = made or Maker(plan, federation, proxy(), looks, starts)
            kept = made.one([seed, number])
            cache.write(file, kept)
        found.append(kept)
    joined = {name: np.concatenate([one[name] for one in found]) for name in NAMES}
    features = Features(joined["published"], joined["lateral"], joined["raw"])
    return Corpus(features, np.tile(np.arange(len(federation.sites)), count), joined["p"])


NAMES = ("published", "lateral", "raw", "p")


class Maker:
    """Runs shadow federations one after the other, with one model in memory."""

    def __init__(
        self, plan: Plan, federation: Federation, proxy: Dataset, looks: Sequence[Look], starts: Starts
    ) -> None:
        self._plan, self._target, self._proxy = plan, federation, proxy
        self._looks, self._starts = looks, starts
        self._near = neighbours(federation)

    def one(self, seed: list[int]) -> dict[str, Array]:
        """The features and the labels of one federation."""
        rng = np.random.default_rng(seed)
        federation = public(self._target, self._plan, int(rng.integers(2**62)))
        work = Workload(federation)
        data = priors.deal(self._target, self._proxy, self._plan.prior, rng)
        sites = [Shadow(federation, work, name, part) for name, part in zip(federation.site_names, data, strict=True)]
        initial = Workload(self._target).initial  # follows from the target's seed, which is public
        book, model, last = Book(work.layout, self._near), initial, 0
        weights = np.array([len(part) for part in data], np.float64)
        for look, start in zip(self._looks, self._starts, strict=True):
            if self._plan.adaptive:
                model, last = start, look.round - 1
            while last < look.round:  # rounds that were not seen are trained as well
                last += 1
                updates = np.stack([site.update(model, last) for site in sites])
                before, model = model, self._combined(model, updates, weights)
            book.add(before, look.of(updates), look.there)
        found = book.features()
        classes = self._target.task.data_set.classes
        p = np.array([priors.concentration(part, classes) for part in data])
        return {"published": found.published, "lateral": found.lateral, "raw": found.raw, "p": p}

    def _combined(self, model: Vector, updates: Matrix, weights: Array) -> Vector:
        chosen = weights if self._target.combine.weights == "records" else np.ones(len(updates))
        return np.asarray(model + np.average(updates, axis=0, weights=chosen), np.float32)


class Shadow:
    """One shadow site."""

    def __init__(self, federation: Federation, work: Workload, name: str, data: Dataset) -> None:
        self._federation, self._work, self._name, self._data = federation, work, name, data
        self._guard = federation.privatise.start(Seat(federation, name, work, len(data), None))

    def update(self, model: Vector, round: int) -> Vector:
        """What it would send: trained and privatised; permuted, compressed or encoded it says no more."""
        at = At(RUN, round, RUN)
        private = self._guard.training(at)
        plain = partial(fit, seed=training_seed(self._federation.seed, self._name, round))
        trained = self._work.update(model, self._data, self._name, round, private=private[0] if private else plain)
        return np.asarray(self._guard.outward(trained, at), np.float32)


def public(target: Federation, plan: Plan, seed: int) -> Federation:
    """The federation as the attacker runs it: seeded noise, and for attackers that do not adapt the average noise."""
    changes = {"seed": seed, "reproducible": True, "name": f"{RUN}-{seed % 10**6}", "audit": False, "canaries": None}
    if not plan.adaptive:
        changes["privatise"] = target.privatise.evenly()
    return target.model_copy(update=changes)


def _digest(plan: Plan, federation: Federation, looks: Sequence[Look], starts: Starts, seed: int) -> str:
    """Everything that a shadow's features depend on."""
    keys = {"name", "audit", "reproducible", "canaries", "route", "deadline", "evaluate", "hosts", "rounds"}
    facts = [
        SUITE,
        TUPLES,
        plan.name,
        federation.model_dump(mode="json", exclude=keys),
        [look.facts() for look in looks],
    ]
    digest = hashlib.sha256(json.dumps([*facts, federation.rounds, seed], default=str, sort_keys=True).encode())
    for start in starts if plan.adaptive else ():
        digest.update(start.tobytes())
    return digest.hexdigest()[:24]
