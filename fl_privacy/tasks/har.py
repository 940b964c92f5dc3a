"""Smartphone activity (HAPT 2.1): windows of the raw signals of 30 people, in six activities."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from fl_privacy.errors import DataError
from fl_privacy.tasks import files
from fl_privacy.tasks.data import Dataset, Parts, Split, pool
from fl_privacy.tasks.dataset import Benchmark

ARCHIVE = "hapt_raw_int16.npz"
# Over the arrays, not over the archive: packing may differ.
CONTENT = "27bc2416650de50fa9c0316deb7e1175d282157cfbdfad2f44a775cd71ab33f5"
PEOPLE, ACTIVITIES = 30, 6  # the six transitions between postures, activities 7 to 12, are left out
WINDOW, STRIDE = 128, 64  # readings: 2.56 s, half of which are in the next window too
HELD_OUT = 0.2  # the end of every stretch of an activity
ACCELERATION, ROTATION = 1 / 720, np.pi / 180 * 0.0175  # of the stored integers, to g and to rad/s

Arrays = dict[str, NDArray[Any]]


class Har(Benchmark):
    """8,076 training and 1,041 held-out windows of three accelerations (g) and three rates of rotation (rad/s)."""

    own_sites: ClassVar[bool] = True
    record: ClassVar[tuple[int, ...]] = (WINDOW, 6)
    labels: ClassVar[int] = ACTIVITIES
    sites: ClassVar[tuple[str, ...]] = tuple(f"person-{number:02}" for number in range(1, PEOPLE + 1))
    train: ClassVar[int] = 8076

    def load(self, folder: Path | None) -> Split:
        arrays = read(folder)
        people = [of_person(arrays, number) for number in range(PEOPLE)]
        train, test = pool([one.train for one in people]), pool([one.held_out for one in people])
        return Split(train, test, self.classes, self.shape, self.sites)

    def of_site(self, site: str, folder: Path | None) -> Parts:
        return of_person(read(folder), self.sites.index(site))


def read(folder: Path | None) -> Arrays:
    """The arrays of the archive, checked."""
    content = files.read(folder, "har", ARCHIVE)
    path = files.folder(folder, "har") / "har" / ARCHIVE
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            members = {name.removesuffix(".npy"): archive.read(name) for name in sorted(archive.namelist())}
        arrays = {name: npy.read_array(io.BytesIO(member), allow_pickle=False) for name, member in members.items()}
    except (zipfile.BadZipFile, ValueError, EOFError, NotImplementedError) as error:
        raise DataError(f"data_dir: {path} is not a complete .npz file ({error}); get the file again") from None
    plain = {name: np.ascontiguousarray(array).tobytes() for name, array in arrays.items()}
    files.check(path, files.content_sum(plain), CONTENT, "expected (all arrays)")
    return arrays


def of_person(arrays: Arrays, number: int) -> Parts:
    """The windows of one person (from 0). No held-out window shares a reading with a training window."""
    train, held_out = list[Dataset](), list[Dataset]()
    for signals, activity in stretches(arrays, number + 1):
        cut = len(signals) - round(HELD_OUT * len(signals))
        for part, readings in ((train, signals[:cut]), (held_out, signals[cut:])):
            x = windows(readings)
            part.append(Dataset(x, np.full(len(x), activity), np.full(len(x), number)))
    return Parts(pool(train), pool(held_out))


def stretches(arrays: Arrays, person: int) -> Iterator[tuple[NDArray[np.float32], int]]:
    """The readings of every stretch of one of the six activities (from 0) in the recordings of a person (from 1)."""
    for recording, who, activity, start, end in arrays["labels"].tolist():
        if who == person and activity <= ACTIVITIES:
            acc, gyro = (arrays[f"{name}_{recording:02}_{person:02}"][start - 1 : end] for name in ("acc", "gyro"))
            yield np.concatenate([acc * ACCELERATION, gyro * ROTATION], axis=1).astype(np.float32), activity - 1


def windows(readings: NDArray[np.float32]) -> NDArray[np.float32]:
    """As many windows as fit, each half a window after the one before: (windows, readings, signals)."""
    starts = np.arange(0, len(readings) - WINDOW + 1, STRIDE)
    made: NDArray[np.float32] = readings[starts[:, None] + np.arange(WINDOW)]
    return made
