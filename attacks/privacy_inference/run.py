"""The Privacy Inference Attack of IntraShuffler (Section 5) and stronger measures, on what the server saw.

Denoise every update by its privacy label, tell the attribute of the site behind it, link updates of one site across
rounds. A row that was mixed from several sites has no owner, so that these fail on it by construction; therefore also
what can still be done: put updates together again, tell a bucket's attributes from its sum, a site's presence from the
rounds it was known to be in, and the least noisy site of a merged bucket from its variance.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.cluster import KMeans

from attacks.common.knowledge import Knowledge, Progress
from attacks.common.observed import Observation, as_received, budget
from attacks.privacy_inference import linkage, surrogate, unmixing
from attacks.privacy_inference.denoiser import LEADING, Denoiser, learn
from fl_privacy.config import Federation

ROUNDS = 4  # at whose models auxiliary updates are made
TAKEN_APART = 10  # rounds whose buckets are put together again

Array = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class BucketFinding:
    """What was found of one bucket; `rows` are its rows in the round, choices are among them."""

    round: int  # index of the round in the view
    rows: Ints
    composition: Array
    least_noisy: Ints
    reassembled: Ints | None


@dataclass(frozen=True)
class Findings:
    """Everything the attack says. Arrays over all rows of all rounds, in the view's order, unless said otherwise."""

    seen: list[Observation]
    denoiser: Denoiser
    classes: tuple[int, ...]
    rounds: Ints  # index of the round
    denoised: Array
    predicted: Ints
    clusters: Ints
    linked: Ints
    linked_raw: Ints
    buckets: list[BucketFinding]
    present: linkage.Presence


def spread(seen: list[Observation], count: int) -> list[Observation]:
    """So many rounds, evenly over the run."""
    return [seen[i] for i in sorted({round(i) for i in np.linspace(0, len(seen) - 1, count)})]


def examine(seen: list[Observation], knowledge: Knowledge, seed: int = 0) -> Findings:
    """The attack on these rounds."""
    rng = np.random.default_rng(seed)
    clean, labels = _clean(seen, knowledge), knowledge.auxiliary.labels
    knowledge.progress("denoiser, surrogate, linkage")
    denoiser = learn(clean.reshape(-1, clean.shape[2]), seen)
    examples = surrogate.Examples(np.asarray(clean @ denoiser.directions, np.float64), labels)
    denoised = [_denoise(one, denoiser) for one in seen]
    relative = [rows - rows.mean(axis=0) for rows in denoised]
    rounds = np.repeat(np.arange(len(seen)), [len(rows) for rows in denoised])
    features = np.concatenate(relative)
    classes = tuple(int(label) for label in np.unique(labels))
    raw = np.concatenate([one.rows - one.rows.mean(axis=0) for one in seen])
    return Findings(
        seen,
        denoiser,
        classes,
        rounds,
        np.concatenate(denoised),
        _predict(seen, relative, examples, denoiser, rng),
        KMeans(len(classes), n_init=4, random_state=seed).fit_predict(linkage.unit(features)),
        linkage.nearest(features, rounds),
        linkage.nearest(raw, rounds),
        _buckets(seen, examples, denoiser, classes, clean, knowledge.progress, rng),
        _presence(seen, relative, knowledge.federation, rng),
    )


def _clean(seen: list[Observation], knowledge: Knowledge) -> NDArray[np.float32]:
    """Clean updates of the auxiliary sites at some rounds' models: (rounds, sites, parameters)."""
    made, chosen = [], spread(seen, ROUNDS)
    for number, one in enumerate(chosen):
        knowledge.progress(f"auxiliary updates, model {number + 1} of {len(chosen)}")
        made.append(knowledge.updates(one.model, one.round))
    return np.stack(made)


def _presence(
    seen: list[Observation], rows: list[Array], federation: Federation, rng: np.random.Generator
) -> linkage.Presence:
    """Among the rows whose label the site's own budget leads to: the largest one not above it, or the lowest."""

    def mine(round: int, site: str) -> Ints:
        budgets = np.array([budget(tier) for tier in seen[round].tiers])
        below = budgets[budgets <= (federation.site(site).budget or np.inf)]
        return np.flatnonzero(budgets == (below.max() if len(below) else budgets.min()))

    return linkage.presence(rows, [one.invited for one in seen], mine, rng)


def _denoise(one: Observation, denoiser: Denoiser) -> Array:
    made = np.empty((len(one.rows), len(denoiser.energy)))
    for tier in set(one.tiers):
        rows = [i for i, label in enumerate(one.tiers) if label == tier]
        made[rows] = denoiser(one.rows[rows], tier)
    return made


def _predict(
    seen: list[Observation],
    relative: list[Array],
    examples: surrogate.Examples,
    denoiser: Denoiser,
    rng: np.random.Generator,
) -> Ints:
    """The attribute of the site behind every row."""
    trained = {tier: surrogate.attributes(examples, denoiser, tier, rng) for tier in sorted(denoiser.noise)}
    features = np.concatenate(relative)[:, :LEADING]
    labels = np.array([tier for one in seen for tier in one.tiers])
    said = np.empty(len(labels), np.int64)
    for tier, reader in trained.items():
        said[labels == tier] = reader.predict(features[labels == tier])
    return said


def _buckets(
    seen: list[Observation],
    examples: surrogate.Examples,
    denoiser: Denoiser,
    classes: tuple[int, ...],
    clean: NDArray[np.float32],
    progress: Progress,
    rng: np.random.Generator,
) -> list[BucketFinding]:
    """Composition and least noisy member of every bucket; its updates put together again in some rounds."""
    progress("buckets taken apart")
    apart = {one.round for one in spread(seen, TAKEN_APART)}
    mixed = [
        (o.rows[rows], o.tiers[rows[0]]) for o in seen if o.round in apart for rows in o.buckets() if len(rows) > 1
    ]
    whole = unmixing.whole([unmixing.coherence(rows, tier, denoiser, rng) for rows, tier in mixed])
    readers: dict[tuple[str, int], Any] = {}
    found = []
    for index, one in enumerate(seen):
        near = round(index / max(1, len(seen) - 1) * (len(clean) - 1))  # the auxiliary updates of a model like this one
        for rows in one.buckets():
            inside, tier, size = one.rows[rows], one.tiers[rows[0]], len(rows)
            noise = denoiser.noise[tier]
            if (tier, size) not in readers:
                readers[tier, size] = surrogate.composition(examples, denoiser, size, noise, classes, rng)
            shares = readers[tier, size].predict(_feature(one, rows, examples.components[near], denoiser))[0]
            choice = None
            if one.round in apart and size > 1:
                templates = clean[near, rng.choice(clean.shape[1], size, replace=size > clean.shape[1])]
                choice = as_received(inside)
                if not whole:
                    choice = unmixing.reassemble(inside, tier, denoiser, templates)
            found.append(BucketFinding(index, rows, np.atleast_1d(shares), unmixing.least_noisy(inside)[0], choice))
    return found


def _feature(one: Observation, rows: Ints, own: Array, denoiser: Denoiser) -> Array:
    """The denoised mean of a bucket, less what is usual at this model: the round's mean, or the attacker's own."""
    noise = denoiser.noise[one.tiers[rows[0]]] / len(rows)
    mean = np.asarray(one.rows[rows].mean(axis=0, keepdims=True) @ denoiser.directions, np.float64)
    usual = own.mean(axis=0) if len(rows) == len(one.rows) else one.rows.mean(axis=0) @ denoiser.directions
    return np.asarray((denoiser.shrink(mean, noise) - usual)[:, :LEADING])
