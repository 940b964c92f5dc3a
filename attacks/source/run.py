"""Source inference: every record is attributed to the site whose model gives it the lowest loss (Hu et al. 2021).

Where updates come by name, the models are there. Where a shuffle took the names away, they are rebuilt first
(rebuild.py); where only sums are left, they are estimated from many rounds (sums.py). On a view with names, the attack
also shuffles the updates itself, at each level, and says what would be left then.

`known` is no attack on updates: each record goes to the site whose shadow set has its class most often. What a rebuilt
model says is worth something only above that.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from attacks.common.attack import Unsuitable
from attacks.common.knowledge import Knowledge
from attacks.source import noise, rebuild, residues, sums
from attacks.source.reader import Reader
from attacks.source.seen import Bucket, Sight, observe
from fl_privacy.rns.coding import Modular
from fl_privacy.tasks.data import Dataset
from fl_privacy.transcript.read import View

Array = NDArray[np.float64]
Guesses = NDArray[np.int16]
SMALLER = {"1 %": 0.2, "0.5 %": 0.1}  # of the clean shadow set, which is 5 % of a site's training records
MOST_NUMBERS = 2**28  # of the mean updates that are held for the sums
SOURCE, SUMS, KNOWN = "source", "sums", "known"
ABSENT = -1


@dataclass
class Guessed:
    """What one method says: by round and record the site, and the losses of all rounds together."""

    rounds: list[Guesses] = field(default_factory=list)
    total: Array | None = None

    @property
    def overall(self) -> Guesses:
        assert self.total is not None
        return np.asarray(self.total.argmin(axis=1), np.int16)


@dataclass(frozen=True)
class Findings:
    """Guesses are numbers of sites, in the order of `sites`; `present[r, i]` says who took part in the r-th round.

    `variants[method, variant]` are those with another shadow set; `simulated` are methods that the attack tried on rows
    that it had shuffled itself.
    """

    rounds: tuple[int, ...]
    sites: tuple[str, ...]
    present: NDArray[np.bool_]
    guesses: Mapping[str, NDArray[np.int16]]  # (rounds, records)
    overall: Mapping[str, Guesses]
    variants: Mapping[tuple[str, str], NDArray[np.int16]]
    simulated: frozenset[str]
    notes: tuple[str, ...]
    seed: int


class Book:
    """Losses as they come, turned into guesses."""

    def __init__(self, sites: tuple[str, ...], seed: int) -> None:
        self._sites, self._rng = sites, np.random.default_rng(seed)
        self.found = dict[tuple[str, str], Guessed]()

    def add(self, method: str, variant: str, sight_sites: tuple[str, ...], losses: Array) -> None:
        """The losses (records, sites of the round) of one method."""
        places = np.array([self._sites.index(name) for name in sight_sites])
        mine = self.found.setdefault((method, variant), Guessed())
        mine.rounds.append(places[lowest(losses, self._rng)].astype(np.int16))
        spread = losses.std(axis=1, keepdims=True)
        relative = (losses - losses.mean(axis=1, keepdims=True)) / np.where(spread > 0, spread, 1.0)
        if mine.total is None:
            mine.total = self._rng.uniform(0, 1e-9, (len(losses), len(self._sites)))  # equal ones in random order
        mine.total[:, places] += relative


def lowest(losses: Array, rng: np.random.Generator) -> NDArray[np.int64]:
    """The column with the lowest value of every row; one of them at random if several have it."""
    ties = losses == losses.min(axis=1, keepdims=True)
    return np.asarray((ties * rng.uniform(0.5, 1.0, losses.shape)).argmax(axis=1))


def examine(views: Mapping[str, View], knowledge: Knowledge, seed: int) -> Findings:
    """The attack as these parties, all colluding, make it."""
    reader = Reader(knowledge.federation)
    return inspect(observe(views, knowledge.federation, knowledge.models, reader.layout.size), reader, knowledge, seed)


def inspect(sights: Iterable[Sight], reader: Reader, knowledge: Knowledge, seed: int) -> Findings:
    """The attack on these rounds."""
    targets, sites = knowledge.targets, knowledge.federation.site_names
    level = knowledge.federation.route.mixed_by
    sets, book = shadow_sets(knowledge, seed), Book(sites, seed)
    rounds, present, means = list[int](), list[NDArray[np.bool_]](), list[NDArray[np.float32]]()
    notes, simulated = dict[str, None](), set[str]()
    prior = by_class(knowledge.shadows, targets)
    for sight in sights:
        knowledge.progress(f"source, round {sight.round}")
        rounds.append(sight.round)
        present.append(np.array([name in sight.sites for name in sites]))
        means.append(sight.mean)
        if prior is not None:
            book.add(KNOWN, "", sight.sites, prior[:, present[-1]])
        if sight.named is not None:
            named = [reader.outputs(sight.model + sight.named[name], targets)[1] for name in sight.sites]
            book.add(SOURCE, "", sight.sites, np.stack(named, axis=1))
        predicted = rebuild.predictions(reader, sight, sets, seed)
        for kind, mixture in mixtures(sight, level, reader, seed):
            for method, variant, rebuilt in _rebuilt(reader, mixture, kind, sets, targets, predicted, notes):
                book.add(method, variant, sight.sites, rebuilt)
                if sight.named is not None:
                    simulated.add(method)
        if sight.sums is not None and isinstance(coding := knowledge.federation.coding, Modular):
            for method, variant, rebuilt in residues.rebuilt(reader, sight, targets, coding, predicted):
                book.add(method, variant, sight.sites, rebuilt)
    for number, losses in _of_sums(knowledge, reader, means, np.array(present), rounds, targets, notes):
        there = tuple(name for name, here in zip(sites, present[number], strict=True) if here)
        book.add(SUMS, "", there, losses)
    if simulated:
        notes["rm, rl, rp: these parties know whose each update is; the attack shuffled them itself"] = None
    found = {key: np.stack(one.rounds) for key, one in book.found.items() if len(one.rounds) == len(rounds)}
    return Findings(
        tuple(rounds),
        sites,
        np.array(present),
        {method: guesses for (method, variant), guesses in found.items() if not variant},
        {method: book.found[method, variant].overall for method, variant in found if not variant},
        {key: guesses for key, guesses in found.items() if key[1]},
        frozenset(simulated),
        tuple(notes),
        seed,
    )


def shadow_sets(knowledge: Knowledge, seed: int) -> rebuild.Sets:
    """Those of all sites: clean, smaller, and where they are images with noise."""
    clean = knowledge.shadows
    variants = {rebuild.CLEAN: clean}
    if all(map(noise.is_images, clean.values())):
        for kind in noise.NOISES:
            variants[kind] = {name: noise.noisy(data, kind, seed) for name, data in clean.items()}
    return rebuild.Sets(variants, SMALLER)


def by_class(shadows: Mapping[str, Dataset], targets: Dataset) -> Array | None:
    """What the shadow sets say without any update: minus how often a site's has the class of a record."""
    if targets.forecast:
        return None
    return np.stack([-(targets.y[:, None] == data.y).mean(axis=1) for data in shadows.values()], axis=1)


def mixtures(sight: Sight, level: str, reader: Reader, seed: int) -> Iterator[tuple[str, Sight]]:
    """The rows as they came with the level of their shuffle; or, where there are names, shuffled at each level here."""
    if sight.rows is not None:
        yield level, sight
    if sight.named is None:
        return
    rng = np.random.default_rng([seed, sight.round])
    rows = np.stack([sight.named[name] for name in sight.sites])
    whole = (Bucket(np.arange(len(rows)), sight.sites),)
    for one, parts in (("model", [slice(None)]), ("layer", reader.layout.layers), ("parameter", None)):
        made = rows.copy()
        if parts is None:
            made = rng.permuted(rows, axis=0)
        else:
            for part in parts:
                made[:, part] = rows[rng.permutation(len(rows)), part]
        yield one, replace(sight, named=None, rows=made, buckets=whole)


def _rebuilt(
    reader: Reader,
    sight: Sight,
    level: str,
    sets: rebuild.Sets,
    targets: Dataset,
    predicted: rebuild.Predicted,
    notes: dict[str, None],
) -> rebuild.Found:
    parts = {"model": [slice(None)], "layer": reader.layout.layers, "parameter": ()}[level]
    if targets.forecast:
        notes["rm, rl, rp: they need classes, and the label is a number"] = None
    else:
        try:
            yield from rebuild.PUBLISHED[level](reader, sight, sets, targets)
        except Unsuitable as error:
            notes[str(error)] = None
    yield from rebuild.everything(reader, sight, targets, level, parts, predicted)


def _of_sums(
    knowledge: Knowledge,
    reader: Reader,
    means: list[NDArray[np.float32]],
    present: NDArray[np.bool_],
    rounds: list[int],
    targets: Dataset,
    notes: dict[str, None],
) -> Iterator[tuple[int, Array]]:
    """Round by round the losses under each site's model, as least squares over all rounds estimates its update."""
    if sum(mean.size for mean in means) > MOST_NUMBERS:
        notes[f"{SUMS}: {len(means)} updates of {reader.layout.size} parameters are too many to hold"] = None
        return
    cohorts = [np.flatnonzero(here).tolist() for here in present]
    updates = sums.disaggregated(means, cohorts, present.shape[1])
    for number, (round, mean) in enumerate(zip(rounds, means, strict=True)):
        start, scale = knowledge.models.before(round), np.float32(sums.length(mean))
        if len({tuple(cohort) for cohort in cohorts}) == 1:  # nothing tells the sites apart
            yield number, np.zeros((len(targets), len(cohorts[number])))
            continue
        losses = [reader.outputs(start + scale * updates[site], targets)[1] for site in cohorts[number]]
        yield number, np.stack(losses, axis=1)
