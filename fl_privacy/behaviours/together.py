"""Poisoned updates of sites that collude: all with the same behaviour train honestly, and send one vector.

Each of them computes it for itself, from the records of all. It is near what the honest sites send, so that rules that
look for outliers keep it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from statistics import NormalDist
from typing import TYPE_CHECKING, Literal

import numpy as np
from pydantic import Field

from fl_privacy.behaviours.base import Behaviour, Scene
from fl_privacy.vector import Vector

if TYPE_CHECKING:
    from fl_privacy.config import Federation
    from fl_privacy.steps.base import At


def inconspicuous(sites: int, colluding: int) -> float:
    """How many standard deviations from the mean still look normal to a majority (Baruch et al. 2019, Algorithm 3).

    The largest z with phi(z) < (n - m - s) / (n - m), where s = floor(n / 2 + 1) - m honest ones must be farther out.
    """
    honest, needed = sites - colluding, sites // 2 + 1 - colluding
    return NormalDist().inv_cdf((honest - needed) / honest)


class Colluding(Behaviour):
    """Knows the updates that the sites with the same behaviour train."""

    def known(self, update: Vector, scene: Scene) -> list[Vector]:
        """What each of them would send if it were honest."""
        return [update if name == scene.site else scene.honest(name) for name in scene.together]


class Little(Colluding):
    """A Little Is Enough: mean - z * standard deviation of every coordinate (Baruch et al. 2019)."""

    kind: Literal["little"] = "little"
    z: float | None = Field(None, gt=0, description="default: the most that looks normal to a majority of the cohort")

    def sent(self, update: Vector, at: At, scene: Scene) -> Vector:
        known = np.stack(self.known(update, scene)).astype(np.float64)
        away = self.z or inconspicuous(scene.federation.cohort, len(known))
        poisoned: Vector = (known.mean(axis=0) - away * known.std(axis=0)).astype(np.float32)
        return poisoned

    def problems(self, federation: Federation) -> Iterator[str]:
        count = sum(site.behaviour == self for site in federation.sites)
        if count < 2:
            yield "sites.behaviour: little needs two sites or more with it, to know how far updates differ; add one"
        elif self.z is None and (needed := federation.cohort // 2 + 1 - count) <= 0:
            yield f"sites.behaviour: {count} sites are a majority of a cohort of {federation.cohort}; give z"
        elif self.z is None and math.isclose(federation.cohort - count, 2 * needed):
            yield "sites.behaviour: little would send the plain mean in a cohort of this size; give z"


class InnerProduct(Colluding):
    """Sends -epsilon * the mean of the known updates (Xie et al. 2020): the sum points away from the honest one."""

    kind: Literal["inner-product"] = "inner-product"
    epsilon: float = Field(0.5, gt=0)

    def sent(self, update: Vector, at: At, scene: Scene) -> Vector:
        known = np.stack(self.known(update, scene))
        poisoned: Vector = (-self.epsilon * known.mean(axis=0, dtype=np.float64)).astype(np.float32)
        return poisoned
