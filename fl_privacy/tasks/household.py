"""`dataset: load`: the readings of one meter per site, to forecast the next reading."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field, model_validator

from fl_privacy.errors import DataError
from fl_privacy.tasks.data import Dataset, Parts
from fl_privacy.tasks.dataset import DataSet
from fl_privacy.tasks.load import FEATURES, Columns, Plan, on_grid, read_csv, split
from fl_privacy.tasks.own_files import LARGEST, File, opened, own_file
from fl_privacy.tasks.scaling import Statistics

DAY = 24 * 60


class Load(DataSet):
    """One CSV file of readings per site: a column of times and a column of numbers."""

    own_sites: ClassVar[bool] = True
    public_with: ClassVar[str] = "{scale: {mean: ..., std: ...}}"

    file: File = None
    delimiter: Literal[",", ";", "\t", "|"] = ","
    time: str = Field("time", min_length=1, description="column of the times, in ISO 8601")
    value: str = Field("kwh", min_length=1, description="column of the readings")
    start: datetime = Field(description="the first reading, in the file's own time")
    days: int = Field(ge=1, le=36_600, description="from `start` on; readings outside are ignored")
    minutes: int = Field(30, ge=1, le=DAY, description="from one reading to the next; readings in between are ignored")
    windows: int = Field(1, ge=1, le=1000, description="equal parts of the time, the end of each held out")
    held_out: int = Field(720, ge=2, description="readings at the end of each window that are held out")
    length: int = Field(48, ge=1, le=10_000, description="readings in a record; the one after them is forecast")
    stride: int = Field(7, ge=1, description="readings from the start of one record to the start of the next")
    longest_gap: int = Field(4, ge=0, description="gaps of up to so many readings repeat the reading before")
    scale: Statistics = Field(
        Statistics(), description="mean and std, or min and max; default: mean and std of the site's training readings"
    )

    @model_validator(mode="after")
    def _possible(self) -> Load:
        if self.start.tzinfo is not None:
            raise ValueError("start: it has a time zone; write the time as it is in the file, without one")
        if DAY % self.minutes:
            raise ValueError(f"minutes: {self.minutes} do not divide a day; use 15, 30 or 60")
        try:
            self._plan.parts(self._steps)
        except DataError as error:
            raise ValueError(str(error)) from None
        records = self._steps // self.stride
        if 4 * records * self.length * FEATURES > LARGEST:
            raise ValueError(f"{records} records of {self.length} readings are too many; raise stride, or lower days")
        return self

    @property
    def _plan(self) -> Plan:
        return Plan(self.windows, self.length, self.stride, self.held_out, self.longest_gap)

    @property
    def _steps(self) -> int:
        return self.days * DAY // self.minutes

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.length, FEATURES)

    @property
    def classes(self) -> int:
        return 0

    @property
    def preprocessing(self) -> str:
        return "local" if self.scale.statistics is None else "public"

    def of_site(self, site: str, folder: Path | None) -> Parts:
        path = own_file(site, folder, self.file, (".csv",))
        with opened(path) as stream:
            table = read_csv(stream, Columns(None, self.time, self.value), str(path), self.delimiter)
        readings = on_grid([table], np.datetime64(self.start), self._steps, np.timedelta64(self.minutes, "m"))
        if not np.isfinite(readings.kwh).any():
            raise DataError(f"data: {path} has no reading at the times that start, days and minutes give; correct them")
        made = split(readings, self._plan, self.scale.statistics)
        if not len(made.test):
            raise DataError(f"data: {path} has no record in the held-out parts; use fewer windows or other days")
        return Parts(*(Dataset(half.x, half.y) for half in (made.train, made.test)))
