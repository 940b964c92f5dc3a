"""Where a site's own files are, and which of its records it holds out."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, BinaryIO

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, Field

from fl_privacy.choices import Model
from fl_privacy.errors import DataError
from fl_privacy.tasks.data import Dataset, Labels, Parts
from fl_privacy.tasks.files import ENVIRONMENT

SITE = "{site}"
LARGEST = 2**31  # bytes of a site's records in memory


def inside(path: str) -> str:
    """Refuse a path out of the site's folder: whoever writes the config must not choose what a site reads."""
    pure = PurePosixPath(path)
    if pure.is_absolute() or ".." in pure.parts or "\\" in path or "\0" in path or not pure.name:
        raise ValueError("not a path below the site's folder; use a relative one without ..")
    return path


Inside = Annotated[str, AfterValidator(inside)]
File = Annotated[
    Inside | None,
    Field(description="in the site's folder, such as {site}.csv; default: named after the site, or the only one"),
]


def own_folder(site: str, folder: Path | None) -> Path:
    """The site's folder; in a folder that several sites share, the one named after the site."""
    given = folder or os.environ.get(ENVIRONMENT)
    if not given:
        raise DataError(f"data: site {site!r} has no data folder; set its `data`, --data-dir or {ENVIRONMENT}")
    root = Path(given)
    if not root.is_dir():
        raise DataError(f"data: {root} of site {site!r} is not a folder; make it or set another")
    return root / site if (root / site).is_dir() else root


def own_file(site: str, folder: Path | None, file: str | None, endings: tuple[str, ...]) -> Path:
    """The site's one file: the one that the config names, else the one named after the site, else the only one."""
    root = own_folder(site, folder)
    names = [file.replace(SITE, site)] if file else [site + ending for ending in endings]
    found = [root / name for name in names if (root / name).is_file()]
    if not found and not file:
        found = [path for path in root.iterdir() if path.suffix in endings and path.is_file()]
    if len(found) != 1:
        raise DataError(
            f"data: {root} has no {' or '.join(names)}"
            + (f", and {len(found)} other {' and '.join(endings)} files" if not file else "")
            + "; put the site's file there or name it in task.options.file"
        )
    return found[0]


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """A file of the site to read."""
    try:
        with path.open("rb") as stream:
            yield stream
    except OSError as error:
        raise DataError(f"data: {path} cannot be read ({error.strerror or error}); check it") from None


class HeldOut(Model):
    """Which records are held out: a share of them, or those that a column marks.

    By the share, a record's own content and the seed decide. So one record more or less moves no other record, as
    per-record privacy needs; the order of records does not matter; and copies of a record are all on the same side.
    """

    ratio: float = Field(0.2, gt=0, lt=1, description="about this share of the records")
    seed: int = Field(0, ge=0, lt=2**63)
    column: str | None = Field(None, min_length=1, description="instead of a share: the column that says it")
    value: str = Field("test", description="what `column` has for a record that is held out")

    def choose(self, records: Iterable[bytes], marked: NDArray[np.bool_] | None, where: object) -> NDArray[np.bool_]:
        """Whether each record is held out: as `marked` by the column, else by the content."""
        chosen = self.drawn(records) if marked is None else marked
        if chosen.all() or not chosen.any():
            raise DataError(
                f"data: {where} has {len(chosen)} complete records, {chosen.sum()} of them held out; "
                "add records or change task.options.held_out, so that some are and some are not"
            )
        return chosen

    def drawn(self, records: Iterable[bytes]) -> NDArray[np.bool_]:
        """Whether each record is held out, by its content."""
        key, below = self.seed.to_bytes(8, "big"), int(self.ratio * 2**64)
        drawn = (int.from_bytes(blake2b(record, digest_size=8, key=key).digest(), "big") for record in records)
        return np.fromiter((number < below for number in drawn), np.bool_)


def contents(*columns: NDArray[Any]) -> Iterable[bytes]:
    """The bytes of each record, which may be in several arrays."""
    whole = [np.ascontiguousarray(column) for column in columns]
    return (b"".join(row.tobytes() for row in rows) for rows in zip(*whole, strict=True))


def parts(x: NDArray[np.float32], y: Labels, held_out: NDArray[np.bool_], where: object) -> Parts:
    """Training and held-out records."""
    if not (np.isfinite(x).all() and np.isfinite(y).all()):
        raise DataError(f"data: {where} has numbers too large for a model; scale them by other statistics")
    return Parts(Dataset(x[~held_out], y[~held_out]), Dataset(x[held_out], y[held_out]))
