"""The models by name: which records they accept, their sizes, per-record gradients, and that they learn."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from fl_privacy import vector
from fl_privacy.dp import per_record
from fl_privacy.errors import FederationError
from fl_privacy.tasks.catalog import MODELS
from fl_privacy.tasks.data import Dataset
from fl_privacy.tasks.models import BUILDERS, build
from fl_privacy.tasks.train import Recipe, evaluate, fit
from profiles import examples

# A record's shape and classes (0: a number to predict), for every kind of record that the data sets give.
TABLES = [((3,), 2), ((30,), 5), ((30,), 0)]
SERIES = [((48, 3), 0), ((48, 3), 4), ((200,), 5)]
IMAGES = [((1, 8, 8), 10), ((3, 32, 32), 2), ((3, 16, 12), 2)]
FITTING = [
    (name, shape, classes)
    for name in MODELS
    for shape, classes in (*TABLES, *SERIES, *IMAGES)
    if MODELS[name].take(shape, classes)
]


def some(shape: tuple[int, ...], classes: int) -> Dataset:
    y = np.arange(4) % classes if classes else np.zeros(4, np.float32)
    return Dataset(np.zeros((4, *shape), np.float32), y)


def test_every_model_is_in_the_catalog_and_every_record_has_one() -> None:
    assert list(MODELS) == list(BUILDERS)
    assert {name for name, _, _ in FITTING} == set(MODELS)
    assert {name for name, shape, _ in FITTING if shape == (3, 16, 12)} == {"mlp", "logistic"}


@pytest.mark.parametrize(("name", "shape", "classes"), FITTING)
def test_a_model_takes_its_shape_from_the_data(name: str, shape: tuple[int, ...], classes: int) -> None:
    model = build(name, shape, classes, seed=0)
    for batch in (1, 3):
        assert model(torch.zeros(batch, *shape)).shape == (batch, classes or 1)
    weights, layout = vector.flatten(model)
    other = build(name, shape, classes, seed=1)
    vector.load(other, weights, layout)
    x = torch.ones(2, *shape)
    assert torch.equal(model(x), other(x))


def test_known_sizes() -> None:
    def size(name: str, shape: tuple[int, ...], classes: int) -> int:
        return vector.flatten(build(name, shape, classes, 0))[1].size

    assert size("logistic", (30,), 2) == 62
    assert size("logistic", (30,), 0) == 31
    convolutions = sum(9 * a * b + 2 * b for a, b in [(3, 64), (64, 128), (128, 128), (128, 128), (128, 256)])
    convolutions += sum(9 * a * b + 2 * b for a, b in [(256, 512), (512, 512), (512, 512)])
    assert size("resnet9", (3, 32, 32), 10) == convolutions + 512 * 10 + 10
    assert 10_000 < size("transformer", (48, 3), 0) < 30_000


@pytest.mark.parametrize("name", ["lstm", "transformer"])
def test_a_series_that_is_too_long_is_refused(name: str) -> None:
    with pytest.raises(FederationError, match="does not accept records of shape"):
        build(name, (20_000,), 0, seed=0)


@examples(10)
@given(seed=st.integers(0, 2**32))
def test_a_transformer_knows_where_a_reading_is(seed: int) -> None:
    model = build("transformer", (6, 2), 3, seed)
    x = torch.randn(1, 6, 2, generator=torch.Generator().manual_seed(seed))
    assert not torch.allclose(model(x), model(x.flip(1)))


@pytest.mark.parametrize(
    ("name", "shape", "classes"),
    [("logistic", (13,), 0), ("transformer", (12,), 2), ("transformer", (12, 3), 0), ("resnet9", (1, 8, 8), 2)],
)
def test_models_have_per_record_gradients_for_every_kind_of_record(
    name: str, shape: tuple[int, ...], classes: int
) -> None:
    per_record.check(build(name, shape, classes, seed=0), some(shape, classes))


def test_a_layer_without_per_record_gradients_is_named() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
    with pytest.raises(FederationError, match=r"task\.model: BatchNorm1d '1' has no per-record privacy"):
        per_record.check(model, some((4,), 2))


def test_a_transformer_learns_to_count_and_to_forecast() -> None:
    """Which half of a series is larger needs the places; the last reading plus the first needs attention."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(1200, 8, 1)).astype(np.float32)
    halves = (x[:, :4, 0].sum(axis=1) > x[:, 4:, 0].sum(axis=1)).astype(np.int64)
    sums = (x[:, 0, 0] + x[:, -1, 0]).astype(np.float32)
    scores = []
    for y, classes in ((halves, 2), (sums, 0)):
        model = build("transformer", (8, 1), classes, seed=0)
        fit(model, Dataset(x[:1000], y[:1000]), Recipe(epochs=8, batch_size=32, lr=0.03, momentum=0.9), seed=0)
        scores.append(evaluate(model, Dataset(x[1000:], y[1000:])))
    assert scores[0].accuracy is not None
    assert scores[0].accuracy > 0.75  # chance: 0.5
    assert scores[1].loss < 0.2  # always the mean: 2


def test_resnet9_learns_bright_from_dark() -> None:
    rng = np.random.default_rng(0)
    y = np.arange(64) % 2
    x = (rng.normal(size=(64, 1, 8, 8)) + np.where(y, 1, -1)[:, None, None, None]).astype(np.float32)
    model = build("resnet9", (1, 8, 8), 2, seed=0)
    fit(model, Dataset(x, y), Recipe(epochs=3, batch_size=16, lr=0.001, momentum=0.9), seed=0)
    accuracy = evaluate(model, Dataset(x, y)).accuracy
    assert accuracy is not None
    assert accuracy > 0.9  # chance: 0.5
