"""Tasks of one's own that are wrong in ways that could train silently, or be blamed on something else."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn

import fl_privacy
from client_app.evaluation import Evaluation
from commands import cli
from fl_privacy.config import Federation
from fl_privacy.dp import dpsgd, per_record
from fl_privacy.dp.sampled import Plan, Private
from fl_privacy.errors import ConfigError, DataError, FederationError
from fl_privacy.steps.base import At, Seat
from fl_privacy.tasks.data import Dataset
from fl_privacy.tasks.making import task_of
from fl_privacy.tasks.measures import latest
from fl_privacy.tasks.records import dataset_of
from fl_privacy.tasks.train import How, Recipe
from fl_privacy.tasks.workload import Workload
from fl_privacy.trial import check
from test_own_data import DATA, HEAD, MODEL, load

X = "np.random.default_rng(0).normal(size=(8, 2))"
FLOATS = DATA.format(f"({X}, np.arange(8) % 2 * 1.0), ({X}, np.arange(8) % 2 * 1.0)")
RECORDS = DATA.format(f"({X}, np.arange(8) % 2), ({X}, np.arange(8) % 2)")
ONE = "    def model(self):\n        return nn.Linear(2, 1)\n"
NET = "    def model(self):\n        class Net(nn.Module):\n            def __init__(self):\n"
NET += "                super().__init__()\n                {}\n"
NET += "            def forward(self, x):\n                return {}\n        return Net()\n"
PLAIN = "self.a = nn.Linear(2, 2)"


def method(name: str, body: str) -> str:
    return f"    def {name}(self, *given):\n        {body}\n"


WRONG = {
    "floats for classes": (MODEL + FLOATS, r":6: model\(\): has 2 outputs, and labels are floats; give integers"),
    "integers for one output": (ONE + RECORDS, r":6: model\(\): has one output, and labels are integers; give floats"),
    "other width": (MODEL + RECORDS + "    classes = 3\n", r":6: model\(\): gives outputs of shape \(2,\) per record"),
    "head first": (
        NET.format("self.out = nn.Linear(5, 2); self.body = nn.Linear(2, 5)", "self.out(self.body(x))") + RECORDS,
        r":6: model\(\): gives outputs of shape \(2,\) .* 5 classes.*set `classes`",
    ),
    "tuple": (NET.format(PLAIN, "self.a(x), 1") + RECORDS, r"model\(\): gives tuple; return one tensor"),
    "lazy": (MODEL.replace("Linear(2, 2)", "LazyLinear(2)") + RECORDS, r":6: weight of the new model has no size yet"),
    "double": (
        MODEL.replace("2)", "2).double()") + RECORDS,
        r":6: weight of the new model is torch.float64; use float32",
    ),
    "whole numbers": (
        MODEL + DATA.format("(np.ones((8, 2), int), np.arange(8) % 2),"),
        r"of whole numbers; return floats from data\(\)",
    ),
    "one dimension": (
        MODEL.replace("2, 2", "1, 2") + DATA.format("(np.ones(8), np.arange(8) % 2),"),
        r"return x of shape \(records, 1\)",
    ),
    "NaN labels": (
        ONE + DATA.format("(np.zeros((4, 2)), np.array([1, 2, np.nan, 3])),"),
        "training records: 1 of 4 labels are not finite",
    ),
    "text labels": (
        MODEL + DATA.format("(np.zeros((2, 2)), np.array(['a', 'b'])),"),
        "labels are of type <U1; give classes",
    ),
    "ragged": (
        MODEL + DATA.format("([[1, 2], [3]], [0, 1]),"),
        r"records: x: not an array .* give rows of equal length",
    ),
    "other labels held out": (
        MODEL + DATA.format("(np.zeros((4, 2)), np.arange(4) % 2), (np.zeros((2, 2)), np.ones(2))"),
        "labels are integers and floats, to train on and held out",
    ),
    "too few arguments": ("    def data(self):\n        pass\n" + MODEL, r":6: data of site .*TypeError"),
    "NaN loss": (
        MODEL + RECORDS + method("loss", "return given[0].sum(1) * np.nan"),
        r":10: loss of the new model is not finite for 2 of 2 records",
    ),
    "no loss": (MODEL + RECORDS + method("loss", "pass"), ":10: loss gave NoneType; return one loss per record"),
    "no optimiser": (MODEL + RECORDS + method("optimizer", "return 5"), ":10: optimizer gave int; return a torch opti"),
    "augment": (
        MODEL + RECORDS + method("augment", "return given[0][:1]"),
        r":10: augment gave shape \(1, 2\); return as",
    ),
    "metrics": (MODEL + RECORDS + method("metrics", "return {'a': 1 / 0}"), ":11: metrics: ZeroDivisionError"),
    "metrics list": (MODEL + RECORDS + method("metrics", "return [1]"), ":10: metrics: gave list; return names"),
    "metrics of our name": (
        MODEL + RECORDS + method("metrics", "return {'model': 1}"),
        ":10: metrics: 'model' is not a name",
    ),
    "preprocessing": (MODEL + RECORDS + "    preprocessing = 'pubic'\n", ":10: preprocessing: 'pubic' was given; use"),
    "classes": (MODEL + RECORDS + "    classes: str = 'two'\n", ":10: classes: 'two' was given; use"),
    "Options": (MODEL + RECORDS + "    Options = dict\n", ":10: Options: <class 'dict'> was given; make it a class"),
    "abstract": ("    pass\n", ":5: model: NotImplementedError: model: return an nn.Module"),
    "no such package": (
        "    import nosuch\n",
        r":6: cannot be loaded: ModuleNotFoundError.*; install it, at every site",
    ),
}


@pytest.mark.parametrize("kind", WRONG)
def test_what_is_wrong_is_said_with_its_line_and_the_fix(kind: str, tmp_path: Path) -> None:
    code, message = WRONG[kind]
    code = code.replace("),\n", "), (np.zeros((0, 2)), [])\n")
    with pytest.raises(FederationError) as error:
        check(load(tmp_path, HEAD + code), "clinic-a", tmp_path)
    assert re.search(message, str(error.value)), error.value
    assert re.match(r"task\.py:\d+: ", str(error.value))
    assert "\n" not in str(error.value)


def test_an_option_that_nobody_reads_is_refused(tmp_path: Path) -> None:
    code = HEAD.replace("class T", "from pydantic import BaseModel\nclass T") + MODEL + RECORDS
    code += "    class Options(BaseModel):\n        hidden: int = 3\n"
    with pytest.raises(ConfigError, match=r"task\.options: hiden: unknown key; did you mean hidden\?"):
        task_of(load(tmp_path, code, hiden=4))
    assert task_of(load(tmp_path, code, hidden=4)).options.hidden == 4
    ignoring = code.replace("        hidden", "        model_config = {'extra': 'ignore'}\n        hidden")
    assert task_of(load(tmp_path, ignoring, hiden=4)).options.hidden == 3


@pytest.mark.parametrize(
    "code",
    ["../task.py", "sub/../../task.py", "/etc/hostname", "task.txt", "link.py", "folder.py", "pipe.py", "a\0.py", "."],
)
def test_code_is_a_python_file_below_the_config(code: str, tmp_path: Path) -> None:
    """It goes to every party: it must not be another file of whoever provisions, and reading it must end."""
    here = tmp_path / "configs"
    (here / "folder.py").mkdir(parents=True)
    for path in (tmp_path / "task.py", tmp_path / "secret", here / "task.txt"):
        path.write_text("x = 1\n")
    (here / "link.py").symlink_to(tmp_path / "secret")
    os.mkfifo(here / "pipe.py")
    with pytest.raises(
        ConfigError, match=r"^task\.code .*(not a|no path).*; put the task's file into the config's folder"
    ):
        Federation.of({"sites": 3, "task": {"code": code}}, folder=here)


def test_code_may_be_in_a_folder_below_and_is_bounded(tmp_path: Path) -> None:
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "one.py").write_text("x = 1\n")
    assert Federation.of({"sites": 3, "task": {"code": "tasks/one.py"}}, folder=tmp_path).task.source == "x = 1\n"
    (tmp_path / "tasks" / "one.py").write_bytes(b"#" * 2**23)
    with pytest.raises(ConfigError, match="use at most 1,048,576 characters"):
        Federation.of({"sites": 3, "task": {"code": "tasks/one.py"}}, folder=tmp_path)


def test_what_a_task_prints_is_no_part_of_a_report(tmp_path: Path) -> None:
    loud = method("loss", "print('loud'); return nn.functional.cross_entropy(*given, reduction='none')")
    (tmp_path / "task.py").write_text("print('louder')\n" + HEAD + MODEL + RECORDS + loud)
    done = cli("task", "check", tmp_path / "task.py", "--data-dir", tmp_path, "--json")
    assert json.loads(done.stdout)["records"] == 8


# What a task draws and changes


class InPlace(nn.Module):
    """Changes its input, and drops some of it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Dropout(), nn.Linear(2, 2))

    def forward(self, x: Tensor) -> Tensor:
        x -= 1
        return self.layers(x)  # type: ignore[no-any-return]


IN_PLACE = (
    NET.format(PLAIN, "self.a(nn.functional.dropout(x.sub_(1), training=self.training))")
    + RECORDS
    + method("augment", "given[0].add_(torch.randn(2)); return given[0]")
)


def test_neither_model_nor_augment_can_change_the_records_of_a_site(tmp_path: Path) -> None:
    work = Workload(load(tmp_path, HEAD + IN_PLACE), tmp_path)
    train, held_out = work.site_data("clinic-a"), work.held_out("clinic-a")
    before = train.x.copy(), held_out.x.copy()
    work.check_model(train)
    work.update(work.initial, train, "clinic-a", 1)
    first = work.measured(work.initial, held_out, "cpu").outputs
    assert torch.equal(first, work.measured(work.initial, held_out, "cpu").outputs)
    work.scored(held_out)
    private = Private(Plan(rate=1.0, steps=2, batch=8.0, clip=1.0, noise=0.0), bytes(32))
    dpsgd.fit(InPlace(), train, Recipe(epochs=1, batch_size=8, lr=0.1), private, how=How(augment=added, changes=True))
    assert np.array_equal(train.x, before[0])
    assert np.array_equal(held_out.x, before[1])


def added(records: Tensor) -> Tensor:
    return records.add_(1)


def test_what_a_task_draws_follows_from_seed_site_and_round(tmp_path: Path) -> None:
    work = Workload(load(tmp_path, HEAD + IN_PLACE), tmp_path)
    data = work.site_data("clinic-a")
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = work.update(work.initial, data, "clinic-a", 1)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    assert np.array_equal(work.update(work.initial, data, "clinic-a", 1), first)
    assert not np.array_equal(work.update(work.initial, data, "clinic-a", 2), first)


def test_a_weight_that_the_model_does_not_use_stays_as_it_is(tmp_path: Path) -> None:
    code = NET.format(PLAIN + "; self.b = nn.Parameter(torch.ones(3))", "self.a(x)")
    work = Workload(load(tmp_path, HEAD + code + RECORDS), tmp_path)
    update = dict(zip((e.name for e in work.layout.entries), work.layout.slices.values(), strict=True))
    found = work.update(work.initial, work.site_data("clinic-a"), "clinic-a", 1)
    assert not found[update["b"]].any()
    assert found[update["a.weight"]].any()


# What DP-SGD can train


class Uses(nn.Module):
    """A layer, then the last one."""

    def __init__(self, layer: nn.Module, width: int = 4) -> None:
        super().__init__()
        self.layer, self.out = layer, nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.layer(x))  # type: ignore[no-any-return]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x[:, None])[:, 0]  # type: ignore[no-any-return]


class Lookup(nn.Module):
    """The first feature is a category of two, and the second must be above 0; may mix records."""

    def __init__(self, mixes: bool = False) -> None:
        super().__init__()
        self.table, self.mixes = nn.Embedding(2, 3), mixes

    def forward(self, x: Tensor) -> Tensor:
        found = torch.cat([self.table(x[:, 0].long()), x[:, 1:2].log()], 1)
        return found - found.mean(0) if self.mixes and len(x) > 1 else found


class Drops(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x, training=self.training)


class Chooses(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([row if float(row[1]) > 0 else 2 * row for row in x])


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.GRU(1, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x[:, :, None])[0][:, -1]  # type: ignore[no-any-return]


@pytest.fixture
def categories() -> Dataset:
    """A category of two, and positive numbers."""
    draw = np.random.default_rng(0)
    return Dataset(np.c_[np.arange(12) % 2, draw.random((12, 3)) + 1].astype(np.float32), np.arange(12) % 2)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("layer", [nn.Dropout(0.5), Attention(), Lookup()])
def test_models_with_gradients_of_each_record_can_be_trained(layer: nn.Module, categories: Dataset) -> None:
    per_record.check(Uses(layer), categories)
    model = Uses(layer)
    private = Private(Plan(rate=0.5, steps=2, batch=6.0, clip=1.0, noise=0.0), bytes(32))
    dpsgd.fit(model, categories, Recipe(epochs=1, batch_size=6, lr=0.1), private)
    assert all(torch.isfinite(weight).all() for weight in model.parameters())


@pytest.mark.parametrize(
    ("layer", "said"),
    [
        (Lookup(mixes=True), "depends on the other records of its batch; normalise with GroupNorm"),
        (Drops(), r"draws random numbers outside of nn\.Dropout"),
        (Chooses(), r"has no gradients per record: .*do not use \.item\(\)"),
        (Recurrent(), r"GRU 'layer\.layer' has no per-record privacy; use nn\.LSTM"),
    ],
)
def test_others_are_refused_for_what_they_do(layer: nn.Module, said: str, categories: Dataset) -> None:
    with pytest.raises(FederationError, match=rf"^task\.model: .*{said}"):
        per_record.check(Uses(layer), categories)


def test_an_error_of_the_model_s_own_code_is_raised_as_it_is() -> None:
    with pytest.raises(IndexError):
        per_record.check(
            Uses(Lookup()), Dataset(np.full((4, 4), 5, np.float32) + np.eye(4, dtype=np.float32), np.arange(4) % 2)
        )


# A task's own measures


def test_an_error_in_metrics_is_kept_at_the_site_and_its_counts_are_sent(tmp_path: Path) -> None:
    own = method("metrics", "return {'share': float(given[1].float().mean()), 'nan': np.nan}")
    at = At("run-1", 2, "attempt")
    for number, code in enumerate((own, method("metrics", "return {'a': 1 / 0}"))):
        work = Workload(load(tmp_path, HEAD + MODEL + RECORDS + code), tmp_path)
        seat = Seat(work.federation, "clinic-a", work, 8, tmp_path / str(number))
        assert Evaluation(seat).counts(at, work.initial).sum() > 0
    fine, broken = (latest(tmp_path / name / "metrics") for name in ("0", "1"))
    assert fine is not None
    assert broken is not None
    assert (fine["run"], fine["global"]["model"], fine["global"]["share"], fine["global"]["nan"]) == (
        "run-1",
        1,
        0.5,
        None,
    )
    assert re.match(r"task\.py:11: metrics: ZeroDivisionError", broken["global"]["metrics_error"])
    assert broken["global"]["accuracy"] == fine["global"]["accuracy"]
    assert fine["alone"] is None


def test_a_journal_is_read_whatever_a_crash_left(tmp_path: Path) -> None:
    assert latest(tmp_path / "none") is None
    (tmp_path / "run-1.jsonl").write_text(
        '{"model": 1, "loss": 0.5}\n{"model": "alone", "loss": 0.7}\n[]\n{"model": 2, "lo'
    )
    assert latest(tmp_path) == {
        "run": "run-1",
        "global": {"model": 1, "loss": 0.5},
        "alone": {"model": "alone", "loss": 0.7},
    }


# Records in memory


class Pairs(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, at: int) -> tuple[Tensor, int]:
        return torch.full((2, 3), float(at), requires_grad=True), at % 2


def forever() -> Iterator[tuple[np.ndarray, float]]:
    while True:
        yield np.zeros(10**6), 0.5


def test_a_dataset_is_refused_before_it_fills_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = dataset_of(Pairs(5), "task.py:1")
    assert whole.x.shape == (5, 2, 3)
    assert whole.x[4, 0, 0] == 4
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("Free", (), {"available": 2**24}))
    with pytest.raises(DataError, match=r"records: 1,000,000 of 24 bytes need 0\.0 GiB, and half of the free memory"):
        dataset_of(Pairs(10**6), "task.py:1")
    with pytest.raises(DataError, match="return fewer or smaller ones"):
        dataset_of(forever(), "task.py:1")
    many = np.broadcast_to(np.zeros((1, 4), np.uint8), (10**6, 4)), np.broadcast_to(np.int64(0), 10**6)
    with pytest.raises(DataError, match=r"^task\.py:1: 1,000,000 of them need"):
        dataset_of(many, "task.py:1")


def test_rows_of_a_dataset_have_one_shape_and_the_widest_type() -> None:
    mixed = dataset_of([(np.array([1, 2]), 0), (np.array([0.5, 1]), 1)] * 2000, "task.py:1")
    assert mixed.x[:2].tolist() == [[1, 2], [0.5, 1]]
    assert len(mixed) == 4000
    with pytest.raises(DataError, match=r"number 1 has shape \(3,\), and those before have \(2,\)"):
        dataset_of([(np.zeros(2), 0), (np.zeros(3), 0), (np.zeros(3), 0)], "task.py:1")
    with pytest.raises(DataError, match=r"number 0 is dict of 2; give \(record, label\) pairs"):
        dataset_of([{"x": 0, "y": 1}] * 3, "task.py:1")


# Which records are held out

ROWS = st.lists(st.tuples(st.integers(-5, 5), st.text("abc", max_size=4)), min_size=1, max_size=30)


@settings(max_examples=60, deadline=None)
@given(ROWS)
def test_a_record_alone_decides_whether_it_is_held_out(rows: list[tuple[int, str]]) -> None:
    def chosen(of: list[tuple[int, str]]) -> list[bool]:
        return list(map(bool, fl_privacy.held_out([n for n, _ in of], [t for _, t in of], ratio=0.5)))

    assert chosen(rows) == [chosen([row])[0] for row in rows]
    assert chosen([*rows, (99, "another much longer text")])[:-1] == chosen(rows)


def test_the_ratio_and_the_seed_are_as_asked() -> None:
    rows = np.random.default_rng(0).normal(size=(4000, 3))
    first, other = fl_privacy.held_out(rows), fl_privacy.held_out(rows, seed=1)
    assert 700 < first.sum() < 900
    assert (first != other).sum() > 1000
    assert np.array_equal(first, fl_privacy.held_out(rows.astype(object).astype(float)))
    for wrong in ([np.array([None, 1])], [], [rows, rows[1:]]):
        with pytest.raises(DataError, match=r"^held_out: "):
            fl_privacy.held_out(*wrong)
    with pytest.raises(DataError, match="ratio between 0 and 1"):
        fl_privacy.held_out(rows, ratio=1)


def test_a_broken_task_names_a_site_s_folder_and_how_to_read_another_s(tmp_path: Path) -> None:
    with pytest.raises(FederationError, match=rf"--data-dir {tmp_path}; --site NAME reads those of another"):
        check(load(tmp_path, HEAD + MODEL + DATA.format("open(folder / site)")), "clinic-a", tmp_path)
