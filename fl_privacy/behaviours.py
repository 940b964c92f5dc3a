"""Sites that misbehave on purpose, so that an audit can measure what a defence does about them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from fl_privacy.choices import Choice
from fl_privacy.registry import Registry
from fl_privacy.vector import Vector

if TYPE_CHECKING:
    from fl_privacy.steps.base import At


class Behaviour(Choice, ABC):
    """A choice for a site's `behaviour`; refused unless the federation has `audit: true`."""

    @abstractmethod
    def act(self, update: Vector, at: At) -> Vector:
        """What this site makes of the update that it trained, before the steps of an honest site."""


BEHAVIOURS: Registry[type[Behaviour]] = Registry("fl_privacy.behaviours", {}, Behaviour)
