"""How well the Privacy Inference Attack did: every measure with the value that knowing nothing would give."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment
from sklearn.metrics import adjusted_rand_score, roc_auc_score
from sklearn.model_selection import GroupKFold, cross_val_score

from attacks.common.measure import Measure, Scores
from attacks.common.truth import RoundTruth, Truth, shares
from attacks.privacy_inference import linkage, surrogate, unmixing
from attacks.privacy_inference.denoiser import LEADING
from attacks.privacy_inference.run import BucketFinding, Findings
from fl_privacy.config import Federation

Array = NDArray[np.float64]
Ints = NDArray[np.int64]
TIERS = {"epsilon<=1": (0.0, 1.0), "1<epsilon<=4": (1.0, 4.0), "epsilon>4": (4.0, np.inf)}
FOLDS = 5
FEWEST_PAIRS = 10  # with a site, and without it


@dataclass(frozen=True)
class Known:
    """What the measures take of the truth: of each observed round, and the attribute and group of every site."""

    federation: Federation
    rounds: list[RoundTruth]
    labels: Ints
    groups: Ints


def score(findings: Findings, truth: Truth) -> Scores:
    """All measures by name, and the curve of recovered cosine over the budgets."""
    rounds = [truth.round(one.round) for one in findings.seen]
    return judge(findings, Known(truth.federation, rounds, truth.labels, truth.groups))


def judge(findings: Findings, truth: Known) -> Scores:
    rows = _Rows(truth)
    cosines, curve = _cosines(findings, truth, rows)
    measures = {
        **cosines,
        **_attributes(findings, truth, rows),
        **_links(findings, rows),
        **_unmixing(findings, truth),
        **_presence(findings, truth),
    }
    return Scores(measures, {"cosine_by_epsilon": curve})


class _Rows:
    """The truth about every row of every round, in the findings' order."""

    def __init__(self, truth: Known) -> None:
        self.site = np.concatenate([one.sites[one.owners] for one in truth.rounds])
        self.label = truth.labels[self.site]
        budgets = [site.budget for site in truth.federation.sites]
        self.epsilon = np.array([np.inf if e is None else e for e in budgets])[self.site]
        # The same people may stand behind several sites: a probe must not know them from another one.
        self.group = truth.groups[self.site]

    def by_tier(self, values: Array) -> dict[str, float]:
        inside = {name: (self.epsilon > low) & (self.epsilon <= high) for name, (low, high) in TIERS.items()}
        return {name: float(values[mask].mean()) for name, mask in inside.items() if mask.any()}


def _cosines(findings: Findings, truth: Known, rows: _Rows) -> tuple[dict[str, Measure], dict[str, float]]:
    """Received and denoised updates against the clean ones, and the latter by budget.

    Chance: against the clean updates of the round's other sites.
    """
    raw, recovered, start = [], [], 0
    for seen, one in zip(findings.seen, truth.rounds, strict=True):
        denoised = linkage.unit(findings.denoised[start : start + len(seen.rows)])
        start += len(seen.rows)
        clean = linkage.unit(one.clean.astype(np.float64))
        raw.append(_own_and_other(linkage.unit(seen.rows.astype(np.float64)) @ clean.T, one.owners))
        recovered.append(_own_and_other(denoised @ (clean @ findings.denoiser.directions).T, one.owners))
    (raw_own, raw_other), (own, other) = np.concatenate(raw, axis=1), np.concatenate(recovered, axis=1)
    made = {
        "cossim_raw": Measure(float(raw_own.mean()), float(raw_other.mean())),
        "cossim": Measure(float(own.mean()), float(other.mean()), rows.by_tier(own)),
    }
    budgets = [e for e in np.unique(rows.epsilon) if np.isfinite(e)]
    curve, chance = ([float(values[rows.epsilon == e].mean()) for e in budgets] for values in (own, other))
    if len(budgets) > 1:
        at = np.log2(budgets)
        area, blind = (float(np.trapezoid(values, at) / (at[-1] - at[0])) for values in (curve, chance))
        made["cos_auc"] = Measure(area, blind)
        made["delta_cos"] = Measure(curve[-1] - curve[0], chance[-1] - chance[0])
    return made, {f"{e:g}": value for e, value in zip(budgets, curve, strict=True)}


def _own_and_other(cosines: Array, owners: Ints) -> Array:
    """Of each row, the cosine with its owner's update and the mean of those with the others'."""
    own = cosines[np.arange(len(cosines)), owners]
    return np.stack([own, (cosines.sum(axis=1) - own) / max(1, cosines.shape[1] - 1)])


def _attributes(findings: Findings, truth: Known, rows: _Rows) -> dict[str, Measure]:
    """Attributes of sites, told and probed; chance: always naming the most frequent one."""
    right = (findings.predicted == rows.label).astype(float)
    frequent = float(np.bincount(rows.label).max() / len(rows.label))
    made = {
        "surrogate_accuracy": Measure(float(right.mean()), frequent, rows.by_tier(right)),
        "ari": Measure(float(adjusted_rand_score(rows.label, findings.clusters)), 0.0),
    }
    received = np.concatenate([one.rows for one in findings.seen])
    for name, features in (("linear_separability", findings.denoised), ("linear_separability_raw", received)):
        found = _probe(_leading(_relative(features, findings.rounds)), rows)
        if found is not None:
            made[name] = Measure(found, frequent)
    return made | _compositions(findings, truth)


def _relative(features: NDArray[Any], rounds: Ints) -> NDArray[Any]:
    """Features of all rows less their round's mean."""
    made = features.copy()
    for index in np.unique(rounds):
        made[rounds == index] -= made[rounds == index].mean(axis=0)
    return made


def _leading(features: NDArray[Any]) -> Array:
    """The rows along their own strongest directions: a probe of few examples can bear no more."""
    values, vectors = np.linalg.eigh(np.asarray(features @ features.T, np.float64))
    return np.asarray((vectors * np.sqrt(np.maximum(values, 0)))[:, ::-1][:, :LEADING])


def _probe(features: Array, rows: _Rows) -> float | None:
    """Cross-validated accuracy of a linear classifier that is given true labels; no site is in two folds."""
    folds = min(FOLDS, len(np.unique(rows.group)))
    splits = list(GroupKFold(folds).split(features, rows.label, rows.group)) if folds > 1 else []
    if not splits or any(len(np.unique(rows.label[train])) < 2 for train, _ in splits):
        return None
    return float(cross_val_score(surrogate.classifier(), features, rows.label, cv=splits).mean())


def _compositions(findings: Findings, truth: Known) -> dict[str, Measure]:
    """Correlation of a bucket's told and true shares of each attribute, over all buckets."""
    told, true = [], []
    for bucket in findings.buckets:
        one = truth.rounds[bucket.round]
        labels = truth.labels[one.sites[one.owners[bucket.rows]]]
        told.append(bucket.composition)
        true.append([np.mean(labels == label) for label in findings.classes])
    said, real = np.array(told), np.array(true)
    moving = (said.std(axis=0) > 0) & (real.std(axis=0) > 0)
    if not moving.any():
        return {}
    found = [np.corrcoef(said[:, k], real[:, k])[0, 1] for k in np.flatnonzero(moving)]
    return {"bucket_attribute": Measure(float(np.mean(found)), 0.0)}


def _links(findings: Findings, rows: _Rows) -> dict[str, Measure]:
    """Top-1 accuracy over updates that have a match among their candidates; chance: a candidate at random."""
    allowed = linkage.candidates(findings.rounds)
    same = allowed & (rows.site[:, None] == rows.site[None, :])
    queries = np.flatnonzero(same.any(axis=1))
    if not len(queries):
        return {}
    chance = float((same[queries].sum(axis=1) / allowed[queries].sum(axis=1)).mean())
    made = {}
    for name, linked in (("linkage", findings.linked), ("linkage_raw", findings.linked_raw)):
        right = rows.site[linked[queries]] == rows.site[queries]
        made[name] = Measure(float(right.mean()), chance)
    return made


def _unmixing(findings: Findings, truth: Known) -> dict[str, Measure]:
    """Share of a site's coordinates that was put together again; and of the least noisy site of merged buckets."""
    rng = np.random.default_rng(0)
    rebuilt, picked, cosines = [], [], []
    for bucket in findings.buckets:
        one = truth.rounds[bucket.round]
        sources = one.sources[bucket.rows]
        if bucket.reassembled is not None:
            choices = (bucket.reassembled, unmixing.blind(rng, sources.shape))
            rebuilt.append([_largest(choice, sources, len(one.sites)) for choice in choices])
        budgets = _budgets(bucket, one, truth)
        if len(np.unique(budgets)) > 1:
            target = one.owners[bucket.rows][int(np.argmax(budgets))]
            rows = findings.seen[bucket.round].rows[bucket.rows]
            choices = (bucket.least_noisy, np.asarray(rng.integers(len(rows), size=rows.shape[1])))
            found = [_pick(choice, rows, sources, one.sent[target], target) for choice in choices]
            picked.append([fraction for fraction, _ in found])
            cosines.append([cosine for _, cosine in found])
    made = {"reassigned": rebuilt, "unmixed_fraction": picked, "unmixed_cosine": cosines}
    means = {name: np.mean(pairs, axis=0) for name, pairs in made.items() if pairs}
    return {name: Measure(float(value), float(chance)) for name, (value, chance) in means.items()}


def _pick(
    choice: Ints, rows: NDArray[np.float32], sources: NDArray[np.int16], sent: NDArray[np.float32], target: int
) -> tuple[float, float]:
    """Of one row of choices: the fraction that is the target's, and the cosine with what it sent."""
    at = np.arange(len(choice))
    values = rows[choice, at]
    cosine = float(values @ sent / (np.linalg.norm(values) * np.linalg.norm(sent)))
    return float((sources[choice, at] == target).mean()), cosine


def _budgets(bucket: BucketFinding, one: RoundTruth, truth: Known) -> Array:
    """The true budgets of the sites in a bucket."""
    sites = one.sites[one.owners[bucket.rows]]
    return np.array([truth.federation.sites[s].budget or np.inf for s in sites])


def _largest(choice: Ints, sources: NDArray[np.int16], participants: int) -> float:
    """Mean share of the site that each rebuilt row is best taken for, each site once."""
    found = shares(np.take_along_axis(sources, choice, axis=0), participants)
    rows, columns = linear_sum_assignment(found, maximize=True)
    return float(found[rows, columns].mean())


def _presence(findings: Findings, truth: Known) -> dict[str, Measure]:
    """Area under the ROC curve over all pairs of a site and a later round; chance: the same with blind traces."""
    found = findings.present
    index = {name: k for k, name in enumerate(truth.federation.site_names)}
    there = np.array([[index[name] in truth.rounds[t].sites for name in found.names] for t in found.rounds], bool)
    if min(there.sum(), (~there).sum()) < FEWEST_PAIRS:
        return {}
    chance = np.mean([_auc(there, blind) for blind in found.blind])
    return {"presence": Measure(_auc(there, found.scores), float(chance))}


def _auc(there: NDArray[np.bool_], scores: Array) -> float:
    """Every site's scores relative to their own mean, for traces differ in how much anything is like them."""
    return float(roc_auc_score(there.ravel(), (scores - scores.mean(axis=0)).ravel()))
