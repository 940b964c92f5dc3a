"""How often the evidence is right about canaries, beside the same on relabelled canaries, and what epsilon it refutes.

Chance is measured, not assumed: the coins of each site's canaries are permuted, and everything is computed again on the
same guesses. So the paper's maximum over rounds, which is above one half for anybody, has a chance of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache

import numpy as np
from numpy.typing import NDArray

from attacks.common.measure import Measure, Scores
from attacks.common.truth import Truth
from attacks.membership import guesses
from attacks.membership.bound import epsilon_lower
from attacks.membership.run import LAST_MODEL, ZEROS, Findings
from fl_privacy.errors import TranscriptError
from fl_privacy.report import figures

RELABELLED = 1000
CONFIDENCE = 0.999
DELTA = 1e-5  # where the federation has none
UNIT, ADJACENCY = "record", "add-or-remove"  # of the bound
RATES = {"tpr_at_1": 0.01, "tpr_at_01": 0.001}  # false positives at which true ones are counted: 1 % and 0.1 %
GRID = np.concatenate([np.arange(1, 10) / 1000, np.arange(1, 10) / 100, np.arange(1, 11) / 10])

Array = NDArray[np.float64]
Bools = NDArray[np.bool_]


def score(findings: Findings, truth: Truth) -> Scores:
    """Every measure by statistic, and the bound over all of them."""
    included, known = _coins(findings, truth)
    sites = findings.sites[known]
    labels = guesses.relabelled(included, sites, RELABELLED, np.random.default_rng(findings.seed))
    measures, curves = dict[str, Measure](), dict[str, dict[str, float]]()
    for name in findings.overall:
        evidence, overall = findings.evidence[name][:, known], findings.overall[name][known]
        measures |= _accuracies(name, evidence, overall, sites, labels)
        measures |= _rates(name, overall, labels)
        curves |= _curves(name, findings.rounds, evidence, sites, included)
        curves[f"{name}_roc"] = {f"{x:g}": float(y) for x, y in zip(GRID, _roc(overall, included), strict=True)}
    strong = {name: values[known] for name, values in findings.overall.items() if _counts(name)}
    measures |= _epsilons(strong, labels, truth)
    notes = (*findings.notes, *_terms(measures, len(strong), len(included), truth))
    drawn = [figures.Curve(name, list(GRID), list(curves[f"{name}_roc"].values())) for name in findings.overall]
    roc = figures.roc("Membership inference: all rounds", drawn, float(GRID[0]))
    return Scores(measures, curves, {"roc": roc}, notes)


def _counts(name: str) -> bool:
    """Whether a statistic is one of the attack's own: not its handicapped variant, nor what needs no attack."""
    return not name.endswith(ZEROS) and name != LAST_MODEL


def _coins(findings: Findings, truth: Truth) -> tuple[Bools, Bools]:
    """Which canaries took part, and which of all this is known of: a site that never trained tossed no coins."""
    known = np.isin(findings.sites, truth.sites)
    if not known.any():
        raise TranscriptError("truth: no site that was seen says which canaries took part; record the run again")
    names = dict.fromkeys(findings.sites[known])
    return np.concatenate([truth.included(str(name)) for name in names]), known


def _accuracies(
    name: str, evidence: Array, overall: Array, sites: NDArray[np.str_], labels: Bools
) -> dict[str, Measure]:
    """The paper's maximum over rounds with its p-value, and the accuracy after all rounds; both over thirds by site."""
    there = np.isfinite(evidence).any(axis=1)
    best = guesses.accuracies(evidence[there] if there.any() else evidence, sites, labels).max(axis=0)
    final = guesses.accuracies(overall[None], sites, labels)[0]
    beaten = float((best >= best[0]).mean())  # the true labels are the first column, and count as one relabelling
    return {
        f"{name}_accuracy_max": Measure(float(best[0]), float(best[1:].mean())),
        f"{name}_accuracy_max_p": Measure(beaten, 0.5),
        f"{name}_accuracy": Measure(float(final[0]), float(final[1:].mean())),
    }


def _rates(name: str, overall: Array, labels: Bools) -> dict[str, Measure]:
    found = {"auc": guesses.areas(overall, labels)}
    found |= {rate: guesses.true_positives(overall, labels, at) for rate, at in RATES.items()}
    return {f"{name}_{what}": Measure(float(values[0]), float(values[1:].mean())) for what, values in found.items()}


def _curves(
    name: str, rounds: tuple[int, ...], evidence: Array, sites: NDArray[np.str_], included: Bools
) -> dict[str, dict[str, float]]:
    """Accuracy by round, over all sites and of each; rounds without evidence are left out."""
    groups = {f"{name}_accuracy": np.ones(len(sites), bool)}
    groups |= {f"{name}_accuracy/{site}": sites == site for site in dict.fromkeys(sites)}
    curves = {}
    for title, mine in groups.items():
        seen = np.asarray(np.isfinite(evidence[:, mine]).any(axis=1))
        found = guesses.accuracies(evidence[:, mine], sites[mine], included[mine, None])[:, 0]
        curves[title] = {str(round): float(a) for round, a, there in zip(rounds, found, seen, strict=True) if there}
    return curves


def _roc(overall: Array, included: Bools) -> list[float]:
    return [float(guesses.true_positives(overall, included[:, None], rate)[0]) for rate in GRID]


def _epsilons(strong: dict[str, Array], labels: Bools, truth: Truth) -> dict[str, Measure]:
    """The largest bound, each at a level corrected for their number; the ledger's epsilon must not be below it."""
    count, level, delta = len(labels), (1 - CONFIDENCE) / len(strong), truth.federation.privatise.at_delta or DELTA

    @cache
    def refuted(guessed: int, right: int) -> float:
        return epsilon_lower(count, guessed, right, delta, level)

    bounds = {}
    for name, overall in strong.items():
        guess = guesses.thirds(overall)
        right = guesses.right(guess, labels)
        bounds[name] = np.array([refuted(int((guess != 0).sum()), int(r)) for r in right])
    largest = np.max(list(bounds.values()), axis=0)
    groups = {name: float(values[0]) for name, values in bounds.items()}
    found = {"epsilon": Measure(float(largest[0]), float(largest[1:].mean()), groups)}
    spent = [epsilon for site in truth.sites if (epsilon := truth.spent(site)) is not None]
    if spent:
        found["epsilon_ledger"] = Measure(max(spent), max(spent))
    return found


def _terms(measures: Mapping[str, Measure], tests: int, canaries: int, truth: Truth) -> Iterator[str]:
    """What the bound is a bound on, and whether it contradicts the ledger."""
    federation, delta = truth.federation, truth.federation.privatise.at_delta or DELTA
    text = f"epsilon: refuted at {CONFIDENCE:.1%} confidence in {tests} tests on {canaries} canaries, delta {delta:g}"
    ledger = "" if federation.unit in (None, UNIT) else f"; the ledger protects a {federation.unit}, which covers it"
    yield f"{text}, unit: {UNIT}, adjacency: {ADJACENCY}{ledger}"
    spent = measures.get("epsilon_ledger")
    if spent is not None and measures["epsilon"].value > spent.value:
        yield f"epsilon: the ledger's {spent.value:.3g} is refuted: this run is less private than it claims"
