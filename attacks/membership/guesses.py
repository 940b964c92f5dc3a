"""Guesses from evidence, and how right they are under many labellings at once. The first labelling is the true one."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.stats import rankdata

Array = NDArray[np.float64]
Bools = NDArray[np.bool_]
Names = NDArray[np.str_]


def relabelled(included: Bools, sites: Names, count: int, rng: np.random.Generator) -> Bools:
    """The labels, and `count` relabellings of them as further columns: each permutes the coins of every site."""
    labels = np.tile(included[:, None], (1, count + 1))
    for site in np.unique(sites):
        mine = np.flatnonzero(sites == site)
        order = rng.permuted(np.tile(mine[:, None], (1, count)), axis=0)
        labels[mine, 1:] = included[order]
    return labels


def thirds(evidence: Array) -> NDArray[np.int8]:
    """1 for the third with the largest evidence, -1 for that with the smallest, 0 for all others (ERIS, C.2)."""
    guess, there = np.zeros(len(evidence), np.int8), np.flatnonzero(np.isfinite(evidence))
    order, third = there[np.argsort(evidence[there], kind="stable")], len(there) // 3
    guess[order[:third]], guess[order[len(order) - third :]] = -1, 1
    return guess


def right(guess: NDArray[np.int8], labels: Bools) -> NDArray[np.int64]:
    """How many guesses are right, by labelling."""
    return np.asarray(labels[guess > 0].sum(axis=0) + (~labels[guess < 0]).sum(axis=0), np.int64)


def accuracies(evidence: Array, sites: Names, labels: Bools) -> Array:
    """The mean over sites of the accuracy of guesses about thirds: a row per round, a column per labelling.

    One half where there is nothing to guess from.
    """
    signs, weight = np.where(labels, 1.0, -1.0), np.zeros(evidence.shape)
    for site in np.unique(sites):
        mine = np.flatnonzero(sites == site)
        for number, row in enumerate(evidence):
            guess = thirds(row[mine])
            weight[number, mine] = guess / max(1, int(np.count_nonzero(guess)))
    guessing = [len(np.unique(sites[row != 0])) for row in weight]
    return np.asarray(0.5 + 0.5 * (weight @ signs) / np.maximum(guessing, 1)[:, None])


def areas(evidence: Array, labels: Bools) -> Array:
    """The area under the operating curve, by labelling: the chance that a member has more evidence than another."""
    there = np.isfinite(evidence)
    ranks, known = rankdata(evidence[there]), labels[there]
    members, others = known.sum(axis=0), (~known).sum(axis=0)
    above = ranks @ known - members * (members + 1) / 2
    return np.asarray(np.where(members * others > 0, above / np.maximum(members * others, 1), 0.5))


def true_positives(evidence: Array, labels: Bools, rate: float) -> Array:
    """The share of members above a threshold that at most this share of the others exceeds, by labelling."""
    there = np.flatnonzero(np.isfinite(evidence))
    known = labels[there[np.argsort(-evidence[there], kind="stable")]]
    allowed = np.floor(rate * (~known).sum(axis=0))
    above = np.cumsum(~known, axis=0) <= allowed
    return np.asarray((known & above).sum(axis=0) / np.maximum(known.sum(axis=0), 1))
