"""An aggregator's shards on its disk, by round: what a run is resumed from."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from fl_privacy.errors import ProtocolError

KEPT = 2  # the newest and the one before it: enough to go back where another aggregator did not come along
_FILE = re.compile(r"^shard-(\d{6})\.safetensors$")


class ShardStore:
    """Shard and optimiser moments of every run, the last two rounds of each."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def save(self, run: str, round: int, shard: NDArray[np.float32], moments: dict[str, NDArray[Any]]) -> None:
        folder = self._run(run)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"shard-{round:06d}.safetensors"
        draft = path.with_suffix(".tmp")
        try:
            save_file({"shard": shard, **{f"moment.{name}": array for name, array in moments.items()}}, draft)
            with draft.open("rb") as file:
                os.fsync(file.fileno())
            draft.replace(path)
        except OSError as error:
            raise ProtocolError("RESOURCE_EXHAUSTED", f"state {folder}: {error.strerror}; make room") from None
        for old in self._rounds(run)[:-KEPT]:
            (folder / f"shard-{old:06d}.safetensors").unlink(missing_ok=True)

    def load(self, run: str, round: int) -> tuple[NDArray[np.float32], dict[str, NDArray[Any]]]:
        path = self._run(run) / f"shard-{round:06d}.safetensors"
        if not path.exists():
            raise ProtocolError("FAILED_PRECONDITION", f"round: this aggregator has no shard after round {round}")
        arrays = load_file(path)
        prefix = "moment."
        moments = {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}
        return arrays["shard"], moments

    def newest(self, run: str) -> int | None:
        """The last round there is a shard of."""
        return max(self._rounds(run), default=None)

    def _rounds(self, run: str) -> list[int]:
        folder = self._run(run)
        found = [_FILE.match(p.name) for p in folder.iterdir()] if folder.is_dir() else []
        return sorted(int(match[1]) for match in found if match)

    def _run(self, run: str) -> Path:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", run):
            raise ProtocolError("INVALID_ARGUMENT", "run: letters, digits, dots and dashes only")
        return self._folder / run
