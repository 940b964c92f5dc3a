"""`python -m shuffler_app.mixer FD`: mixes the rows of one round in place, and ends.

The compiled kernels bring a compiler of 130 MB. In a process that lives as long as the mixing, it is gone before the
next round's updates arrive. The job, with its keys, comes on the standard input.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, dataclass

import numpy as np

from fl_privacy import kernels
from fl_privacy.dp.noise import standard_normal
from fl_privacy.errors import ProtocolError
from fl_privacy.shuffle import LEVELS, Matrix, reorder
from fl_privacy.wire.rows import mapped


@dataclass(frozen=True)
class TopUp:
    """Noise that a row lacks: its standard deviation and its key."""

    deviation: float
    key: bytes


@dataclass(frozen=True)
class MixingSet:
    """Rows that are shuffled together; with levelled buckets, what each is brought to the same noise by."""

    members: tuple[int, ...]
    key: bytes
    top_ups: tuple[TopUp, ...] = ()


@dataclass(frozen=True)
class Job:
    """One round's mixing: the sets, each on its own, in the order in which the rows are left."""

    level: str
    rows: int
    length: int
    layers: tuple[int, ...]  # where each ends
    sets: tuple[MixingSet, ...]

    def to_json(self) -> str:
        return json.dumps(asdict(self), default=bytes.hex)

    @classmethod
    def from_json(cls, text: str) -> Job:
        """Back again; written by hand, for a validating library would take as much memory as the round has to spare."""
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


def mix(matrix: Matrix, job: Job) -> None:
    """Do the job here, in place."""
    reorder(matrix, [member for group in job.sets for member in group.members])
    layers = [slice(start, end) for start, end in zip((0, *job.layers[:-1]), job.layers, strict=True)]
    done = 0
    for group in job.sets:
        part = matrix[done : done + len(group.members)]
        for row, top in zip(part, group.top_ups, strict=bool(group.top_ups)):
            noise = standard_normal(row.size, top.key)
            noise *= np.float32(top.deviation)
            row += noise
        LEVELS[job.level](part, group.key, layers)
        done += len(group.members)


def mix_apart(matrix: Matrix, file: int, job: Job) -> None:
    """Do the job on the matrix that lies in `file`: in a process of its own where compiled kernels are used."""
    if kernels.choose(matrix.size) == "numpy":
        mix(matrix, job)
        return
    command = [sys.executable, "-m", "shuffler_app.mixer", str(file)]
    done = subprocess.run(command, input=job.to_json().encode(), pass_fds=(file,), stdout=subprocess.DEVNULL)
    if done.returncode:
        raise ProtocolError("UNAVAILABLE", f"mixing ended with exit code {done.returncode}; see the shuffler's log")


def main() -> int:
    job = Job.from_json(sys.stdin.read())
    mix(mapped(int(sys.argv[1]), job.rows, job.length), job)
    return 0


if __name__ == "__main__":
    sys.exit(main())
