"""How good the honest sites' models are, and how many poisoned updates were combined with honest ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from attacks.common.attack import Unsuitable
from attacks.common.measure import Measure, Scores
from attacks.common.truth import Truth
from attacks.poisoning.picture import clusters
from attacks.poisoning.run import OUTLIER, Findings, Seen
from fl_privacy import vector
from fl_privacy.behaviours.records import Backdoor
from fl_privacy.config import Federation
from fl_privacy.tasks.data import Dataset
from fl_privacy.tasks.making import classes_of
from fl_privacy.tasks.workload import Workload


def score(found: Findings, truth: Truth) -> Scores:
    """Of several models, those that some honest site has count."""
    federation = truth.federation
    poisoned = {site.name for site in federation.sites if site.behaviour is not None}
    if not poisoned and not federation.combine.several:
        raise Unsuitable("sites: none of this run misbehaves; give some a behaviour")
    if not (classes := classes_of(federation)):
        raise Unsuitable("task: labels are numbers, and accuracy needs classes; use another attack")
    honest = [name for name in federation.site_names if name not in poisoned]
    work = Workload(federation, truth.data_dir)
    test, chance = held_out(federation, work, honest), 1 / classes
    held = {site: found.holder(site) for site in federation.site_names}
    models = {name: truth.opened(found.models[name], honest) for name in {held[site] for site in honest}}
    accuracy = {name: _accuracy(work, model, test) for name, model in models.items()}
    measures = {
        "benign_accuracy": Measure(_mean(accuracy.values()), chance),
        "benign_site_accuracy": Measure(_mean(accuracy[held[site]] for site in honest), chance),
    }
    if poisoned:
        apart = [held[site] not in accuracy for site in sorted(poisoned)]
        measures["isolated"] = Measure(_mean(apart), 0.0)
        out = {which: _kept_out(found.rounds, poisoned, which) for which in (True, False)}
        measures["kept_out"] = Measure(out[True], out[False])
    attack = next((site.behaviour for site in federation.sites if isinstance(site.behaviour, Backdoor)), None)
    if attack is not None:
        pairs = [_fooled(work, model, test, attack) for model in models.values()]
        measures["backdoor"] = Measure(_mean(pair[0] for pair in pairs), _mean(pair[1] for pair in pairs))
    curve = {str(one.round): _kept_out([one], poisoned, True) for one in found.rounds if poisoned & one.groups.keys()}
    pictures = {"clusters": clusters(found.rounds, honest, sorted(poisoned))}
    return Scores(measures, {"kept out, by round": curve} if curve else {}, pictures)


def held_out(federation: Federation, work: Workload, honest: Sequence[str]) -> Dataset:
    """The benchmark's held-out records, or those of all honest sites where sites have their own."""
    if not federation.task.by_site:
        return work.test
    parts = [work.held_out(site) for site in honest]
    return Dataset(np.concatenate([part.x for part in parts]), np.concatenate([part.y for part in parts]))


def _kept_out(rounds: Sequence[Seen], poisoned: set[str], which: bool) -> float:
    """The share of poisoned (or of honest) updates that were not combined with the group of most honest ones."""
    found = []
    for one in rounds:
        honest = [group for site, group in one.groups.items() if site not in poisoned and group != OUTLIER]
        largest = max(set(honest), key=honest.count, default=None)
        found += [group != largest for site, group in one.groups.items() if (site in poisoned) == which]
    return _mean(found)


def _accuracy(work: Workload, model: vector.Vector, test: Dataset) -> float:
    vector.load(work.model, model, work.layout)
    return float(work.scored(test).accuracy or 0.0)


def _fooled(work: Workload, model: vector.Vector, test: Dataset, attack: Backdoor) -> tuple[float, float]:
    """How often records of other classes are taken for the target: with the trigger, and without."""
    others = test.y != attack.target
    target = np.full(int(others.sum()), attack.target)
    shown = attack.stamped(test.x[others]), test.x[others]
    stamped, plain = (_accuracy(work, model, Dataset(x, target)) for x in shown)
    return stamped, plain


def _mean(values: Iterable[float]) -> float:
    given = [float(value) for value in values]
    return float(np.mean(given)) if given else 0.0
