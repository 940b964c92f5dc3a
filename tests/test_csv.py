"""`dataset: csv`: what is read, which records are held out, and what is said of a bad file."""

from __future__ import annotations

import math
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from numpy.typing import NDArray
from pydantic import ValidationError
from torch.nn.functional import cross_entropy

from fl_privacy.config import Federation
from fl_privacy.dp import per_record
from fl_privacy.errors import DataError
from fl_privacy.tasks import csv_table, tables
from fl_privacy.tasks.csv_table import Csv
from fl_privacy.tasks.data import Parts
from fl_privacy.tasks.models import build
from fl_privacy.tasks.own_files import HeldOut, contents
from fl_privacy.tasks.train import Recipe, evaluate, fit
from fl_privacy.tasks.workload import Workload
from profiles import examples

LABEL = {"name": "y", "levels": ["no", "yes"]}
SEX = {"name": "sex", "levels": ["f", "m", "x"]}
OPTIONS: dict[str, Any] = {"label": LABEL, "features": ["age", SEX], "scaling": "none"}


def made(**changes: Any) -> Csv:
    return Csv.model_validate(OPTIONS | changes)


def write(folder: Path, *lines: str, header: str = "age,sex,y", name: str = "a.csv") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text("\n".join([header, *lines, ""]), encoding="utf-8")
    return folder


def whole(found: Parts) -> list[tuple[tuple[float, ...], float, bool]]:
    """Every record, its label, and whether it is held out."""
    return sorted(
        (tuple(x.tolist()), float(y), held_out)
        for half, held_out in ((found.train, False), (found.held_out, True))
        for x, y in zip(half.x, half.y, strict=True)
    )


def problems(options: Csv, folder: Path) -> str:
    with pytest.raises(DataError) as error:
        options.of_site("a", folder)
    text = str(error.value)
    assert "\n" not in text
    return text


# What is read

ages = st.one_of(st.integers(0, 120), st.floats(-1e6, 1e6, width=32))
hundredths = st.integers(-100_000, 100_000).map(lambda number: number / 100)
rows = st.lists(st.tuples(ages, st.sampled_from("fmx"), st.sampled_from(["no", "yes"])), min_size=30, max_size=60)


@examples(50)
@given(table=rows, delimiter=st.sampled_from([",", ";", "\t", "|"]))
def test_a_table_comes_back_in_the_shape_that_the_config_states(
    tmp_path_factory: pytest.TempPathFactory, table: list[tuple[float, str, str]], delimiter: str
) -> None:
    folder = tmp_path_factory.mktemp("site")
    lines = [delimiter.join((y, f" {age!r} ", sex)) for age, sex, y in table]
    marks = ["test", "train"] * len(lines)
    lines = [delimiter.join(pair) for pair in zip(lines, marks, strict=False)]
    write(folder, *lines, header=delimiter.join(("y", "age", "sex", "part")))
    data = made(delimiter=delimiter, held_out={"column": "part"})
    found = data.of_site("a", folder)
    assert (data.shape, data.classes, data.preprocessing) == ((4,), 2, "public")
    for half, first in ((found.held_out, 0), (found.train, 1)):
        mine = table[first::2]
        np.testing.assert_array_equal(half.x[:, 0], np.array([age for age, _, _ in mine], np.float32))
        np.testing.assert_array_equal(half.x[:, 1:], [[sex == level for level in "fmx"] for _, sex, _ in mine])
        assert half.y.tolist() == [y == "yes" for _, _, y in mine]
        assert (half.x.dtype, half.y.dtype) == (np.float32, np.int64)


def test_levels_that_are_numbers_are_compared_as_numbers(tmp_path: Path) -> None:
    write(tmp_path, "1.0,1,test", "2,3.0,train", "3,01,train", header="age,sex,part")
    data = made(label={"name": "sex", "levels": [1, 3]}, features=["age"], held_out={"column": "part"})
    assert data.of_site("a", tmp_path).train.y.tolist() == [1, 0]


def test_a_number_to_predict_is_scaled_by_what_is_given(tmp_path: Path) -> None:
    write(tmp_path, "1,10", "2,20", "3,30", "9,40", header="age,cost")
    label = {"name": "cost", "type": "number", "mean": 20, "std": 10}
    data = made(label=label, features=["age"], held_out={"ratio": 0.5, "seed": 1})
    found = data.of_site("a", tmp_path)
    assert data.classes == 0
    assert found.train.forecast
    assert sorted([*found.train.y.tolist(), *found.held_out.y.tolist()]) == [-1, 0, 1, 2]


def test_given_statistics_are_used_and_nothing_else(tmp_path: Path) -> None:
    features = [{"name": "age", "mean": 10, "std": 2}, {"name": "pulse", "min": 100, "max": 300}]
    lines = [f"{age},{50 * age},{age}" for age in range(20)]
    data = made(label={"name": "y", "type": "number"}, features=features, scaling="given")
    assert data.preprocessing == "public"
    found = data.of_site("a", write(tmp_path, *lines, header="age,pulse,y"))
    for half in (found.train, found.held_out):
        np.testing.assert_allclose(half.x[:, 0], (half.y - 10) / 2, rtol=1e-6)
        np.testing.assert_allclose(half.x[:, 1], (50 * half.y - 100) / 200, rtol=1e-6)


@given(st.lists(hundredths, min_size=3, max_size=30), st.lists(hundredths, min_size=1, max_size=9))
def test_local_scaling_is_by_the_training_records_alone(
    tmp_path_factory: pytest.TempPathFactory, seen: list[float], unseen: list[float]
) -> None:
    folder = tmp_path_factory.mktemp("site")
    data = made(label={"name": "y", "levels": [0, 1]}, features=["age"], scaling="local", held_out={"column": "part"})
    assert data.preprocessing == "local"
    trains = []
    for others in (unseen, [value + 1e4 for value in unseen]):
        lines = [f"{value!r},1,train" for value in seen] + [f"{value!r},0,test" for value in others]
        found = data.of_site("a", write(folder, *lines, header="age,y,part"))
        trains.append(found.train.x)
    np.testing.assert_array_equal(*trains)
    x = trains[0].astype(np.float64)
    spread = np.std(seen, ddof=1)
    # Rounding of values up to 1e3, relative to what they are divided by.
    slack = 1e-6 * (1 + 1e3 / spread) if spread > 0 else 1e-3
    assert abs(x.mean()) <= slack
    assert spread == 0 or abs(x.std(ddof=1) - 1) <= slack


# Empty cells


def test_a_record_with_an_empty_cell_is_dropped_filled_or_a_constant(tmp_path: Path) -> None:
    lines = [
        "1,f,no,train",
        "3,f,no,train",
        ",m,yes,train",
        "8, ? ,no,train",
        "9,NA,yes,test",
        "7,f,,train",
        "5,x,no,test",
    ]
    write(tmp_path, *lines, header="age,sex,y,part")
    by_column = {"column": "part"}
    dropped = made(held_out=by_column)
    assert whole(dropped.of_site("a", tmp_path)) == [
        ((1, 1, 0, 0), 0, False),
        ((3, 1, 0, 0), 0, False),
        ((5, 0, 0, 1), 0, True),
    ]
    local = made(held_out=by_column, missing="local")
    assert local.preprocessing == "local"
    assert whole(local.of_site("a", tmp_path)) == [
        ((1, 1, 0, 0), 0, False),
        ((3, 1, 0, 0), 0, False),
        ((4, 0, 1, 0), 1, False),  # the mean of 1, 3 and 8
        ((5, 0, 0, 1), 0, True),
        ((8, 1, 0, 0), 0, False),  # f is the most frequent
        ((9, 1, 0, 0), 1, True),
    ]
    constant = made(held_out=by_column, features=[{"name": "age", "missing": 50}, SEX | {"missing": "x"}])
    assert constant.preprocessing == "public"
    assert {x for x, _, _ in whole(constant.of_site("a", tmp_path))} >= {(50, 0, 1, 0), (8, 0, 0, 1), (9, 0, 0, 1)}


def test_a_level_may_be_called_none_and_other_marks_can_be_given(tmp_path: Path) -> None:
    write(tmp_path, "none,no,test", "some,yes,train", "-9,yes,train", "n.a.,no,train", header="pain,y,part")
    pain = {"name": "pain", "levels": ["none", "some"]}
    found = made(features=[pain], missing_values=["-9", "N.A."], held_out={"column": "part"}).of_site("a", tmp_path)
    assert found.held_out.x.tolist() == [[1, 0]]
    assert found.train.x.tolist() == [[0, 1]]


def test_a_column_that_is_empty_in_all_training_records_is_named(tmp_path: Path) -> None:
    write(tmp_path, "1,,no,train", "2,,yes,train", "2,f,yes,test", header="age,sex,y,part")
    text = problems(made(missing="local", held_out={"column": "part"}), tmp_path)
    assert "a.csv, column 'sex': empty in all training records (give it a `missing` value)" in text


# Which records are held out

records = st.lists(st.binary(min_size=1, max_size=4), min_size=1, max_size=200)


@given(records, st.integers(0, 2**63 - 1), st.floats(0.01, 0.99), st.randoms())
def test_a_record_s_own_content_decides_whether_it_is_held_out(
    found: list[bytes], seed: int, ratio: float, random: Any
) -> None:
    drawn = HeldOut(ratio=ratio, seed=seed).drawn
    sides = dict(zip(found, drawn(found).tolist(), strict=True))
    shuffled = random.sample(found, len(found))
    assert drawn(shuffled).tolist() == [sides[record] for record in shuffled]
    assert drawn(found[1:]).tolist() == [sides[record] for record in found[1:]]


def test_the_share_is_that_of_the_config_and_seeds_differ() -> None:
    found = list(contents(np.arange(20_000)))
    for ratio in (0.1, 0.5):
        counts = [int(HeldOut(ratio=ratio, seed=seed).drawn(found).sum()) for seed in range(5)]
        # Six standard deviations of a binomial draw: once in 5e8 for each of ten.
        assert all(abs(count - ratio * 20_000) < 6 * math.sqrt(20_000 * ratio * (1 - ratio)) for count in counts)
    one, other = (HeldOut(seed=seed).drawn(found) for seed in (0, 1))
    assert not np.array_equal(one, other)


def test_one_record_more_moves_no_other(tmp_path: Path) -> None:
    lines = [f"{age},{'fmx'[age % 3]},{'no' if age % 2 else 'yes'}" for age in range(60)]
    before = whole(made().of_site("a", write(tmp_path, *lines)))
    after = whole(made().of_site("a", write(tmp_path, "99,f,no", *reversed(lines))))
    assert set(before) < set(after)
    assert len(after) == len(before) + 1


def test_a_column_that_is_nearly_constant_in_training_is_refused_not_blown_up(tmp_path: Path) -> None:
    lines = ["1,0,train", "1.0000000000000002,1,train", "1e29,0,test"]
    data = made(label={"name": "y", "levels": [0, 1]}, features=["age"], scaling="local", held_out={"column": "part"})
    assert "numbers too large for a model" in problems(data, write(tmp_path, *lines, header="age,y,part"))


def test_both_parts_need_records(tmp_path: Path) -> None:
    assert "1 complete records, 1 of them held out; add records" in problems(
        made(held_out={"column": "y", "value": "no"}), write(tmp_path, "1,f,no")
    )
    assert "0 of them held out" in problems(made(held_out={"column": "y", "value": "nosuch"}), tmp_path)


# Where the file is


def test_a_site_s_file_is_found_by_name_alone_or_by_the_config(tmp_path: Path) -> None:
    lines = [f"{age},f,no" for age in range(30)]
    data = made()
    write(tmp_path, *lines, name="export.csv")
    assert len(data.of_site("a", tmp_path).train) > 0
    write(tmp_path, *lines[:20], name="b.csv")
    assert "has no a.csv, and 2 other .csv files; put the site's file there" in problems(data, tmp_path)
    write(tmp_path, *lines[:9], name="a.csv")
    assert len(whole(data.of_site("a", tmp_path))) == 9
    assert len(whole(made(file="{site}.csv").of_site("b", tmp_path))) == 20
    assert "has no b/a.csv; put" in problems(made(file="b/{site}.csv"), tmp_path)
    write(tmp_path / "a", *lines[:12])
    assert len(whole(data.of_site("a", tmp_path))) == 12


def test_a_site_without_a_folder_reads_what_to_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FL_PRIVACY_DATA", raising=False)
    with pytest.raises(DataError, match="site 'a' has no data folder; set its `data`, --data-dir or FL_PRIVACY_DATA"):
        made().of_site("a", None)
    assert "is not a folder" in problems(made(), tmp_path / "nosuch")


@pytest.mark.parametrize("file", ["/etc/passwd", "../b/b.csv", "x/../../b.csv", "", "..", "a\\..\\b"])
def test_a_config_cannot_choose_what_a_site_reads(file: str) -> None:
    with pytest.raises(ValidationError, match="below the site's folder"):
        made(file=file)


# Bad files


def test_every_problem_is_named_at_once_with_its_place_and_fix(tmp_path: Path) -> None:
    lines = ["1,f,no", "old,q,maybe", "2,f", "\xe4,f,no", "3,m,yes"]
    (tmp_path / "a.csv").write_bytes("\n".join(["age,sex,y", *lines]).encode("latin-1"))
    text = problems(made(features=["age", "weight", SEX]), tmp_path)
    assert text.startswith(f"data: 6 problems in {tmp_path}: ")
    for part in (
        "a.csv, line 1, column 'weight': missing (add it or correct its name in task.options)",
        "a.csv, line 3, column 'age': not a number (write one",
        "a.csv, line 3, column 'sex': none of the 3 levels (correct it",
        "a.csv, line 3, column 'y': none of the 2 levels (correct it",
        "a.csv, line 4: 2 cells, and the header has 3 (correct the line)",
        "a.csv, line 5: not UTF-8 (save the file as UTF-8)",
    ):
        assert part in text


def test_the_same_problem_on_many_lines_is_listed_once_and_no_cell_is_quoted(tmp_path: Path) -> None:
    text = problems(made(), write(tmp_path, *["secret,sick,cured"] * 100))
    assert text.startswith("data: 300 problems in ")
    lines = ", ".join(map(str, range(2, 22)))
    assert f"a.csv, lines {lines} and 80 more, column 'age': not a number (" in text
    assert [text.count(f"column {name!r}") for name in ("age", "sex", "y")] == [1, 1, 1]
    assert not any(word in text for word in ("secret", "sick", "cured"))


def test_many_different_problems_are_counted(tmp_path: Path) -> None:
    text = problems(made(), write(tmp_path, *("," * cells for cells in range(3, 33))))
    assert text.startswith("data: 30 problems in ")
    assert text.endswith("; and 10 more")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "a.csv: no records (write a header"),
        (b"\n\n", "a.csv: no records (write a header"),
        (b"age,sex,y\n", "a.csv: no records (write a header"),
        ("age,sex,y\n1,f,no\n".encode("utf-16"), "a.csv, line 1: not UTF-8"),
        (b"age;sex;y\n1;f;no\n", "only one column, check task.options.delimiter"),
        (b"age,age,sex,y\n1,1,f,no\n", "line 1, column 'age': there twice"),
        (b'age,sex,y\n1,"f,no\n', "not CSV: unexpected end of data (correct the quotes)"),
        (b'age,sex,y\n1,"f"x,no\n', "a.csv, line 2: not CSV"),
        (b"age,sex,y\n1e40,f,no\n", "line 2, column 'age': not a number"),
        (b"age,sex,y\ninf,f,no\n", "line 2, column 'age': not a number"),
        (b"age,sex,y\n1_0,f,no\n", "line 2, column 'age': not a number"),
        (b'age,sex,y\n"1\n2",f,no\nz,f,no\n', "lines 3, 4, column 'age': not a number"),
    ],
)
def test_a_bad_file_is_refused(tmp_path: Path, content: bytes, reason: str) -> None:
    (tmp_path / "a.csv").write_bytes(content)
    assert reason in problems(made(), tmp_path)


def test_excel_s_mark_of_utf_8_is_not_part_of_a_name(tmp_path: Path) -> None:
    lines = "".join(f"{age},f,no\r\n" for age in range(30))
    (tmp_path / "a.csv").write_bytes(b"\xef\xbb\xbfage,sex,y\r\n" + lines.encode())
    assert len(whole(made().of_site("a", tmp_path))) == 30


@examples(200)
@given(st.binary(max_size=200))
def test_whatever_a_file_contains_it_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    folder = tmp_path_factory.mktemp("site")
    for text in (content, b"age,sex,y\n1,f,no\n" + content):
        (folder / "a.csv").write_bytes(text)
        with suppress(DataError):
            made().of_site("a", folder)


@pytest.mark.parametrize(
    ("limit", "reason"),
    [("LARGEST", "too large: the limits are"), ("LONGEST", "too large"), ("MOST_CELLS", "more than 8 values")],
)
def test_huge_files_are_not_read_to_their_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, reason: str
) -> None:
    write(tmp_path, *["1,f,no"] * 1000)
    monkeypatch.setattr(tables, limit, 8)
    assert reason in problems(made(), tmp_path)


def test_levels_do_not_multiply_to_more_than_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, *(f"{age},f,no" for age in range(100)))
    monkeypatch.setattr(csv_table, "LARGEST", 4 * 4 * 99)
    assert "100 records of 4 numbers are too many" in problems(made(), tmp_path)


# Configs that make no sense


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"label": {"name": "y"}}, "'y' needs the levels of its classes, or else type: number"),
        ({"label": {"name": "y", "levels": [True, False]}}, "put the level in quotes"),
        ({"label": LABEL | {"type": "number"}}, "give one of them"),
        ({"label": {"name": "y", "levels": ["a", "a"]}}, "level 'a' of 'y' is there twice"),
        ({"features": ["age", "age", "y"]}, "column 'y' is used twice; remove one; column 'age' is used twice"),
        ({"scaling": "given"}, "feature 'age' has no statistics; give mean and std, or min and max"),
        ({"features": [{"name": "age", "mean": 1, "std": 2}]}, "statistics of 'age' are not used with scaling none"),
        ({"features": [{"name": "age", "mean": 1}]}, "one statistic alone"),
        ({"features": [{"name": "age", "min": 2, "max": 2}]}, "min 2.0 is not below max 2.0"),
        ({"features": [{"name": "age", "min": 2, "max": 3, "mean": 1, "std": 1}]}, "mean and min were given"),
        ({"features": [SEX | {"missing": "q"}]}, "missing 'q' is no value of 'sex'"),
        ({"features": [{"name": "age", "missing": "old"}]}, "missing 'old' is no value of 'age'"),
        ({"features": [SEX | {"min": 0, "max": 1}]}, "'sex' has levels, which are not scaled"),
        ({"class_weights": [1, 2, 3]}, "class_weights: 3 for 2 classes; give one per class"),
        ({"class_weights": [1, 0]}, "greater than 0"),
    ],
)
def test_a_config_that_makes_no_sense_is_refused_with_the_fix(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValidationError) as error:
        made(**changes)
    assert reason in str(error.value)


# Class weights


def test_class_weights_are_those_of_the_loss_also_record_by_record(tmp_path: Path) -> None:
    write(tmp_path, *(f"{age},{'fm'[age % 2]},{'no' if age % 3 else 'yes'}" for age in range(40)))
    options = OPTIONS | {"class_weights": [1, 5]}
    sites = [{"name": "a", "data": str(tmp_path)}, {"name": "b"}]
    task = {"dataset": "csv", "options": options}
    federation = Federation.model_validate({"sites": sites, "task": task, "route": {"kind": "server"}})
    work = Workload(federation)
    data = work.site_data("a")
    outputs, labels = work.model(torch.from_numpy(data.x)), torch.from_numpy(data.y)
    plain = cross_entropy(outputs, labels, reduction="none")
    torch.testing.assert_close(work.how.loss(outputs, labels, "none"), plain * torch.where(labels == 1, 5.0, 1.0))
    work.once(per_record.check, data)


# A public table


def breast_cancer() -> tuple[list[str], NDArray[np.float64], NDArray[np.int64]]:
    from sklearn.datasets import load_breast_cancer

    bunch = load_breast_cancer()
    return [name.replace(" ", "_") for name in bunch.feature_names], bunch.data, bunch.target


@pytest.mark.parametrize("model", ["logistic", "mlp"])
def test_a_site_of_breast_cancer_learns(tmp_path: Path, model: str) -> None:
    names, x, y = breast_cancer()
    lines = [",".join([*map(repr, row.tolist()), "mb"[label]]) for row, label in zip(x, y, strict=True)]
    write(tmp_path, *lines, header=",".join([*names, "kind"]))
    data = Csv.model_validate({"label": {"name": "kind", "levels": ["m", "b"]}, "features": names})
    found = data.of_site("a", tmp_path)
    assert len(found.train) + len(found.held_out) == len(y) == 569
    built = build(model, data.shape, data.classes, seed=0)
    fit(built, found.train, Recipe(epochs=5, batch_size=16, lr=0.05), seed=0)
    accuracy = evaluate(built, found.held_out).accuracy
    assert accuracy is not None
    assert accuracy > 0.9  # always the larger class: 0.63
