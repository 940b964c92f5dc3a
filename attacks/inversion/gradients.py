"""What parties saw of each site's gradient: the update of one step, divided by the public learning rate."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from attacks.common.attack import Unsuitable
from attacks.common.fetched import Models
from attacks.common.observed import invited
from fl_privacy.coding import Known
from fl_privacy.config import Federation
from fl_privacy.errors import TranscriptError
from fl_privacy.models.initial import initial
from fl_privacy.transcript.events import Farewell, Row
from fl_privacy.transcript.read import View
from fl_privacy.vector import Vector

LARGEST_BATCH = 8
FIX = "use task: {partition: {records: 1}, train: {epochs: 1}}"
ROUNDS = 4  # of a site that are matched at once
Mask = NDArray[np.bool_]
Messages = tuple[int, dict[int, str], list[Known], Mask]


@dataclass(frozen=True)
class Sight:
    """The gradient at `model` on the coordinates in `seen`; the others are zero.

    `bare`, where it differs, is the same of what arrived, without what the party tracks of earlier rounds.
    """

    round: int
    row: int
    model: Vector
    gradient: NDArray[np.float64]
    seen: Mask
    bare: NDArray[np.float64] | None = None

    @property
    def untracked(self) -> NDArray[np.float64]:
        return self.gradient if self.bare is None else self.bare


@dataclass(frozen=True)
class Target:
    """A site, and the gradients of its batch that were seen at known models; a row without a name is its own site.

    With `sites`, all these together: one step of each is like one step on all records (Athanasiou et al. 2026, F.3).
    """

    site: str | None
    sights: tuple[Sight, ...]
    sites: tuple[str, ...] = ()

    @property
    def whole(self) -> bool:
        return all(sight.seen.all() for sight in self.sights)


def filled(target: Target) -> Target:
    """The same for one that tracks nothing and takes what it did not see for zeros, as the code of ERIS's authors."""
    made = [replace(s, gradient=s.untracked, seen=np.ones_like(s.seen), bare=None) for s in target.sights]
    return replace(target, sights=tuple(made))


def batch_of(federation: Federation) -> int:
    """The records of a site's one step per round; an error if it makes more steps, or a larger one."""
    train, records = federation.task.train, federation.task.typical_records(len(federation.sites))
    steps = train.epochs * -(-records // train.batch_size)
    if steps > 1:
        raise Unsuitable(f"task.train: inversion needs one step per round, and sites make {steps}; {FIX}")
    check_batch(records)
    return records


def check_batch(records: int) -> None:
    """Refuse an update of more records than a search finds."""
    if records > LARGEST_BATCH:
        raise Unsuitable(f"task.train: inversion supports batches of {LARGEST_BATCH}, and sites have {records}; {FIX}")


def sums(server: View, federation: Federation, models: Models) -> list[Target]:
    """What a server that gets sums alone knows: the mean update of a cohort, by the models before and after a round."""
    if federation.combine.optimiser().names:
        raise Unsuitable(f"combine.kind: {federation.combine.kind} hides the mean that inversion needs; use fedavg")
    found, train = dict[tuple[str, ...], list[Sight]](), federation.task.train
    for round in sorted(server.rounds):
        farewell = any(isinstance(event, Farewell) for event in server.events(round))
        before, after = (None, None) if farewell else (models.before(round), models.after(round))
        if before is None or after is None:
            continue
        update = (after.astype(np.float64) - before) / federation.combine.lr
        gradient = -update / train.lr - train.weight_decay * before.astype(np.float64)
        sites = invited({"server": server}, round) or federation.site_names
        found.setdefault(sites, []).append(Sight(round, 0, before, gradient, np.ones(before.size, np.bool_)))
    if not found:
        raise TranscriptError("observer: recorded no sum between two models; let the run finish a round")
    return [Target(None, tuple(sights[:ROUNDS]), sites) for sites, sights in found.items()]


def targets(views: Mapping[str, View], federation: Federation) -> list[Target]:
    """Every site whose update these parties saw at a model they know. A site's batch is the same in all rounds."""
    models, joined = known_models(views, federation), dict[tuple[int, str | int], Sight]()
    for view in views.values():
        for round, names, known, mine in _messages(view, federation, models[1].size):
            for row, one in enumerate(known if round in models else ()):
                sight = sight_of(round, row, models[round], one, mine, federation)
                _add(joined, (round, names.get(row, row)), sight)
    if not joined:
        raise TranscriptError("observer: saw no update at a model it knows; add another aggregator, or the evaluator")
    found: dict[tuple[int, str | int], list[Sight]] = {}
    for (round, who), sight in sorted(joined.items(), key=lambda item: (item[0][0], item[1].row)):
        found.setdefault((0 if isinstance(who, str) else round, who), []).append(sight)
    return [Target(who if isinstance(who, str) else None, tuple(s[:ROUNDS])) for (_, who), s in found.items()]


def _messages(view: View, federation: Federation, size: int) -> Iterator[Messages]:
    """By round: the senders, if known, and what their messages tell; references move in every round, known or not."""
    decoder = None
    for round in sorted(view.rounds):
        rows = view.round(round).arrays.get("updates")
        if rows is None:
            continue
        names = {event.row: event.name for event in view.events(round) if isinstance(event, Row)}
        mine = coordinates(federation, view.observer, size, round)
        decoder = decoder or federation.coding.decoder(int(mine.sum()))
        yield round, names, decoder.known(rows, [names[row] for row in sorted(names)], round), mine


def known_models(views: Mapping[str, View], federation: Federation) -> dict[int, Vector]:
    """The model that each round started from: the first is public, a server sends it, an evaluator gets the next."""
    known = {1: initial(federation)}
    for view in views.values():
        for round in view.rounds:
            arrays = view.round(round).arrays
            if "model" in arrays:
                known[round if "updates" in arrays else round + 1] = arrays["model"]
    return known


def coordinates(federation: Federation, observer: str, size: int, round: int) -> Mask:
    """Those that this party receives in a round: its shard, or all."""
    mine = federation.route.parts(federation, size).at(round).coordinates(observer)
    found = np.zeros(size, np.bool_)
    found[slice(None) if mine is None else mine] = True
    return found


def sight_of(round: int, row: int, model: Vector, known: Known, mine: Mask, federation: Federation) -> Sight:
    """The gradient of the one SGD step that made the update; with momentum, the first step is the same."""
    train, seen = federation.task.train, mine
    if known.where is not None:
        seen = np.zeros_like(mine)
        seen[np.flatnonzero(mine)[known.where]] = True

    def gradient(values: Vector) -> NDArray[np.float64]:
        made = np.zeros(model.size)
        made[seen] = -values.astype(np.float64) / train.lr - train.weight_decay * model[seen].astype(np.float64)
        return made

    bare = None if known.bare is None else gradient(known.bare)
    return Sight(round, row, model, gradient(known.values), seen, bare)


def _add(joined: dict[tuple[int, str | int], Sight], key: tuple[int, str | int], sight: Sight) -> None:
    """Colluding parties put their coordinates together."""
    before = joined.get(key)
    if before is not None:
        gradient = np.where(before.seen, before.gradient, sight.gradient)
        bare = None if sight.bare is None else np.where(before.seen, before.untracked, sight.bare)
        sight = Sight(sight.round, sight.row, sight.model, gradient, before.seen | sight.seen, bare)
    joined[key] = sight
