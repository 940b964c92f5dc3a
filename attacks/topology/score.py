"""How near the guesses are: the metrics of Table I per channel, with intervals over sites, and channels compared.

A0 says the mean of all sites, which no attacker knows: its loss is Var(p), and a lift is measured against it. `prior`
is what a regressor says that has learned nothing from its input: the mean of the shadows. With a mismatched prior its
lift is negative, and so is that of any channel without information.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from attacks.common.measure import Measure, Scores
from attacks.common.paired import bootstrap, holm
from attacks.common.truth import Truth
from attacks.topology.priors import concentration
from attacks.topology.run import CHANNELS, Findings

Array = NDArray[np.float64]
NULL = 1e-12  # of Var(p): all sites have the same share
ENOUGH = 20  # sites, below which an area under the curve says little


def score(findings: Findings, truth: Truth) -> Scores:
    """Every metric by corpus, features, regressor and channel; comparisons of channels, corrected for their number."""
    classes = truth.federation.task.data_set.classes
    p = np.array([concentration(truth.records(name), classes) for name in findings.sites])
    measures = {"variance": Measure(float(p.var()), float(p.var()))}
    for (label, channel), guess in findings.guesses.items():
        measures |= of_channel("_".join(part for part in (label, channel) if part), guess, p, findings.seed)
    for label, mean in findings.prior.items():
        name = "_".join(part for part in (label, "prior") if part)
        measures[f"{name}_lift"] = Measure(lift(np.full(len(p), mean), p), 0.0)
    for label in findings.prior:
        measures |= comparisons(label, findings, p)
    measures |= picked_out(findings, truth)
    return Scores(measures, notes=[*findings.notes, *_notes(p)])


def lift(guess: Array, p: Array) -> float:
    """L_cal of the mean less L_cal of the guess (Table I)."""
    return float(p.var() - np.square(guess - p).mean())


def of_channel(name: str, guess: Array, p: Array, seed: int) -> dict[str, Measure]:
    """Table I. Where all sites have the same share there is nothing to rank."""
    error, spread = np.square(guess - p), np.square(p - p.mean())
    over = bootstrap(spread - error, seed)
    found = {
        f"{name}_loss": Measure(float(error.mean()), float(p.var())),
        f"{name}_lift": Measure(over.mean, 0.0, {"low": over.low, "high": over.high, "p": over.p}),
    }
    if p.var() <= NULL:
        return found
    k = max(1, len(p) // 5)
    found[f"{name}_top_k"] = Measure(top_k(guess, p, k), k / len(p))
    low, high = areas(guess, p, seed)
    area = area_under(guess, p > p.mean())
    return found | {f"{name}_auroc": Measure(area, 0.5, {"low": low, "high": high})}


def top_k(guess: Array, p: Array, k: int) -> float:
    """Share of the k sites with the most that are among the k guessed ones; of equal guesses, by chance."""
    truly, cut = np.argsort(-p, kind="stable")[:k], np.sort(guess)[-k]
    sure, tied = guess > cut, guess == cut
    weight = sure + tied * (k - sure.sum()) / tied.sum()
    return float(weight[truly].sum() / k)


def area_under(guess: Array, positive: NDArray[np.bool_]) -> float:
    """The area under the operating curve; equal guesses count half."""
    from scipy.stats import rankdata

    yes, no = int(positive.sum()), int((~positive).sum())
    if not yes or not no:
        return 0.5
    return float((rankdata(guess)[positive].sum() - yes * (yes + 1) / 2) / (yes * no))


def areas(guess: Array, p: Array, seed: int, resamples: int = 500) -> tuple[float, float]:
    """The percentile interval of the area over resampled sites."""
    rng, positive = np.random.default_rng(seed), p > p.mean()
    rows = rng.integers(0, len(p), (resamples, len(p)))
    found = [area_under(guess[row], positive[row]) for row in rows if 0 < positive[row].sum() < len(row)]
    low, high = np.quantile(found or [0.5], [0.025, 0.975])
    return float(low), float(high)


def comparisons(label: str, findings: Findings, p: Array) -> dict[str, Measure]:
    """L_cal of the second channel less that of the first, over resampled sites; p-values with Holm's correction."""
    errors = {one: np.square(findings.guesses[label, one] - p) for one in CHANNELS}
    found = {
        f"{second}_over_{first}": bootstrap(errors[first] - errors[second], findings.seed)
        for first, second in combinations(CHANNELS, 2)
    }
    adjusted = holm({name: one.p for name, one in found.items()})
    return {
        "_".join(part for part in (label, name) if part): Measure(
            one.mean, 0.0, {"low": one.low, "high": one.high, "p": one.p, "p_holm": adjusted[name]}
        )
        for name, one in found.items()
    }


def picked_out(findings: Findings, truth: Truth) -> dict[str, Measure]:
    """The cosine of a site's own update with its estimate from a shuffled bucket, beside another site's."""
    if not findings.unmixed:
        return {}
    own, other = list[float](), list[float]()
    for round, estimates in findings.unmixed.items():
        traced = truth.round(round)
        sent = np.empty_like(traced.sent)
        sent[traced.sites] = traced.sent
        away = estimates - estimates.mean(axis=0)
        cosines = _cosines(away, sent - sent.mean(axis=0))
        own += np.diag(cosines).tolist()
        other += [cosines[i, (i + 1) % len(cosines)] for i in range(len(cosines))]
    return {"unmixed_cosine": Measure(float(np.mean(own)), float(np.mean(other)))}


def _cosines(first: NDArray[np.float32], second: NDArray[np.float32]) -> Array:
    size = [np.maximum(np.linalg.norm(part, axis=1), 1e-12) for part in (first, second)]
    return np.asarray(first @ second.T / (size[0][:, None] * size[1]), np.float64)


def _notes(p: Array) -> Iterator[str]:
    if p.var() <= NULL:
        yield "null: all sites have the same share, so no lift can be above 0 and nothing is ranked"
    if len(p) < ENOUGH:
        yield f"auroc, top_k: {len(p)} sites are few; both mean something from {ENOUGH} on"
