"""CIFAR-10 from an archive of JPEG files, decoded once and cached."""

from __future__ import annotations

import io
from pathlib import Path, PurePosixPath
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from fl_privacy.errors import DataError
from fl_privacy.tasks import cache, files
from fl_privacy.tasks.data import Dataset, Split, scale
from fl_privacy.tasks.dataset import Benchmark

ARCHIVE = "cifar10_jpg.tar.xz"
# Over paths and images, not over the archive, which differs every time the public files are packed.
CONTENT = "f10d4c9e536a564f17fa5e8d68ba087d1235e60cd1f21700e11ff43f0647bbb0"
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
HALVES = ("train", "test")
SIZES = {"train": 50_000, "test": 10_000}

Images = dict[str, bytes]
Arrays = dict[str, NDArray[np.uint8]]


class Cifar10(Benchmark):
    """50,000 training and 10,000 held-out images, scaled to 0..1."""

    record: ClassVar[tuple[int, ...]] = (3, 32, 32)
    labels: ClassVar[int] = 10
    train: ClassVar[int] = 50_000

    def load(self, folder: Path | None) -> Split:
        archive = files.read(folder, "cifar10", ARCHIVE)
        cached = cache.path("cifar10", files.sha256(archive))
        arrays = read_cache(cached)
        if arrays is None:
            images = read_tar(archive)
            path = files.folder(folder, "cifar10") / "cifar10" / ARCHIVE
            files.check(path, files.content_sum(images), CONTENT, "expected (all images)")
            arrays = decode(images)
            cache.write(cached, arrays)
        train, test = (Dataset(scale(arrays[f"{h}_x"]), arrays[f"{h}_y"].astype(np.int64)) for h in HALVES)
        return Split(train, test, self.classes, self.shape)


def read_tar(archive: bytes) -> Images:
    """The encoded images by path (starting at `train` or `test`), in a fixed order."""

    def key(path: PurePosixPath) -> str | None:
        parts = path.parts[-3:]
        return "/".join(parts) if parts and parts[0] in HALVES else None

    return files.unpack(archive, f"cifar10/{ARCHIVE}", key)


def decode(images: Images) -> Arrays:
    """Pixels and labels of both halves: `train_x`, `train_y`, `test_x`, `test_y`."""
    arrays: Arrays = {}
    for half in HALVES:
        paths = [path for path in images if path.startswith(f"{half}/")]
        pixels = np.empty((len(paths), *Cifar10.record), np.uint8)
        for row, path in enumerate(paths):
            pixels[row] = decode_image(path, images[path])
        arrays[f"{half}_x"] = pixels
        arrays[f"{half}_y"] = np.array([_label(path) for path in paths], np.uint8)
    return arrays


def decode_image(path: str, content: bytes) -> NDArray[np.uint8]:
    """One image, channels first."""
    from PIL import Image

    _, height, width = Cifar10.record
    try:
        with Image.open(io.BytesIO(content), formats=("JPEG", "PNG")) as image:
            pixels = np.asarray(image.convert("RGB"), np.uint8) if image.size == (width, height) else None
    except (OSError, SyntaxError) as error:
        raise DataError(f"cifar10: {path} cannot be decoded ({error}); get the archive again") from None
    if pixels is None:
        raise DataError(f"cifar10: {path} is not {width}x{height}; get the archive again")
    return pixels.transpose(2, 0, 1)


def _label(path: str) -> int:
    name = path.split("/")[1]
    if name not in CLASSES:
        raise DataError(f"cifar10: {path} has an unknown class; the classes are {', '.join(CLASSES)}")
    return CLASSES.index(name)


def read_cache(path: Path | None) -> Arrays | None:
    """The decoded arrays, or None if they are missing, damaged or have the wrong sizes."""
    arrays = cache.read(path, [f"{half}_{part}" for half in HALVES for part in "xy"])
    if arrays is None:
        return None
    shape = Cifar10.record
    whole = all(
        arrays[f"{half}_x"].shape == (size, *shape) and arrays[f"{half}_y"].shape == (size,)
        for half, size in SIZES.items()
    )
    return arrays if whole and all(array.dtype == np.uint8 for array in arrays.values()) else None
