"""Poisoned sites that know how `combine: clusters` judges them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from fl_privacy.behaviours.base import Scene
from fl_privacy.behaviours.records import LabelFlip
from fl_privacy.combine.clusters import samples
from fl_privacy.combine.clusters.rule import FACTOR, POINTS, SAMPLES
from fl_privacy.combine.clusters.validation import Found, validate
from fl_privacy.vector import Vector

if TYPE_CHECKING:
    from fl_privacy.config import Federation
    from fl_privacy.steps.base import At

STEPS = 24  # lengths that are tried, from the largest down


class Inside(LabelFlip):
    """Trains on wrong labels, and goes as far from what it would honestly send as keeps it in the honest cluster.

    Sites with the same behaviour pool their records: each trains the honest update of all of them, draws validation
    samples of its own, and judges itself by these models as the server would.
    """

    kind: Literal["inside"] = "inside"  # type: ignore[assignment]
    points: int = Field(POINTS, ge=2, description="as in `combine: clusters`")
    factor: float = Field(FACTOR, gt=0, description="as in `combine: clusters`")
    margin: float = Field(0.9, gt=0, le=1, description="share of eps that it uses")
    most: float = Field(4.0, gt=0, description="longest step, as a multiple of the one to its poisoned update")

    def problems(self, federation: Federation) -> Iterator[str]:
        yield from super().problems(federation)
        if (count := sum(site.behaviour == self for site in federation.sites)) < self.points:
            yield f"sites.behaviour: inside knows {count} sites and needs {self.points} to see a cluster; add some"
        if not federation.combine.several:
            yield f"sites.behaviour: inside is made for clusters, and combine.kind is {federation.combine.kind}"

    def sent(self, update: Vector, at: At, scene: Scene) -> Vector:
        honest = {name: scene.honest(name) for name in scene.together}
        own = honest[scene.site]
        x = self._samples(at, scene)
        known = np.stack([scene.outputs(one, x) for one in honest.values()])
        for step in np.linspace(self.most, 0.0, STEPS, endpoint=False, dtype=np.float32):
            tried: Vector = own + step * (update - own)
            if self.accepted(known, scene.outputs(tried, x)):
                return tried
        return own

    def accepted(self, known: NDArray[np.float32], mine: NDArray[np.float32]) -> bool:
        """Whether this model joins the cluster of the honest ones; arrays are (models, samples, numbers)."""
        eps = self._judged(known, None).eps * self.margin
        labels = self._judged(np.concatenate([known, mine[None]]), eps).labels
        return labels[-1] >= 0 and labels.count(labels[-1]) > self.points

    def _judged(self, outputs: NDArray[np.float32], eps: float | None) -> Found:
        return validate(outputs.reshape(len(outputs), -1, SAMPLES, outputs.shape[-1]), self.points, self.factor, eps)

    def _samples(self, at: At, scene: Scene) -> NDArray[np.float32]:
        """As many as a cohort sends, in the shape of records."""
        count = SAMPLES * scene.federation.cohort
        record = scene.shape
        key = scene.draw("inside samples", at.round).bytes(32)
        return samples.draw(key, count * int(np.prod(record))).reshape(count, *record)


class LyingSample(LabelFlip):
    """Trains on wrong labels, and sends validation samples to which all models answer much the same."""

    kind: Literal["lying-sample"] = "lying-sample"  # type: ignore[assignment]
    value: float = Field(0.0, ge=-samples.LARGEST, le=samples.LARGEST, description="of every coordinate")

    def samples(self, drawn: NDArray[np.float32]) -> NDArray[np.float32]:
        return np.full_like(drawn, self.value)
