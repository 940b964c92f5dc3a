"""Low Carbon London, the attacker's side: 20 households outside the federation, and who is day-active."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fl_privacy.tasks import load as electricity
from fl_privacy.tasks.attacker import Auxiliary, Facts, Ints, parts
from fl_privacy.tasks.data import Dataset, Split
from fl_privacy.tasks.lcl import HOUSEHOLDS, PLAN, Lcl, readings, sides
from fl_privacy.tasks.load import Readings

if TYPE_CHECKING:
    from fl_privacy.config import Federation


class Households:
    """The attribute is the household's behaviour; where records are dealt out at random, which the site has more of."""

    def auxiliary(self, federation: Federation, data_dir: Path | None, seed: int) -> Auxiliary:
        data = federation.task.data_set
        split, behaviour = outsiders(data_dir, data.statistics if isinstance(data, Lcl) else None)
        owned = tuple(split.train.take(np.flatnonzero(split.train.site == s)) for s in range(len(behaviour)))
        if federation.task.by_site:
            return Auxiliary(owned, behaviour)
        return _remixed(owned, behaviour, seed)

    def attributes(self, federation: Federation, data_dir: Path | None) -> Ints:
        behaviour = members(data_dir)
        if federation.task.by_site:
            return behaviour[: len(federation.sites)]
        return _above_median([behaviour[part.site].mean() for part in parts(federation, data_dir)])

    def groups(self, federation: Federation) -> Ints:
        """Sites are a household in a window of the year: the same household comes again in the next window."""
        return np.arange(len(federation.sites)) % len(HOUSEHOLDS)


FACTS: Facts = Households()


def outsiders(data_dir: Path | None = None, statistics: tuple[float, float] | None = None) -> tuple[Split, Ints]:
    """The 20 households outside the federation in its sites' form, scaled alike, and the behaviour of each site.

    Some lack readings, so these are fewer than 100 sites.
    """
    _, others = sides(readings(data_dir))
    made = electricity.split(others, PLAN, statistics)
    return made, labels(made.sites, others, others)


def members(data_dir: Path | None = None) -> Ints:
    """The behaviour of every site of the federation, in their order."""
    inside, others = sides(readings(data_dir))
    return labels(Lcl.sites, inside, others)


def labels(sites: tuple[str, ...], households: Readings, others: Readings) -> Ints:
    """1 (day-active) for sites of households with a larger share by day than the median of `others`, else 0."""
    median = np.median(electricity.day_share(others))
    by_day = dict(zip(households.households, electricity.day_share(households) > median, strict=True))
    return np.array([by_day[site.rpartition("-")[0].upper()] for site in sites], np.int64)


def _remixed(owned: Sequence[Dataset], behaviour: Ints, seed: int) -> Auxiliary:
    """The same records dealt out at random: a site's attribute is whether it has more day-active ones than most."""
    rng = np.random.default_rng(seed)
    x, y = np.concatenate([p.x for p in owned]), np.concatenate([p.y for p in owned])
    owner = np.repeat(behaviour, [len(p) for p in owned])
    dealt = np.array_split(rng.permutation(len(y)), len(owned))
    shares = [owner[rows].mean() for rows in dealt]
    return Auxiliary(tuple(Dataset(x[rows], y[rows]) for rows in dealt), _above_median(shares))


def _above_median(shares: Sequence[float]) -> Ints:
    """1 for the upper half."""
    return (np.asarray(shares) > np.median(shares)).astype(np.int64)
