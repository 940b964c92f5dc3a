"""An aggregator's shards on its disk, by run and round."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fl_privacy.errors import ProtocolError, require
from fl_privacy.round.checkpoints import Arrays, CheckpointError, Checkpoints

MOMENT = "moment."
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


class ShardStore:
    """Shard and optimiser moments of every run, the last two rounds of each and the best one."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def save(self, run: str, round: int, shard: NDArray[np.float32], moments: Arrays, best: int = 0) -> None:
        named = {MOMENT + name: array for name, array in moments.items()}
        try:
            self._run(run).save(round, {"shard": shard, **named}, best)
        except CheckpointError as error:
            raise ProtocolError("RESOURCE_EXHAUSTED", str(error)) from None

    def load(self, run: str, round: int) -> tuple[NDArray[np.float32], Arrays]:
        try:
            arrays = self._run(run).load(round)
        except CheckpointError as error:
            raise ProtocolError("FAILED_PRECONDITION", str(error)) from None
        moments = {name.removeprefix(MOMENT): array for name, array in arrays.items() if name.startswith(MOMENT)}
        return arrays["shard"], moments

    def newest(self, run: str) -> int | None:
        """The last round with a stored shard."""
        return max(self._run(run).rounds(), default=None) if _NAME.fullmatch(run) else None

    def _run(self, run: str) -> Checkpoints:
        require(_NAME.fullmatch(run) is not None, "run: letters, digits, dots and dashes only")
        return Checkpoints(self._folder / run)
