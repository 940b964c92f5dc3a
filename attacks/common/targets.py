"""Records whose source an attacker asks for, and records like a site's own that no site trained on."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from attacks.common.attack import Unsuitable
from fl_privacy.config import Federation
from fl_privacy.tasks.canaries import chosen
from fl_privacy.tasks.data import Dataset, pool
from fl_privacy.tasks.workload import Workload

MOST = 100  # records of each site, as in the code of Hu et al. 2021
SHADOW = 0.05  # of the size of a site's training records
Rows = NDArray[np.int64]


class Targets(NamedTuple):
    """Training records of all sites in random order, as many of each; and whose each is (index of the site)."""

    records: Dataset
    owners: Rows


def targets(federation: Federation, data_dir: Path | None) -> Targets:
    """Records that certainly took part: canaries are left out."""
    work, parts = Workload(federation, data_dir), list[Dataset]()
    for name in federation.site_names:
        data = work.site_data(name)
        rows = np.arange(len(data))
        if federation.canaries is not None:
            rows = np.setdiff1d(rows, chosen(len(data), federation.canaries.fraction, federation.seed, name))
        parts.append(data.take(_drawn(federation, f"{name}/targets").permutation(rows)))
    each = min(MOST, *map(len, parts)) if parts[1:] else 0
    if not each:
        raise Unsuitable("sites: source inference needs two of them, and a record of each that is no canary")
    order = _drawn(federation, "order").permutation(each * len(parts))
    records = pool([part.take(np.arange(each)) for part in parts]).take(order)
    return Targets(records, np.repeat(np.arange(len(parts)), each)[order])


def shadows(federation: Federation, data_dir: Path | None) -> dict[str, Dataset]:
    """By site, held-out records with the same classes as its training records, in random order: a twentieth as many."""
    work, by_site, found = Workload(federation, data_dir), federation.task.by_site, dict[str, Dataset]()
    for name in federation.site_names:
        held_out = work.held_out(name) if by_site else work.test
        rng = _drawn(federation, f"{name}/shadow")
        found[name] = held_out.take(alike(work.site_data(name), held_out, rng))
    return found


def alike(own: Dataset, others: Dataset, rng: np.random.Generator) -> Rows:
    """Rows of `others` with classes as a twentieth of `own` has them; fewer if a class has too few."""
    size = max(1, round(SHADOW * len(own)))
    if own.forecast:
        return rng.permutation(len(others))[:size]
    rows = list[Rows]()
    for label, count in zip(*np.unique(rng.permutation(own.y)[:size], return_counts=True), strict=True):
        rows.append(rng.permutation(np.flatnonzero(others.y == label))[:count])
    found = rng.permutation(np.concatenate(rows))
    return found if len(found) else rng.permutation(len(others))[:1]


def _drawn(federation: Federation, what: str) -> np.random.Generator:
    return np.random.default_rng(list(hashlib.sha256(f"{federation.seed}/{what}".encode()).digest()))
