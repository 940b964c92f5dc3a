"""What really happened in a run, for scoring: never given to an attack."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from attacks.auxiliary import above_median
from attacks.observed import Observation
from attacks.unmixing import as_received
from fl_privacy.config import Federation
from fl_privacy.errors import TranscriptError
from fl_privacy.shuffle.job import Job, mix, top_up
from fl_privacy.tasks import lcl
from fl_privacy.tasks.workload import Workload
from fl_privacy.transcript.read import Run

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class RoundTruth:
    """Who took part (index of site), the noisy and clean update of each, and the origin of every received value.

    `sources[r, c]` is the participant whose value stands in row r at coordinate c. `owners[r]` is the participant that
    row r has most of: a whole update's sender, or an arbitrary member of the bucket for a mixture.
    """

    sites: Ints
    sent: NDArray[np.float32]
    clean: NDArray[np.float32]
    sources: NDArray[np.int16]
    owners: Ints


@dataclass(frozen=True)
class Truth:
    """All rounds, and the attribute of every site of the federation."""

    federation: Federation
    rounds: list[RoundTruth]
    labels: Ints


def reveal(run: Run, seen: list[Observation], data_dir: Path | None) -> Truth:
    """The truth of a run that was made with `audit: true`."""
    federation = Federation.model_validate(run.manifest["config"])
    if not federation.audit or not run.sites:
        raise TranscriptError(f"{run.path}: holds no truth to score against; record the run with `audit: true`")
    return Truth(federation, [_round(run, federation, one) for one in seen], labels(federation, data_dir))


def _round(run: Run, federation: Federation, one: Observation) -> RoundTruth:
    shuffled = federation.route.kind == "shuffler"
    view = run.view("shuffler" if shuffled else "server")
    attempt = run.view("server").attempts(one.round)[-1]
    events = view.events(one.round, attempt)
    names = [name for _, name in sorted((e["row"], e["name"]) for e in events if e.get("kind") == "row")]
    sent = view.round(one.round, attempt).arrays["updates"]
    truths = (run.truth(name).round(one.round, attempt if shuffled else "server") for name in names)
    clean = np.stack([found.arrays["update"] for found in truths])
    sites = np.array([federation.site_names.index(name) for name in names])
    jobs = [Job.from_json(event["job"]) for event in events if event.get("kind") == "mixing"]
    if shuffled and not jobs:
        raise TranscriptError(f"{view.folder}: does not say how round {one.round} was mixed; record the run anew")
    sources, sent = mixed(jobs[0], sent) if shuffled else (as_received(sent).astype(np.int16), sent)
    if not np.array_equal(np.take_along_axis(sent, sources.astype(np.int64), axis=0), one.rows):
        raise TranscriptError(f"{view.folder}: what it sent in round {one.round} is not what the server received")
    return RoundTruth(sites, sent, clean, sources, owners_of(sources))


def mixed(job: Job, sent: NDArray[np.float32]) -> tuple[NDArray[np.int16], NDArray[np.float32]]:
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


def labels(federation: Federation, data_dir: Path | None) -> Ints:
    """The attribute of every site: the household's behaviour, or the class that most of its records have."""
    if federation.task.dataset == "lcl" and federation.task.partition.kind == "by-site":
        return lcl.behaviour(data_dir)[: len(federation.sites)]
    work = Workload(federation, data_dir)
    parts = [work.site_data(name) for name in federation.site_names]
    if federation.task.dataset == "lcl":
        behaviour = lcl.behaviour(data_dir)
        return above_median([behaviour[part.site].mean() for part in parts])
    return np.array([np.bincount(part.y).argmax() for part in parts])
