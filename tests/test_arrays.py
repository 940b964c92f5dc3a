"""`dataset: arrays`: .npz and .parquet files, and what is said of bad ones."""

from __future__ import annotations

import io
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray
from pyarrow import parquet
from pydantic import ValidationError

from fl_privacy.errors import DataError
from fl_privacy.tasks import arrays
from fl_privacy.tasks.arrays import Arrays
from profiles import examples

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


@examples(25)
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
    assert "a.npz, array 'y', records 7, 8 (from 0): not a class from 0 to 2 (correct it" in text
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


def zipped(folder: Path, how: int = zipfile.ZIP_DEFLATED, **named: bytes) -> Path:
    """An .npz file with these members instead of its own, or besides them."""
    npz(folder)
    with zipfile.ZipFile(folder / "a.npz") as source:
        members = {name: source.read(name) for name in source.namelist()} | named
    with zipfile.ZipFile(folder / "a.npz", "w", how) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return folder


def npy(header: str, content: bytes = b"") -> bytes:
    """A member of an .npz file, whatever its header says."""
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode() + content


NPY = {
    "no array": b"text",
    "half a header": npy("{'descr': '<f4',"),
    "brackets": npy("(" * 16),
    "a list": npy("[1, 2]"),
    "too many numbers": npy("{'descr': '<f8', 'fortran_order': False, 'shape': (30, 1000000000000), }"),
    "objects": npy("{'descr': '|O', 'fortran_order': False, 'shape': (30,), }", b"cos\nsystem\n(S'true'\ntR."),
}


@pytest.mark.parametrize("kind", NPY)
def test_a_member_that_is_no_array_of_numbers_is_refused(tmp_path: Path, kind: str) -> None:
    assert "a.npz: not readable" in problems(made(), zipped(tmp_path, **{"x.npy": NPY[kind]}))


@pytest.mark.parametrize("how", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_a_damaged_compressed_file_is_refused(tmp_path: Path, how: int) -> None:
    path = zipped(tmp_path, how) / "a.npz"
    whole = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        start = archive.getinfo("x.npy").header_offset + 30 + len("x.npy")
    whole[start + 40 : start + 60] = (byte ^ 255 for byte in whole[start + 40 : start + 60])
    path.write_bytes(whole)
    assert "a.npz: not readable" in problems(made(), tmp_path)


def test_a_file_with_a_password_is_refused(tmp_path: Path) -> None:
    path = npz(tmp_path) / "a.npz"
    whole = bytearray(path.read_bytes())
    for mark, place in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        whole[whole.index(mark) + place] |= 1
    path.write_bytes(whole)
    assert "a.npz: not readable" in problems(made(), tmp_path)


def test_a_second_member_of_the_same_name_does_not_hide_the_size_of_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """numpy reads the member `x` before `x.npy`, as bytes if it is no array."""
    out = io.BytesIO()
    np.save(out, X)
    zipped(tmp_path, x=bytes(2**24))
    monkeypatch.setattr(arrays, "LARGEST", 2**20)
    assert len(made().of_site("a", tmp_path).train) == 20


@pytest.mark.parametrize(
    ("column", "said"),
    [
        (pa.array([[0.0] * 2**21] + [[0.0]] * 29), "of numbers (split the file over more sites)"),
        (pa.array([["a" * 2**21]] * 30), "list<"),
        (pa.array([{"a": 1.0}] * 30), "struct<a: double> (save numbers"),
        (pa.array([[[1.0]]] * 30), "list<element: double>> (save numbers"),
        (pa.array([b"1234"] * 30, pa.binary(4)), "fixed_size_binary[4] (save numbers"),
    ],
)
def test_a_column_that_may_unpack_to_any_size_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, column: Any, said: str
) -> None:
    parquet_file(tmp_path, x=column)
    assert (tmp_path / "a.parquet").stat().st_size < 2**18
    monkeypatch.setattr(arrays, "LARGEST", 2**23)
    read, asked = parquet.ParquetFile.read, list[str]()
    monkeypatch.setattr(parquet.ParquetFile, "read", lambda file, columns: asked.extend(columns) or read(file, columns))
    assert said in problems(made(), tmp_path)
    assert "x" not in asked


def test_one_long_text_in_the_column_of_parts_does_not_make_all_as_long(tmp_path: Path) -> None:
    parts = ["test", "a" * 2**20, *["train"] * 9_998]
    options = made(x={"name": ["y"], "shape": [1]}, y={"name": "z", "classes": 3})
    columns = {"y": [0] * 10_000, "z": [0] * 10_000, "part": parts}
    parquet.write_table(pa.table(columns), tmp_path / "a.parquet")
    tracemalloc.start()
    found = options.of_site("a", tmp_path)
    assert (len(found.held_out), tracemalloc.get_traced_memory()[1] < 2**26) == (1, True)
    tracemalloc.stop()


@pytest.mark.parametrize("name", ["a.npz", "a.parquet"])
@examples(50)
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
