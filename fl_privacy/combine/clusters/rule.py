"""`combine: clusters`: Tazza's validation and cluster-aware aggregation (Sections 5.4.1 and 5.4.2)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import numpy as np
from pydantic import Field

from fl_privacy.choices import Chosen
from fl_privacy.coding import Coding, Payload
from fl_privacy.combine.clusters import samples
from fl_privacy.combine.rules import INNER, FedAvg, Forward, Grouping, Rule
from fl_privacy.steps.base import At, Running, Seat

if TYPE_CHECKING:
    from fl_privacy.config import Federation

SAMPLES, POINTS, FACTOR = 4, 3, 1.25
MOST_NUMBERS = 2**24  # of all samples of a site


class Clusters(Rule):
    """Groups sites whose models answer alike to random samples; each group has a model of its own."""

    kind: Literal["clusters"] = "clusters"
    rule: Annotated[Rule, Chosen(INNER)] = Field(FedAvg(), description="how the updates of one cluster are combined")
    samples: int = Field(SAMPLES, ge=1, le=1024, description="validation samples that every site sends with its update")
    points: int = Field(
        POINTS, ge=2, le=10_000, description="DBSCAN: models within eps, itself included, of a core point"
    )
    factor: float = Field(
        FACTOR, gt=0, description="eps of a round: this times the median distance at which its models are core points"
    )
    eps: float | None = Field(None, gt=0, lt=2, description="or a fixed cosine distance; needed with `published`")
    published: bool = Field(
        False, description="Algorithm 1 as published: clusters never split, and one vector of all outputs is compared"
    )
    record: tuple[Annotated[int, Field(ge=1, le=2**24)], ...] | None = Field(
        None, min_length=1, max_length=8, description="shape of one record, for a task of your own"
    )

    needs_rows: ClassVar[bool] = True
    needs_owners: ClassVar[bool] = True
    coordinatewise: ClassVar[bool] = False
    weighable: ClassVar[bool] = False
    several: ClassVar[bool] = True

    @property
    def proximal(self) -> float:
        return self.rule.proximal

    def rules(self) -> Sequence[Rule]:
        return (self, self.rule)

    def shape(self, federation: Federation) -> tuple[int, ...]:
        """Of one record."""
        return self.record or (() if federation.task.is_own else federation.task.data_set.shape)

    def numbers(self, federation: Federation) -> int:
        """In all samples of a site."""
        return self.samples * math.prod(self.shape(federation))

    def problems(self, federation: Federation) -> Iterator[str]:
        yield from super().problems(federation)
        for problem in self.rule.problems(federation):
            yield problem.replace("combine.", "combine.rule.", 1)
        if self.lr != 1.0:
            yield f"combine.lr: {self.lr:g} has no effect with clusters; set combine.rule.lr"
        if self.rule.needs_owners:
            yield f"combine.rule.kind: {self.rule.kind} needs one site in all clusters, which none is; use another rule"
        if self.published and self.eps is None:
            yield "combine.eps: the published form has a fixed distance, and the paper gives none; set one"
        if self.points > federation.quorum:
            yield f"combine.points: {self.points} is more than the quorum of {federation.quorum}; lower it"
        yield from self._of_records(federation)

    def _of_records(self, federation: Federation) -> Iterator[str]:
        before = federation.encode.coded(federation.compressed, federation)
        if before.type != np.dtype("<f4") or before.length(1) != 1:
            yield f"combine.kind: clusters needs whole float32 updates, and encode gives {before.name}; use none"
        if federation.task.is_own and self.record is None:
            yield "combine.record: missing; give the shape of one record of your task, such as [13]"
        elif self.record is not None and not federation.task.is_own:
            yield f"combine.record: {federation.task.dataset} says it itself; remove it"
        elif self.numbers(federation) > MOST_NUMBERS:
            yield f"combine.samples: {self.samples} of shape {self.shape(federation)} are too many numbers; lower it"

    def coded(self, before: Coding, federation: Federation) -> Coding:
        name, extra = f"{before.name}+samples", self.numbers(federation)
        return samples.WithSamples(name, before.dtype, 0, inner=before, extra=extra)

    def start(self, seat: Seat) -> Running:
        return Sending(seat, self.numbers(seat.federation))

    def grouping(self, federation: Federation, forward: Forward) -> Grouping:
        from fl_privacy.combine.clusters.grouping import Clustering

        return Clustering(self, federation, forward)


class Sending(Running):
    """A site adds its samples behind its update."""

    def __init__(self, seat: Seat, numbers: int) -> None:
        self._seat, self._numbers = seat, numbers

    def outward(self, update: Payload, at: At) -> Payload:
        drawn = samples.draw(samples.key(self._seat, at), self._numbers)
        behaviour = self._seat.federation.site(self._seat.site).behaviour
        return np.concatenate([update, drawn if behaviour is None else behaviour.samples(drawn)])
