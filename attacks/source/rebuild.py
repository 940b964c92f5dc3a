"""Every site's model put together again from shuffled rows, by what the shadow set of each site says.

Published (Athanasiou et al. 2026, Appendix B.1): R_M takes the row that classifies the target's shadow set best
(Algorithm 2), R_L the last layer that does so in the mean model (Algorithms 3 and 4), R_P each weight of the last layer
that does so alone (Algorithms 5 and 6). Each has stronger variants: by log-likelihood instead of accuracy; `joint`,
which gives every row or value to one site; and `all`, which trains a model on each shadow set and gives all layers, or
all parameters, to the sites whose predicted update they fit best.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache

import numpy as np
from numpy.typing import NDArray

from attacks.source import parameter
from attacks.source.reader import Reader, right
from attacks.source.seen import Sight
from fl_privacy.tasks.data import Dataset, pool

Vector = NDArray[np.float32]
Matrix = NDArray[np.float32]
Array = NDArray[np.float64]
Ints = NDArray[np.int64]
CLEAN = ""
Found = Iterator[tuple[str, str, Array]]  # method, variant of the shadow sets, losses (records, sites)


Predicted = Callable[[str], Vector]


class Sets:
    """The shadow sets of all sites, in several variants, as one data set."""

    def __init__(self, variants: Mapping[str, Mapping[str, Dataset]], parts: Mapping[str, float]) -> None:
        """`parts` are variants that are the first share of the clean sets."""
        self.records = pool([data for sets in variants.values() for data in sets.values()])
        self.variants, self._where = (*variants, *parts), dict[tuple[str, str], slice]()
        start = 0
        for variant, sets in variants.items():
            for site, data in sets.items():
                self._where[variant, site] = slice(start, start + len(data))
                start += len(data)
        for variant, share in parts.items():
            for site in variants[CLEAN]:
                whole = self._where[CLEAN, site]
                size = max(1, round(share * (whole.stop - whole.start)))
                self._where[variant, site] = slice(whole.start, whole.start + size)

    def of(self, variant: str, site: str) -> slice:
        return self._where[variant, site]

    def clean(self, site: str) -> Dataset:
        return self.records.take(np.arange(len(self.records))[self.of(CLEAN, site)])


def predictions(reader: Reader, sight: Sight, sets: Sets, seed: int) -> Predicted:
    """The update of a site as the attacker makes it from the site's shadow set; trained once."""
    return cache(lambda site: reader.trained(sight.model, sets.clean(site), seed))


def models(reader: Reader, sight: Sight, sets: Sets, targets: Dataset) -> Found:
    """R_M (Algorithm 2), and by log-likelihood."""
    rows = np.asarray(sight.rows)
    asked = pool([sets.records, targets])
    made = [reader.outputs(sight.model + row, asked) for row in rows]
    count = len(sets.records)
    outputs, losses = np.stack([out[:count] for out, _ in made]), np.stack([loss for _, loss in made])
    yield from _picked("rm", sight, sets, outputs, losses[:, :count], losses[:, count:])


def layers(reader: Reader, sight: Sight, sets: Sets, targets: Dataset) -> Found:
    """R_L (Algorithm 3), and by log-likelihood: the last layer of a row in the mean model."""
    shadow, asked = (reader.inputs(sight.model + sight.mean, data) for data in (sets.records, targets))
    heads = _heads(reader, sight)
    outputs = np.stack([shadow @ head.T for head in heads])
    known = np.stack([reader.losses(out, sets.records) for out in outputs])
    yield from _picked(
        "rl", sight, sets, outputs, known, np.stack([reader.losses(asked @ h.T, targets) for h in heads])
    )


def _picked(name: str, sight: Sight, sets: Sets, outputs: Array, known: Array, losses: Array) -> Found:
    """The losses of the candidate that each site's shadow set chooses: by accuracy, by likelihood, and jointly."""
    labels = sets.records.y
    for variant in sets.variants:
        places = [sets.of(variant, site) for site in sight.sites]
        scores = np.array([[right(row[part], labels[part]) for row in outputs] for part in places])
        yield name, variant, losses[_best(sight, scores)].T
    scores = np.stack([-known[:, sets.of(CLEAN, site)].sum(axis=1) for site in sight.sites])
    yield f"{name}_likelihood", CLEAN, losses[_best(sight, scores)].T
    yield f"{name}_joint", CLEAN, losses[_jointly(sight, scores)].T


def parameters(reader: Reader, sight: Sight, sets: Sets, targets: Dataset) -> Found:
    """R_P (Algorithm 5), by log-likelihood, and with a whole column assigned at once."""
    shadow, asked = (reader.inputs(sight.model + sight.mean, data) for data in (sets.records, targets))
    heads, columns = _heads(reader, sight), reader.last().columns
    base = np.asarray((sight.model + sight.mean)[columns], np.float64)
    logits, steps = shadow @ base.T, heads - base

    def seen(variant: str, site: str) -> parameter.Shadow:
        part = sets.of(variant, site)
        return parameter.Shadow(shadow[part], logits[part], np.asarray(sets.records.y[part], np.int64))

    def losses(choices: Mapping[str, Ints]) -> Array:
        picked = (np.take_along_axis(heads, choices[site][None], axis=0)[0] for site in sight.sites)
        return np.stack([reader.losses(asked @ head.T, targets) for head in picked], axis=1)

    for variant in sets.variants:
        yield (
            "rp",
            variant,
            losses(
                {
                    site: bucket.rows[parameter.chosen(parameter.correct(seen(variant, site), steps[bucket.rows]))]
                    for bucket in sight.buckets
                    for site in bucket.sites
                }
            ),
        )
    alone, jointly = dict[str, Ints](), dict[str, Ints]()
    for bucket in sight.buckets:
        gains = np.stack([parameter.gains(seen(CLEAN, site), steps[bucket.rows]) for site in bucket.sites])
        for site, gain, value in zip(bucket.sites, gains, parameter.assigned(gains), strict=True):
            alone[site], jointly[site] = bucket.rows[parameter.chosen(gain)], bucket.rows[value]
    yield "rp_likelihood", CLEAN, losses(alone)
    yield "rp_joint", CLEAN, losses(jointly)


def everything(
    reader: Reader, sight: Sight, targets: Dataset, level: str, parts: Sequence[slice], predicted: Predicted
) -> Found:
    """All layers, or all parameters: what fits best to updates that the attacker trains on the shadow sets."""
    made = np.empty((len(sight.sites), sight.model.size), np.float32)
    for bucket in sight.buckets:
        places = [sight.sites.index(site) for site in bucket.sites]
        wanted = np.stack([predicted(site) for site in bucket.sites])
        made[places] = fitted(np.asarray(sight.rows)[bucket.rows], wanted, level, parts)
    losses = [reader.outputs(sight.model + update, targets)[1] for update in made]
    yield f"{PREFIX[level]}_all", CLEAN, np.stack(losses, axis=1)


def fitted(rows: Matrix, predicted: Matrix, level: str, parts: Sequence[slice]) -> Matrix:
    """The rows' values given to the predictions with the least squared error in all, part by part.

    For single values this is sorting: of all ways to pair two lists, pairing both in order has the least squared error.
    """
    if level == "parameter":
        order = np.argsort(np.argsort(predicted, axis=0, kind="stable"), axis=0, kind="stable")
        return np.take_along_axis(np.sort(rows, axis=0), order * len(rows) // len(predicted), axis=0)
    made = np.empty_like(predicted)
    for part in parts:
        mine, wanted = rows[:, part].astype(np.float64), predicted[:, part].astype(np.float64)
        made[:, part] = rows[parameter.assigned((wanted - wanted.mean(axis=0)) @ (mine - mine.mean(axis=0)).T), part]
    return made


PREFIX = {"model": "rm", "layer": "rl", "parameter": "rp"}
PUBLISHED = {"model": models, "layer": layers, "parameter": parameters}


def _heads(reader: Reader, sight: Sight) -> Array:
    """The last layer of every row: (rows, classes, inputs)."""
    columns = reader.last().columns
    return np.asarray(sight.model[columns] + np.asarray(sight.rows)[:, columns], np.float64)


def _best(sight: Sight, scores: Array) -> Ints:
    """For each site the row of its bucket with the highest score (sites, rows); of equal ones the first."""
    found = np.empty(len(sight.sites), np.int64)
    for bucket in sight.buckets:
        for site in (sight.sites.index(name) for name in bucket.sites):
            found[site] = bucket.rows[scores[site, bucket.rows].argmax()]
    return found


def _jointly(sight: Sight, scores: Array) -> Ints:
    """The same with every row for one site."""
    found = np.empty(len(sight.sites), np.int64)
    for bucket in sight.buckets:
        places = np.array([sight.sites.index(name) for name in bucket.sites])
        found[places] = bucket.rows[parameter.assigned(scores[np.ix_(places, bucket.rows)])]
    return found
