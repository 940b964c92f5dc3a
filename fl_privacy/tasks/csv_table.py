"""`dataset: csv`: a table per site, whose columns the config describes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BeforeValidator, Field, model_validator

from fl_privacy.tasks import tables
from fl_privacy.tasks.data import Labels, Parts
from fl_privacy.tasks.dataset import DataSet
from fl_privacy.tasks.findings import Findings
from fl_privacy.tasks.own_files import LARGEST, File, HeldOut, contents, opened, own_file, parts
from fl_privacy.tasks.scaling import Scaling, Statistics, standardise

Column = NDArray[np.float64]
SCALED: dict[Scaling, str] = {
    "local": "Each site scaled its numbers by the mean and the standard deviation of its own training records "
    "(`scaling: local`), so scale yours by those of your own records.",
    "given": "Numbers were scaled by the statistics given with each feature (`scaling: given`): minus `mean`, divided "
    "by `std`, or so that `min` becomes 0 and `max` 1.",
    "none": "Numbers were not scaled (`scaling: none`).",
}


def _level(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("YAML reads yes, no, on and off as true and false; put the level in quotes")
    if not isinstance(value, str | int | float):
        raise ValueError("not a text or a number; write the value as it is in the file")
    return value


Level = Annotated[str | int | float, BeforeValidator(_level)]
Levels = Annotated[tuple[Level, ...], Field(min_length=2, max_length=10_000)]


class Described(Statistics):
    """A column of the table: numbers, or one of some levels."""

    name: str = Field(min_length=1)
    levels: Levels | None = Field(None, description="the values that the column may have; default: it has numbers")

    @model_validator(mode="after")
    def _levels(self) -> Described:
        twice = [level for level, count in Counter(self.levels or ()).items() if count > 1]
        if twice:
            raise ValueError(f"level {twice[0]!r} of {self.name!r} is there twice; remove one")
        if self.levels and self.statistics:
            raise ValueError(f"{self.name!r} has levels, which are not scaled; remove its statistics")
        return self

    def code(self, missing: Collection[str]) -> tables.Code:
        """How its cells are read."""
        return tables.level(self.levels, missing) if self.levels else tables.number(missing)


class Label(Described):
    """What is learned: one of the levels, in the order of the classes, or a number."""

    type: Literal["classes", "number"] = "classes"

    @model_validator(mode="after")
    def _typed(self) -> Label:
        if (self.type == "number") == bool(self.levels):
            raise ValueError(f"{self.name!r} needs the levels of its classes, or else type: number; give one of them")
        return self

    def encode(self, cells: Column) -> Labels:
        """Classes, or numbers scaled by the statistics if given."""
        offset, divisor = self.statistics or (0.0, 1.0)
        return cells.astype(np.int64) if self.levels else ((cells - offset) / divisor).astype(np.float32)


class Feature(Described):
    """One input: a number, or one column of 0 and 1 per level."""

    missing: Level | None = Field(None, description="the value of an empty cell; default: as the table's `missing`")

    @model_validator(mode="after")
    def _possible(self) -> Feature:
        fits = self.missing in self.levels if self.levels else not isinstance(self.missing, str)
        if self.missing is not None and not fits:
            raise ValueError(f"missing {self.missing!r} is no value of {self.name!r}; use a level or a number")
        return self

    @property
    def width(self) -> int:
        return len(self.levels or (0,))

    @property
    def constant(self) -> float:
        """Instead of an empty cell; NaN if the table's rule decides."""
        if self.missing is None:
            return np.nan
        return float(self.levels.index(self.missing) if self.levels else self.missing)

    def fitted(self, seen: Column) -> float:
        """Instead of an empty cell: the mean of the others, or the most frequent level (the first of equals)."""
        known = seen[np.isfinite(seen)]
        if not len(known):
            return np.nan
        return float(np.bincount(known.astype(np.int64)).argmax() if self.levels else known.mean())

    def encode(self, cells: Column, train: NDArray[np.bool_], scaling: Scaling) -> NDArray[np.float32]:
        if self.levels:
            return np.asarray(cells[:, None] == np.arange(self.width), np.float32)
        if scaling == "local":
            return standardise(cells[:, None], train)
        offset, divisor = self.statistics or (0.0, 1.0)
        return ((cells[:, None] - offset) / divisor).astype(np.float32)


def _described(value: Any) -> Any:
    """`age` means `{name: age}`."""
    return {"name": value} if isinstance(value, str) else value


class Csv(DataSet):
    """One CSV file per site. The config describes its columns, so that the model never depends on the data."""

    own_sites: ClassVar[bool] = True
    public_with: ClassVar[str] = "{scaling: given, missing: drop}"

    file: File = None
    delimiter: Literal[",", ";", "\t", "|"] = ","
    label: Label
    features: tuple[Annotated[Feature, BeforeValidator(_described)], ...] = Field(
        min_length=1, max_length=100_000, description="the inputs: names of columns of numbers, or descriptions"
    )
    missing: Literal["drop", "local"] = Field(
        "drop",
        description="a record with an empty cell: drop it, or use the mean or most frequent level of the site's "
        "training records; a record without a label is always dropped",
    )
    missing_values: tuple[str, ...] = Field(
        tuple(sorted(tables.MISSING)), description="what an empty cell may contain, in any case"
    )
    scaling: Scaling = Field(
        "local",
        description="of numbers: to mean 0 and deviation 1 of the site's training records, by the statistics given "
        "with each feature, or none",
    )
    held_out: HeldOut = HeldOut()

    @model_validator(mode="after")
    def _consistent(self) -> Csv:
        names = Counter([self.label.name, *(feature.name for feature in self.features)])
        problems = [f"column {name!r} is used twice; remove one" for name, count in names.items() if count > 1]
        for feature in self.features:
            if self.scaling == "given" and not feature.levels and feature.statistics is None:
                problems.append(f"feature {feature.name!r} has no statistics; give mean and std, or min and max")
            if self.scaling != "given" and feature.statistics is not None:
                problems.append(f"statistics of {feature.name!r} are not used with scaling {self.scaling}; use given")
        if problems:
            raise ValueError("; ".join(problems))
        return self

    @property
    def shape(self) -> tuple[int, ...]:
        return (sum(feature.width for feature in self.features),)

    @property
    def classes(self) -> int:
        return len(self.label.levels or ())

    @property
    def preprocessing(self) -> str:
        return "local" if "local" in (self.scaling, self.missing) else "public"

    @property
    def inputs(self) -> str:
        columns = "The inputs are the columns of `features`, in this order; one with levels gives a 0 or 1 per level."
        return f"{columns} {SCALED[self.scaling]}"

    def of_site(self, site: str, folder: Path | None) -> Parts:
        path = own_file(site, folder, self.file, (".csv",))
        cells, marked = self._read(path)
        given = np.where(np.isnan(cells), [np.nan, *(feature.constant for feature in self.features)], cells)
        kept = ~np.isnan(given if self.missing == "drop" else given[:, :1]).any(axis=1)
        marked = marked if marked is None else marked[kept]
        held_out = self.held_out.choose(contents(cells[kept]), marked, path)
        x = self._encode(given[kept, 1:], ~held_out, path)
        return parts(x, self.label.encode(given[kept, 0]), held_out, path)

    def _read(self, path: Path) -> tuple[Column, NDArray[np.bool_] | None]:
        """The cells of label and features, and which records a column holds out."""
        missing = frozenset(value.lower() for value in self.missing_values)
        columns = [(column.name, column.code(missing)) for column in (self.label, *self.features)]
        by_column = self.held_out.column
        if by_column is not None:
            columns.append((by_column, lambda cell: float(cell == self.held_out.value)))
        found = Findings(path.parent)
        with opened(path) as stream:
            cells = tables.read(stream, path.name, columns, found, self.delimiter)
        found.check()
        width = 1 + len(self.features)
        return cells[:, :width], None if by_column is None else cells[:, width] > 0

    def _encode(self, cells: Column, train: NDArray[np.bool_], path: Path) -> NDArray[np.float32]:
        found = Findings(path.parent)
        add, encoded = found.of(path.name), []
        if cells.shape[0] * self.shape[0] * 4 > LARGEST:
            add(f"{cells.shape[0]} records of {self.shape[0]} numbers are too many (split the file over more sites)")
            found.check()
        for feature, column in zip(self.features, cells.T, strict=True):
            if np.isnan(column).any():
                column = np.where(np.isnan(column), feature.fitted(column[train]), column)
            if np.isnan(column).any():
                add("empty in all training records (give it a `missing` value)", f"column {feature.name!r}")
            else:
                encoded.append(feature.encode(column, train, self.scaling))
        found.check()
        return np.concatenate(encoded, axis=1)
