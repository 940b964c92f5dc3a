"""How many records were attributed to their site, beside the same guesses on records whose owners were exchanged."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binomtest

from attacks.common.measure import Measure, Scores
from attacks.common.truth import Truth
from attacks.source import residues
from attacks.source.run import KNOWN, SOURCE, SUMS, Findings

RELABELLED = 1000
WIDTH = 3.29  # standard deviations of a 99.9 % interval
PUBLISHED = ("rm", "rl", "rp")
NO_UPDATE = {KNOWN, residues.RNS, residues.CONTROL}  # these say most by shadow sets

Array = NDArray[np.float64]


def score(findings: Findings, truth: Truth) -> Scores:
    """Every measure by method, the published ones also with other shadow sets, and the strongest of each kind."""
    labels = relabelled(truth.owners, RELABELLED, np.random.default_rng(findings.seed))
    measures, curves, reached = dict[str, Measure](), dict[str, dict[str, float]](), dict[str, Array]()
    for method, guesses in findings.guesses.items():
        rounds = by_round(guesses, labels, findings.present)
        overall = (findings.overall[method][:, None] == labels).mean(axis=0)[None]
        variants = {name: other for (of, name), other in findings.variants.items() if of == method}
        groups = {name: _best(by_round(other, labels, findings.present)) for name, other in variants.items()}
        measures |= _measures(method, rounds, overall[0], groups)
        curves[method] = {str(n): float(found) for n, found in zip(findings.rounds, rounds[:, 0], strict=True)}
        reached[method] = np.concatenate([rounds, overall]).max(axis=0)
    if residues.RNS in findings.guesses:
        measures |= gained(findings, truth)
    for kind, methods in families(findings):
        most = np.max([reached[method] for method in methods], axis=0)
        measures[f"{kind}_strongest"] = _measure(most)
        measures[f"{kind}_strongest_p"] = Measure(beaten(most), 0.5)
    return Scores(measures, curves, {}, findings.notes)


def relabelled(owners: NDArray[np.int64], count: int, rng: np.random.Generator) -> NDArray[np.int16]:
    """The owners, and in `count` further columns the owners of records that were exchanged at random."""
    columns = [owners, *(rng.permutation(owners) for _ in range(count))]
    return np.stack(columns, axis=1).astype(np.int16)


def by_round(guesses: NDArray[np.int16], labels: NDArray[np.int16], present: NDArray[np.bool_]) -> Array:
    """The share of right guesses about records of those who took part: a row per round, a column per labelling."""
    found = np.empty((len(guesses), labels.shape[1]))
    each = len(labels) // present.shape[1]  # records of every site
    for number, (guess, here) in enumerate(zip(guesses, present, strict=True)):
        found[number] = (guess[:, None] == labels).sum(axis=0) / (each * here.sum())
    return found


def gained(findings: Findings, truth: Truth) -> dict[str, Measure]:
    """What sums of residues say beyond the sum: chance is the same attack on the sum alone.

    The p-value is McNemar's: among records that only one of the two attributes correctly, each is as likely.
    """
    with_leak, without = (findings.overall[name] == truth.owners for name in (residues.RNS, residues.CONTROL))
    only_leak, only_sum = int((with_leak & ~without).sum()), int((~with_leak & without).sum())
    p = float(binomtest(only_leak, only_leak + only_sum, alternative="greater").pvalue) if only_leak + only_sum else 1.0
    gain = Measure(float(with_leak.mean()), float(without.mean()))
    return {f"{residues.RNS}_gain": gain, f"{residues.RNS}_gain_p": Measure(p, 0.5)}


def families(findings: Findings) -> Iterator[tuple[str, list[str]]]:
    """The methods by kind; and `any`: all that read an update and need no shuffle of the attack's own."""
    there = list(findings.guesses)
    for family in (SOURCE, *PUBLISHED, SUMS):
        if mine := [method for method in there if method.split("_")[0] == family]:
            yield family, mine
    yield "any", [method for method in there if method not in {*NO_UPDATE, *findings.simulated}]


def _measures(method: str, rounds: Array, overall: Array, groups: dict[str, float]) -> dict[str, Measure]:
    """The best round as in the papers, with the same maximum as its chance; the mean over rounds; all of them."""
    best, mean = rounds.max(axis=0), rounds.mean(axis=0)
    spread = WIDTH * float(overall[1:].std())
    return {
        f"{method}_best": _measure(best, groups),
        f"{method}_best_p": Measure(beaten(best), 0.5),
        f"{method}_mean": _measure(mean),
        f"{method}_overall": _measure(overall),
        f"{method}_overall_interval": Measure(spread, spread),
    }


def _measure(values: Array, groups: dict[str, float] | None = None) -> Measure:
    return Measure(float(values[0]), float(values[1:].mean()), groups or {})


def _best(rounds: Array) -> float:
    return float(rounds[:, 0].max())


def beaten(values: Array) -> float:
    """The share of labellings that do as well as the true one, which counts as one of them."""
    return float((values >= values[0]).mean())
