"""A site that sends a sound model in an order that no other site uses."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from fl_privacy.behaviours.base import Behaviour, Scene
from fl_privacy.vector import Vector

if TYPE_CHECKING:
    from fl_privacy.steps.base import At


class TamperedRule(Behaviour):
    """Trains honestly, and permutes the trained model by a rule of its own: with `permute`, after the agreed rule.

    Hidden units in another order answer every sample as before, so validation sees nothing, but averages mix units that
    do not belong together. With `inputs`, the inputs are in another order too, as with any other rule of Tazza.
    """

    kind: Literal["tampered-rule"] = "tampered-rule"
    inputs: bool = Field(False, description="the inputs too, which validation notices")

    def sent(self, update: Vector, at: At, scene: Scene) -> Vector:
        from fl_privacy.steps.permute import tazza  # torch

        rules = tazza.rules(scene.module, scene.example)
        if not self.inputs:
            fixed = {part.group for _, axis in rules.inputs for part in axis}
            kinds = (replace(kind, fixed=kind.fixed or at in fixed) for at, kind in enumerate(rules.groups))
            rules = replace(rules, groups=tuple(kinds))
        rule = rules.draw(scene.draw("tampered-rule").bytes(32), at.run, at.round)
        return rule.apply(scene.start + update, scene.layout) - scene.start
