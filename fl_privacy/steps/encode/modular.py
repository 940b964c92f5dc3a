"""What `rns` and `fixed` have in common: updates become integers in a range, and integers become residues."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from fl_privacy.coding import FLOAT32, Coding, Payload
from fl_privacy.errors import FederationError
from fl_privacy.kernels.packed import bits_of
from fl_privacy.rns import residues
from fl_privacy.rns.coding import CARRY_SAFE, PUBLISHED, Modular
from fl_privacy.rns.integers import Integers
from fl_privacy.rns.meter import Beyond, beyond
from fl_privacy.rns.moduli import Moduli, least_for, power_of_two
from fl_privacy.steps.base import At, Foretold, Running, Seat, Step
from fl_privacy.vector import Vector

if TYPE_CHECKING:
    from fl_privacy.config import Federation

DIGITS = 4


class Encoding(Step):
    """Updates as integers whose residues can be added up."""

    r: int = Field(DIGITS, ge=1, le=16, description="decimal digits of a coordinate relative to the range")
    range: Literal["auto"] | Annotated[float, Field(gt=0)] = Field(
        "auto", description="larger coordinates are cut off; auto: by the noise, or by the model of the round"
    )
    integers: Literal["decimal", "int8"] = Field("decimal", description="r digits, or integers from -127 to 127")

    @property
    def whole(self) -> Integers:
        return Integers.int8() if self.integers == "int8" else Integers.decimal(self.r)

    @property
    def released(self) -> str:
        """The form in which sums are released."""
        return CARRY_SAFE

    @abstractmethod
    def moduli_for(self, least: int) -> Moduli:
        """Moduli with at least this product."""

    def coded(self, before: Coding, federation: Federation) -> Modular:
        sites = federation.cohort
        return Modular(
            self.kind,
            "<u4",
            0,
            moduli=self.chosen(federation),
            form=self.released,
            integers=self.whole,
            bound=federation.privatise.bound(federation) if self.range == "auto" else self.range,
            most=sites,
        )

    def problems(self, federation: Federation) -> Iterator[str]:
        yield from super().problems(federation)
        route, rule = federation.route, federation.combine
        if route.shows != "sum":
            why = f"hides updates in a sum, and route {route.kind} gives single ones"
            yield f"encode.kind: {self.kind} {why}; use a route that adds up, or none"
        if rule.weights != "equal":
            why = f"is not supported with encode {self.kind}, whose sums have no weights"
            yield f"combine.weights: {rule.weights!r} {why}; use equal"
        if (before := federation.compressed) != FLOAT32:
            yield f"encode.kind: {self.kind} encodes float32 updates, not {before.name}; use compress: {{kind: none}}"
        if self.integers == "int8" and self.r != DIGITS:
            yield f"encode.r: {self.r} digits, but encode.integers is int8, which has none; remove one of them"
        yield from self._fits(federation)

    def _fits(self, federation: Federation) -> Iterator[str]:
        try:
            moduli = self.chosen(federation)
            residues.check_moduli(moduli)
            residues.width(moduli, federation.cohort)
        except FederationError as error:
            yield f"encode.r: {self.r} digits of {federation.cohort} sites: {error}"

    def foretell(self, federation: Federation) -> Foretold:
        """Bits per parameter, and what is released beyond the sum."""
        sites, moduli = federation.cohort, self.chosen(federation)
        as_numbers, in_unary = bits_of(moduli), residues.unary_bits(moduli)
        (plain,) = power_of_two(least_for(sites, self.whole.largest))
        more = beyond(sites, moduli) if self.released == PUBLISHED else Beyond(0.0, 0.0)
        facts = {
            "moduli": list(moduli),
            "bits_per_parameter": as_numbers,
            "unary_bits_per_parameter": in_unary,
            "plain_bits_per_parameter": (plain - 1).bit_length(),
            "leak_bits": {"form": self.released, "together": more.together, "single": more.single},
        }
        return Foretold(facts, list(self._lines(sites, as_numbers, in_unary, plain, more)))

    def _lines(self, sites: int, as_numbers: int, in_unary: int, plain: int, more: Beyond) -> Iterator[str]:
        yield (
            f"encode: {self.kind} takes {as_numbers} bits per parameter as numbers, {in_unary:,} in unary; "
            f"plain fixed point takes {(plain - 1).bit_length()}, float32 32"
        )
        if more.together:
            yield (
                f"encode: published sums tell {more.together:.3g} bits per parameter more than the sum about "
                f"{sites} sites' values together, {more.single:.2g} about one of them; carry-safe ones tell none"
            )
        else:
            yield f"encode: {self.released} sums of residues tell the sum of {sites} updates, and nothing else of them"

    def chosen(self, federation: Federation) -> Moduli:
        """The moduli that hold the sum of the largest cohort."""
        return self.moduli_for(least_for(federation.cohort, self.whole.largest))

    def start(self, seat: Seat) -> Running:
        coding = seat.federation.coding
        assert isinstance(coding, Modular)
        return _Encoding(coding)


class _Encoding(Running):
    """The range is that of the model received, so a site that missed rounds has the same one."""

    def __init__(self, coding: Modular) -> None:
        self._coding, self._bound, self._clamped = coding, coding.bound, 0.0

    def inward(self, model: Vector, at: At) -> Vector:
        self._bound = self._coding.bound_at(model)
        return model

    def outward(self, update: Payload, at: At) -> Payload:
        assert self._bound is not None
        packed, cut = self._coding.encode(update, self._bound)
        self._clamped = cut / max(1, update.size)
        return packed

    def notes(self) -> Mapping[str, float]:
        assert self._bound is not None
        return {"range": self._bound, "clamped": self._clamped}
