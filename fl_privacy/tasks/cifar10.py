"""CIFAR-10 from an archive of JPEG files, decoded once and cached."""

from __future__ import annotations

import hashlib
import io
import os
import tarfile
import tempfile
import zipfile
from pathlib import Path, PurePosixPath
from typing import IO

import numpy as np
from numpy.typing import NDArray

from fl_privacy.errors import DataError
from fl_privacy.tasks import files
from fl_privacy.tasks.catalog import CATALOG
from fl_privacy.tasks.data import Dataset, Split, scale

ARCHIVE = "cifar10_jpg.tar.xz"
# Over paths and images, not over the archive: everyone packs the public files anew.
CONTENT = "f10d4c9e536a564f17fa5e8d68ba087d1235e60cd1f21700e11ff43f0647bbb0"
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
HALVES = ("train", "test")
SIZES = {"train": 50_000, "test": 10_000}

Images = dict[str, bytes]
Arrays = dict[str, NDArray[np.uint8]]


def load(data_dir: Path | None = None) -> Split:
    """50,000 training and 10,000 held-out images, scaled to 0..1."""
    archive = files.read(data_dir, "cifar10", ARCHIVE)
    cached = cache_path(files.sha256(archive))
    arrays = read_cache(cached)
    if arrays is None:
        images = read_tar(io.BytesIO(archive))
        path = files.folder(data_dir, "cifar10") / "cifar10" / ARCHIVE
        files.check(path, content_sum(images), CONTENT, "over its images it should be")
        arrays = decode(images)
        write_cache(cached, arrays)
    train, test = (Dataset(scale(arrays[f"{h}_x"]), arrays[f"{h}_y"].astype(np.int64)) for h in HALVES)
    return Split(train, test, CATALOG["cifar10"].classes, CATALOG["cifar10"].shape)


def read_tar(stream: IO[bytes]) -> Images:
    """The encoded images of a tar (packed in any way) by path from `train` or `test` on, in a fixed order."""
    images: Images = {}
    try:
        with tarfile.open(fileobj=stream, mode="r|*") as tar:
            for member in tar:
                parts = PurePosixPath(member.name).parts[-3:]
                content = tar.extractfile(member) if member.isfile() and parts[0] in HALVES else None
                if content is not None:
                    images["/".join(parts)] = content.read()
    except (tarfile.TarError, OSError, EOFError) as error:
        raise DataError(f"data_dir: cifar10/{ARCHIVE} is not a whole archive ({error}); get the file again") from None
    return dict(sorted(images.items()))


def content_sum(images: Images) -> str:
    """SHA-256 over the sums of all images in `sha256sum`'s form, by path."""
    digest = hashlib.sha256()
    for path, content in images.items():
        digest.update(f"{files.sha256(content)}  {path}\n".encode())
    return digest.hexdigest()


def decode(images: Images) -> Arrays:
    """Pixels and labels of both halves: `train_x`, `train_y`, `test_x`, `test_y`."""
    arrays: Arrays = {}
    for half in HALVES:
        paths = [path for path in images if path.startswith(f"{half}/")]
        pixels = np.empty((len(paths), *CATALOG["cifar10"].shape), np.uint8)
        for row, path in enumerate(paths):
            pixels[row] = decode_image(path, images[path])
        arrays[f"{half}_x"] = pixels
        arrays[f"{half}_y"] = np.array([_label(path) for path in paths], np.uint8)
    return arrays


def decode_image(path: str, content: bytes) -> NDArray[np.uint8]:
    """One image, channels first."""
    from PIL import Image

    _, height, width = CATALOG["cifar10"].shape
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
        raise DataError(f"cifar10: {path} is of no known class; the classes are {', '.join(CLASSES)}")
    return CLASSES.index(name)


def cache_path(source: str) -> Path | None:
    """Where the decoded archive with this sum is kept for the user; none without a home."""
    try:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:
        return None
    return base / "fl-privacy" / f"cifar10-{source}.npz"


def read_cache(path: Path | None) -> Arrays | None:
    """The decoded arrays, or none where they are missing or damaged."""
    if path is None:
        return None
    try:
        with np.load(path, allow_pickle=False) as stored:
            arrays = {f"{half}_{part}": stored[f"{half}_{part}"] for half in HALVES for part in "xy"}
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None
    shape = CATALOG["cifar10"].shape
    whole = all(
        arrays[f"{half}_x"].shape == (size, *shape) and arrays[f"{half}_y"].shape == (size,)
        for half, size in SIZES.items()
    )
    return arrays if whole and all(array.dtype == np.uint8 for array in arrays.values()) else None


def write_cache(path: Path | None, arrays: Arrays) -> None:
    """Keep the arrays, whole or not at all; a full or read-only disk only costs the next start some seconds."""
    if path is None:
        return
    part: Path | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".part", delete=False) as out:
            part = Path(out.name)
            np.savez(out, allow_pickle=False, **arrays)
        part.replace(path)
    except OSError:
        if part is not None:
            part.unlink(missing_ok=True)
