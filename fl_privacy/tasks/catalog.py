"""The tasks and models by name, and what must be known of them to check a config without loading anything."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fl_privacy.errors import DataError
from fl_privacy.registry import Registry, resolve

if TYPE_CHECKING:
    from torch import nn

    from fl_privacy.tasks.data import Split

OWN = "own"  # as `task.model`: the model that comes with the task


@dataclass(frozen=True)
class Entry:
    """A task: shape of one record, classes, training records, how to load it, natural sites, its own model.

    Without classes (0), a record's label is a number to forecast. `loader`, `model` and `attacker` are targets
    (`module:name`) that are imported when they are needed: a config must be read without torch.
    """

    shape: tuple[int, ...]
    classes: int
    train: int
    loader: str  # of (data_dir) -> Split
    sites: tuple[str, ...] = ()
    needs_data: bool = True  # in a data folder; else it is bundled or generated
    model: str | None = None  # of () -> nn.Module
    attacker: str | None = None  # of the object that fl_privacy/tasks/attacker.py calls Facts

    @property
    def forecast(self) -> bool:
        return self.classes == 0

    def load(self, data_dir: Path | None = None) -> Split:
        """The data; `data_dir` (default: FL_PRIVACY_DATA) has one folder per data set. Nothing is downloaded."""
        split: Split = resolve(self.loader)(data_dir)
        halves, label = (split.train, split.test), "float32" if self.forecast else "int64"
        checked: dict[str, tuple[object, object]] = {
            "shape": (split.shape, self.shape),
            "classes": (split.classes, self.classes),
            "sites": (split.sites, self.sites),
            "records of shape": ({half.x.shape[1:] for half in halves}, {self.shape}),
            "records of type": ({str(half.x.dtype) for half in halves}, {"float32"}),
            "labels of type": ({str(half.y.dtype) for half in halves}, {label}),
        }
        for what, (found, stated) in checked.items():
            if found != stated:
                raise DataError(f"{self.loader}: gives {what} {str(found)[:60]}, not {str(stated)[:60]}; correct it")
        return split

    def own_model(self) -> nn.Module:
        """A new model of the task's own."""
        made: nn.Module = resolve(self.model or "")()
        return made


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

DIGITS = Entry((1, 8, 8), 10, 1438, "fl_privacy.tasks.digits:load", needs_data=False)
MNIST = Entry((1, 28, 28), 10, 60_000, "fl_privacy.tasks.mnist:load")
CIFAR10 = Entry((3, 32, 32), 10, 50_000, "fl_privacy.tasks.cifar10:load")
CENTRES = ("cleveland", "hungarian", "switzerland", "va")
HEART_DISEASE = Entry((13,), 2, 486, "fl_privacy.tasks.heart_disease:load", CENTRES)
# Window by window, so the first 40 sites are 40 different households.
HOUSES = tuple(f"{name.lower()}-w{window}" for window in range(LCL_WINDOWS) for name in LCL_HOUSEHOLDS)
LCL = Entry((48, 3), 0, 78_129, "fl_privacy.tasks.lcl:load", HOUSES, attacker="fl_privacy.tasks.lcl_attacker:FACTS")

OURS = {"digits": "DIGITS", "mnist": "MNIST", "cifar10": "CIFAR10", "heart-disease": "HEART_DISEASE", "lcl": "LCL"}
TARGETS = {name: f"fl_privacy.tasks.catalog:{entry}" for name, entry in OURS.items()}
TASKS: Registry[Entry] = Registry("fl_privacy.tasks", TARGETS, Entry)

IMAGES, SERIES = Inputs(sides=range(8, 257)), Inputs(series=True)
LENET5 = Inputs(sides=range(8, 33))
MODELS = {"mlp": Inputs(), "lenet5": LENET5, "cnn": IMAGES, "mobilecnn": IMAGES, "lstm": SERIES}


def fits(dataset: str, model: str) -> bool:
    """Whether the model accepts the records of the task; unknown names do not fit."""
    if dataset not in TASKS:
        return False
    entry = TASKS.get(dataset)
    if model == OWN:
        return entry.model is not None
    return model in MODELS and MODELS[model].take(entry.shape, entry.classes)
