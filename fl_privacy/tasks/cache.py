"""A per-user cache of decoded arrays: written atomically and safe to delete."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_privacy.files import replacing


def path(dataset: str, source: str) -> Path | None:
    """The cache file for the source with this checksum; None without a home folder."""
    try:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:
        return None
    return base / "fl-privacy" / f"{dataset}-{source}.npz"


def read(path: Path | None, names: Iterable[str]) -> dict[str, NDArray[Any]] | None:
    """The named arrays, or None if one is missing or damaged."""
    if path is None:
        return None
    try:
        with np.load(path, allow_pickle=False) as stored:
            return {name: stored[name] for name in names}
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, NotImplementedError):
        return None


def write(path: Path | None, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Cache the arrays; with a full or read-only disk, the next start takes a few seconds longer."""
    if path is None:
        return
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path, mode=0o600, durable=False, unique=True) as out:
            np.savez(out, allow_pickle=False, **arrays)
