"""Facts about the data sets and models, to check a config without loading anything."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Entry:
    """A data set: shape of one record, classes, training records, natural sites, and whether it needs a data folder.

    Without classes (0), a record's label is a number to forecast.
    """

    shape: tuple[int, ...]
    classes: int
    train: int
    sites: tuple[str, ...] = ()
    needs_data: bool = True

    @property
    def forecast(self) -> bool:
        return self.classes == 0


@dataclass(frozen=True)
class Inputs:
    """What a model accepts: anything, square images whose side is in `sides`, or series to forecast."""

    sides: range | None = None
    series: bool = False

    def take(self, shape: tuple[int, ...], classes: int) -> bool:
        if self.series:
            return len(shape) in (1, 2) and classes == 0
        return self.sides is None or (len(shape) == 3 and shape[1] == shape[2] and shape[1] in self.sides)


# Four of the first 44 are unusable: MAC000008, 16 and 28 lack months, and 37 uses nothing in 99 of 100 half-hours.
LCL_HOUSEHOLDS = tuple(f"MAC{number:06d}" for number in range(2, 46) if number not in (8, 16, 28, 37))
LCL_WINDOWS = 5

CATALOG: dict[str, Entry] = {
    "digits": Entry((1, 8, 8), classes=10, train=1438, needs_data=False),
    "mnist": Entry((1, 28, 28), classes=10, train=60_000),
    "cifar10": Entry((3, 32, 32), classes=10, train=50_000),
    "heart-disease": Entry((13,), classes=2, train=486, sites=("cleveland", "hungarian", "switzerland", "va")),
    # Window by window, so the first 40 sites are 40 different households.
    "lcl": Entry(
        (48, 3),
        classes=0,
        train=78_129,
        sites=tuple(f"{name.lower()}-w{window}" for window in range(LCL_WINDOWS) for name in LCL_HOUSEHOLDS),
    ),
}

MODELS: dict[str, Inputs] = {
    "mlp": Inputs(),
    "lenet5": Inputs(sides=range(8, 33)),
    "cnn": Inputs(sides=range(8, 257)),
    "mobilecnn": Inputs(sides=range(8, 257)),
    "lstm": Inputs(series=True),
}


def fits(dataset: str, model: str) -> bool:
    """Whether the model accepts the records of the data set; unknown names do not fit."""
    if dataset not in CATALOG or model not in MODELS:
        return False
    entry = CATALOG[dataset]
    return MODELS[model].take(entry.shape, entry.classes)
