"""Poisoned updates that a site makes of its own alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np
from pydantic import Field

from fl_privacy.behaviours.base import Behaviour, Scene
from fl_privacy.vector import Vector

if TYPE_CHECKING:
    from fl_privacy.steps.base import At


class Noise(Behaviour):
    """Adds Gaussian noise to every parameter of the trained model (Fang et al. 2020)."""

    kind: Literal["noise"] = "noise"
    scale: float = Field(0.25, gt=0, description="standard deviation")

    def sent(self, update: Vector, at: At, scene: Scene) -> Vector:
        noise = scene.draw("noise", at.round).standard_normal(update.size, dtype=np.float32)
        noise *= np.float32(self.scale)
        return update + noise


class Scaling(Behaviour):
    """Sends factor * update: with n / lr, the mean becomes this site's model (Bagdasaryan et al. 2020, Eq. 3)."""

    kind: Literal["scaling"] = "scaling"
    factor: float = Field(10.0, gt=0)

    def act(self, update: Vector, at: At) -> Vector:
        return np.float32(self.factor) * update


class SignFlip(Behaviour):
    """Sends -factor * update."""

    kind: Literal["sign-flip"] = "sign-flip"
    factor: float = Field(1.0, gt=0)

    def act(self, update: Vector, at: At) -> Vector:
        return -np.float32(self.factor) * update
