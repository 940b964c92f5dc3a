"""Single values from sums of residues that were not reduced: a posterior, with updates of the attacker's own as priors.

Everybody's values have the same posterior given the sums; whose a value is, only a prediction of each site's update can
tell, which the attacker trains on its shadow set. The same with the sum alone is the control: what a prediction and the
mean update say, without any leak.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from attacks.source.reader import Reader
from attacks.source.rebuild import CLEAN, Found, Predicted
from attacks.source.seen import Sight
from fl_privacy.rns.coding import Modular
from fl_privacy.rns.moduli import Moduli
from fl_privacy.rns.posterior import posterior
from fl_privacy.rns.residues import Residues, decode
from fl_privacy.tasks.data import Dataset

Array = NDArray[np.float64]
RNS, CONTROL = "rns", "rns_control"
MOST_NUMBERS = 2**21  # probabilities held at once
LEAST = 0.5  # of a standard deviation, in integers


def rebuilt(reader: Reader, sight: Sight, targets: Dataset, coding: Modular, predicted: Predicted) -> Found:
    """The last layer of every site by the posterior mean of each weight, in the mean model."""
    assert sight.sums is not None
    columns = reader.last().columns
    places, unit = columns.ravel(), coding.integers.unit(coding.bound_at(sight.model))
    sums, largest = sight.sums[:, places], coding.integers.largest
    asked, base = reader.inputs(sight.model + sight.mean, targets), sight.model[places].astype(np.float64)
    wanted = np.stack([predicted(site)[places] for site in sight.sites]).astype(np.float64) / unit
    for name, reduced in ((RNS, is_reduced(sums, coding.moduli)), (CONTROL, [True] * len(coding.moduli))):
        found = base + unit * estimated(sums, wanted, coding.moduli, largest, reduced)
        losses = [reader.losses(asked @ head.reshape(columns.shape).T, targets) for head in found]
        yield name, CLEAN, np.stack(losses, axis=1)


def is_reduced(sums: Residues, moduli: Moduli) -> list[bool]:
    """Which rows could be sums modulo their modulus: a single larger number says that a row is not."""
    return [bool(row.max(initial=0) < modulus) for row, modulus in zip(sums, moduli, strict=True)]


def estimated(sums: Residues, predicted: Array, moduli: Moduli, largest: int, reduced: list[bool]) -> Array:
    """The posterior mean of each site's integers: (sites, columns).

    A prediction is off by about as much as the mean of all predictions is off the mean that the sum tells, so that it
    counts as a Gaussian factor of this width.
    """
    sites, values = len(predicted), np.arange(-largest, largest + 1)
    mean = decode(sums, moduli).astype(np.float64) / sites
    spread = max(LEAST, float(np.sqrt(np.square(mean).mean() * sites)))
    prior = _normal(values, 0.0, spread)
    error = max(LEAST, float(np.sqrt(np.square(predicted.mean(axis=0) - mean).mean() * sites)))
    found, size = np.empty(predicted.shape), max(1, MOST_NUMBERS // values.size)
    for start in range(0, sums.shape[1], size):
        part = slice(start, start + size)
        common = posterior(sums[:, part], sites, prior, moduli, reduced=reduced)
        for site, guess in enumerate(predicted[:, part].clip(-largest, largest)):
            weights = np.log(np.maximum(common, np.finfo(np.float64).tiny))
            weights -= np.square((values - guess[:, None]) / error) / 2
            weights = np.exp(weights - weights.max(axis=1, keepdims=True))
            found[site, part] = weights @ values / weights.sum(axis=1)
    return found


def _normal(values: NDArray[np.int64], mean: float, spread: float) -> Array:
    weights = np.exp(-np.square((values - mean) / spread) / 2)
    return np.asarray(weights / weights.sum(), np.float64)
