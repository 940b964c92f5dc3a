"""How updates and models are cut into shards and joined again (ERIS, section on FSA)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fl_privacy.coding import FLOAT32, Coding, Payload
from fl_privacy.round.terms import joined
from fl_privacy.routes.parts import Ints
from fl_privacy.shard import masks
from fl_privacy.vector import Vector


class Cut:
    """Splits and joins vectors along masks, the run's or a round's; the next call overwrites the results.

    Sites, server and evaluator use it alike. The model after round t is given out along the masks of round t + 1, so
    that an aggregator holds the coordinates that it will get updates of.
    """

    def __init__(
        self,
        parameters: int,
        aggregators: int,
        seed: int,
        coding: Coding = FLOAT32,
        shares: Sequence[float] = (),
        per_round: bool = False,
        receivers: Sequence[str] = (),
    ) -> None:
        self.aggregators, self._parameters, self._seed, self._coding = aggregators, parameters, seed, coding
        self._shares, self._per_round, self._receivers = shares, per_round, tuple(receivers)
        self._masks: tuple[int, masks.Owners] | None = None  # and the round that they are of
        self._round = 0
        # Kept and reused: new vectors would be faulted in page by page every round.
        self._parts: Payload | None = None
        self._whole: Vector | None = None

    def at(self, round: int) -> Cut:
        """The same, along the masks of a round from now on, if rounds have their own."""
        self._round = round if self._per_round else 0
        return self

    @property
    def owners(self) -> masks.Owners:
        """The aggregator of every coordinate."""
        if self._masks is None or self._masks[0] != self._round:
            seed = b"%d round %d" % (self._seed, self._round) if self._per_round else self._seed
            self._masks = self._round, masks.owners(self._parameters, self.aggregators, seed, self._shares)
        return self._masks[1]

    def coordinates(self, party: str) -> Ints | None:
        """An aggregator's; no other party receives a part of an update, so what it knows of any is of the whole."""
        if party not in self._receivers:
            return None
        return np.flatnonzero(self.owners == self._receivers.index(party))

    def sizes(self) -> list[int]:
        """Numbers in each shard of an update as it travels."""
        return [self._coding.length(size) for size in masks.sizes(self._parameters, self.aggregators, self._shares)]

    def split(self, payload: Payload) -> list[Payload]:
        """The shards of an update, or of a model."""
        if self._coding.by_part:
            return np.split(payload, np.cumsum(self.sizes())[:-1])
        if payload.dtype != np.float32 or self._coding.per_parameter != 1:
            whose = np.repeat(self.owners, self._coding.per_parameter)
            return [np.ascontiguousarray(payload[whose == k]) for k in range(self.aggregators)]
        self._parts = np.empty_like(payload) if self._parts is None else self._parts
        return list(masks.split(payload, self.owners, self.aggregators, shares=self._shares, out=self._parts))

    def join(self, models: list[Vector]) -> Vector:
        """The model from its shards."""
        self._whole = np.empty(self._parameters, np.float32) if self._whole is None else self._whole
        return masks.join(models, self.owners, shares=self._shares, out=self._whole)

    def digest(self, digests: list[bytes]) -> bytes:
        """What stands for a model in the terms of an attempt, from the digests of its shards."""
        return joined(digests)
