"""Files of a run folder: written durably, and read as bytes that anyone may have changed."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import Any

import numpy as np

from fl_privacy.errors import TranscriptError

DOCUMENT_LIMIT = 64 << 20
LOG_LIMIT = 256 << 20
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


def check_name(field: str, value: Any) -> str:
    """A run, an observer or a site: a name that is also a safe folder name."""
    if not isinstance(value, str) or not NAME.fullmatch(value):
        raise TranscriptError(f"{field}: {value!r:.80} is no name; use letters, digits, '.', '_' and '-'")
    return value


def canonical(value: Any) -> bytes:
    """The one JSON encoding that is hashed and signed: sorted keys, no spaces, ASCII."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")


def plain(value: Any, where: str) -> Any:
    """`value` as JSON can hold it: numpy becomes Python, a number that is not finite becomes null."""
    if isinstance(value, np.generic | np.ndarray):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(key): plain(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item, where) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, str | int):
        return value
    raise TranscriptError(f"{where}: a {type(value).__name__} cannot be written as JSON; pass numbers, text or lists")


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def file_sha256(path: Path) -> str:
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def open_regular(path: Path) -> BufferedReader:
    """Open a file, but never through a link and never a device or a pipe."""
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    try:
        file = os.fdopen(os.open(path, flags), "rb")
    except IsADirectoryError:
        raise TranscriptError(f"{path}: is a folder, not a file") from None
    except OSError as error:
        reason = "is a link, which may leave the folder" if error.errno == errno.ELOOP else error.strerror
        raise TranscriptError(f"{path}: {reason}") from None
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise TranscriptError(f"{path}: is not a regular file")
    return file


def read_bounded(path: Path, limit: int = DOCUMENT_LIMIT) -> bytes:
    with open_regular(path) as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise TranscriptError(f"{path}: larger than the {limit >> 10} KiB this format allows")
    return data


def parse_object(data: bytes, where: str) -> dict[str, Any]:
    """A JSON object from bytes nobody vouches for."""
    try:
        value = json.loads(data, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise TranscriptError(f"{where}: not JSON ({first_line(error)})") from None
    if not isinstance(value, dict):
        raise TranscriptError(f"{where}: a JSON object is needed, found {type(value).__name__}")
    return value


def parse_signed(data: bytes, where: str, forms: Mapping[int, Mapping[str, type]]) -> dict[str, Any]:
    """A signed document in canonical bytes, with exactly the fields of its format; the signature is not checked."""
    document = parse_object(data, where)
    check_format(document, where, *forms)
    check_fields(document, where, forms)
    if data != canonical(document) + b"\n":
        raise TranscriptError(f"{where}: not in canonical form, so it was changed after it was signed")
    return document


def check_fields(document: Any, where: str, forms: Mapping[int, Mapping[str, type]]) -> None:
    """Exactly the fields of its format, and those of every signed document."""
    format = document.get("format") if isinstance(document, dict) else None
    form = forms.get(format) if type(format) is int else None
    common = {"format": int, "signed_at": str, "certificate": str, "signature": str}
    if form is None or {key: type(value) for key, value in document.items()} != {**common, **form}:
        raise TranscriptError(f"{where}: its fields are not those of its format")


def check_format(document: Mapping[str, Any], where: str | Path, *formats: int) -> None:
    if document.get("format") not in formats:
        reads = ", ".join(map(str, formats))
        raise TranscriptError(f"{where}: format {document.get('format')!r:.40} is unknown; this version reads {reads}")


def first_line(error: BaseException) -> str:
    """What a library says about a bad file, short enough to stand inside our own line."""
    return f"{(str(error).splitlines() or [type(error).__name__])[0]:.120}"


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is not a JSON number")


def read_log(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The lines of an append-only log and where the next one goes; an unfinished last one is what a crash left."""
    lines = read_bounded(path, LOG_LIMIT).split(b"\n")[:-1] if path.exists() else []
    rows = [parse_object(line, f"{path}: line {number}") for number, line in enumerate(lines, start=1)]
    return rows, sum(len(line) + 1 for line in lines)


@contextmanager
def writing(what: str) -> Iterator[None]:
    """A disk that is full, read-only or broken is for the operator to fix: one line says which and how."""
    try:
        yield
    except OSError as error:
        fix = "free some space, then record again" if error.errno == errno.ENOSPC else "check the disk and its rights"
        raise TranscriptError(f"{what}: cannot write, {error.strerror or error}; {fix}") from error
