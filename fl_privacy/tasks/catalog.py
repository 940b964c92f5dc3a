"""The models by name, and which records each accepts: what a config is checked against, without importing torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Inputs:
    """What a model accepts: anything, square images whose side is in `sides`, or series to forecast."""

    sides: range | None = None
    series: bool = False

    def take(self, shape: tuple[int, ...], classes: int) -> bool:
        if self.series:
            return len(shape) in (1, 2) and classes == 0
        return self.sides is None or (len(shape) == 3 and shape[1] == shape[2] and shape[1] in self.sides)


IMAGES, SERIES = Inputs(sides=range(8, 257)), Inputs(series=True)
LENET5 = Inputs(sides=range(8, 33))
MODELS = {"mlp": Inputs(), "lenet5": LENET5, "cnn": IMAGES, "mobilecnn": IMAGES, "lstm": SERIES}
