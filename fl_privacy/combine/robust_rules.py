"""The `combine:` choices that bear some poisoned updates; the mathematics is in `robust`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
from pydantic import Field

from fl_privacy.combine import mean, robust
from fl_privacy.combine.mean import Shares
from fl_privacy.combine.rules import Beside, Matrix, Rule
from fl_privacy.reading import NAME
from fl_privacy.vector import Vector

if TYPE_CHECKING:
    from fl_privacy.config import Federation


class Robust(Rule):
    """Needs every update, unweighted."""

    needs_rows: ClassVar[bool] = True
    weighable: ClassVar[bool] = False


class Median(Robust):
    """model + lr * the median of every coordinate (Yin et al. 2018, Option I)."""

    kind: Literal["median"] = "median"

    def aggregate(self, rows: Matrix, shares: Shares, exact: bool) -> Vector:
        return robust.median(rows)


class TrimmedMean(Robust):
    """model + lr * the mean of every coordinate without its extreme values (Yin et al. 2018, Option II)."""

    kind: Literal["trimmed-mean"] = "trimmed-mean"
    trim: float = Field(0.1, ge=0, lt=0.5, description="fraction of the values dropped at each end")

    def aggregate(self, rows: Matrix, shares: Shares, exact: bool) -> Vector:
        return robust.trimmed_mean(rows, self.trim)


class Whole(Robust):
    """Judges updates as a whole, so a shard of each is not enough."""

    coordinatewise: ClassVar[bool] = False


class Bearing(Whole):
    """Bears f poisoned updates, if enough others are there."""

    f: int = Field(1, ge=0, le=100_000, description="poisoned updates per round that it bears")

    def needed(self) -> int:
        """Fewest updates of a round."""
        return 2 * self.f + 3

    def problems(self, federation: Federation) -> Iterator[str]:
        yield from super().problems(federation)
        if federation.quorum < self.needed():
            few = f"needs {self.needed()} updates in every round, and quorum is {federation.quorum}"
            yield f"combine.f: {self.kind} with f = {self.f} {few}; lower f or raise quorum"


class Krum(Bearing):
    """model + lr * the update that is nearest to its n - f - 2 nearest others (Blanchard et al. 2017)."""

    kind: Literal["krum"] = "krum"

    def aggregate(self, rows: Matrix, shares: Shares, exact: bool) -> Vector:
        return robust.krum(in_order(rows, exact), self.f)


class MultiKrum(Bearing):
    """model + lr * the mean of the updates with the best scores of Krum (Blanchard et al. 2017)."""

    kind: Literal["multi-krum"] = "multi-krum"
    chosen: int | None = Field(None, ge=1, description="how many updates are averaged; default: n - f - 2")

    def aggregate(self, rows: Matrix, shares: Shares, exact: bool) -> Vector:
        return robust.multi_krum(in_order(rows, exact), self.f, self.chosen)

    def problems(self, federation: Federation) -> Iterator[str]:
        yield from super().problems(federation)
        if self.chosen is not None and self.chosen > federation.quorum:
            yield f"combine.chosen: {self.chosen} is more than the quorum of {federation.quorum}; lower it"


class Bulyan(Bearing):
    """model + lr * a trimmed mean of the updates that Krum picks one by one (El Mhamdi et al. 2018)."""

    kind: Literal["bulyan"] = "bulyan"

    def needed(self) -> int:
        return 4 * self.f + 3

    def aggregate(self, rows: Matrix, shares: Shares, exact: bool) -> Vector:
        return robust.bulyan(in_order(rows, exact), self.f)


class GeometricMedian(Whole):
    """model + lr * the point with the smallest sum of distances to all updates (Pillutla et al. 2022)."""

    kind: Literal["geometric-median"] = "geometric-median"
    iterations: int = Field(100, ge=1, le=10_000, description="of Weiszfeld's algorithm, at most")

    def aggregate(self, rows: Matrix, shares: Shares, exact: bool) -> Vector:
        return robust.geometric_median(in_order(rows, exact), self.iterations)


class CentredClipping(Whole):
    """model + lr * the mean of the updates, clipped around the result of the last round (Karimireddy et al. 2021)."""

    kind: Literal["centred-clipping"] = "centred-clipping"
    radius: float = Field(1.0, gt=0, description="farthest that an update counts from the centre")
    iterations: int = Field(3, ge=1, le=1000)

    continues: ClassVar[bool] = True
    translates: ClassVar[bool] = False

    def combined(self, rows: Matrix, beside: Beside) -> Vector:
        centre = np.zeros(rows.shape[1], np.float32) if beside.last is None else beside.last
        return robust.centred_clipping(in_order(rows, beside.exact), centre, self.radius, self.iterations)


class NormBounding(Rule):
    """model + lr * the mean of the updates, long ones scaled down to a bound (Sun et al. 2019)."""

    kind: Literal["norm-bounding"] = "norm-bounding"
    bound: float | None = Field(None, gt=0, description="longest that an update may be; default: the round's median")

    translates: ClassVar[bool] = False
    needs_rows: ClassVar[bool] = True
    coordinatewise: ClassVar[bool] = False

    def aggregate(self, rows: Matrix, shares: Shares, exact: bool) -> Vector:
        return mean.weighted(robust.norm_bounding(rows, self.bound), shares, exact)


class FLTrust(Whole):
    """model + lr * the mean of the updates, by how much they agree with that of a trusted site (Cao et al. 2021).

    The trusted site takes the place of the server's own clean records: its update judges the others and is not itself
    among them. In a round without it, nothing can be judged, and the model stays as it is.
    """

    kind: Literal["fltrust"] = "fltrust"
    root: str = Field(pattern=NAME, description="the site whose update judges the others")

    needs_owners: ClassVar[bool] = True
    translates: ClassVar[bool] = False

    def combined(self, rows: Matrix, beside: Beside) -> Vector:
        others = [row for row, owner in enumerate(beside.owners) if owner != self.root]
        if self.root not in beside.owners or not others:
            return np.zeros(rows.shape[1], np.float32)
        return robust.fltrust(in_order(rows[others], beside.exact), rows[list(beside.owners).index(self.root)])

    def problems(self, federation: Federation) -> Iterator[str]:
        yield from super().problems(federation)
        if self.root not in federation.site_names:
            known = ", ".join(federation.site_names[:10])
            yield f"combine.root: {self.root!r} is none of the sites; use one of {known}"
            return
        if federation.site(self.root).behaviour is not None:
            yield f"combine.root: {self.root!r} misbehaves, and judges the others; use another site"
        if federation.cohort < len(federation.sites):
            yield f"combine.root: {self.root!r} must be in every cohort; set cohort to {len(federation.sites)}"


def in_order(rows: Matrix, exact: bool) -> Matrix:
    """The rows; with `exact` sorted by their bytes, so that sums and ties do not depend on how they came."""
    if not exact:
        return rows
    return np.ascontiguousarray(rows[sorted(range(len(rows)), key=lambda row: rows[row].tobytes())])
