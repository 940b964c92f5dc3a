"""What colluding parties saw of every site's update in a round: some coordinates of it, or of a mixture it is in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from attacks.common.attack import Unsuitable
from attacks.common.fetched import Models
from attacks.common.observed import budget
from fl_privacy.coding import Known
from fl_privacy.config import Federation
from fl_privacy.errors import TranscriptError
from fl_privacy.transcript.events import Invited, Row
from fl_privacy.transcript.read import View

Vector = NDArray[np.float32]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Part:
    """Values at some coordinates of an update (`where` is None: at all), or of the mean of `members` updates.

    `bare`, where it differs, is what arrived there, without what the party tracks of earlier rounds.
    """

    values: Vector
    where: Ints | None = None
    members: int = 1
    bare: Vector | None = None

    def of(self, vectors: Vector) -> Vector:
        """These coordinates of vectors of the model's size, the last axis."""
        return vectors if self.where is None else vectors[..., self.where]

    def thinned(self, most: int) -> Part:
        """At most so many of its coordinates, evenly spaced: enough for cosines of large updates."""
        if len(self.values) <= most:
            return self
        kept = np.linspace(0, len(self.values) - 1, most).astype(np.int64)
        bare = None if self.bare is None else self.bare[kept]
        return Part(self.values[kept], kept if self.where is None else self.where[kept], self.members, bare)

    def untracked(self) -> Part:
        """What a party that tracks nothing has."""
        return self if self.bare is None else replace(self, values=self.bare)


@dataclass(frozen=True)
class Seen:
    """One round: the model before and, if known, after it, and a part by site; those of a mixture share theirs."""

    round: int
    model: Vector
    after: Vector | None
    parts: Mapping[str, Part]


class Observer:
    """One party's view, read round by round in order."""

    def __init__(self, view: View, federation: Federation, models: Models, parameters: int) -> None:
        self._view, self._federation, self._models = view, federation, models
        self._parts = federation.route.parts(federation, parameters)
        self._where = self._coordinates(1)
        self._decoder = federation.coding.decoder(parameters if self._where is None else len(self._where))

    def _coordinates(self, round: int) -> NDArray[np.int64] | None:
        """Those that reach this party in a round; None for all."""
        return self._parts.at(round).coordinates(self._view.observer)

    def parts(self, round: int) -> dict[str, Part]:
        """By site: its own row, if the party knows whose it is, else the mean of the rows that it may be in."""
        if round not in self._view.rounds:
            return {}
        (arrays, tiers), events = self._view.round(round), self._view.events(round)
        if "updates" not in arrays:
            return self._difference(round) if "model" in arrays else {}
        self._where = self._coordinates(round)
        named = {event.name: event.row for event in events if isinstance(event, Row)}
        senders = sorted(named, key=lambda name: named[name])
        if named:
            known = self._decoder.known(arrays["updates"], senders, round)
            return {name: self._part(one) for name, one in zip(senders, known, strict=True)}
        invited = [event.name for event in events if isinstance(event, Invited)]
        rows = self._decoder.decode(arrays["updates"], senders, round)
        return self._mixed(rows, [str(tier) for tier in tiers], invited)

    def _part(self, known: Known) -> Part:
        """What a message tells, at the coordinates of the whole update."""
        if known.where is None:
            return Part(known.values, self._where, bare=known.bare)
        where = known.where if self._where is None else self._where[known.where]
        return Part(known.values, where, bare=known.bare)

    def _difference(self, round: int) -> dict[str, Part]:
        """Who gets nothing but models has the mean of all updates."""
        after = self._models.after(round)
        if after is None:
            return {}
        mean = Part(after - self._models.before(round), members=self._federation.cohort)
        return dict.fromkeys(self._federation.site_names, mean)

    def _mixed(self, rows: Vector, tiers: list[str], invited: list[str]) -> dict[str, Part]:
        """No shuffle changes the mean of the rows that it mixed: those of one label."""
        budgets = np.array([budget(tier) for tier in tiers] if len(tiers) == len(rows) else [np.inf] * len(rows))
        means = {b: Part(rows[budgets == b].mean(axis=0), self._where, int((budgets == b).sum())) for b in set(budgets)}
        return {name: means[self._label(name, means)] for name in invited}

    def _label(self, site: str, labels: Mapping[float, Part]) -> float:
        """Where a site's budget leads to: the largest label not above it, or the lowest."""
        own = self._federation.site(site).budget or np.inf
        return max((label for label in labels if label <= own), default=min(labels))


def observe(views: Mapping[str, View], federation: Federation, models: Models, parameters: int) -> Iterator[Seen]:
    """Every round in which these parties saw updates; all coordinates that any of them saw of a site are joined."""
    observers = [Observer(view, federation, models, parameters) for view in views.values()]
    empty, join = True, Join(parameters)
    for round in sorted({number for view in views.values() for number in view.rounds if number}):
        found = [observer.parts(round) for observer in observers]
        names = dict.fromkeys(name for one in found for name in one)
        parts = {name: join([one[name] for one in found if name in one]) for name in names}
        if parts:
            empty = False
            yield Seen(round, models.before(round), models.after(round), parts)
    if empty:
        raise Unsuitable(f"observer: {', '.join(views)} saw no updates in this run; use another observer")


class Join:
    """Joins parts of one update. If those of all sites have the same coordinates, these are sorted once."""

    def __init__(self, parameters: int) -> None:
        self._parameters, self._last = parameters, list[Ints | None]()
        self._sorted: tuple[Ints | None, Ints] = None, np.empty(0, np.int64)

    def __call__(self, parts: list[Part]) -> Part:
        """The union of the coordinates, each once; of mixtures, the smallest, and only if nobody saw the site's own."""
        own = [part for part in parts if part.members == 1] or [min(parts, key=lambda part: part.members)]
        parts = [part for part in own if part.where is None][:1] or own
        if len(parts) == 1:
            return parts[0]
        given = [part.where for part in parts]
        if len(given) != len(self._last) or any(one is not other for one, other in zip(given, self._last, strict=True)):
            self._last = given
            self._sorted = self._sort(np.concatenate([one for one in given if one is not None]))
        where, order = self._sorted
        bare = [part.bare for part in parts if part.bare is not None]
        joined = np.concatenate(bare)[order] if len(bare) == len(parts) else None
        return Part(np.concatenate([part.values for part in parts])[order], where, bare=joined)

    def _sort(self, where: Ints) -> tuple[Ints | None, Ints]:
        order = np.argsort(where)
        if (np.diff(where[order]) == 0).any():
            raise TranscriptError("views: two aggregators have the same coordinate; record the run again")
        return (where[order] if len(where) < self._parameters else None), order
