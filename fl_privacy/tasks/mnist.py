"""MNIST from its four idx files."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path
from typing import ClassVar

import numpy as np

from fl_privacy.errors import DataError
from fl_privacy.tasks import files
from fl_privacy.tasks.data import Dataset, Split, scale
from fl_privacy.tasks.dataset import Benchmark

# Checksums of the unpacked files: mirrors repack them, so the checksums of the .gz files differ.
SUMS = {
    "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
}
IMAGES_HEADER, LABELS_HEADER = 16, 8


class Mnist(Benchmark):
    """60,000 training and 10,000 held-out images, scaled to 0..1."""

    record: ClassVar[tuple[int, ...]] = (1, 28, 28)
    labels: ClassVar[int] = 10
    train: ClassVar[int] = 60_000

    def load(self, folder: Path | None) -> Split:
        return Split(_half(folder, "train"), _half(folder, "t10k"), self.classes, self.shape)


def _half(data_dir: Path | None, half: str) -> Dataset:
    pixels = np.frombuffer(unpack(data_dir, f"{half}-images-idx3-ubyte"), np.uint8, offset=IMAGES_HEADER)
    labels = np.frombuffer(unpack(data_dir, f"{half}-labels-idx1-ubyte"), np.uint8, offset=LABELS_HEADER)
    return Dataset(scale(pixels.reshape(-1, *Mnist.record)), labels.astype(np.int64))


def unpack(data_dir: Path | None, name: str) -> bytes:
    """The idx file inside NAME.gz, checked."""
    packed = files.read(data_dir, "mnist", f"{name}.gz")
    path = files.folder(data_dir, "mnist") / "mnist" / f"{name}.gz"
    try:
        content = gzip.decompress(packed)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"data_dir: {path} is not a complete gzip file ({error}); get the file again") from None
    files.check(path, files.sha256(content), SUMS[name], "expected (unpacked)")
    return content
