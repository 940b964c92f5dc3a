"""Updates as integers: coordinates are divided by a range, cut off at it, and scaled."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fl_privacy.errors import FederationError

MOST_DIGITS = 18  # 10^18 < 2^63


@dataclass(frozen=True)
class Integers:
    """x becomes x / R * factor as an integer from -largest to largest, for x in (-R, R)."""

    factor: int
    largest: int
    nearest: bool  # rounded to the nearest integer, or truncated

    @classmethod
    def decimal(cls, r: int) -> Integers:
        """trunc(x 10^r) in float64, as in Algorithm 1."""
        if not 1 <= r <= MOST_DIGITS:
            raise FederationError(f"r: {r} digits are not supported; use 1 to {MOST_DIGITS}")
        largest = int(math.nextafter(10.0**r, 0))  # 10^r - 1; above 15 digits, the next one that float64 has
        return cls(10**r, largest, nearest=False)

    @classmethod
    def int8(cls) -> Integers:
        """The nearest of the integers from -127 to 127 (Kim et al. 2021)."""
        return cls(127, 127, nearest=True)

    def scale(self, bound: float) -> float:
        """What a coordinate is multiplied by."""
        return self.factor / bound

    def unit(self, bound: float) -> float:
        """What an integer stands for."""
        return bound / self.factor
