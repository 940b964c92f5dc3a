"""`stop:` in a federation's YAML: which round is a run's best, and when a run ends early."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from fl_privacy.choices import Model


class Stop(Model):
    """Which round is a run's best, and when the run ends before its last round."""

    metric: Literal["loss", "accuracy", "rmse"] = Field("loss", description="of the held-out records")
    patience: int | None = Field(
        None, ge=1, le=100_000, description="end the run after this many rounds without a better one; default: never"
    )
    min_delta: float = Field(0.0, ge=0, description="a round is better if the metric improves by more than this")

    def is_better(self, value: float, best: float) -> bool:
        """Whether a value of the metric is an improvement; NaN never is."""
        return value - best > self.min_delta if self.metric == "accuracy" else best - value > self.min_delta
