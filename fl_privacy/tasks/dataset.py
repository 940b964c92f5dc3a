"""A data set as a config names it: what a record looks like, and how to read one site's own records.

Nothing here imports torch: a config is read, and a model's layout is known, without any data.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field, model_validator

from fl_privacy.choices import Model
from fl_privacy.errors import DataError
from fl_privacy.registry import Registry
from fl_privacy.tasks.data import Parts, Split

if TYPE_CHECKING:
    from fl_privacy.config import Federation


class DataSet(Model):
    """One data set. Its fields are what `task.options` may set; each has a documented default or is required.

    Two kinds: records that belong to their sites (`own_sites`), where each site reads its own folder and nothing else;
    and public benchmarks in one piece, which the federation's `partition` deals out to the sites of an experiment.
    """

    needs_data: ClassVar[bool] = True  # in a data folder; else it is bundled or generated
    own_sites: ClassVar[bool] = False  # every site has a part of its own
    pooled: ClassVar[bool] = False  # it can be read in one piece
    sites: ClassVar[tuple[str, ...]] = ()  # the sites of a benchmark that has some
    train: ClassVar[int] = 0  # training records of a benchmark
    attacker: ClassVar[str | None] = None  # module:name of what fl_privacy/tasks/attacker.py calls Facts
    public_with: ClassVar[str] = "{scaling: public}"  # the options with which `preprocessing` is public

    class_weights: tuple[Annotated[float, Field(gt=0)], ...] | None = Field(
        None, description="weight of each class in the loss; default: all the same"
    )

    @model_validator(mode="after")
    def _one_weight_per_class(self) -> DataSet:
        if self.class_weights is not None and len(self.class_weights) != self.classes:
            raise ValueError(f"class_weights: {len(self.class_weights)} for {self.classes} classes; give one per class")
        return self

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one record."""
        raise NotImplementedError

    @property
    def classes(self) -> int:
        """0: the label is a number to predict."""
        raise NotImplementedError

    @property
    def preprocessing(self) -> str:
        """`public` if nothing is fitted to a site's own records, else `local`."""
        return "public"

    @property
    def inputs(self) -> str:
        """How a record becomes the model's input, for whoever uses the model elsewhere: whole sentences."""
        if self.preprocessing == "local":
            return "Each site scaled its records by statistics of its own training records, so use those of your own."
        return "Records were prepared as the task says, in the same way at every site."

    def problems(self, federation: Federation) -> Iterator[str]:
        """What this data set demands of the rest of the config and does not find: field, value and fix."""
        yield from ()

    def load(self, folder: Path | None) -> Split:
        """All records; only where `pooled`."""
        raise DataError(f"{type(self).__name__}: each site reads its own records; use partition by-site")

    def of_site(self, site: str, folder: Path | None) -> Parts:
        """The records of one site from its own folder; only where `own_sites`."""
        raise DataError(f"{type(self).__name__}: has no sites of its own; use partition iid or dirichlet")


class Benchmark(DataSet):
    """A public data set of known size, to compare methods on."""

    record: ClassVar[tuple[int, ...]] = ()
    labels: ClassVar[int] = 0
    pooled: ClassVar[bool] = True

    @property
    def shape(self) -> tuple[int, ...]:
        return self.record

    @property
    def classes(self) -> int:
        return self.labels


OURS = {
    "digits": "digits:Digits",
    "mnist": "mnist:Mnist",
    "cifar10": "cifar10:Cifar10",
    "imdb": "imdb:Imdb",
    "har": "har:Har",
    "synthetic": "synthetic:Synthetic",
    "heart-disease": "heart_disease:HeartDisease",
    "lcl": "lcl:Lcl",
    "csv": "csv_table:Csv",
    "images": "images:Images",
    "arrays": "arrays:Arrays",
    "load": "household:Load",
}
DATASETS: Registry[type[DataSet]] = Registry(
    "fl_privacy.datasets", {name: f"fl_privacy.tasks.{target}" for name, target in OURS.items()}, DataSet
)
