"""A party's own state after each round, on its disk: a run resumes from it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from fl_privacy.errors import FederationError
from fl_privacy.files import PART, settle

KEPT = 2  # the newest and the one before it: enough to go back a round if another party did not finish it
EMPTY = "empty"
_FILE = re.compile(r"^round-(\d{6})\.safetensors$")

Arrays = dict[str, NDArray[Any]]


class CheckpointError(FederationError):
    """A checkpoint is missing or damaged, or there is no room for one."""


class Checkpoints:
    """Named arrays by round; the last two are kept, and the best one where it is known."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def save(self, round: int, arrays: Mapping[str, NDArray[Any]], best: int | None = None) -> None:
        """Durable when it returns. Of older rounds, only `best` is kept, or the last one before it."""
        path = self.path(round)
        part = path.with_name(path.name + PART)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            # safetensors cannot store an empty set, and a server without a model still needs a checkpoint.
            save_file({name: np.ascontiguousarray(a) for name, a in arrays.items()} or {EMPTY: np.zeros(1)}, part)
            settle(part, path)
        except OSError as error:
            raise CheckpointError(f"checkpoint {path}: {error.strerror or error}; free some disk space") from None
        rounds = self.rounds()
        # A party that missed the best round holds what it had before it.
        needed = max((one for one in rounds if best is not None and one <= best), default=None)
        for old in rounds[:-KEPT]:
            if old != needed:
                self.path(old).unlink(missing_ok=True)

    def load(self, round: int) -> Arrays:
        try:
            arrays: Arrays = load_file(self.path(round))
        except FileNotFoundError:
            raise CheckpointError(f"checkpoint: none after round {round} in {self._folder}") from None
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"checkpoint {self.path(round)}: {error}; delete it to go back a round") from None
        return {name: array for name, array in arrays.items() if name != EMPTY}

    def rounds(self) -> list[int]:
        """The rounds there are checkpoints of, ascending."""
        found = [_FILE.match(path.name) for path in self._folder.iterdir()] if self._folder.is_dir() else []
        return sorted(int(match[1]) for match in found if match)

    def path(self, round: int) -> Path:
        return self._folder / f"round-{round:06d}.safetensors"
