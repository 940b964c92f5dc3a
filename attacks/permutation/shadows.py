"""Absolute input positions without an earlier model: what hidden orders cancel in, matched to shadow federations.

The attacker trains shadow federations on public records, each from a first model of its own, and takes the same
invariants of them. `products` assigns inputs by the product of all weights alone. `moments` adds the second moment of
first-layer changes, which an order permutes on both sides: it assigns again by the moments with inputs as assigned
before, until nothing changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from attacks.permutation.factors import Factors, Indices
from attacks.permutation.invariants import Array, Invariants, Step, invariants
from attacks.permutation.matching import assigned
from attacks.topology.shadows import Shadow
from fl_privacy.config import Federation
from fl_privacy.tasks.data import Dataset
from fl_privacy.tasks.workload import Workload

SHADOWS, SITES, ROUNDS, RECORDS = 6, 8, 20, 4000  # at most: more change little
SWEEPS = 100
FLOOR = 0.1  # of the typical size: deviations over a few shadows are uncertain


def shadows(factors: Factors, federation: Federation, proxy: Dataset, rounds: int, seed: int) -> list[Invariants]:
    """The invariants of a few federations on public records."""
    rng, found = np.random.default_rng(seed), list[Invariants]()
    for _ in range(SHADOWS):
        changes = {
            "seed": int(rng.integers(2**62)),
            "init": None,
            "reproducible": True,
            "audit": False,
            "canaries": None,
        }
        own = federation.model_copy(update=changes)
        parts = np.array_split(rng.permutation(len(proxy))[:RECORDS], min(SITES, len(federation.sites), len(proxy)))
        data = [proxy.take(part) for part in parts]
        found.append(invariants(factors, _trained(factors, own, data, min(rounds, ROUNDS))))
    return found


def _trained(factors: Factors, federation: Federation, data: Sequence[Dataset], rounds: int) -> Iterator[Step]:
    """What a server would see of it: it has no model to compare the first round with."""
    (group,) = factors.inputs
    work, names = Workload(federation), federation.site_names
    sites = [Shadow(federation, work, name, part) for name, part in zip(names, data, strict=False)]
    model, as_is = work.initial, np.arange(factors.size(group))
    for round in range(1, rounds + 1):
        updates = np.stack([site.update(model, round) for site in sites])
        if round > 1:
            yield Step(model, [model + update for update in updates], as_is)
        model = model + updates.mean(axis=0)


def absolute(seen: Invariants, found: Sequence[Invariants]) -> dict[str, Indices]:
    """Which input of the shadows each input is, by both methods."""
    start = unlikely(seen.product.T, np.stack([one.product.T for one in found]))
    products = assigned(-start)
    moments, own = np.stack([_scaled(one.moment) for one in found]), _scaled(seen.moment)
    order = products
    for _ in range(SWEEPS):
        following = assigned(-start - unlikely(own, moments[:, :, order]))
        if np.array_equal(following, order):
            break
        order = following
    return {"products": products, "moments": order}


def unlikely(rows: Array, samples: Array) -> Array:
    """By row and shadow row twice the negative log-likelihood: independent normals, fitted over the shadows."""
    mean, spread = samples.mean(axis=0), samples.std(axis=0)
    spread = spread + FLOOR * (spread.mean() + samples.std() * FLOOR) + np.finfo(np.float64).tiny
    weight = 1 / np.square(spread)
    crossed = np.square(rows) @ weight.T - 2 * rows @ (mean * weight).T
    return np.asarray(crossed + (np.square(mean) * weight - np.log(weight)).sum(axis=1), np.float64)


def _scaled(moment: Array) -> Array:
    """In units of its length, without what noise adds to every input alike."""
    clean = moment - np.diag(moment).min() * np.eye(len(moment))
    return np.asarray(clean / max(float(np.linalg.norm(clean)), np.finfo(np.float64).tiny), np.float64)
