"""Electricity load: readings from CSV, records, behaviours, and models that forecast."""

from __future__ import annotations

import io
import math
import os
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray
from torch.func import functional_call, grad, vmap

from fl_privacy.config import Federation, Partition, Training
from fl_privacy.errors import DataError, FederationError
from fl_privacy.tasks import files, lcl, lcl_attacker
from fl_privacy.tasks.data import Dataset
from fl_privacy.tasks.load import (
    HALF_HOUR,
    Columns,
    Plan,
    Readings,
    day_share,
    fill,
    on_grid,
    read_csv,
    records,
    split,
    standardise,
)
from fl_privacy.tasks.models import build
from fl_privacy.tasks.partition import partition
from fl_privacy.tasks.train import Metrics, Recipe, evaluate, fit
from fl_privacy.tasks.workload import Workload
from fl_privacy.vector import flatten, load as load_vector
from profiles import QUICK

ROOT = Path(__file__).resolve().parent.parent
START = np.datetime64("2013-01-01T00:00", "ns")
COLUMNS = Columns("home", "when", "kWh")
NAN = math.nan


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The real data; otherwise skips with how to provide them."""
    for given_dir in (os.environ.get(files.ENVIRONMENT), ROOT.parent / "shared" / "data"):
        if given_dir and (Path(given_dir) / "lcl" / lcl.ARCHIVE).exists():
            return Path(given_dir)
    pytest.skip(f"real data are missing: set {files.ENVIRONMENT} to a data folder with lcl (docs/tasks.md)")


def series(*values: float) -> NDArray[np.float32]:
    return np.array(values, np.float32)


def csv(*rows: str) -> bytes:
    return "\n".join(["home,when,other,kWh", *rows, ""]).encode()


# Readings


def test_a_csv_is_read_regardless_of_order_padding_and_gaps() -> None:
    first = csv(
        "B,2013-01-01 01:00:00,x, 0.5 ",
        "A ,2013-01-01 00:00:00,x,  1 ",
        "A,2013-01-01 00:30:00.0000000 ,x, Null ",
        "A,2013-01-01 01:30,x,nan",
    )
    second = csv("B,2013-01-01 00:00:00,x,2", "A,2013-01-01T01:00:00,x,3")
    found = on_grid([read_csv(io.BytesIO(content), COLUMNS, "test") for content in (first, second)], START, 4)
    assert found.households == ("A", "B")
    np.testing.assert_array_equal(found.kwh, [series(1, NAN, 3, NAN), series(2, NAN, 0.5, NAN)])
    assert found.hours().tolist() == [0, 0.5, 1, 1.5]


def test_times_off_the_grid_are_dropped_and_the_last_of_two_readings_wins() -> None:
    content = csv(
        "A,2013-01-01 00:30:00,,1",
        "A,2013-01-01 00:30:00,,2",
        "A,2013-01-01 00:30:00,,Null",
        "A,2013-01-01 00:12:34,,3",
        "A,2012-12-31 23:30:00,,4",
        "A,2013-01-01 01:00:00,,5",
    )
    np.testing.assert_array_equal(
        on_grid([read_csv(io.BytesIO(content), COLUMNS, "test")], START, 2).kwh, [series(NAN, 2)]
    )


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"home,when\nA,2013-01-01\n",
        csv("A,yesterday,,1"),
        csv("A,2013-01-01 00:00:00,,much"),
        csv("A,2013-01-01 00:00:00"),
        b"\xff\xfe\x00",
    ],
)
def test_an_invalid_csv_is_refused_in_one_line(content: bytes) -> None:
    with pytest.raises(DataError) as error:
        read_csv(io.BytesIO(content), COLUMNS, "meters/a.csv")
    assert "\n" not in str(error.value)
    assert re.match(r"data: \d problems? in meters: a\.csv", str(error.value))


@given(hnp.arrays(np.int64, st.tuples(st.integers(1, 3), st.integers(1, 50)), elements=st.integers(-1, 9999)))
def test_written_readings_read_back_the_same(grid: NDArray[np.int64]) -> None:
    kwh = np.where(grid < 0, np.nan, grid / 1000).astype(np.float32)
    rows = [
        f"H{h},{str(START + t * HALF_HOUR)[:19]},, {'Null' if grid[h, t] < 0 else grid[h, t] / 1000} "
        for h, t in np.ndindex(*grid.shape)
    ]
    found = on_grid([read_csv(io.BytesIO(csv(*reversed(rows))), COLUMNS, "test")], START, grid.shape[1])
    np.testing.assert_array_equal(found.kwh, kwh)


# Records

gappy = hnp.arrays(np.float32, st.integers(60, 200), elements=st.sampled_from([0.0, 1.0, 2.5, NAN]))


def test_short_gaps_repeat_the_reading_before_and_long_ones_stay() -> None:
    given_series = series(NAN, 1, NAN, NAN, 2, NAN, NAN, NAN, 3, NAN)
    np.testing.assert_array_equal(fill(given_series, 2), series(NAN, 1, 1, 1, 2, NAN, NAN, NAN, 3, 3))
    np.testing.assert_array_equal(fill(given_series, 0), given_series)


@given(gappy, st.integers(0, 5))
def test_filling_keeps_readings_and_uses_no_future_ones(values: NDArray[np.float32], longest: int) -> None:
    filled = fill(values, longest)
    there = np.isfinite(values)
    np.testing.assert_array_equal(filled[there], values[there])
    for at in np.flatnonzero(np.isfinite(filled) & ~there):
        assert filled[at] == values[np.flatnonzero(there[:at])[-1]]


@given(gappy, st.integers(1, 9))
def test_a_record_is_the_readings_before_its_target(values: NDArray[np.float32], stride: int) -> None:
    plan = Plan(length=8, stride=stride, longest_gap=2)
    hours = np.arange(len(values)) / 2 % 24
    x, y = records(values, hours, plan)
    filled = fill(values, 2)
    kept = [
        at
        for at in range(0, len(values) - 8, stride)
        if np.isfinite(filled[at : at + 8]).all() and np.isfinite(values[at + 8])
    ]
    assert len(x) == len(y) == len(kept)
    for row, at in enumerate(kept):
        np.testing.assert_array_equal(x[row, :, 0], filled[at : at + 8])
        angle = 2 * np.pi * hours[at + 1 : at + 9] / 24
        np.testing.assert_allclose(x[row, :, 1:], np.stack([np.sin(angle), np.cos(angle)], axis=1), atol=1e-6)
        assert y[row] == values[at + 8]


def test_a_household_is_scaled_by_its_training_readings_alone() -> None:
    rng = np.random.default_rng(0)
    kwh = rng.gamma(2.0, 0.2, (3, 100)).astype(np.float32)
    kwh[0, 5] = np.nan
    kwh[2, :60] = 0.5
    scaled = standardise(kwh, [slice(0, 20), slice(30, 60)])
    changed = kwh.copy()
    changed[:, 60:] = 9
    np.testing.assert_array_equal(standardise(changed, [slice(0, 20), slice(30, 60)])[:, :60], scaled[:, :60])
    seen = np.concatenate([scaled[:2, 0:20], scaled[:2, 30:60]], axis=1)
    # float32 rounding of 50 values below 10.
    np.testing.assert_allclose(np.nanmean(seen, axis=1), 0, atol=1e-5)
    np.testing.assert_allclose(np.nanstd(seen, axis=1), 1, atol=1e-5)
    assert scaled[2, 0] == 0
    assert np.isfinite(scaled[2]).all()


def counted(households: int, steps: int) -> Readings:
    """Every reading is a different number, so a record shows which readings it contains."""
    kwh = np.arange(households * steps, dtype=np.float32).reshape(households, steps)
    return Readings(tuple(f"H{h}" for h in range(households)), kwh, START)


def test_no_held_out_record_shares_a_reading_with_a_training_record() -> None:
    plan = Plan(windows=2, length=8, stride=3, held_out=20)
    made = split(counted(2, 140), plan)
    assert made.sites == ("h0-w0", "h1-w0", "h0-w1", "h1-w1")
    assert (made.classes, made.shape) == (0, (8, 3))
    assert made.train.forecast
    assert made.train.site is not None
    assert made.test.site is not None
    for household in (0, 1):
        used = []
        for half in (made.train, made.test):
            assert half.site is not None
            for window in (0, 1):
                mine = half.site == 2 * window + household
                used.append({*half.x[mine, :, 0].ravel().tolist(), *half.y[mine].tolist()})
        assert sum(map(len, used)) == len(set.union(*used))


def test_a_site_without_training_records_is_left_out() -> None:
    readings = counted(2, 140)
    readings.kwh[1, :70] = np.nan
    assert split(readings, Plan(windows=2, length=8, held_out=20)).sites == ("h0-w0", "h0-w1", "h1-w1")
    readings.kwh[:] = np.nan
    with pytest.raises(DataError, match="no household"):
        split(readings, Plan(windows=2, length=8, held_out=20))
    with pytest.raises(DataError, match="too short"):
        split(readings, Plan(windows=5, length=8, held_out=20))


def test_the_daytime_share_is_of_an_average_day_and_ignores_gaps() -> None:
    hours = np.tile(np.arange(48) / 2, 4)
    day, night = (hours >= 8) & (hours < 18), (hours >= 20) | (hours < 6)
    kwh = np.stack([day * 1.0, night * 1.0, day * 3.0 + night, np.ones(192), np.zeros(192)]).astype(np.float32)
    kwh[3, :48][day[:48]] = np.nan
    readings = Readings(("a", "b", "c", "d", "e"), kwh, START)
    np.testing.assert_allclose(day_share(readings), [1, 0, 0.75, 0.5, 0.5])


# Low Carbon London


def test_lcl_is_read_and_cached(data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not QUICK:  # else from the user's cache, where it is in it
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = lcl.readings(data_dir)
    monkeypatch.setattr("fl_privacy.tasks.load.read_csv", None)
    again = lcl.readings(data_dir)
    assert again.households == first.households
    np.testing.assert_array_equal(again.kwh, first.kwh)
    assert first.kwh.shape == (60, 17_520)
    assert int(np.isfinite(first.kwh).sum()) == 1_014_581
    np.testing.assert_allclose(first.kwh[0, :4], [0.219, 0.241, 0.191, 0.235])


def test_the_sites_of_lcl_are_large_and_even(data_dir: Path) -> None:
    made = lcl.Lcl().load(data_dir)
    assert made.sites == lcl.Lcl.sites
    assert len(made.sites) == 200
    assert len({site.rpartition("-")[0] for site in made.sites[:40]}) == 40
    assert made.train.site is not None
    assert made.test.site is not None
    assert np.bincount(made.train.site).min() == 376
    assert np.bincount(made.train.site).max() == 391
    assert np.bincount(made.test.site).min() == 94


def test_the_attacker_s_households_are_not_in_the_federation(data_dir: Path) -> None:
    members, others = lcl.sides(lcl.readings(data_dir))
    assert members.households == lcl.HOUSEHOLDS
    assert len(others.households) == 20
    assert not set(members.households) & set(others.households)
    known, behaviour = lcl_attacker.outsiders(data_dir)
    assert not set(known.sites) & set(lcl.Lcl.sites)
    assert behaviour.shape == (len(known.sites),) == (92,)


def test_behaviour_belongs_to_the_household(data_dir: Path) -> None:
    (known, behaviour), truth = lcl_attacker.outsiders(data_dir), lcl_attacker.members(data_dir)
    assert truth.shape == (200,)
    np.testing.assert_array_equal(truth.reshape(5, 40), np.tile(truth[:40], (5, 1)))
    homes = {site.rpartition("-")[0]: label for site, label in zip(known.sites, behaviour, strict=True)}
    assert sum(homes.values()) == 10
    assert 0.3 < truth.mean() < 0.7


# Forecasts


def waves(count: int, noise: float = 0.0) -> Dataset:
    """Sines of any phase, and the next value of each."""
    rng = np.random.default_rng(0)
    angle = rng.uniform(0, 2 * np.pi, (count, 1)) + np.arange(49) * 2 * np.pi / 24
    values = (np.sin(angle) + noise * rng.normal(size=angle.shape)).astype(np.float32)
    return Dataset(np.ascontiguousarray(values[:, :48]), values[:, 48])


def forecaster(model: str = "lstm") -> torch.nn.Module:
    return build(model, (48,), 0, seed=0)


@pytest.mark.parametrize("model", ["lstm", "mlp"])
def test_a_model_learns_to_forecast(model: str) -> None:
    built, data = forecaster(model), waves(400)
    before = evaluate(built, data)
    fit(built, data, Recipe(20, 32, 0.05, 0.9), seed=0)
    after = evaluate(built, data)
    assert before.rmse is not None
    assert after.rmse is not None
    # Predicting the mean of a sine has an error of sqrt(1/2).
    assert after.rmse < 0.1 < 0.5 < before.rmse


def test_the_metrics_of_a_forecast() -> None:
    built = build("mlp", (2,), 0, 0, hidden=())
    weights, layout = flatten(built)
    load_vector(built, np.zeros_like(weights), layout)
    found = evaluate(built, Dataset(np.ones((2, 2), np.float32), series(3, 4)))
    assert found == Metrics(accuracy=None, loss=12.5, rmse=math.sqrt(12.5))
    assert found.score == ("rmse", math.sqrt(12.5))
    assert Metrics(0.5, 1.0).score == ("accuracy", 0.5)


@pytest.mark.parametrize("model", ["lstm", "mlp"])
def test_two_trainings_give_the_same_bits(model: str) -> None:
    def run(seed: int) -> bytes:
        built = forecaster(model)
        fit(built, waves(60, 0.1), Recipe(2, 16, 0.05, 0.9), seed)
        return flatten(built)[0].tobytes()

    assert run(1) == run(1) != run(2)


def per_sample(model: torch.nn.Module, data: Dataset) -> dict[str, torch.Tensor]:
    weights = {name: weight.detach() for name, weight in model.named_parameters()}

    def loss(weights: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (functional_call(model, weights, (x.unsqueeze(0),)).squeeze() - y) ** 2

    found: Callable[..., dict[str, torch.Tensor]] = vmap(grad(loss), in_dims=(None, 0, 0))
    return found(weights, torch.from_numpy(data.x), torch.from_numpy(data.y))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_the_lstm_has_gradients_per_sample() -> None:
    data, model = waves(4, 0.5), forecaster()
    outputs = model(torch.from_numpy(data.x)).squeeze(1)
    mean = torch.nn.functional.mse_loss(outputs, torch.from_numpy(data.y))
    whole = torch.autograd.grad(mean, list(model.parameters()))
    for each, together in zip(per_sample(model, data).values(), whole, strict=True):
        assert each.shape == (4, *together.shape)
        # Sums of at most 48 steps of values of order one, in float32.
        torch.testing.assert_close(each.mean(dim=0), together, atol=1e-5, rtol=1e-4)


def test_forecasts_are_partitioned_iid_or_by_site_but_not_by_class() -> None:
    y = np.linspace(0, 1, 20, dtype=np.float32)
    assert [len(part) for part in partition(y, 4, "iid", 0)] == [5, 5, 5, 5]
    with pytest.raises(FederationError, match="dirichlet needs classes"):
        partition(y, 4, "dirichlet", 0)


def test_a_federation_smaller_than_the_data_has_only_its_first_sites(data_dir: Path) -> None:
    small = Federation.model_validate({"sites": 3})
    task = small.task.model_copy(
        update={"dataset": "lcl", "model": "lstm", "partition": Partition(kind="by-site"), "train": Training(epochs=1)}
    )
    work = Workload(small.model_copy(update={"task": task}), data_dir)
    whole = lcl.Lcl().load(data_dir)
    assert whole.train.site is not None
    np.testing.assert_array_equal(work.site_data("site-2").y, whole.train.y[whole.train.site == 2])
    update = work.update(work.initial, work.site_data("site-1"), "site-1", round=1)
    assert update.shape == work.initial.shape == (4769,)
    before, after = work.evaluate(work.initial), work.evaluate(work.initial + update)
    assert before.accuracy is None
    assert after.loss < before.loss


def rmse_of(y: NDArray[np.float32], forecast: NDArray[np.float32] | float) -> float:
    return float(np.sqrt(np.mean((y - forecast) ** 2)))


def test_rounds_of_plain_averaging_beat_the_mean_and_the_last_reading(data_dir: Path) -> None:
    """40 sites, 10 per round, unweighted mean of their updates."""
    data, model = lcl.Lcl().load(data_dir).first_sites(40), build("lstm", (48, 3), 0, seed=0)
    parts = partition(data.train.y, 40, "by-site", 0, site=data.train.site)
    weights, layout = flatten(model)
    rng = np.random.default_rng(0)
    for number in range(2 if QUICK else 5):
        trained = []
        for site in rng.choice(40, 10, replace=False):
            load_vector(model, weights, layout)
            fit(model, data.train.take(parts[site]), Recipe(2, 32, 0.05, 0.9), seed=100 * number + int(site))
            trained.append(flatten(model)[0])
        weights = np.mean(trained, axis=0, dtype=np.float32)
    load_vector(model, weights, layout)
    found = evaluate(model, data.test).rmse
    assert found is not None
    assert found < rmse_of(data.test.y, data.test.x[:, -1, 0]) < rmse_of(data.test.y, 0.0)
