"""The server's own state after every round: what a run is resumed from."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from fl_privacy.errors import TranscriptError

KEPT = 2


def save(folder: Path, round: int, arrays: dict[str, NDArray[Any]]) -> None:
    """Durable when it returns; older ones but one are removed."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"round-{round:06d}.safetensors"
    draft = path.with_suffix(".tmp")
    try:
        # A round without arrays (the server of a sharded federation has none) still leaves its mark.
        save_file({name: np.ascontiguousarray(a) for name, a in arrays.items()} or {"empty": np.zeros(1)}, draft)
        with draft.open("rb") as file:
            os.fsync(file.fileno())
        draft.replace(path)
    except OSError as error:
        raise TranscriptError(f"checkpoint {path}: {error.strerror or error}; make room") from None
    for old in sorted(folder.glob("round-*.safetensors"))[:-KEPT]:
        old.unlink(missing_ok=True)


def newest(folder: Path) -> tuple[int, dict[str, NDArray[Any]]]:
    """The last round there is a checkpoint of and its arrays; round 0 if there is none."""
    found = sorted(folder.glob("round-*.safetensors"))
    if not found:
        return 0, {}
    return int(found[-1].stem.removeprefix("round-")), load_file(found[-1])
