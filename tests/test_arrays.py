"""`dataset: arrays`: .npz and .parquet files, and what is said of bad ones."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray
from pyarrow import parquet
from pydantic import ValidationError

from fl_privacy.errors import DataError
from fl_privacy.tasks import arrays
from fl_privacy.tasks.arrays import Arrays

PART = np.array(["test", "train", "train"] * 10)
X = np.arange(30 * 6, dtype=np.int16).reshape(30, 3, 2)
Y = np.arange(30) % 3
OPTIONS: dict[str, Any] = {"x": {"shape": [3, 2]}, "y": {"classes": 3}, "held_out": {"column": "part"}}


def made(**changes: Any) -> Arrays:
    return Arrays.model_validate(OPTIONS | changes)


def npz(folder: Path, **named: NDArray[Any]) -> Path:
    np.savez(folder / "a.npz", **({"x": X, "y": Y, "part": PART} | named))
    return folder


def parquet_file(folder: Path, **named: Any) -> Path:
    columns = {"x": X.reshape(30, -1).tolist(), "y": Y.tolist(), "part": PART.tolist()} | named
    parquet.write_table(pa.table(columns), folder / "a.parquet")
    return folder


def problems(options: Arrays, folder: Path) -> str:
    with pytest.raises(DataError) as error:
        options.of_site("a", folder)
    text = str(error.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize("write", [npz, parquet_file])
def test_both_formats_give_the_records_that_the_config_describes(write: Any, tmp_path: Path) -> None:
    data = made(x={"shape": [3, 2], "mean": 10, "std": 4})
    found = data.of_site("a", write(tmp_path))
    assert (data.shape, data.classes, data.preprocessing) == ((3, 2), 3, "public")
    np.testing.assert_array_equal(found.train.x, (X[PART == "train"].astype(np.float32) - 10) / 4)
    np.testing.assert_array_equal(found.held_out.y, Y[PART == "test"])
    assert (found.train.x.dtype, found.train.y.dtype) == (np.float32, np.int64)


@settings(max_examples=25)
@given(
    x=hnp.arrays(st.sampled_from([np.float32, np.uint8, np.int64]), (40, 4), elements=st.integers(0, 200)),
    y=hnp.arrays(np.float64, 40, elements=st.floats(-1e6, 1e6)),
)
def test_numbers_come_back(tmp_path_factory: pytest.TempPathFactory, x: NDArray[Any], y: NDArray[np.float64]) -> None:
    folder = tmp_path_factory.mktemp("site")
    marks = np.array(["train", "test"] * 20)
    for write, columns in ((npz, {"x": x}), (parquet_file, {"x": pa.FixedSizeListArray.from_arrays(x.ravel(), 4)})):
        (found_folder := folder / write.__name__).mkdir()
        write(found_folder, y=y, part=marks, **columns)
        found = made(x={"shape": [2, 2]}, y={"classes": 0}).of_site("a", found_folder)
        np.testing.assert_array_equal(found.train.x.reshape(20, 4), x[::2].astype(np.float32))
        np.testing.assert_array_equal(found.held_out.y, y[1::2].astype(np.float32))
        assert found.train.forecast


def test_several_columns_are_one_record(tmp_path: Path) -> None:
    parquet_file(tmp_path, age=list(range(30)), dose=[0.5] * 30)
    found = made(x={"name": ["age", "dose"], "shape": [2]}).of_site("a", tmp_path)
    assert found.train.x[:2].tolist() == [[1, 0.5], [2, 0.5]]


def test_without_a_column_the_content_decides(tmp_path: Path) -> None:
    data = made(held_out={"ratio": 0.5})
    first = data.of_site("a", npz(tmp_path))
    order = np.random.default_rng(0).permutation(30)
    second = data.of_site("a", npz(tmp_path, x=X[order], y=Y[order]))
    assert {row.tobytes() for row in first.train.x} == {row.tobytes() for row in second.train.x}


def test_every_problem_is_named_at_once(tmp_path: Path) -> None:
    x, y = X.astype(np.float32), Y.copy()
    x[4, 0, 0], y[7], y[8] = np.nan, 3, -1
    text = problems(made(), npz(tmp_path, x=x, y=y))
    assert text.startswith(f"data: 3 problems in {tmp_path}: a.npz, array 'x', record 4 (from 0): not a finite number")
    for record in (7, 8):
        assert f"a.npz, array 'y', record {record} (from 0): not a class from 0 to 2 (correct it" in text
    text = problems(made(x={"name": "u", "shape": [6]}, y={"name": "v", "classes": 2}), tmp_path)
    assert "array 'u': missing" in text
    assert "array 'v': missing" in text


@pytest.mark.parametrize(
    ("named", "reason"),
    [
        ({"x": X[:, :2]}, "int16 of shape (30, 2, 2) (save 6 numbers per record"),
        ({"x": X.astype(str)}, "(save 6 numbers per record"),
        ({"y": Y[:9]}, "not as many labels as records: 9 in 'y', 30 in 'x', 30 in 'part'"),
        ({"y": Y[:, None]}, "int64 of shape (30, 1) (save one number per record)"),
        ({"y": np.float64(1)}, "not as many labels as records: 0 in 'y'"),
        ({"y": Y + 0.5}, "not a class from 0 to 2"),
        ({"x": X[:0], "y": Y[:0], "part": PART[:0]}, "no records (add some)"),
        ({"x": np.array([{}] * 30)}, "not readable"),
    ],
)
def test_a_bad_npz_is_refused(tmp_path: Path, named: dict[str, Any], reason: str) -> None:
    assert reason in problems(made(), npz(tmp_path, **named))


@pytest.mark.parametrize(
    ("named", "reason"),
    [
        ({"y": [None, *Y[1:].tolist()]}, "array 'y', record 0 (from 0): not a class"),
        ({"x": [[1.0], *X[1:].reshape(29, -1).tolist()]}, "array 'x': lists of different lengths"),
        ({"x": [None, *X[1:].reshape(29, -1).tolist()]}, "array 'x': lists of different lengths"),
        ({"x": [[None] * 6, *X[1:].reshape(29, -1).tolist()]}, "array 'x', record 0 (from 0): not a finite number"),
        ({"x": ["text"] * 30}, "(save 6 numbers per record"),
    ],
)
def test_a_bad_parquet_is_refused(tmp_path: Path, named: dict[str, Any], reason: str) -> None:
    assert reason in problems(made(), parquet_file(tmp_path, **named))


@pytest.mark.parametrize("name", ["a.npz", "a.parquet"])
@settings(max_examples=50)
@given(content=st.binary(max_size=200), cut=st.integers(0, 400), flip=st.integers(0, 10_000))
def test_damaged_files_are_refused_or_read(
    tmp_path_factory: pytest.TempPathFactory, name: str, content: bytes, cut: int, flip: int
) -> None:
    folder = tmp_path_factory.mktemp("site")
    path = {"a.npz": npz, "a.parquet": parquet_file}[name](folder) / name
    whole = bytearray(path.read_bytes())
    whole[flip % len(whole)] ^= 255
    for damaged in (content, bytes(whole), bytes(whole[: -1 - cut])):
        path.write_bytes(damaged)
        try:
            made().of_site("a", folder)
        except DataError:
            continue


def test_huge_arrays_are_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A zip file of a megabyte may unpack to gigabytes."""
    out = io.BytesIO()
    np.save(out, np.zeros((30, 3, 20_000)))
    npz(tmp_path)
    with zipfile.ZipFile(tmp_path / "a.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x.npy", out.getvalue())
        for name, array in (("y", Y), ("part", PART)):
            out = io.BytesIO()
            np.save(out, array)
            archive.writestr(f"{name}.npy", out.getvalue())
    monkeypatch.setattr(arrays, "LARGEST", 2**20)
    assert (tmp_path / "a.npz").stat().st_size < 2**16
    assert "of numbers (split the file over more sites)" in problems(made(), tmp_path)
    (tmp_path / "a.npz").unlink()
    monkeypatch.setattr(arrays, "LARGEST", 100)
    assert "of numbers (split the file over more sites)" in problems(made(), parquet_file(tmp_path))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"y": {"classes": 1}}, "one class leaves nothing to learn"),
        ({"x": {"shape": []}}, "at least 1 item"),
        ({"x": {"shape": [0]}}, "greater than or equal to 1"),
        ({"x": {"shape": [2], "std": 0}}, "greater than 0"),
    ],
)
def test_a_config_that_makes_no_sense_is_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        made(**changes)
