"""The models by name, and which records each accepts: what a config is checked against, without importing torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Inputs:
    """What a model accepts: anything, square images whose side is in `sides`, or series of as many steps as in `steps`.

    With `forecasts`, only series whose label is a number.
    """

    sides: range | None = None
    steps: range | None = None
    forecasts: bool = False

    def take(self, shape: tuple[int, ...], classes: int) -> bool:
        if self.steps is not None:
            return len(shape) in (1, 2) and shape[0] in self.steps and not (self.forecasts and classes)
        return self.sides is None or (len(shape) == 3 and shape[1] == shape[2] and shape[1] in self.sides)


ANY, IMAGES = Inputs(), Inputs(sides=range(8, 257))
MODELS = {
    "mlp": ANY,
    "logistic": ANY,
    "lenet5": Inputs(sides=range(8, 33)),
    "sigmoid-lenet": Inputs(sides=range(8, 65)),
    "cnn": IMAGES,
    "cnn5x5": Inputs(sides=range(16, 65)),
    "mobilecnn": IMAGES,
    "resnet9": IMAGES,
    "lstm": Inputs(steps=range(1, 10_001), forecasts=True),
    "cnn1d": Inputs(steps=range(32, 1025)),
    "transformer": Inputs(steps=range(2, 1025)),
}
