"""`encode: {kind: fixed}`: integers modulo a power of two, to compare residue numbers with."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from fl_privacy.rns.moduli import Moduli, power_of_two
from fl_privacy.steps.encode.modular import Encoding


class Fixed(Encoding):
    """Plain fixed point modulo 2^w: one number per parameter."""

    kind: Literal["fixed"] = "fixed"
    bits: Literal["auto", 32] = Field("auto", description="of the modulus; auto: the fewest that hold the sum")

    def moduli_for(self, least: int) -> Moduli:
        return power_of_two(max(least, 1 if self.bits == "auto" else 2**self.bits))
