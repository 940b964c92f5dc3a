"""IMDB reviews as hashed bags of words: a text becomes a vector without anything fitted to other texts."""

from __future__ import annotations

import json
import lzma
import re
import zlib
from collections.abc import Iterable
from functools import cache as remembered
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from fl_privacy.errors import DataError
from fl_privacy.tasks import cache, files
from fl_privacy.tasks.data import Dataset, Split
from fl_privacy.tasks.dataset import Benchmark

ARCHIVE = "imdb_labelled.jsonl.xz"
# Of the unpacked lines: packing may differ.
CONTENT = "6defcff91b2172588eec863f6b67f8951eb6a065783d598c4e6ef79946f8f1b2"
FEATURES = 1024
SIZE = 25_000  # of each half
HALVES = ("train", "test")
LENGTH = 10.0  # of every vector
SHORTEST = 0.1  # that is scaled: one word has log 2
WORD = re.compile(r"[a-z']+")

Counts = NDArray[np.uint8]
Arrays = dict[str, NDArray[Any]]


class Imdb(Benchmark):
    """25,000 training and 25,000 held-out reviews, negative (0) or positive (1)."""

    record: ClassVar[tuple[int, ...]] = (FEATURES,)
    labels: ClassVar[int] = 2
    train: ClassVar[int] = SIZE

    def load(self, folder: Path | None) -> Split:
        archive = files.read(folder, "imdb", ARCHIVE)
        cached = cache.path(f"imdb{FEATURES}", files.sha256(archive))
        arrays = read_cache(cached)
        if arrays is None:
            arrays = counted(unpack(archive, files.folder(folder, "imdb") / "imdb" / ARCHIVE))
            cache.write(cached, arrays)
        train, test = (Dataset(scaled(arrays[f"{h}_x"]), arrays[f"{h}_y"].astype(np.int64)) for h in HALVES)
        return Split(train, test, self.classes, self.shape)


def unpack(archive: bytes, path: Path) -> bytes:
    """One review per line as JSON, checked."""
    try:
        content = lzma.decompress(archive)
    except (lzma.LZMAError, EOFError) as error:
        raise DataError(f"data_dir: {path} is not a complete .xz file ({error}); get the file again") from None
    files.check(path, files.sha256(content), CONTENT, "expected (unpacked)")
    return content


def counted(content: bytes) -> Arrays:
    """Words by bucket and labels of both halves: `train_x`, `train_y`, `test_x`, `test_y`."""
    reviews = [json.loads(line) for line in content.splitlines()]
    arrays: Arrays = {}
    for half in HALVES:
        mine = [review for review in reviews if review["split"] == half]
        arrays[f"{half}_x"] = np.stack([bag(words(review["text"])) for review in mine])
        arrays[f"{half}_y"] = np.array([review["label"] for review in mine], np.uint8)
    return arrays


def words(text: str) -> list[str]:
    """In lower case, without markup."""
    return WORD.findall(text.lower().replace("<br />", " "))


def bag(found: Iterable[str]) -> Counts:
    """How many of the words fall into each bucket, at most 255."""
    counts = np.bincount([_bucket(word) for word in found], minlength=FEATURES)
    return np.minimum(counts, 255).astype(np.uint8)


@remembered
def _bucket(word: str) -> int:
    return zlib.crc32(word.encode()) % FEATURES


def scaled(counts: Counts) -> NDArray[np.float32]:
    """log(1 + count), each review to the same length: long ones have more words, not more to say."""
    table = np.log1p(np.arange(256, dtype=np.float32))
    x = table[counts]
    norms = np.sqrt(np.einsum("ij,ij->i", x, x))
    x *= (np.float32(LENGTH) / np.maximum(norms, np.float32(SHORTEST)))[:, None]
    return x


def read_cache(path: Path | None) -> Arrays | None:
    """The counts, or None if they are missing, damaged or have the wrong sizes."""
    arrays = cache.read(path, [f"{half}_{part}" for half in HALVES for part in "xy"])
    if arrays is None:
        return None
    whole = all(
        arrays[f"{half}_x"].shape == (SIZE, FEATURES) and arrays[f"{half}_y"].shape == (SIZE,) for half in HALVES
    )
    return arrays if whole and all(array.dtype == np.uint8 for array in arrays.values()) else None
