"""An aggregator's shards on its disk, by run and round, and the step from one to the next."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fl_privacy.coding import Decoder, Payload
from fl_privacy.combine.rules import Combiner
from fl_privacy.errors import ProtocolError, require
from fl_privacy.round.checkpoints import Arrays, CheckpointError, Checkpoints

if TYPE_CHECKING:
    from fl_privacy.config import Federation

MOMENT, DECODER, START = "moment", "decoder", "start"
SHARD, MODEL = "shard", "model"
Kept = Mapping[str, Mapping[str, NDArray[Any]]]
RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


class ShardStore:
    """Shards of every run with what the next round needs besides, the last two rounds of each and the best one."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def save(self, run: str, round: int, shard: NDArray[np.float32], kept: Kept, best: int = 0) -> None:
        """`kept` is what each part of the aggregator keeps, by its name."""
        named = {f"{part}.{name}": array for part, arrays in kept.items() for name, array in arrays.items()}
        try:
            self._run(run).save(round, {SHARD: shard, **named}, best)
        except CheckpointError as error:
            raise ProtocolError("RESOURCE_EXHAUSTED", str(error)) from None

    def load(self, run: str, round: int) -> tuple[NDArray[np.float32], dict[str, Arrays]]:
        try:
            arrays = self._run(run).load(round)
        except CheckpointError as error:
            raise ProtocolError("FAILED_PRECONDITION", str(error)) from None
        kept: dict[str, Arrays] = defaultdict(dict)
        for part, _, name in (name.partition(".") for name in arrays if "." in name):
            kept[part][name] = arrays[f"{part}.{name}"]
        return arrays[SHARD], kept

    def add_start(self, run: str, round: int, start: NDArray[np.float32], of: bytes = b"") -> None:
        """With the shard after a round, keep the one that the next round starts from, which has other coordinates.

        `of` is the digest of the model that it was cut from, where the one who cuts is the one who aggregates.
        """
        shard, kept = self.load(run, round)
        fits = start.size == shard.size
        require(fits, f"length: {start.size}, but this shard has {shard.size}")
        parts: dict[str, NDArray[Any]] = {SHARD: start}
        if of:
            parts[MODEL] = np.frombuffer(of, np.uint8)
        self.save(run, round, shard, {**kept, START: parts}, min(self.rounds(run)))

    def newest(self, run: str) -> int | None:
        """The last round with a stored shard."""
        return max(self.rounds(run), default=None)

    def rounds(self, run: str) -> list[int]:
        """The rounds with a stored shard, ascending."""
        return self._run(run).rounds() if RUN_NAME.fullmatch(run) else []

    def _run(self, run: str) -> Checkpoints:
        require(RUN_NAME.fullmatch(run) is not None, "run: letters, digits, dots and dashes only")
        return Checkpoints(self._folder / run)


def stepped(
    federation: Federation,
    shard: NDArray[np.float32],
    before: Mapping[str, Arrays],
    decoder: Decoder,
    matrix: Payload,
    clients: Sequence[str],
    round: int,
    tiers: Sequence[str],
    records: Sequence[int],
) -> tuple[NDArray[np.float32], Kept]:
    """The shard after a round and what is kept with it, from the shard before it, what was kept, and received rows."""
    combiner = Combiner(federation)
    combiner.restore(before.get(MOMENT, {}))
    made = combiner.step(shard, decoder.decode(matrix, clients, round), tiers, records)
    return made, {MOMENT: combiner.state(), DECODER: decoder.state()}
