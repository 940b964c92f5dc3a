"""`compress: {kind: soteriafl}`: shifted compression of noisy updates (Li et al. 2022, SoteriaFL)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from fl_privacy.coding import Payload
from fl_privacy.dp.noise import poisson_sample
from fl_privacy.steps.base import At, Running, Seat, Step
from fl_privacy.theory.utility import omega, shift_step
from fl_privacy.vector import Vector

if TYPE_CHECKING:
    from fl_privacy.config import Federation

SEED_BYTES = 32


def sparsified(update: Vector, kept: float, key: bytes) -> Vector:
    """Every entry with probability `kept`, times its inverse; the others are 0. Unbiased, omega = 1/p - 1."""
    found = np.zeros_like(update)
    chosen = poisson_sample(update.size, kept, key)
    found[chosen] = update[chosen] / np.float32(kept)
    return found


class SoteriaFL(Step):
    """Compresses the difference to a reference that follows the noisy updates, so that the error vanishes. Unbiased.

    The noise is that of `privatise`, which it demands. The receiver of SoteriaFL tracks the reference s and adds the
    compressed v; here the site sends s + v, which tells the same. Travels as float32 (audits only); packed v would take
    4 bytes per kept entry and a seed. The reference is each site's own, so a site may miss rounds.
    """

    kind: Literal["soteriafl"] = "soteriafl"
    keep: float = Field(0.05, gt=0, le=1, description="probability with which an entry is kept")

    @property
    def kept(self) -> float:
        return self.keep

    def problems(self, federation: Federation) -> Iterator[str]:
        yield from super().problems(federation)
        if federation.unit is None:
            yield "compress.kind: soteriafl compresses noisy updates, and privatise.kind is none; use ldp or dpsgd"

    def start(self, seat: Seat) -> Running:
        return _Shifted(self.keep, seat)

    def packed(self, parameters: int) -> int:
        """As expected over the draws."""
        return round(4 * self.keep * parameters) + SEED_BYTES


class _Shifted(Running):
    """s is the reference: v = C(update - s), s + v is sent, and s becomes s + gamma v."""

    def __init__(self, keep: float, seat: Seat) -> None:
        self._keep, self._seat = keep, seat
        self._gamma = np.float32(shift_step(omega(keep)))
        self._reference: NDArray[np.float32] | np.float32 = np.float32(0)

    def outward(self, update: Payload, at: At) -> Payload:
        v = sparsified(update - self._reference, self._keep, self._seat.key(at, "compress"))
        sent: Vector = self._reference + v
        self._reference = self._reference + self._gamma * v
        return sent

    def state(self) -> Mapping[str, NDArray[Any]]:
        return {"reference": np.asarray(self._reference)}

    def restore(self, state: Mapping[str, NDArray[Any]]) -> None:
        self._reference = state.get("reference", np.float32(0))
