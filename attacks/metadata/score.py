"""What the metadata tell: a row's sender, who took part, and which site is behind the time of a reply."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attacks.common.measure import Measure, Scores
from attacks.common.truth import Truth
from attacks.metadata.run import Pairs

TREES = 50
PARTS = 4
WIDTH = 3.29  # half the 99.9 % interval, in standard deviations
Ints = NDArray[np.int64]


def score(pairs: Sequence[Pairs], truth: Truth, seed: int) -> Scores:
    owners = [_owners(one, truth) for one in pairs]
    found = {**attribution(pairs, owners, seed), **reply_times(pairs, seed)}
    found["membership"] = membership(pairs, [set(one.tolist()) for one in owners], len(truth.federation.sites))
    return Scores(found)


def attribution(pairs: Sequence[Pairs], owners: Sequence[Ints], seed: int) -> dict[str, Measure]:
    """How often a row's sender is named by who was given the senders of other rounds."""
    right, chance = list[NDArray[np.float64]](), list[NDArray[np.float64]]()
    for known, asked in _parts(len(pairs), seed):
        model = _learn([(pairs[i], owners[i]) for i in known])
        right += [_right(model, pairs[i], owners[i]) for i in asked]
        chance += [1 / pairs[i].compatible.sum(axis=1) for i in asked]
    by_chance = np.concatenate(chance)
    # The rows of a set are a permutation of its sites, whose right guesses have a variance of at most 1.
    interval = WIDTH * float(np.sqrt(by_chance.sum()) / len(by_chance))
    return {
        "attribution": Measure(float(np.concatenate(right).mean()), float(by_chance.mean())),
        "attribution interval": Measure(interval, interval),
    }


def membership(pairs: Sequence[Pairs], present: Sequence[set[int]], sites: int) -> Measure:
    """How often it is right that those took part who were invited; chance always says the more frequent answer."""
    invited = sum(len(one.sites) for one in pairs)
    wrong = invited - sum(map(len, present))
    share = sum(map(len, present)) / (sites * len(pairs))
    return Measure(1 - wrong / (sites * len(pairs)), max(share, 1 - share))


def reply_times(pairs: Sequence[Pairs], seed: int) -> dict[str, Measure]:
    """How often the time of a reply alone tells whose it is: what is specific to a site in it."""
    pairs = [one for one in pairs if one.replied.any()]
    if len(pairs) < PARTS:
        return {}
    right, count = list[bool](), list[int]()
    for known, asked in _parts(len(pairs), seed):
        model = _classifier().fit(*_replies([pairs[i] for i in known]))
        times, names = _replies([pairs[i] for i in asked])
        right += (model.predict(times) == names).tolist()
        count += [int(pairs[i].replied.sum()) for i in asked for _ in range(int(pairs[i].replied.sum()))]
    interval = WIDTH * float(np.sqrt(sum(1 / n for n in count)) / len(count))
    return {
        "reply times": Measure(float(np.mean(right)), float(np.mean([1 / n for n in count]))),
        "reply times interval": Measure(interval, interval),
    }


def _parts(rounds: int, seed: int) -> list[tuple[list[int], list[int]]]:
    """Rounds to learn from and rounds to guess: each part of them from the parts before it.

    Who guesses every part from all others is right or wrong together in parts that are alike by accident. Here each
    part's guesses depend on nothing that is guessed later, so the variances of all parts add up.
    """
    parts = np.array_split(np.random.default_rng(seed).permutation(rounds), min(PARTS, rounds))
    found = [(np.concatenate(parts[:k]).tolist(), parts[k].tolist()) for k in range(1, len(parts))]
    return found or [([], list(range(rounds)))]


def _owners(one: Pairs, truth: Truth) -> Ints:
    """For every row, which of the invited sites it is from."""
    found = truth.round(one.round)
    names = [truth.federation.site_names[found.sites[owner]] for owner in found.owners]
    return np.array([one.sites.index(name) for name in names])


def _classifier() -> Any:
    from lightgbm import LGBMClassifier

    return LGBMClassifier(n_estimators=TREES, min_child_samples=5, verbosity=-1, n_jobs=1)


def _learn(rounds: Sequence[tuple[Pairs, Ints]]) -> Any:
    """None if there is nothing to learn from."""
    if not rounds:
        return None
    features = np.concatenate([one.features.reshape(-1, one.features.shape[-1]) for one, _ in rounds])
    labels = np.concatenate([(owners[:, None] == np.arange(len(one.sites))).ravel() for one, owners in rounds])
    return _classifier().fit(features, labels)


def _right(model: Any, one: Pairs, owners: Ints) -> NDArray[np.float64]:
    """Whether the likeliest compatible site is the sender; ties count in part."""
    flat = one.features.reshape(-1, one.features.shape[-1])
    odds = np.zeros(len(flat)) if model is None else model.predict_proba(flat)[:, 1]
    odds = np.where(one.compatible, odds.reshape(one.compatible.shape), -1.0)
    best = odds == odds.max(axis=1, keepdims=True)
    return np.asarray(best[np.arange(len(owners)), owners] / best.sum(axis=1), np.float64)


def _replies(rounds: Sequence[Pairs]) -> tuple[NDArray[np.float64], NDArray[np.str_]]:
    times = np.concatenate([one.replies[one.replied] for one in rounds])
    return times, np.concatenate([np.array(one.sites)[one.replied] for one in rounds])
