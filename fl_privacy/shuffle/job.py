"""One round's mixing as a plan that can be sent to another process, recorded and repeated."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_privacy.dp.noise import standard_normal
from fl_privacy.shuffle import LEVELS, reorder


@dataclass(frozen=True)
class TopUp:
    """The noise to add to a row: its standard deviation and key."""

    deviation: float
    key: bytes


@dataclass(frozen=True)
class MixingSet:
    """Rows shuffled together; with levelled buckets, also the noise that brings each to the same level."""

    members: tuple[int, ...]
    key: bytes
    top_ups: tuple[TopUp, ...] = ()


@dataclass(frozen=True)
class Job:
    """One round's mixing: independent sets, in the order of the resulting rows."""

    level: str
    rows: int
    length: int
    layers: tuple[int, ...]  # the end of each
    sets: tuple[MixingSet, ...]

    def to_json(self) -> str:
        return json.dumps(asdict(self), default=bytes.hex)

    @classmethod
    def from_json(cls, text: str) -> Job:
        """The inverse of `to_json`, by hand: a validating library would take as much memory as the round can spare."""
        fields = json.loads(text)
        sets = [
            MixingSet(
                tuple(made["members"]),
                bytes.fromhex(made["key"]),
                tuple(TopUp(top["deviation"], bytes.fromhex(top["key"])) for top in made["top_ups"]),
            )
            for made in fields.pop("sets")
        ]
        return cls(**fields, sets=tuple(sets))


def mix(matrix: NDArray[Any], job: Job, backend: str | None = None) -> None:
    """Run the job in this process, in place; the kernel backend changes the speed, never the result."""
    if matrix.dtype != np.float32:
        matrix[:] = np.take_along_axis(matrix, origins(job, backend), axis=0)
        return
    reorder(matrix, [member for group in job.sets for member in group.members])
    layers = [slice(start, end) for start, end in zip((0, *job.layers[:-1]), job.layers, strict=True)]
    done = 0
    for group in job.sets:
        part = matrix[done : done + len(group.members)]
        for row, top in zip(part, group.top_ups, strict=bool(group.top_ups)):
            top_up(row, top, backend)
        LEVELS[job.level](part, group.key, layers, backend)
        done += len(group.members)


def origins(job: Job, backend: str | None = None) -> NDArray[np.int64]:
    """The origin row of every value of the mixture: the job applied to row numbers, without noise."""
    numbers = np.repeat(np.arange(job.rows, dtype=np.float32)[:, None], job.length, axis=1)
    mix(numbers, replace(job, sets=tuple(replace(group, top_ups=()) for group in job.sets)), backend)
    return numbers.astype(np.int64)


def top_up(row: NDArray[np.float32], top: TopUp, backend: str | None = None) -> None:
    """Top up the noise of a row, in place."""
    noise = standard_normal(row.size, top.key, backend=backend)
    noise *= np.float32(top.deviation)
    row += noise
