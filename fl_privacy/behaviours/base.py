"""What a misbehaving site can change: the records that it trains on, and the update that it sends."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from fl_privacy.choices import Choice
from fl_privacy.tasks.data import Dataset
from fl_privacy.vector import Layout, Vector

if TYPE_CHECKING:
    from torch import Tensor, nn

    from fl_privacy.config import Federation
    from fl_privacy.steps.base import At
    from fl_privacy.tasks.workload import Workload


@dataclass(frozen=True)
class Scene:
    """What a misbehaving site knows: the federation's config, and what the sites that misbehave with it know."""

    federation: Federation
    site: str
    honest: Callable[[str], Vector]  # the update that a site would train in this round from its own records
    start: Vector = field(default_factory=lambda: np.empty(0, np.float32))  # the model that the round starts from
    work: Workload | None = None

    @property
    def module(self) -> nn.Module:
        return self._work.model

    @property
    def layout(self) -> Layout:
        return self._work.layout

    @property
    def example(self) -> Tensor:
        """A few of its own records, as the model takes them."""
        return self._work.example(self.site)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one record."""
        return tuple(self.example.shape[1:])

    def outputs(self, update: Vector, x: NDArray[np.float32]) -> NDArray[np.float32]:
        """What the model answers with this update."""
        return self._work.outputs(self.start + update, x)

    @property
    def _work(self) -> Workload:
        assert self.work is not None, "this behaviour needs the site's model"
        return self.work

    @property
    def together(self) -> tuple[str, ...]:
        """The sites with the same behaviour, this one included: they know each other and pool their records."""
        mine = self.federation.site(self.site).behaviour
        return tuple(site.name for site in self.federation.sites if site.behaviour == mine)

    def draw(self, purpose: str, round: int = 0) -> np.random.Generator:
        """Seeded by the federation: an audit can be repeated."""
        text = f"{self.federation.seed}/{self.site}/{purpose}/{round}"
        return np.random.default_rng(list(hashlib.sha256(text.encode()).digest()))


class Behaviour(Choice):
    """A choice for a site's `behaviour`; refused unless the federation has `audit: true`."""

    def records(self, data: Dataset, scene: Scene) -> Dataset:
        """The records that this site trains on instead of its own; the same in every round of a run."""
        return data

    def sent(self, update: Vector, at: At, scene: Scene) -> Vector:
        """What this site makes of the update that it trained; `act` for a behaviour that needs no more than that."""
        return self.act(update, at)

    def samples(self, drawn: NDArray[np.float32]) -> NDArray[np.float32]:
        """The validation samples that this site sends, where a rule wants some; drawn as an honest site draws them."""
        return drawn

    def act(self, update: Vector, at: At) -> Vector:
        """What this site makes of the update that it trained, before the steps of an honest site."""
        return update
