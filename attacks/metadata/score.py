"""How often the metadata name a row's sender, after learning from half of the rounds whose rows are known."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from attacks.common.measure import Measure, Scores
from attacks.common.truth import Truth
from attacks.metadata.run import Pairs

TREES = 50


def score(pairs: Sequence[Pairs], truth: Truth, seed: int) -> Scores:
    """The attacker is given who sent what in half of the rounds: more than a server ever knows."""
    order = np.random.default_rng(seed).permutation(len(pairs))
    half = len(pairs) // 2
    known, asked = [pairs[i] for i in order[:half]], [pairs[i] for i in order[half:]]
    model = _learn([(one, _owners(one, truth)) for one in known])
    right = [_right(model, one, _owners(one, truth)) for one in asked]
    chance = np.concatenate([1 / one.compatible.sum(axis=1) for one in asked])
    found = np.concatenate(right)
    # Half the 99.9 % interval of a guesser: what is within it of chance shows nothing.
    interval = 3.29 * float(np.sqrt((chance * (1 - chance)).sum()) / len(chance))
    measures = {"attribution": Measure(float(found.mean()), float(chance.mean()))}
    measures["attribution interval"] = Measure(interval, interval)
    return Scores(measures)


def _owners(one: Pairs, truth: Truth) -> NDArray[np.int64]:
    """For every row, which of the invited sites it is from."""
    found = truth.round(one.round)
    names = [truth.federation.site_names[found.sites[owner]] for owner in found.owners]
    return np.array([one.sites.index(name) for name in names])


def _learn(rounds: Sequence[tuple[Pairs, NDArray[np.int64]]]) -> object:
    from lightgbm import LGBMClassifier

    features = np.concatenate([one.features.reshape(-1, one.features.shape[-1]) for one, _ in rounds])
    labels = np.concatenate([(owners[:, None] == np.arange(len(one.sites))).ravel() for one, owners in rounds])
    return LGBMClassifier(n_estimators=TREES, min_child_samples=5, verbosity=-1, n_jobs=1).fit(features, labels)


def _right(model: object, one: Pairs, owners: NDArray[np.int64]) -> NDArray[np.float64]:
    """Whether the likeliest compatible site is the sender; ties count in part."""
    flat = one.features.reshape(-1, one.features.shape[-1])
    odds = model.predict_proba(flat)[:, 1].reshape(one.compatible.shape)  # type: ignore[attr-defined]
    odds = np.where(one.compatible, odds, -1.0)
    best = odds == odds.max(axis=1, keepdims=True)
    return np.asarray(best[np.arange(len(owners)), owners] / best.sum(axis=1), np.float64)
