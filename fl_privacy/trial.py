"""`fl-privacy task check`: one local round of a task outside any federation, and what looks wrong in it."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fl_privacy import vector
from fl_privacy.config import Federation
from fl_privacy.errors import DataError, FederationError
from fl_privacy.tasks.code import TaskError
from fl_privacy.tasks.data import Dataset
from fl_privacy.tasks.making import classes_of
from fl_privacy.tasks.task import own
from fl_privacy.tasks.workload import Workload

SMALL, RARE = 20, 0.01
RECIPE = ("lr", "momentum", "weight_decay")  # of task.train, for our SGD
MIXING = ("BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "SyncBatchNorm", "LazyBatchNorm1d", "LazyBatchNorm2d")


@dataclass
class Report:
    """What one round of a task at one site took and gave."""

    task: str
    site: str
    records: int
    held_out: int
    shape: tuple[int, ...]
    classes: int
    parameters: int
    seconds_per_epoch: float
    megabytes: float
    before: dict[str, Any]
    after: dict[str, Any]
    own: dict[str, float | None]  # the task's own measures after the round
    dpsgd: str  # empty if DP-SGD can take the model, else why not
    warnings: list[str] = field(default_factory=list)


def check(federation: Federation, site: str, folder: Path | None) -> Report:
    """Read the site's data, train one epoch, evaluate before and after."""
    work = Workload(federation, folder)
    train, held_out = _records(work, site, folder)
    classes = classes_of(federation)
    work.check_model(train)
    before = _scores(work, work.initial, held_out)
    for records in (train, held_out):
        work.check_losses(work.measured(work.initial, records, "cpu"))
    began = time.monotonic()
    update = work.update(work.initial, train, site, 1)
    seconds = (time.monotonic() - began) / federation.task.train.epochs
    return Report(
        task=federation.task.label,
        site=site,
        records=len(train),
        held_out=len(held_out),
        shape=tuple(train.x.shape[1:]),
        classes=classes,
        parameters=work.layout.size,
        seconds_per_epoch=round(seconds, 4),
        megabytes=round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
        before=before,
        after=_scores(work, work.initial + update, held_out),
        own=work.further(work.measured(work.initial + update, held_out, "cpu")) if len(held_out) else {},
        dpsgd=_private(work, train),
        warnings=list(_warnings(work, train, held_out, classes)),
    )


def _records(work: Workload, site: str, folder: Path | None) -> tuple[Dataset, Dataset]:
    """The site's training and held-out records."""
    task, given = work.federation.task, folder or work.federation.site(site).data
    if task.is_own and work.task.needs_data and given is None:
        raise DataError(f"data_dir: none is given, and {task.label} reads files; pass --data-dir DIR")
    try:
        return work.site_data(site), work.held_out(site)
    except TaskError as error:
        raise TaskError(f"{error} (--data-dir {given}; --site NAME reads those of another site)") from None


def _scores(work: Workload, model: Any, held_out: Dataset) -> dict[str, Any]:
    if not len(held_out):
        return {}
    vector.load(work.model, model, work.layout)
    found = vars(work.scored(held_out))
    return {name: round(value, 4) for name, value in found.items() if value is not None}


def _private(work: Workload, train: Dataset) -> str:
    from fl_privacy.dp import per_record

    if work.task.preprocessing != "public":
        return "preprocessing is local; dpsgd needs preprocessing = 'public'"
    try:
        work.once(per_record.check, train)
    except FederationError as error:
        return str(error)
    return ""


def _warnings(work: Workload, train: Dataset, held_out: Dataset, classes: int) -> Iterator[str]:
    for name, layer in work.model.named_modules():
        if type(layer).__name__ in MIXING:
            yield f"layer {name!r} is {type(layer).__name__}: its statistics differ by site and leak; use GroupNorm"
    ignored = [name for name in RECIPE if name in work.federation.task.train.model_fields_set]
    if ignored and own(work.task, "optimizer"):
        yield f"task.train.{', '.join(ignored)} have no effect: the task brings its own optimizer"
    if len(train) < SMALL:
        yield f"only {len(train)} training records"
    if not len(held_out):
        yield "no held-out records: this site cannot evaluate models"
    if train.forecast:
        return
    counts = np.bincount(train.y, minlength=classes)
    seen = [label for label in range(len(counts)) if counts[label]]
    if len(seen) == 1:
        yield f"all training records have label {seen[0]}"
    for label in seen:
        if counts[label] < RARE * len(train):
            yield f"label {label} is rare: {counts[label]} of {len(train)} training records"
    spread = train.x.reshape(len(train), -1).std(axis=0) if len(train) else np.ones(1)
    if train.x.dtype == np.float32 and (spread > 100).any():
        yield f"a feature has standard deviation {spread.max():.3g}: scale the features"
