"""How updates travel as residues: what sites send, what middleware adds up, and what the sum decodes to."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fl_privacy.coding import Coding, Payload
from fl_privacy.errors import FederationError, require
from fl_privacy.kernels.arrays import U32
from fl_privacy.kernels.packed import bits_of
from fl_privacy.rns import residues
from fl_privacy.rns.integers import Integers
from fl_privacy.rns.moduli import Moduli
from fl_privacy.rns.residues import Residues
from fl_privacy.vector import Vector

PUBLISHED, CARRY_SAFE = "published", "carry-safe"
EXTRA = 1  # columns after the parameters: the share of the coordinates that were cut off


class Summed(NamedTuple):
    """What summed residues decode to."""

    total: Vector  # the sum of the updates
    clamped: float  # the share of the coordinates that were cut off at the range, over all sites; rounded up


@dataclass(frozen=True)
class Modular(Coding):
    """Updates as packed residues. They have a column per parameter, and one more for the share that was cut off.

    Everything that works on residues treats all columns alike: `columns(parameters)` of them.
    """

    moduli: Moduli = ()
    form: str = CARRY_SAFE  # what is released: sums of residues, or these modulo each modulus
    integers: Integers = Integers.decimal(4)  # noqa: RUF009
    bound: float | None = None  # coordinates are in (-bound, bound); None: as the model of the round says
    most: int = 1  # updates in a sum

    def columns(self, parameters: int) -> int:
        """Integers in an update of so many parameters."""
        return parameters + EXTRA if parameters else 0

    def length(self, parameters: int) -> int:
        return residues.words(self.moduli, self.columns(parameters))

    @property
    def bits(self) -> int:
        """Bits per parameter."""
        return bits_of(self.moduli)

    def bound_at(self, model: Vector) -> float:
        """The coordinate range of a round that starts from this model.

        Without a fixed one, it is 1, or the next power of two above the model's largest weight: all who take part in a
        round hold the same model, whichever rounds they missed.
        """
        if self.bound is not None:
            return self.bound
        largest = float(np.abs(model).max(initial=0))
        if not math.isfinite(largest):
            raise FederationError("model: not finite, so it gives no range; set encode.range to a number")
        return max(1.0, 2.0 ** math.frexp(largest)[1])

    def encode(self, update: Vector, bound: float, out: U32 | None = None) -> tuple[U32, int]:
        """An update as it travels, and how many of its coordinates were cut off."""
        packed, cut = residues.encode(update, self.integers, bound, self.moduli, extra=EXTRA, out=out)
        share = -(-cut * self.integers.largest // max(1, update.size))  # rounded up: never 0 if anything was cut off
        residues.put(packed, self.moduli, update.size + EXTRA, update.size, share)
        return packed, cut

    def check(self, payload: Payload) -> None:
        """Refuse a payload, or a row of several, with residues that are not below their modulus."""
        for row in payload.reshape(-1, payload.shape[-1]) if payload.size else ():
            residues.check(row, self.moduli)

    def unpack(self, payload: Payload, parameters: int) -> Residues:
        """The residues of an update, [moduli, columns]; refuses any that is not below its modulus."""
        return residues.unpack(payload, self.moduli, self.columns(parameters))

    def pack(self, values: Residues) -> U32:
        """Residues as they travel."""
        return residues.pack(values, self.moduli)

    def add(self, rows: Sequence[Payload] | Payload, parameters: int, reduced: bool) -> Residues:
        """Sums of the rows' residues, [moduli, columns]: modulo each modulus, or as integers."""
        return residues.add(rows, self.moduli, self.columns(parameters), reduced=reduced)

    def decode_sum(self, sums: Residues, count: int, bound: float) -> Summed:
        """The sum of `count` updates from the sums of their residues, reduced or not; only the result is rounded."""
        most, parameters = self._most(count), sums.shape[1] - EXTRA
        total = np.empty(parameters, np.float32)
        residues.scaled(sums, self.moduli, count, self.integers.unit(bound), most, total)
        return Summed(total, self._share(sums[:, parameters:], most))

    def decode_packed(
        self, packed: Payload, parameters: int, count: int, bound: float, out: Vector | None = None
    ) -> Summed:
        """The same from packed residues of the sum, as `pack` gives them."""
        most, columns = self._most(count), self.columns(parameters)
        total = np.empty(parameters, np.float32) if out is None else out
        residues.scaled_packed(packed, self.moduli, columns, self.integers.unit(bound), most, total)
        return Summed(total, self._share(residues.get(packed, self.moduli, columns, parameters), most))

    def _most(self, count: int) -> int:
        """The largest integer that so many updates can sum to."""
        require(1 <= count <= self.most, f"count: {count} updates in a sum that has room for {self.most}")
        return count * self.integers.largest

    def _share(self, extra: Residues, most: int) -> float:
        share = int(residues.decode(extra, self.moduli)[0])
        require(0 <= share <= most, "data: the share that was cut off is not one; a residue was altered")
        return share / most

    def decode(self, rows: Payload, parameters: int) -> NDArray[np.float32]:
        raise FederationError("coding: residues are decoded as a sum, with the range of their round; use decode_sum()")
