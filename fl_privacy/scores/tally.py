"""What a site counts of a model: from outputs and labels to a tally. No record's numbers depend on other records."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_privacy.errors import FederationError
from fl_privacy.scores.form import CONFIDENCES, LIMB, MASK, Form, Ints, Tally

Floats = NDArray[np.float64]

LARGEST = 2.0**62  # loss that can be summed
# Score bins are uniform in asinh(x / FINE), where x is the log-odds of a class minus that of a guess: untrained models
# differ only near 0, trained ones by several units.
FINE, FARTHEST = 0.1, 40.0


def tally(form: Form, outputs: NDArray[Any], labels: NDArray[Any], losses: NDArray[Any]) -> Tally:
    """The counts of these records: a model's outputs, the true labels, and the loss of each record."""
    if not len(outputs) == len(labels) == len(losses):
        raise FederationError(f"evaluation: {len(outputs)} outputs, {len(labels)} labels and {len(losses)} losses")
    if not len(labels):
        return Tally(form, np.zeros(form.length, np.int64))
    outputs, losses = _finite(form, np.array(outputs, np.float64), np.array(losses, np.float64))
    found = [np.array([form.unit * len(labels)], np.int64)]
    if form.classes:
        return Tally(form, np.concatenate([*found, *_of_classes(form, outputs, labels), _total(form, "loss", losses)]))
    errors = np.abs(_flat(outputs) - _flat(np.asarray(labels, np.float64)))
    sums = {"loss": losses, "squared": (errors**2).mean(axis=1), "absolute": errors.mean(axis=1)}
    return Tally(form, np.concatenate([*found, *(_total(form, name, sums[name]) for name in form.sums)]))


def _finite(form: Form, outputs: Floats, losses: Floats) -> tuple[Floats, Floats]:
    """Results that can be counted. With noise every record counts: one must not be able to stop an evaluation."""
    broken = ~(np.isfinite(_flat(outputs)).all(axis=1) & np.isfinite(losses))
    if broken.any() and form.clip is None:
        raise FederationError("evaluation: outputs or losses are not finite; lower task.train.lr")
    losses[broken] = np.inf  # clipped
    outputs[broken] = 0.0 if form.classes else np.inf
    return outputs, losses


def _of_classes(form: Form, outputs: Floats, labels: NDArray[Any]) -> list[Ints]:
    classes, truth = form.classes, np.asarray(labels, np.int64)
    logits = _logits(outputs, classes)
    if len(truth) and not 0 <= truth.min() <= truth.max() < classes:
        raise FederationError(f"evaluation: a label is outside 0 to {classes - 1}; check the labels and the task")
    predicted = logits.argmax(axis=1)
    correct, columns = predicted == truth, form.blocks["classes"][1]
    cells = [truth * columns + predicted] if form.has_matrix else [truth * columns, truth[correct] * columns + 1]
    by_class = np.bincount(np.concatenate(cells), minlength=classes * columns)
    histograms = _histograms(form, log_odds(logits), truth)
    return [form.unit * by_class, _calibration(form, logits, correct), form.unit * histograms]


def _flat(values: Floats) -> Floats:
    """One row per record."""
    return values.reshape(len(values), math.prod(values.shape[1:]))


def _logits(outputs: Floats, classes: int) -> Floats:
    """One score per class; a single output is the score of the second of two classes."""
    scores = _flat(outputs)
    if scores.shape[1] == 1 and classes == 2:
        scores = np.concatenate([np.zeros_like(scores), scores], axis=1)
    if scores.shape[1] != classes:
        raise FederationError(f"evaluation: the model has {scores.shape[1]} outputs for {classes} classes")
    return scores


def log_odds(logits: Floats) -> Floats:
    """log p / (1 - p) of every class under softmax, accurate also where p rounds to 1."""
    rows, top = np.arange(len(logits)), logits.argmax(axis=1)
    shifted = np.exp(logits - logits[rows, top][:, None])
    whole = shifted.sum(axis=1, keepdims=True)
    with np.errstate(divide="ignore"):
        odds: Floats = logits - logits[rows, top][:, None] - np.log(whole) - np.log1p(-shifted / whole)
        shifted[rows, top] = 0.0
        odds[rows, top] = -np.log(shifted.sum(axis=1))
    return odds


def score_bins(form: Form, odds: Floats) -> Ints:
    """The bin of each score."""
    beyond_guess = np.clip(odds + np.log(form.classes - 1), -FARTHEST, FARTHEST)
    position = (np.arcsinh(beyond_guess / FINE) / np.arcsinh(FARTHEST / FINE) + 1) / 2
    bins: Ints = np.minimum((position * form.bins).astype(np.int64), form.bins - 1)
    return bins


def _histograms(form: Form, odds: Floats, truth: Ints) -> Ints:
    """Scores of every class, apart for records of other classes and of the class itself."""
    scored = np.array(form.scored, np.int64)
    bins = score_bins(form, odds[:, scored]) if len(scored) else np.empty((len(odds), 0), np.int64)
    which = 2 * np.arange(len(scored)) + (truth[:, None] == scored)
    return np.bincount((which * form.bins + bins).ravel(), minlength=2 * len(scored) * form.bins)


def _calibration(form: Form, logits: Floats, correct: NDArray[np.bool_]) -> Ints:
    """By confidence in the predicted class: records, correct ones, and the sum of confidences."""
    confidence = 1 / np.exp(logits - logits.max(axis=1, keepdims=True)).sum(axis=1)
    bins = np.minimum((confidence * CONFIDENCES).astype(np.int64), CONFIDENCES - 1)
    found = np.zeros((CONFIDENCES, 3), np.int64)
    columns = (form.unit, form.unit * correct.astype(np.int64), (confidence * form.confidence).astype(np.int64))
    for column, values in enumerate(columns):
        np.add.at(found[:, column], bins, values)
    return found.ravel()


def _total(form: Form, name: str, values: Floats) -> Ints:
    """The sum of losses or errors in steps of the form; each record is rounded down on its own."""
    limit = form.limit(name)
    if limit is not None:
        clipped = (np.clip(values / limit, 0, 1) * form.unit).astype(np.int64)
        return np.array([clipped.sum()], np.int64)
    values = np.clip(values, -LARGEST, LARGEST)
    whole = np.floor(values)
    ones, fractions = whole.astype(np.int64), ((values - whole) * 2.0**LIMB).astype(np.int64)
    return np.array([fractions.sum(), (ones & MASK).sum(), (ones >> LIMB).sum()], np.int64)
