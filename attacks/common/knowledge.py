"""What an attacker knows beside its views: the public protocol, and perhaps data of its own to run it on."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from fl_privacy.config import Federation
from fl_privacy.errors import FederationError

if TYPE_CHECKING:
    from attacks.common.auxiliary import Trainer
    from attacks.common.fetched import Models
    from fl_privacy.tasks.attacker import Auxiliary
    from fl_privacy.tasks.data import Dataset

Need = Literal["auxiliary", "canaries", "models", "proxy", "shadows", "targets"]
Progress = Callable[[str], None]
Vector = NDArray[np.float32]
Matrix = NDArray[np.float32]


def silent(step: str) -> None:
    """Progress that nobody follows."""


class Knowledge:
    """The federation's config, which is public, and what the attack declared. It does not say where the data lie."""

    def __init__(
        self,
        federation: Federation,
        gather: Callable[[], Auxiliary] | None = None,
        progress: Progress = silent,
        candidates: Callable[[], Mapping[str, Dataset]] | None = None,
        models: Models | None = None,
        targets: Callable[[], Dataset] | None = None,
        shadows: Callable[[], Mapping[str, Dataset]] | None = None,
        proxy: Callable[[], Dataset] | None = None,
    ) -> None:
        self.federation, self.progress, self._gather = federation, progress, gather
        self._candidates, self._models = candidates, models
        self._targets, self._shadows, self._proxy = targets, shadows, proxy
        self._made: dict[int, Matrix] = {}

    @cached_property
    def auxiliary(self) -> Auxiliary:
        """Records of the same kind that no site of the federation has, as sites, with the attribute of each."""
        if self._gather is None:
            raise FederationError("needs: this attack declares no auxiliary data; add 'auxiliary' to its needs")
        return self._gather()

    @cached_property
    def canaries(self) -> Mapping[str, Dataset]:
        """The canaries of every site, whether or not they took part: the attacker is to say which did."""
        if self._candidates is None:
            raise FederationError("needs: this attack declares no canaries; add 'canaries' to its needs")
        return self._candidates()

    @property
    def models(self) -> Models:
        """The global model before and after every round, which all sites fetch."""
        if self._models is None:
            raise FederationError("needs: this attack declares no models; add 'models' to its needs")
        return self._models

    @cached_property
    def targets(self) -> Dataset:
        """Training records of the sites, as many of each and in random order: the attacker is to say whose they are."""
        if self._targets is None:
            raise FederationError("needs: this attack declares no targets; add 'targets' to its needs")
        return self._targets()

    @cached_property
    def shadows(self) -> Mapping[str, Dataset]:
        """By site a few records like its own, which no site trained on, in random order."""
        if self._shadows is None:
            raise FederationError("needs: this attack declares no shadow sets; add 'shadows' to its needs")
        return self._shadows()

    @cached_property
    def proxy(self) -> Dataset:
        """Records of the same kind that no site trained on; with the centre of each, if the data have centres."""
        if self._proxy is None:
            raise FederationError("needs: this attack declares no proxy data; add 'proxy' to its needs")
        return self._proxy()

    def updates(self, model: Vector, round: int) -> Matrix:
        """The clean update of every auxiliary site from the model of this round; trained once for all seeds."""
        if round not in self._made:
            self._made[round] = self._trainer.updates(model, round)
        return self._made[round]

    @cached_property
    def _trainer(self) -> Trainer:
        from attacks.common.auxiliary import Trainer

        return Trainer(self.federation, self.auxiliary)


def knowledge_of(
    federation: Federation,
    data_dir: Path | None,
    needs: Collection[Need],
    progress: Progress = silent,
    models: Models | None = None,
) -> Knowledge:
    """The knowledge of an attacker with these needs."""

    def gathered() -> Auxiliary:
        from attacks.common.auxiliary import gather  # takes torch

        return gather(federation, data_dir)

    def candidates() -> Mapping[str, Dataset]:
        from attacks.common.auxiliary import canaries  # takes torch

        return canaries(federation, data_dir)

    def targets() -> Dataset:
        from attacks.common.targets import targets  # takes torch

        return targets(federation, data_dir).records

    def shadows() -> Mapping[str, Dataset]:
        from attacks.common.targets import shadows  # takes torch

        return shadows(federation, data_dir)

    def proxy() -> Dataset:
        from fl_privacy.tasks.workload import Workload  # takes torch

        return Workload(federation, data_dir).test

    return Knowledge(
        federation,
        gathered if "auxiliary" in needs else None,
        progress,
        candidates if "canaries" in needs else None,
        models if "models" in needs else None,
        targets if "targets" in needs else None,
        shadows if "shadows" in needs else None,
        proxy if "proxy" in needs else None,
    )
