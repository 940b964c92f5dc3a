"""Read the columns of a CSV file as numbers; every problem is listed with its line, column and fix."""

from __future__ import annotations

import csv
import math
from array import array
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from datetime import UTC, datetime
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from fl_privacy.tasks.findings import Add, Findings

MISSING = frozenset(("", "?", "na", "nan", "none", "null"))  # how tables write a missing value, in lower case
LARGEST = 2**30  # bytes of a file
LONGEST = 2**20  # bytes of a line
MOST_CELLS = 2**27
TOO_LARGE = 1e30  # for the float32 of a model
UNDECODABLE = "\ufffd"
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

Level = str | int | float
Code = Callable[[str], float]  # a cell as a number, NaN if missing; a ValueError has the problem and the fix
Cells = NDArray[np.float64]


def read(
    stream: BinaryIO, file: str, columns: Sequence[tuple[str, Code]], found: Findings, delimiter: str = ","
) -> Cells:
    """One row per line and one column per entry of `columns`; other columns are ignored."""
    add, before = found.of(file), found.count
    lines = _Lines(stream, add)
    rows = csv.reader(lines, delimiter=delimiter, strict=True)
    cells = array("d")
    try:
        header = [name.strip() for name in next(filter(None, rows), [])]
        if lines.decoded(rows.line_num) and header:
            counts, first = Counter(header), {name: at for at, name in reversed(list(enumerate(header)))}
            places = [(first.get(name), name, code) for name, code in columns]
            for name, _ in columns:
                _check_column(counts, name, add)
            for row in filter(None, rows):
                if len(cells) > MOST_CELLS:
                    add(f"more than {MOST_CELLS} values (split the file over more sites)", f"line {rows.line_num}")
                    break
                if lines.decoded(rows.line_num) and _complete(row, header, rows.line_num, add):
                    cells.extend(_coded(row, places, rows.line_num, add))
    except csv.Error as error:
        add(f"not CSV: {error} (correct the quotes)", f"line {rows.line_num}")
    if not cells and found.count == before:
        add("no records (write a header and one line per record)")
    return np.asarray(cells, np.float64).reshape(-1, len(columns))


class _Lines:
    """The lines of a file as text, within bounds."""

    def __init__(self, stream: BinaryIO, add: Add) -> None:
        self._stream, self._add = stream, add
        self._size, self._broken = 0, False

    def __iter__(self) -> Iterator[str]:
        encoding = "utf-8-sig"
        while line := self._stream.readline(LONGEST + 1):
            self._size += len(line)
            if len(line) > LONGEST or self._size > LARGEST:
                limits = f"{LONGEST >> 20} MiB for a line and {LARGEST >> 20} MiB for a file"
                self._add(f"too large: the limits are {limits} (split it over more sites)")
                return
            text = line.decode(encoding, errors="replace")
            self._broken = self._broken or UNDECODABLE in text
            yield text
            encoding = "utf-8"

    def decoded(self, line: int) -> bool:
        """Whether all lines since the last call were UTF-8."""
        broken, self._broken = self._broken, False
        if broken:
            self._add("not UTF-8 (save the file as UTF-8)", f"line {line}")
        return not broken


def _check_column(counts: Counter[str], name: str, add: Add) -> None:
    if counts[name] > 1:
        add("there twice (rename one)", "line 1", f"column {name!r}")
    elif not counts[name]:
        hint = "" if counts.total() > 1 else "; as there is only one column, check task.options.delimiter"
        add(f"missing (add it or correct its name in task.options{hint})", "line 1", f"column {name!r}")


def _complete(row: list[str], header: list[str], line: int, add: Add) -> bool:
    if len(row) != len(header):
        add(f"{len(row)} cells, and the header has {len(header)} (correct the line)", f"line {line}")
    return len(row) == len(header)


def _coded(row: list[str], places: Sequence[tuple[int | None, str, Code]], line: int, add: Add) -> Iterator[float]:
    for place, name, code in places:
        try:
            yield math.nan if place is None else code(row[place].strip())
        except ValueError as error:
            add(str(error), f"line {line}", f"column {name!r}")
            yield math.nan


def number(missing: Collection[str] = MISSING) -> Code:
    """A finite number."""

    def code(cell: str) -> float:
        if cell.lower() in missing:
            return math.nan
        try:
            value = math.nan if "_" in cell else float(cell)
        except ValueError:
            value = math.nan
        if not abs(value) < TOO_LARGE:
            raise ValueError("not a number (write one such as 1.5, below 1e30, or leave the cell empty)")
        return value

    return code


def level(levels: Sequence[Level], missing: Collection[str] = MISSING) -> Code:
    """The place of one of the levels. Levels that are numbers are compared as numbers: 1 and 1.0 are the same."""
    problem = f"none of the {len(levels)} levels (correct it, or add it to the levels in task.options)"
    numeric = not any(isinstance(known, str) for known in levels)
    places = {float(known) if numeric else str(known): float(place) for place, known in enumerate(levels)}

    def code(cell: str) -> float:
        try:
            known = places.get(float(cell) if numeric else cell)
        except ValueError:
            known = None
        if known is not None:
            return known
        if cell.lower() in missing:
            return math.nan
        raise ValueError(problem)

    return code


class Texts:
    """The number of a text among those seen so far."""

    def __init__(self) -> None:
        self.places: dict[str, int] = {}

    def __call__(self, cell: str) -> float:
        return float(self.places.setdefault(cell, len(self.places)))


def time(cell: str) -> float:
    """Seconds since 1970; a time without a zone is as good as UTC."""
    try:
        found = datetime.fromisoformat(cell)
    except ValueError:
        raise ValueError("not a time (write it as 2024-01-31 23:30)") from None
    return ((found if found.tzinfo else found.replace(tzinfo=UTC)) - EPOCH).total_seconds()
