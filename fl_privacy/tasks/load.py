"""Electricity load from CSV files: readings on a time grid, and records to forecast the next reading."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import BinaryIO

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from fl_privacy.errors import DataError
from fl_privacy.tasks import tables
from fl_privacy.tasks.data import Dataset, Split, pool
from fl_privacy.tasks.findings import Findings

HALF_HOUR = np.timedelta64(30, "m")
DAY_HOURS = (8, 18)
NIGHT_HOURS = (20, 6)

FEATURES = 3  # per step: the reading, sine and cosine of the hour

Series = NDArray[np.float32]
Hours = NDArray[np.float64]


@dataclass(frozen=True)
class Columns:
    """The names of the CSV columns for household (None: a file is one household), time and energy."""

    id: str | None
    time: str
    kwh: str


@dataclass(frozen=True)
class Table:
    """The rows of one CSV: index into `households`, time, and energy (NaN: missing)."""

    households: tuple[str, ...]
    household: NDArray[np.int64]
    time: NDArray[np.datetime64]
    kwh: Series


@dataclass(frozen=True)
class Readings:
    """kWh by household and step from `start` on; NaN marks a missing reading."""

    households: tuple[str, ...]
    kwh: Series
    start: np.datetime64
    step: np.timedelta64 = HALF_HOUR

    def take(self, households: Sequence[str]) -> Readings:
        """The named households, in that order."""
        rows = [self.households.index(name) for name in households]
        return Readings(tuple(households), self.kwh[rows], self.start, self.step)

    def hours(self) -> NDArray[np.float64]:
        """The hour of the day at which each step begins, 0 to 24."""
        since = self.start + np.arange(self.kwh.shape[1]) * self.step
        return np.asarray((since - since.astype("datetime64[D]")) / np.timedelta64(1, "h"), np.float64)


@dataclass(frozen=True)
class Plan:
    """How series become records: disjoint time windows, the end of each held out, and records from both parts.

    A record is `length` readings and the next one. Records start `stride` steps apart; a stride that shares no factor
    with a day's steps covers every time of day. Neighbouring records overlap, but none crosses from the training part
    into the held-out part, so no held-out record shares a reading with a training record.
    """

    windows: int = 5
    length: int = 48
    stride: int = 7
    held_out: int = 720
    longest_gap: int = 4

    def parts(self, steps: int) -> list[tuple[slice, slice]]:
        """The training and the held-out part of each window of a series of this many steps."""
        size = steps // self.windows
        if size - self.held_out <= self.length or self.held_out <= self.length:
            raise DataError(
                f"load: {self.windows} windows of {size} steps, {self.held_out} of them held out, are too short for "
                f"records of {self.length}; use fewer windows or shorter records"
            )
        cuts = [(w * size, (w + 1) * size - self.held_out, (w + 1) * size) for w in range(self.windows)]
        return [(slice(start, cut), slice(cut, stop)) for start, cut, stop in cuts]


def read_csv(stream: BinaryIO, columns: Columns, name: str, delimiter: str = ",") -> Table:
    """The rows of one file; other columns are ignored. Without a column of households, the file is one."""
    file, households = PurePath(name), tables.Texts()
    codes: list[tuple[str, tables.Code]] = [(columns.time, tables.time), (columns.kwh, tables.number())]
    codes.append(
        (columns.id, households) if columns.id is not None else (columns.time, lambda _: households(file.stem))
    )
    found = Findings(file.parent)
    time, kwh, household = tables.read(stream, file.name, codes, found, delimiter).T
    found.check()
    microseconds = np.round(time * 1e6).astype(np.int64).astype("datetime64[us]")
    return Table(tuple(households.places), household.astype(np.int64), microseconds, kwh.astype(np.float32))


def on_grid(read: Iterable[Table], start: np.datetime64, steps: int, step: np.timedelta64 = HALF_HOUR) -> Readings:
    """Readings by household (sorted by name) and step: drops times off the grid; the last of two readings wins."""
    rows: dict[str, Series] = {}
    for table in read:
        since = (table.time - start.astype("datetime64[us]")).astype(np.int64)
        slot, off = np.divmod(since, int(step / np.timedelta64(1, "us")))
        kept = (off == 0) & (slot >= 0) & (slot < steps) & np.isfinite(table.kwh)
        found = np.full((len(table.households), steps), np.nan, np.float32)
        found[table.household[kept], slot[kept]] = table.kwh[kept]
        for name, row in zip(table.households, found, strict=True):
            rows[name] = np.where(np.isfinite(row), row, rows[name]) if name in rows else row
    names = tuple(sorted(rows))
    kwh = np.stack([rows[name] for name in names]) if names else np.empty((0, steps), np.float32)
    return Readings(names, kwh, start, step)


def fill(series: Series, longest: int) -> Series:
    """Fill gaps of up to `longest` steps with the reading before them: interpolation would leak the future."""
    there = np.isfinite(series)
    at = np.arange(len(series))
    before = np.maximum.accumulate(np.where(there, at, -1))
    following = np.minimum.accumulate(np.where(there, at, len(series))[::-1])[::-1]
    short = (before >= 0) & (following - before - 1 <= longest)
    filled: Series = np.where(short, series[np.maximum(before, 0)], np.float32(np.nan))
    return filled


def records(series: Series, hours: Hours, plan: Plan) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Inputs and the readings that follow them; drops records with a long gap or without a reading to forecast.

    An input is a reading with the sine and cosine of the next hour, which carries much of the forecast.
    """
    loads = sliding_window_view(fill(series, plan.longest_gap)[:-1], plan.length)[:: plan.stride]
    angle = sliding_window_view(hours[1:] * (np.pi / 12), plan.length)[:: plan.stride]
    targets = series[plan.length :][:: plan.stride]
    whole = np.isfinite(loads).all(axis=1) & np.isfinite(targets)
    inputs = np.stack([loads[whole], np.sin(angle[whole]), np.cos(angle[whole])], axis=2)
    return inputs.astype(np.float32), targets[whole]


def standardise(kwh: Series, training: Sequence[slice]) -> Series:
    """Scale each household to zero mean and unit variance of its training readings; constant ones are only centred."""
    seen = np.concatenate([kwh[:, part] for part in training], axis=1).astype(np.float64)
    count = np.maximum(np.isfinite(seen).sum(axis=1), 1)
    mean = np.nansum(seen, axis=1) / count
    spread = np.sqrt(np.nansum((seen - mean[:, None]) ** 2, axis=1) / count)
    return np.asarray((kwh - mean[:, None]) / np.where(spread > 0, spread, 1.0)[:, None], np.float32)


def split(readings: Readings, plan: Plan, statistics: tuple[float, float] | None = None) -> Split:
    """One site per household and window (`NAME-wN`), window by window; drops sites without a training record.

    Readings are scaled by a mean and a deviation that are given for all, else by those of each household.
    """
    parts, hours = plan.parts(readings.kwh.shape[1]), readings.hours()
    if statistics is None:
        series = standardise(readings.kwh, [training for training, _ in parts])
    else:
        series = ((readings.kwh - statistics[0]) / statistics[1]).astype(np.float32)
    sites: list[str] = []
    halves: tuple[list[Dataset], list[Dataset]] = ([], [])
    for window, both in enumerate(parts):
        for row, household in zip(series, readings.households, strict=True):
            cut = [records(row[part], hours[part], plan) for part in both]
            if not len(cut[0][1]):
                continue
            for half, (x, y) in zip(halves, cut, strict=True):
                half.append(Dataset(x, y, np.full(len(y), len(sites), np.int64)))
            sites.append(f"{household.lower()}-w{window}")
    if not sites:
        raise DataError("load: no household has a training record; use fewer windows or other data")
    return Split(pool(halves[0]), pool(halves[1]), 0, (plan.length, FEATURES), tuple(sites))


def day_share(readings: Readings) -> NDArray[np.float64]:
    """The share of the hours 8 to 18 in a household's average consumption from 8 to 18 h and from 20 to 6 h."""
    hours, there = readings.hours(), np.isfinite(readings.kwh)
    known = np.where(there, readings.kwh, 0)
    by_day = (hours >= DAY_HOURS[0]) & (hours < DAY_HOURS[1])
    by_night = (hours >= NIGHT_HOURS[0]) | (hours < NIGHT_HOURS[1])
    day, night = (
        known[:, chosen].sum(axis=1, dtype=np.float64) / np.maximum(there[:, chosen].sum(axis=1), 1)
        for chosen in (by_day, by_night)
    )
    total = day + night
    return np.asarray(np.where(total > 0, day / np.where(total > 0, total, 1), 0.5))
