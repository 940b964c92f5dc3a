"""The matrix as YAML: which federations are run and attacked, and which number stands where in the report."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, model_validator

from attacks.audit.formulas import FORMULAS
from fl_privacy.config import NAME, Federation, Model
from fl_privacy.errors import ConfigError, FederationError
from fl_privacy.reading import mapping, merged, text_of, validated

PAGE = "docs/audits.md"
REDUCED = "reduced"
# The harness sets these itself.
OURS = {"seed": "the matrix's `seeds` set it", "audit": "it is always true here"}

Name = Annotated[str, Field(pattern=NAME)]
Seeds = Annotated[tuple[Annotated[int, Field(ge=0, lt=2**63)], ...], Field(min_length=1)]
Paper = float | tuple[float, float] | str | None
PerColumn = str | tuple[str | None, ...] | None
Given = dict[str, Any]
Together = Annotated[int, Field(ge=1)] | Annotated[tuple[str, ...], Field(min_length=1)]


class Cell(Model):
    """A federation: what differs from `base`. It may have attacks and seeds of its own."""

    model_config = ConfigDict(extra="allow")

    attacks: tuple[str, ...] | None = Field(None, description="default: the matrix's; [] runs without any")
    seeds: Seeds | None = Field(None, description="default: the matrix's")
    views: dict[Name, Together] = Field(
        {}, description="whose views are attacked, by label: so many aggregators, or these; default: all at once"
    )

    @property
    def observers(self) -> dict[str, tuple[str, ...]]:
        """By label, the parties that collude."""
        named = {label: range(who) if isinstance(who, int) else who for label, who in self.views.items()}
        return {
            label: tuple(f"aggregator-{one}" if isinstance(one, int) else one for one in who)
            for label, who in named.items()
        }

    @property
    def changes(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


class Column(Model):
    """A column's title, and whatever of cell, measure and group is the same in all its rows."""

    title: str
    cell: str | None = None
    measure: str | None = None
    group: str | None = None
    given: Given = Field({}, description="arguments of the table's formula")


class Row(Model):
    """The same for a row; a list has one entry for each column, and null leaves that place to the paper's number."""

    title: str
    cell: PerColumn = None
    measure: PerColumn = None
    group: PerColumn = None
    given: Given = Field({}, description="arguments of the table's formula, over the column's")
    paper: tuple[Paper, ...] = Field((), description="a number, [mean, spread], text or null for each column")


@dataclass(frozen=True)
class Place:
    """One number of a table: where it comes from, and what the paper has there. A formula's is here already."""

    cell: str | None
    measure: str | None
    group: str | None
    paper: Paper
    computed: float | None = None


def _titled(value: Any) -> Any:
    return {"title": value} if isinstance(value, str) else value


class Table(Model):
    """A table of the report, and the figure of the same name."""

    id: Name
    title: str
    note: str = ""
    corner: str = Field("", description="heading of the first column")
    columns: tuple[Annotated[Column, BeforeValidator(_titled)], ...] = Field(min_length=1)
    rows: tuple[Row, ...] = Field(min_length=1)
    formula: str | None = Field(None, description="every number is this closed form's; none is measured")
    given: Given = Field({}, description="arguments of the formula in all places")
    plot: Literal["bars", "lines", "points"] = Field(
        "bars", description="lines: rows are points of the x axis; points: the first two columns against each other"
    )
    logarithmic: bool = Field(False, description="whether lines have a logarithmic scale")

    @model_validator(mode="after")
    def _check(self) -> Table:
        for row in self.rows:
            for field in ("cell", "measure", "group", "paper"):
                given = getattr(row, field)
                if isinstance(given, tuple) and given and len(given) != len(self.columns):
                    counts = f"{len(given)} entries and the table {len(self.columns)} columns"
                    raise ValueError(f"row {row.title!r}: {field} has {counts}; give one for each")
            for column, place in zip(self.columns, self.places(row), strict=True):
                for field in () if self.formula else ("cell", "measure"):
                    if getattr(place, field) is None and not isinstance(getattr(row, field), tuple):
                        where = f"row {row.title!r}, column {column.title!r}"
                        raise ValueError(f"{where}: no {field}; give the row or the column one")
        return self

    def places(self, row: Row) -> list[Place]:
        """The numbers of a row, column by column; what the row says goes before the column's."""
        found = []
        for i, column in enumerate(self.columns):
            where = {f: _at(getattr(row, f), i, getattr(column, f)) for f in ("cell", "measure", "group")}
            paper = row.paper[i] if row.paper else None
            found.append(Place(**where, paper=paper, computed=self._computed(row, column)))
        return found

    def _computed(self, row: Row, column: Column) -> float | None:
        if self.formula is None:
            return None
        if self.formula not in FORMULAS:
            raise ValueError(f"formula: {self.formula!r} is unknown; use one of {', '.join(FORMULAS)}")
        try:
            return FORMULAS[self.formula](**{**self.given, **column.given, **row.given})
        except (TypeError, FederationError) as error:
            raise ValueError(f"row {row.title!r}, column {column.title!r}: {self.formula}: {error}") from None


def _at(given: PerColumn, index: int, otherwise: str | None) -> str | None:
    if isinstance(given, tuple):
        return given[index]
    return given or otherwise


class Number(Model):
    """A number that a claim is about, or chance in its place."""

    cell: str
    measure: str
    group: str | None = None
    chance: bool = False


class Claim(Model):
    """`left` is less than `right`, or both are equal up to `within`: something a paper says, checked by seed."""

    text: str
    left: Number
    right: Number
    within: float | None = Field(None, ge=0)


class Pairs(Model):
    """Two kinds of cells compared run by run: the difference of a measure by seed, left less right, and two tests."""

    title: str
    left: tuple[str, ...] = Field(min_length=1)
    right: tuple[str, ...] = Field(min_length=1)
    measure: str = "accuracy"
    margin: float = Field(0.005, gt=0, description="within which both count as the same (TOST)")

    @model_validator(mode="after")
    def _check(self) -> Pairs:
        if len(self.left) != len(self.right):
            counts = f"{len(self.left)} cells on the left and {len(self.right)} on the right"
            raise ValueError(f"pairs {self.title!r}: {counts}; give as many on both sides")
        return self


class Reduced(Model):
    """A smaller audit of the same kind, for `--reduced` (or `--size NAME`)."""

    seeds: Seeds | None = None
    cells: tuple[str, ...] | None = Field(None, min_length=1, description="the cells that are run; default: all")
    changes: dict[str, Any] = Field({}, description="federation keys that go before those of every cell")
    like: dict[str, dict[str, Any]] = Field({}, description="further keys for the cells whose names match a pattern")
    fewer: dict[str, Seeds] = Field({}, description="other seeds for the cells whose names match a pattern")

    def seeds_of(self, cell: str) -> Seeds | None:
        """Of the first pattern that matches, or those of all cells."""
        return next((seeds for pattern, seeds in self.fewer.items() if fnmatchcase(cell, pattern)), self.seeds)

    def of(self, cell: str) -> dict[str, Any]:
        """What goes over a cell."""
        made = self.changes
        for pattern, changes in self.like.items():
            made = merged(made, changes) if fnmatchcase(cell, pattern) else made
        return made


class Matrix(Model):
    """An audit: cells x seeds are run, attacked and put into tables."""

    name: Name
    title: str = ""
    note: str = ""
    seeds: Seeds
    attacks: tuple[str, ...] = ()
    base: dict[str, Any] = Field({}, description="federation keys that all cells share")
    cells: dict[Name, Cell] = Field(min_length=1)
    measures: dict[str, str] = Field({}, description="what each measure means: the report's glossary")
    curves: tuple[str, ...] | None = Field(None, description="the curves that are kept and drawn; default: all")
    tables: tuple[Table, ...] = ()
    claims: tuple[Claim, ...] = ()
    pairs: tuple[Pairs, ...] = ()
    reduced: Reduced | None = None
    sizes: dict[Name, Reduced] = Field({}, description="further sizes, for `--size NAME`")

    def size(self, name: str) -> Reduced | None:
        """The reduction of this name; none for the full size."""
        return self.reduced if name == REDUCED else self.sizes.get(name)

    def federation(self, cell: str, size: str) -> dict[str, Any]:
        """A cell as a federation's keys: the base, over it the cell, over it the reduction."""
        small = self.size(size)
        return merged(merged(self.base, self.cells[cell].changes), small.of(cell) if small else {})


@dataclass(frozen=True)
class Job:
    """One run: a cell with a seed."""

    cell: str
    seed: int
    federation: Federation
    attacks: tuple[str, ...]
    views: tuple[tuple[str, tuple[str, ...]], ...] = ()
    curves: tuple[str, ...] | None = None

    @property
    def label(self) -> str:
        return f"{self.cell}-seed-{self.seed}"


@dataclass(frozen=True)
class Audit:
    """A checked matrix, in full or reduced, and its runs in order."""

    matrix: Matrix
    size: str  # empty: in full
    jobs: tuple[Job, ...]

    @property
    def reduced(self) -> bool:
        return bool(self.size)

    @property
    def name(self) -> str:
        return self.matrix.name + (f"-{self.size}" if self.size else "")

    @property
    def cells(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(job.cell for job in self.jobs))


def load(path: str | Path, reduced: bool = False, size: str = "") -> Audit:
    """Read a matrix and check every cell of it; all problems are reported at once."""
    source, size = str(path), REDUCED if reduced else size
    matrix = validated(Matrix, mapping(text_of(path, "matrix"), source, PAGE), source)
    if reduced and matrix.reduced is None:
        raise ConfigError(f"{source}: reduced: missing, and --reduced was given; add it or leave --reduced out")
    small = matrix.size(size)
    if size and small is None:
        there = ", ".join([*([REDUCED] if matrix.reduced else []), *matrix.sizes]) or "none"
        raise ConfigError(f"{source}: sizes: {size!r} is not there; use one of {there}, or leave --size out")
    problems = [*_unknown_cells(matrix), *_repeated(matrix)]
    jobs: list[list[Job]] = []
    for name, cell in matrix.cells.items():
        if small and small.cells is not None and name not in small.cells:
            continue
        try:
            jobs.append(_jobs(matrix, name, cell, size))
        except ConfigError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError(f"{source}: " + "; ".join(problems))
    # Seed by seed: whoever stops early has every cell, with fewer seeds.
    turns = itertools.zip_longest(*jobs)
    return Audit(matrix, size, tuple(job for turn in turns for job in turn if job is not None))


def _jobs(matrix: Matrix, name: str, cell: Cell, size: str) -> list[Job]:
    where, small = f"cells.{name}", matrix.size(size)
    values = matrix.federation(name, size)
    for key, reason in OURS.items():
        if key in values:
            raise ConfigError(f"{where}: {key}: {reason}; remove it")
    attacks = matrix.attacks if cell.attacks is None else cell.attacks
    seeds = (small.seeds_of(name) if small else None) or cell.seeds or matrix.seeds
    # Not the cell's name: cells with the same federation share their runs.
    named = {"name": matrix.name, **values, "audit": True}
    views = tuple(cell.observers.items())
    made = [validated(Federation, {**named, "seed": seed}, where) for seed in seeds]
    return [Job(name, seed, one, attacks, views, matrix.curves) for seed, one in zip(seeds, made, strict=True)]


def _unknown_cells(matrix: Matrix) -> list[str]:
    used = [
        (f"tables.{table.id}: row {row.title!r}", place.cell)
        for table in matrix.tables
        for row in table.rows
        for place in table.places(row)
    ]
    used += [(f"claims: {claim.text!r}", side.cell) for claim in matrix.claims for side in (claim.left, claim.right)]
    used += [(f"pairs: {one.title!r}", cell) for one in matrix.pairs for cell in (*one.left, *one.right)]
    small = {REDUCED: matrix.reduced, **{f"sizes.{name}": size for name, size in matrix.sizes.items()}}
    used += [(f"{where}.cells", name) for where, size in small.items() for name in (size.cells or () if size else ())]
    there = ", ".join(matrix.cells)
    unknown = {(where, name) for where, name in used if name is not None and name not in matrix.cells}
    return [f"{where}: cell {name!r} is not in the matrix; use one of {there}" for where, name in sorted(unknown)]


def _repeated(matrix: Matrix) -> list[str]:
    ids = [table.id for table in matrix.tables]
    problems = [
        f"tables: id {one!r} is there twice; give every table its own" for one in set(ids) if ids.count(one) > 1
    ]
    lists = [("seeds", matrix.seeds), *((f"cells.{n}.seeds", c.seeds) for n, c in matrix.cells.items())]
    return problems + [f"{where}: a seed is there twice; remove it" for where, s in lists if s and len(set(s)) < len(s)]
