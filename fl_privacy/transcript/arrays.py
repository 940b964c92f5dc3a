"""The two files of a record: arrays as safetensors, streamed, and their index as Parquet."""

from __future__ import annotations

import hashlib
import io
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file

from fl_privacy.errors import TranscriptError
from fl_privacy.transcript.events import Event, parse
from fl_privacy.transcript.files import canonical, first_line, open_regular, parse_object, plain

Array = NDArray[Any]
Tier = float | str | None

NUMBERS = ("float64", "float32", "float16", "complex64", "int64", "uint64", "int32", "uint32")
SMALL = ("int16", "uint16", "int8", "uint8")
# As safetensors calls them: F64, U8, ...
DTYPES = {name: f"{name[0].upper()}{8 * np.dtype(name).itemsize}" for name in NUMBERS + SMALL} | {"bool": "BOOL"}
COLUMNS = ("round", "attempt", "seq", "kind", "name", "row", "tier", "tier_label", "dtype", "shape", "file", "event")
CHUNK = 1 << 20
MAX_ROWS = 10_000_000


def check_arrays(arrays: Mapping[str, Any]) -> dict[str, Array]:
    """The arrays under names and types that safetensors can hold."""
    checked: dict[str, Array] = {}
    for name, value in arrays.items():
        array = np.asarray(value)
        if array.dtype.name not in DTYPES:
            raise TranscriptError(f"arrays.{name}: dtype {array.dtype} is not recorded; use one of {', '.join(DTYPES)}")
        if not isinstance(name, str) or name == "__metadata__" or not _is_text(name):
            raise TranscriptError(f"arrays: {name!r} cannot name an array; use other text")
        checked[name] = array
    return checked


def write_arrays(file: BinaryIO, arrays: Mapping[str, Array], metadata: Mapping[str, str]) -> str:
    """Stream the arrays as one safetensors file and return its SHA-256; no array is copied as a whole."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    ordered = sorted(arrays.items(), key=lambda item: -item[1].itemsize)
    for name, array in ordered:
        start, end = end, end + array.nbytes
        header[name] = {"dtype": DTYPES[array.dtype.name], "shape": list(array.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    head = [memoryview(len(text).to_bytes(8, "little")), memoryview(text)]
    for part in itertools.chain(head, *(_chunks(array) for _, array in ordered)):
        file.write(part)
        digest.update(part)
    return digest.hexdigest()


def read_arrays(path: Path) -> dict[str, Array]:
    open_regular(path).close()
    try:
        return dict(load_file(path))
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, AttributeError, MemoryError) as error:
        raise TranscriptError(f"{path}: not a readable safetensors file ({first_line(error)})") from None


def index_rows(
    arrays: Mapping[str, Array], tiers: Sequence[Tier], events: Sequence[Event], common: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """One row per array, per tier (of row i of every matrix) and per event."""
    blank = {**dict.fromkeys(COLUMNS), **common}
    rows = [
        {**blank, "kind": "array", "name": name, "dtype": array.dtype.name, "shape": list(array.shape)}
        for name, array in arrays.items()
    ]
    rows += [{**blank, "kind": "tier", "row": row, **_tier_columns(row, tier)} for row, tier in enumerate(tiers)]
    for row, event in enumerate(events):
        text = canonical(plain(event.to_json(), f"events[{row}]")).decode()
        rows.append({**blank, "kind": "event", "row": row, "event": text})
    return rows


def encode_index(rows: Sequence[Mapping[str, Any]]) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    buffer, schema = io.BytesIO(), _schema()
    table = pa.Table.from_pylist(rows, schema=schema) if rows else schema.empty_table()
    pq.write_table(table, buffer, compression="zstd")
    return buffer.getvalue()


def read_index(path: Path) -> list[dict[str, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    with open_regular(path) as file:
        try:
            table = pq.ParquetFile(file)
            if table.metadata.num_rows > MAX_ROWS or not table.schema_arrow.equals(_schema()):
                raise TranscriptError(f"{path}: its columns or size are not those of this format")
            rows: list[dict[str, Any]] = table.read().to_pylist()
        except (pa.ArrowException, OSError, ValueError, MemoryError) as error:
            raise TranscriptError(f"{path}: not a readable Parquet file ({first_line(error)})") from None
    return rows


def tiers_of(rows: Sequence[Mapping[str, Any]]) -> list[Tier]:
    return [row["tier"] if row["tier_label"] is None else row["tier_label"] for row in rows if row["kind"] == "tier"]


def events_of(rows: Sequence[Mapping[str, Any]], where: str) -> list[Event]:
    texts = (row["event"] or "" for row in rows if row["kind"] == "event")
    return [parse(parse_object(text.encode(), where), where) for text in texts]


def _chunks(array: Array) -> Iterator[memoryview]:
    """The bytes of an array in C order, little-endian, a few MiB at a time."""
    if array.size == 0:
        return
    little = [array.dtype.newbyteorder("<")]
    flags: Any = ("external_loop", "buffered")
    parts = np.nditer([array], flags, op_dtypes=little, order="C", casting="equiv", buffersize=CHUNK)
    for part in parts:
        yield np.ascontiguousarray(part).view(np.uint8).data


def _tier_columns(row: int, tier: Any) -> dict[str, float | str | None]:
    if isinstance(tier, str) and _is_text(tier):
        return {"tier_label": tier}
    try:
        return {"tier": None if tier is None else float(tier)}
    except (TypeError, ValueError):
        raise TranscriptError(f"tiers[{row}]: {tier!r:.40} is neither a number nor text") from None


def _schema() -> Any:
    import pyarrow as pa

    whole = pa.int64()
    types = {"round": whole, "seq": whole, "row": whole, "tier": pa.float64(), "shape": pa.list_(whole)}
    return pa.schema([(name, types.get(name, pa.string())) for name in COLUMNS])


def _is_text(value: str) -> bool:
    """Whether UTF-8 can hold it: lone surrogates are no text."""
    return not any("\ud800" <= letter <= "\udfff" for letter in value)
