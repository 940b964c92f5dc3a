"""R_P without forward passes: changing one weight of the last linear layer moves one logit by (delta w) h.

A `Column` has what Algorithm 5 asks about one target: the inputs of the last layer for its shadow set under the mean
model, the logits there, and the labels. The bias is a further weight, whose input is 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

Array = NDArray[np.float64]
Ints = NDArray[np.int64]
MOST_NUMBERS = 2**23  # held at once


@dataclass(frozen=True)
class Shadow:
    """A target's shadow set as the last layer of the mean model sees it: (records, inputs), (records, classes)."""

    inputs: Array
    logits: Array
    labels: Ints


def correct(shadow: Shadow, steps: Array) -> Ints:
    """How many records are right after each step of one weight: A(REP(w_glob, i, j), S_x) times |S_x|.

    `steps[j, o, i]` is candidate j's difference to the mean at the weight from input i to class o.
    """
    counts = np.empty(steps.shape, np.int64)
    for label in range(steps.shape[1]):
        others = shadow.logits.copy()
        others[:, label] = -np.inf
        rival = others.argmax(axis=1)
        best = others[np.arange(len(rival)), rival]
        own, kept = shadow.labels == label, (shadow.labels != label) & (rival == shadow.labels)
        won = _count(shadow, steps[:, label], label, own, best, rival > label)
        lost = _count(shadow, steps[:, label], label, kept, best, rival > label)
        counts[:, label] = won + kept.sum() - lost
    return counts


def _count(
    shadow: Shadow, steps: Array, label: int, mine: NDArray[np.bool_], best: Array, first: NDArray[np.bool_]
) -> Ints:
    """For each step, the records among `mine` whose answer becomes `label`; of equal logits the first class counts."""
    inputs, own, best, first = shadow.inputs[mine], shadow.logits[mine, label], best[mine], first[mine]
    found = np.zeros(steps.shape, np.int64)
    for rows in _pieces(len(inputs), steps.size):
        moved = own[rows, None] + steps[:, None, :] * inputs[None, rows]
        wins = (moved > best[rows, None]) | ((moved == best[rows, None]) & first[rows, None])
        found += wins.sum(axis=1)
    return found


def gains(shadow: Shadow, steps: Array) -> Array:
    """The log-likelihood of the shadow set after each step of one weight, up to a constant of the weight."""
    found = np.empty(steps.shape)
    for label in range(steps.shape[1]):
        own = shadow.labels == label
        linear = steps[:, label] * shadow.inputs[own].sum(axis=0)
        others = np.delete(shadow.logits, label, axis=1)
        ahead = shadow.logits[:, label] - np.logaddexp.reduce(others, axis=1)
        normal = np.zeros(steps[:, label].shape)
        for rows in _pieces(len(ahead), steps[:, label].size):
            moved = ahead[rows, None] + steps[:, label, None, :] * shadow.inputs[None, rows]
            normal += np.logaddexp(0.0, moved).sum(axis=1)
        found[:, label] = linear - normal
    return found


def chosen(scores: NDArray[np.generic]) -> Ints:
    """The best candidate for every weight; of equal ones the first, as in Algorithm 5."""
    return np.asarray(scores.argmax(axis=0), np.int64)


def assigned(scores: Array) -> Ints:
    """Every value of a column to one target: `scores[x, j, ...]`, the sum over the targets as large as possible.

    Where there are fewer values than targets (sums of several), each goes to as many targets as it has members.
    """
    targets, values = scores.shape[:2]
    copies = -(-targets // values)
    found = np.empty((targets, *scores.shape[2:]), np.int64)
    for at in np.ndindex(*scores.shape[2:]):
        rows, columns = linear_sum_assignment(np.tile(scores[(slice(None), slice(None), *at)], copies), maximize=True)
        found[(rows, *at)] = columns % values
    return found


def _pieces(records: int, numbers: int) -> list[slice]:
    """So many records at a time that the products of all of them fit into memory."""
    size = max(1, MOST_NUMBERS // max(1, numbers))
    return [slice(start, start + size) for start in range(0, records, size)]
