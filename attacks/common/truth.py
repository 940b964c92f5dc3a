"""What really happened in a run, for scoring: never given to an attack's `run`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from attacks.common.attack import Unsuitable
from attacks.common.observed import as_received
from attacks.common.targets import targets
from fl_privacy.config.changes import config_of
from fl_privacy.config.evaluate import charge_of
from fl_privacy.dp.ledger import compose
from fl_privacy.errors import TranscriptError
from fl_privacy.shuffle.job import Job, mix, top_up
from fl_privacy.steps.base import Seat
from fl_privacy.tasks import accepted
from fl_privacy.tasks.attacker import Facts, facts_of
from fl_privacy.tasks.canaries import expected
from fl_privacy.tasks.data import Dataset
from fl_privacy.tasks.workload import Workload
from fl_privacy.transcript.events import Event, Mixing, Row
from fl_privacy.transcript.read import Run, View

Ints = NDArray[np.int64]
Vector = NDArray[np.float32]
Matrix = NDArray[np.float32]


@dataclass(frozen=True)
class RoundTruth:
    """Who took part (index of site), the noisy and clean update of each, and the origin of every received value.

    `sources[r, c]` is the participant whose value stands in row r at coordinate c. `owners[r]` is the participant that
    row r has most of: a whole update's sender, or an arbitrary member of the bucket for a mixture.
    """

    sites: Ints
    sent: Matrix
    clean: Matrix
    sources: NDArray[np.int16]
    owners: Ints


class Witness(NamedTuple):
    """A party that received updates by name, and its record of a round."""

    view: View
    attempt: str
    events: list[Event]

    @property
    def names(self) -> list[str]:
        """The sites that took part, in the order of the rows."""
        return [event.name for event in sorted(rows_in(self.events), key=lambda event: event.row)]


class Truth:
    """The truth of a run that was made with `audit: true`, read when it is asked for."""

    def __init__(self, run: Run, data_dir: Path | None = None) -> None:
        self.federation = config_of(run.manifest, str(run.path / "manifest.json"))
        states = (run.path.parent / "sites" / self.federation.name / name for name in self.federation.site_names)
        accepted.check_here(self.federation, states)  # a run that somebody sent must not bring code
        if not self.federation.audit or not run.sites:
            raise TranscriptError(f"{run.path}: holds no truth to score against; record the run with `audit: true`")
        self.data_dir = data_dir
        self._run, self._rounds = run, dict[int, RoundTruth]()
        self._view = cache(run.view)

    @cached_property
    def labels(self) -> Ints:
        """The attribute of every site, as its data set defines it."""
        return self._facts.attributes(self.federation, self.data_dir)

    @cached_property
    def groups(self) -> Ints:
        """A number per site, the same for sites behind which the same people stand."""
        return self._facts.groups(self.federation)

    def clean(self, round: int) -> dict[str, Vector]:
        """The update of every site that took part, before noise."""
        return self._clean(round, self._witness(round))

    @property
    def sites(self) -> list[str]:
        """Those that took part in some round."""
        return self._run.sites

    def included(self, site: str) -> NDArray[np.bool_]:
        """Which of the site's canaries took part, in the order in which an attacker gets them."""
        truth = self._run.truth(site)
        for number in truth.rounds:
            arrays = truth.round(number).arrays
            if "included" in arrays:
                return arrays["included"].astype(bool)
        raise TranscriptError(f"{truth.folder}: does not say which canaries took part; record the run again")

    def spent(self, site: str) -> float | None:
        """Epsilon of this run as the site's ledger composes it, at the delta of its budget; None without noise."""
        federation, truth, delta = self.federation, self._run.truth(site), self.federation.privatise.at_delta
        if federation.unit is None or delta is None:
            return None
        canaries = 0 if federation.canaries is None else len(self.included(site))
        records = expected(len(self._work.site_data(site)), canaries)
        update = federation.privatise.start(Seat(federation, site, self._work, records, None)).charge
        costs = {"update": update, "counts": charge_of(federation)}  # by the name under which it is recorded
        rounds = [*truth.rounds, *truth.farewells]
        named = {(number, attempt) for number in rounds for attempt in truth.attempts(number)}
        kept = [truth.round(*which).arrays for which in named]
        return compose(
            [charge for arrays in kept for name, charge in costs.items() if charge and name in arrays], delta
        )

    def opened(self, model: Vector, sites: Iterable[str]) -> Vector:
        """A model after the last round, as these sites read it: a step may have its own order of coordinates."""
        for truth in map(self._run.truth, sites):
            arrays = truth.round(truth.rounds[-1]).arrays if truth.rounds else {}
            if "order" in arrays:
                plain = np.empty_like(model)
                plain[arrays["order"]] = model
                return plain
        return model

    def orders(self, site: str) -> dict[int, Ints]:
        """By round where every coordinate of what the site sent comes from, if a step moved them."""
        truth = self._run.truth(site)
        found = {round: truth.round(round).arrays.get("order") for round in truth.rounds}
        return {round: order.astype(np.int64) for round, order in found.items() if order is not None}

    def records(self, site: str) -> Dataset:
        """What the site trained on, read again from the data folder."""
        return self._work.site_data(site)

    @cached_property
    def owners(self) -> Ints:
        """The index of the site of each record that an attacker is asked about, in the order in which it gets them."""
        return targets(self.federation, self.data_dir).owners

    def round(self, round: int) -> RoundTruth:
        """Where every value that the server received in a round came from."""
        if round not in self._rounds:
            self._rounds[round] = self._traced(round)
        return self._rounds[round]

    @cached_property
    def _work(self) -> Workload:
        return Workload(self.federation, self.data_dir)

    @property
    def _facts(self) -> Facts:
        return facts_of(self.federation)

    def _witness(self, round: int) -> Witness:
        """The party whose record of the round says whose each row is."""
        attempt = self._view("server").attempts(round)[-1]
        for view in map(self._view, self._run.observers):
            if round in view.rounds and attempt in view.attempts(round):
                events = view.events(round, attempt)
                if rows_in(events):
                    return Witness(view, attempt, events)
        nobody = f"{self._run.path}: no view names the sites of round {round}"
        if self.federation.route.simulated:
            raise Unsuitable(f"{nobody}: route {self.federation.route.kind} has none; use another attack")
        raise TranscriptError(f"{nobody}; record the run again")

    def _clean(self, round: int, witness: Witness) -> dict[str, Vector]:
        found = {}
        for name in witness.names:
            truth = self._run.truth(name)
            # In older runs a site did not learn the attempt's name where its update went through Flower.
            attempt = witness.attempt if witness.attempt in truth.attempts(round) else "server"
            found[name] = truth.round(round, attempt).arrays["update"]
        return found

    def _traced(self, round: int) -> RoundTruth:
        view, attempt, events = witness = self._witness(round)
        received = self._view("server").round(round, attempt).arrays["updates"]
        sent = view.round(round, attempt).arrays["updates"]
        clean = np.stack(list(self._clean(round, witness).values()))
        sites = np.array([self.federation.site_names.index(name) for name in witness.names])
        sources = as_received(sent).astype(np.int16)
        if view.observer in self.federation.route.middleware():
            jobs = [Job.from_json(event.job) for event in events if isinstance(event, Mixing)]
            if not jobs:
                raise TranscriptError(f"{view.folder}: does not say how round {round} was mixed; record the run again")
            sources, sent = mixed(jobs[0], sent)
        if not np.array_equal(np.take_along_axis(sent, sources.astype(np.int64), axis=0), received):
            raise TranscriptError(f"{view.folder}: what it sent in round {round} is not what the server received")
        return RoundTruth(sites, sent, clean, sources, owners_of(sources))


def rows_in(events: list[Event]) -> list[Row]:
    return [event for event in events if isinstance(event, Row)]


def mixed(job: Job, sent: Matrix) -> tuple[NDArray[np.int16], Matrix]:
    """The shuffler's job done again on row numbers: the origin of every value; and the updates with topped-up noise."""
    numbers = as_received(sent).astype(np.float32)
    mix(numbers, replace(job, sets=tuple(replace(group, top_ups=()) for group in job.sets)))
    topped = sent.copy()
    for group in job.sets:
        for member, top in zip(group.members, group.top_ups, strict=bool(group.top_ups)):
            top_up(topped[member], top)
    return numbers.astype(np.int16), topped


def shares(sources: NDArray[np.int16], participants: int) -> NDArray[np.float64]:
    """How much of each row is from each participant."""
    counts = np.stack([np.bincount(row, minlength=participants) for row in sources])
    return np.asarray(counts / sources.shape[1], np.float64)


def owners_of(sources: NDArray[np.int16]) -> Ints:
    rows, columns = linear_sum_assignment(shares(sources, len(sources)), maximize=True)
    owners = np.empty(len(rows), np.int64)
    owners[rows] = columns
    return owners
