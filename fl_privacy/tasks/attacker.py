"""What an attacker may know of a data set, and what its attributes are: facts that the data sets give themselves."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from fl_privacy.errors import DataError
from fl_privacy.registry import resolve
from fl_privacy.tasks.data import Dataset, pool
from fl_privacy.tasks.making import task_of
from fl_privacy.tasks.workload import Workload

if TYPE_CHECKING:
    from fl_privacy.config import Federation

Ints = NDArray[np.int64]
SITES = 96  # that an attacker makes of records which do not come by site


@dataclass(frozen=True)
class Auxiliary:
    """An attacker's own records, which no site of the federation has, as sites; and the attribute of each site.

    `own` are the records before they were dealt out, each once.
    """

    sites: tuple[Dataset, ...]
    labels: Ints
    own: Dataset | None = None

    @property
    def records(self) -> Dataset:
        """All of them, in no sites."""
        return pool(self.sites) if self.own is None else self.own


class Facts(Protocol):
    """The attacker's side of a data set. An attribute is a small number per site, such as its most frequent class."""

    def auxiliary(self, federation: Federation, data_dir: Path | None, seed: int) -> Auxiliary:
        """What an attacker on this federation has; an error where nobody outside it has such records."""
        ...

    def attributes(self, federation: Federation, data_dir: Path | None) -> Ints:
        """The attribute of every site, in their order: the truth that attacks are scored against."""
        ...

    def groups(self, federation: Federation) -> Ints:
        """A number per site, the same for sites behind which the same people stand."""
        ...


class ByClass:
    """Records with classes: the attacker has the held-out ones, and an attribute is the class of most records."""

    def auxiliary(self, federation: Federation, data_dir: Path | None, seed: int) -> Auxiliary:
        task, dealt = federation.task, federation.task.partition
        if task.by_site or not task.data_set.classes:
            where = f"{task.label!r} by site"
            raise DataError(
                f"task: no auxiliary data for {where}; use a benchmark with partition iid or dirichlet, or lcl"
            )
        split = task.data_set.load(data_dir)
        size = min(len(split.train) // len(federation.sites), len(split.test), dealt.records or len(split.test))
        return _drawn(split.test, split.classes, size, dealt.skew, seed)

    def attributes(self, federation: Federation, data_dir: Path | None) -> Ints:
        return np.array([np.bincount(part.y).argmax() for part in parts(federation, data_dir)])

    def groups(self, federation: Federation) -> Ints:
        return np.arange(len(federation.sites))


def facts_of(federation: Federation) -> Facts:
    """Those that the task brings; without any, its sites are taken by class."""
    task = federation.task
    own = task_of(federation).attacker if task.is_own else task.data_set.attacker
    facts: Facts = resolve(own) if own else ByClass()
    return facts


def parts(federation: Federation, data_dir: Path | None) -> list[Dataset]:
    """The training records of every site."""
    work = Workload(federation, data_dir)
    return [work.site_data(name) for name in federation.site_names]


def _drawn(records: Dataset, classes: int, size: int, alpha: float | None, seed: int) -> Auxiliary:
    """Sites with class shares from Dirichlet(alpha), or equal ones, of records drawn with replacement."""
    rng = np.random.default_rng(seed)
    by_class = [np.flatnonzero(records.y == label) for label in range(classes)]
    sites, labels = [], []
    for _ in range(SITES):
        shares = rng.dirichlet([alpha] * classes) if alpha is not None else np.full(classes, 1 / classes)
        counts = rng.multinomial(size, shares)
        rows = np.concatenate(
            [rng.choice(found, count) for found, count in zip(by_class, counts, strict=True) if count]
        )
        sites.append(records.take(rng.permutation(rows)))
        labels.append(int(counts.argmax()))
    return Auxiliary(tuple(sites), np.array(labels), records)
