"""`stop:` in a federation's YAML: which round is a run's best, and when a run ends early."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from fl_privacy.choices import Model
from fl_privacy.errors import ConfigError

if TYPE_CHECKING:
    from fl_privacy.config import Federation

FORECAST = ("rmse", "mae")  # of a number; the others but for the loss are of classes
EVERYWHERE = ("loss", "accuracy", "rmse")  # also where the server evaluates
LOWER = ("loss", "ece", *FORECAST)


class Stop(Model):
    """Which round is a run's best, and when the run ends before its last round."""

    metric: Literal["loss", "accuracy", "balanced_accuracy", "auroc", "ece", "rmse", "mae"] = Field(
        "loss", description="of the held-out records; loss, ece, rmse and mae are better if lower"
    )
    patience: int | None = Field(
        None, ge=1, le=100_000, description="end the run after this many rounds without a better one; default: never"
    )
    min_delta: float = Field(0.0, ge=0, description="a round is better if the metric improves by more than this")

    def is_better(self, value: float, best: float) -> bool:
        """Whether a value of the metric is an improvement; NaN never is."""
        return (best - value if self.metric in LOWER else value - best) > self.min_delta

    def check(self, measured: Iterable[str]) -> None:
        """Raise if the metric is none of what this task measures: a task of your own shows that only now."""
        found = sorted(measured)
        if self.metric != "loss" and found and (self.metric in FORECAST) == set(FORECAST).isdisjoint(found):
            raise ConfigError(f"stop.metric: {self.metric!r} is not measured here; use one of {', '.join(found)}")

    def problems(self, federation: Federation) -> Iterator[str]:
        """A metric that this federation does not measure."""
        task, given = federation.task, f"stop.metric: {self.metric!r}"
        if self.metric not in EVERYWHERE and not federation.sites_evaluate:
            yield f"{given} is measured only by sites; use {', '.join(EVERYWHERE)}, or evaluate: sites"
        if task.is_own or self.metric == "loss":
            return
        if (task.data_set.classes == 0) != (self.metric in FORECAST):
            kind = "a forecast" if task.data_set.classes == 0 else "classes"
            yield f"{given} is not measured for {kind}; use loss, or another one"
