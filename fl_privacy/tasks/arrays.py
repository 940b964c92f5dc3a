"""`dataset: arrays`: the records and labels of a site in an .npz or .parquet file."""

from __future__ import annotations

import math
import zipfile
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray
from pydantic import BeforeValidator, Field, field_validator

from fl_privacy.choices import Model
from fl_privacy.tasks.data import Labels, Parts
from fl_privacy.tasks.dataset import DataSet
from fl_privacy.tasks.findings import Add, Findings
from fl_privacy.tasks.own_files import LARGEST, File, HeldOut, contents, own_file, parts

Array = NDArray[Any]
Name = Annotated[str, Field(min_length=1)]

NPY = ".npy"  # what the name of an array ends with in an .npz file
NOT_FINITE = "not a finite number (correct or remove the record)"
TOO_LARGE = f"more than {LARGEST >> 20} MiB of numbers (split the file over more sites)"


def _several(value: Any) -> Any:
    """`x` means `[x]`."""
    return (value,) if isinstance(value, str) else value


class Records(Model):
    """Where the records are, and what one looks like."""

    name: Annotated[tuple[Name, ...], BeforeValidator(_several)] = Field(
        ("x",), min_length=1, description="an array or a column of lists, or several columns"
    )
    shape: tuple[Annotated[int, Field(ge=1)], ...] = Field(min_length=1, max_length=4, description="of one record")
    mean: float = Field(0.0, description="subtracted from every number")
    std: float = Field(1.0, gt=0, description="every number is divided by it, such as 255 for bytes")


class Targets(Model):
    """Where the labels are."""

    name: Name = "y"
    classes: int = Field(ge=0, le=1_000_000, description="labels are 0 to classes - 1; 0: they are numbers to predict")

    @field_validator("classes")
    @classmethod
    def _not_one(cls, classes: int) -> int:
        if classes == 1:
            raise ValueError("one class leaves nothing to learn; use 2 or more, or 0 for numbers")
        return classes


class Arrays(DataSet):
    """One .npz or .parquet file per site."""

    own_sites: ClassVar[bool] = True

    file: File = None
    x: Records
    y: Targets
    held_out: HeldOut = HeldOut()

    @property
    def shape(self) -> tuple[int, ...]:
        return self.x.shape

    @property
    def classes(self) -> int:
        return self.y.classes

    def of_site(self, site: str, folder: Path | None) -> Parts:
        path = own_file(site, folder, self.file, tuple(READERS))
        found, column = Findings(path.parent), self.held_out.column
        add = found.of(path.name)
        arrays = _read(path, (self.y.name, *self.x.name, *([column] if column else [])), add)
        found.check()
        x = self._records([arrays[name] for name in self.x.name], add)
        y = self._labels(arrays[self.y.name], add)
        found.check()
        marked = None if column is None else _equal(arrays[column], self.held_out.value)
        return parts(x, y, self.held_out.choose(contents(x, y), marked, path), path)

    def _records(self, columns: list[Array], add: Add) -> NDArray[np.float32]:
        """In the shape that the config states, and scaled."""
        where, size = f"array {self.x.name[0]!r}", math.prod(self.shape)
        found = [column.reshape(len(column), -1) for column in columns]
        if not all(map(_numeric, found)) or sum(column.shape[1] for column in found) != size:
            stored = " and ".join(f"{column.dtype} of shape {column.shape}" for column in columns[:2])
            add(f"{stored} (save {size} numbers per record, or correct task.options.x.shape)", where)
            return np.empty((0, *self.shape), np.float32)
        raw = np.concatenate(found, axis=1)
        _report(~np.isfinite(raw).all(axis=1), NOT_FINITE, where, add)
        scaled = (raw.astype(np.float32) - np.float32(self.x.mean)) / np.float32(self.x.std)
        return scaled.reshape(-1, *self.shape)

    def _labels(self, labels: Array, add: Add) -> Labels:
        where, classes = f"array {self.y.name!r}", self.classes
        if not _numeric(labels) or labels.ndim != 1:
            add(f"{labels.dtype} of shape {labels.shape} (save one number per record)", where)
            return np.empty(0, np.int64)
        if not classes:
            _report(~np.isfinite(labels), NOT_FINITE, where, add)
            return labels.astype(np.float32)
        known = (labels >= 0) & (labels < classes) & (labels == np.floor(labels))
        _report(~known, f"not a class from 0 to {classes - 1} (correct it or task.options.y.classes)", where, add)
        return np.where(known, labels, 0).astype(np.int64)


def _numeric(array: Array) -> bool:
    return array.dtype == np.bool_ or np.issubdtype(array.dtype, np.integer) or np.issubdtype(array.dtype, np.floating)


def _equal(array: Array, value: str) -> NDArray[np.bool_]:
    """Whether each entry reads as the value; texts of very different lengths are not made equally long."""
    if array.dtype == object:
        return np.fromiter((str(entry) == value for entry in array), np.bool_, len(array))
    return np.asarray(array.astype(str) == value, np.bool_)


def _report(wrong: NDArray[np.bool_], problem: str, where: str, add: Add) -> None:
    for record in np.flatnonzero(wrong):
        add(problem, where, f"record {record} (from 0)")


def _read(path: Path, names: Sequence[str], add: Add) -> dict[str, Array]:
    """The named arrays, which are all of the same length."""
    try:
        arrays = READERS[path.suffix](path, names, add)
    except Exception as error:  # numpy, zipfile and pyarrow document no list for a damaged file
        add(f"not readable: {(str(error) or type(error).__name__).splitlines()[0][:80]} (save it again, as numbers)")
        return {}
    lengths = {name: array.shape[0] if array.ndim else 0 for name, array in arrays.items()}
    if len(set(lengths.values())) > 1:
        counts = ", ".join(f"{count} in {name!r}" for name, count in lengths.items())
        add(f"not as many labels as records: {counts} (give every record one)")
    elif not all(lengths.values()):
        add("no records (add some)")
    return arrays


def _known(name: str, names: Collection[str], add: Add) -> bool:
    if name not in names:
        add("missing (add it or correct its name in task.options)", f"array {name!r}")
    return name in names


def _npz(path: Path, names: Sequence[str], add: Add) -> dict[str, Array]:
    """Arrays of numbers alone: an array of Python objects would run code."""
    with zipfile.ZipFile(path) as members:
        stored = {one.filename.removesuffix(NPY): one for one in members.infolist() if one.filename.endswith(NPY)}
        known = [name for name in names if _known(name, stored, add)]
        if sum(stored[name].file_size for name in known) > LARGEST:
            add(TOO_LARGE)
            return {}
        return {name: _npy(members, stored[name]) for name in known}


def _npy(members: zipfile.ZipFile, member: zipfile.ZipInfo) -> Array:
    with members.open(member) as stream:
        return np.asarray(npy.read_array(stream, allow_pickle=False))


def _parquet(path: Path, names: Sequence[str], add: Add) -> dict[str, Array]:
    """Columns of numbers, of lists of numbers, or of texts."""
    from pyarrow import parquet

    metadata = parquet.read_metadata(path)
    kinds = {field.name: field.type for field in metadata.schema.to_arrow_schema()}
    known = [name for name in names if _known(name, kinds, add) and _plain(name, kinds[name], add)]
    if _size(metadata, known) > LARGEST:
        add(TOO_LARGE)
        return {}
    texts = [name for name in known if _is_text(kinds[name])]  # of which equal ones are kept once
    with parquet.ParquetFile(path, metadata=metadata, read_dictionary=texts) as file:
        table = file.read(columns=known)
    return {name: _values(table[name], f"array {name!r}", add) for name in known}


def _plain(name: str, kind: Any, add: Add) -> bool:
    """Whether a column takes no more memory than its file says, however it is packed."""
    from pyarrow import types

    inner = kind.value_type if _is_list(kind) else kind
    fits = types.is_integer(inner) or types.is_floating(inner) or types.is_boolean(inner) or _is_text(kind)
    if not fits:
        add(f"{str(kind)[:40]} (save numbers, or lists of numbers)", f"array {name!r}")
    return fits


def _size(metadata: Any, names: Sequence[str]) -> int:
    """Bytes of these columns in memory: a file of a megabyte may hold one number a billion times."""
    groups = map(metadata.row_group, range(metadata.num_row_groups))
    chunks = [group.column(index) for group in groups for index in range(group.num_columns)]
    needed = [one for one in chunks if any(f"{one.path_in_schema}.".startswith(f"{name}.") for name in names)]
    return sum(max(8 * one.num_values, one.total_uncompressed_size) for one in needed)


def _is_text(kind: Any) -> bool:
    from pyarrow import types

    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_dictionary(kind))


def _is_list(kind: Any) -> bool:
    from pyarrow import types

    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def _values(column: Any, where: str, add: Add) -> Array:
    """A column as an array: of numbers (NaN: missing), or of lists that are all of the same length."""
    from pyarrow import compute

    if not _is_list(column.type):
        return np.asarray(column.to_numpy())
    lengths = compute.unique(compute.list_value_length(column)).to_pylist()
    if len(lengths) != 1 or lengths[0] is None:
        add("lists of different lengths (make them the same)", where)
        return np.empty((len(column), 0), np.float32)
    return np.asarray(compute.list_flatten(column).to_numpy()).reshape(len(column), -1)


READERS = {".npz": _npz, ".parquet": _parquet}
