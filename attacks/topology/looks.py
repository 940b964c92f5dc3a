"""What an observer sees of every site in a round, as a rule that is applied to the target and to shadows alike."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from attacks.common.fetched import Models
from attacks.membership.peers import observe
from attacks.membership.seen import Part, Seen
from fl_privacy.config import Federation
from fl_privacy.transcript.read import View
from fl_privacy.vector import Vector

Matrix = NDArray[np.float32]


@dataclass(frozen=True)
class Look:
    """Of every site the coordinates that are seen (None: all; missing: nothing), and those whose updates are mixed."""

    round: int
    sites: int
    where: Mapping[int, NDArray[np.int64] | None]
    mixed: tuple[tuple[int, ...], ...]

    @property
    def there(self) -> NDArray[np.bool_]:
        """Which sites something is seen of."""
        return np.isin(np.arange(self.sites), list(self.where))

    @property
    def own(self) -> bool:
        """Whether some site's own update is seen, not only a mean that it is in."""
        return len({i for group in self.mixed for i in group}) < len(self.where)

    def of(self, updates: Matrix) -> Matrix:
        """What is seen where the sites sent these updates: 0 at coordinates that are not seen."""
        mixed, seen = updates.copy(), np.zeros_like(updates)
        for group in self.mixed:
            mixed[list(group)] = updates[list(group)].mean(axis=0)
        for site, where in self.where.items():
            if where is None:
                seen[site] = mixed[site]
            else:
                seen[site, where] = mixed[site, where]
        return seen

    def facts(self) -> list[object]:
        """What a cache tells one look from another by."""
        arrays = {id(at): at for at in self.where.values()}  # sites mostly share one
        digests = {key: "" if at is None else hashlib.sha256(at.tobytes()).hexdigest() for key, at in arrays.items()}
        where = [(site, digests[id(at)]) for site, at in sorted(self.where.items())]
        return [self.round, self.sites, where, self.mixed]


@dataclass(frozen=True)
class Sight:
    """A round of the target: the model before it, what was seen, and the rule that says how."""

    model: Vector
    rows: Matrix
    look: Look


def sights(views: Mapping[str, View], federation: Federation, models: Models, parameters: int) -> Iterator[Sight]:
    """Every round in which these parties saw something of the updates."""
    for one in observe(views, federation, models, parameters):
        one = replace(one, parts={**one.parts, **regional(views, federation, one)})
        yield Sight(one.model, _rows(one, federation, parameters), look_of(one, federation))


def regional(views: Mapping[str, View], federation: Federation, one: Seen) -> dict[str, Part]:
    """By site, the mean of its region, which is all that the server of a hierarchy has of it."""
    view, found = views.get("server"), dict[str, Part]()
    if view is None or one.round not in view.rounds:
        return found
    for sites, count, total in federation.route.partial_sums(federation, view.round(one.round).arrays):
        part = Part(np.asarray(total / count, np.float32), members=max(2, count))
        found |= {site: part for site in sites if site not in one.parts or one.parts[site].members > 1}
    return found


def look_of(one: Seen, federation: Federation) -> Look:
    """Sites that share a part are mixed: the part is the mean of their updates."""
    number = {name: i for i, name in enumerate(federation.site_names)}
    groups: dict[int, list[int]] = {}
    for name, part in one.parts.items():
        if part.members > 1:
            groups.setdefault(id(part), []).append(number[name])
    where = {number[name]: part.where for name, part in one.parts.items()}
    return Look(one.round, len(number), where, tuple(tuple(sorted(group)) for group in groups.values()))


def _rows(one: Seen, federation: Federation, parameters: int) -> Matrix:
    rows = np.zeros((len(federation.sites), parameters), np.float32)
    for name, part in one.parts.items():
        _place(rows[federation.site_names.index(name)], part)
    return rows


def _place(row: Vector, part: Part) -> None:
    if part.where is None:
        row[:] = part.values
    else:
        row[part.where] = part.values
