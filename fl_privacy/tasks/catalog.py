"""The data sets and models by name, as plain facts: a config is checked against them without loading anything."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Entry:
    """A data set: shape of one record, classes, training records, natural sites, and whether it needs a data folder."""

    shape: tuple[int, ...]
    classes: int
    train: int
    sites: tuple[str, ...] = ()
    needs_data: bool = True


@dataclass(frozen=True)
class Inputs:
    """What a model takes: anything, or square images whose side is in `sides`."""

    sides: range | None = None

    def take(self, shape: tuple[int, ...]) -> bool:
        return self.sides is None or (len(shape) == 3 and shape[1] == shape[2] and shape[1] in self.sides)


CATALOG: dict[str, Entry] = {
    "digits": Entry((1, 8, 8), classes=10, train=1438, needs_data=False),
    "mnist": Entry((1, 28, 28), classes=10, train=60_000),
    "cifar10": Entry((3, 32, 32), classes=10, train=50_000),
    "heart-disease": Entry((13,), classes=2, train=486, sites=("cleveland", "hungarian", "switzerland", "va")),
}

MODELS: dict[str, Inputs] = {
    "mlp": Inputs(),
    "lenet5": Inputs(sides=range(8, 33)),
    "cnn": Inputs(sides=range(8, 257)),
}


def fits(dataset: str, model: str) -> bool:
    """Whether the model takes the records of the data set; unknown names do not fit."""
    return dataset in CATALOG and model in MODELS and MODELS[model].take(CATALOG[dataset].shape)
