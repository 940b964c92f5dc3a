"""Regularised training: what it computes, that a seed decides it, and that a plain recipe trains as before."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn
from torch.nn.functional import cross_entropy, one_hot

from fl_privacy.config import Federation
from fl_privacy.errors import ConfigError
from fl_privacy.tasks import regularise
from fl_privacy.tasks.data import Dataset
from fl_privacy.tasks.models import build
from fl_privacy.tasks.train import How, Recipe, batch_loss, fit, loss_of
from fl_privacy.vector import flatten


@given(seed=st.integers(0, 2**32 - 1), share=st.floats(0, 0.99))
def test_smoothed_labels_are_those_of_torch(seed: int, share: float) -> None:
    draw = torch.Generator().manual_seed(seed)
    outputs, labels = torch.randn(7, 5, generator=draw), torch.randint(5, (7,), generator=draw)
    for reduction in ("none", "mean", "sum"):
        found = regularise.smoothed(loss_of, share)(outputs, labels, reduction)
        assert torch.allclose(
            found, cross_entropy(outputs, labels, reduction=reduction, label_smoothing=share), atol=1e-5
        )


def test_dropout_keeps_the_mean_and_ends_with_its_block() -> None:
    model = nn.Sequential(nn.Linear(1000, 1, bias=False))
    with torch.no_grad():
        model[0].weight.fill_(1 / 1000)
    x = torch.ones(400, 1000)
    with torch.no_grad(), regularise.dropout(model, 0.8, torch.Generator().manual_seed(0)):
        found = model(x)
    # Each output is the mean of 1000 values that are 5 with probability 0.2: mean 1, variance 4 / 1000.
    assert abs(float(found.mean()) - 1) < 5 * (4 / 1000 / 400) ** 0.5
    assert float(found.std()) == pytest.approx((4 / 1000) ** 0.5, rel=0.2)
    assert torch.allclose(model(x), torch.ones(400, 1), atol=1e-5)


def test_crops_are_squares_of_the_image_in_its_own_size() -> None:
    draw = torch.Generator().manual_seed(0)
    rows = torch.arange(12.0)[None, None, :, None].expand(50, 1, 12, 12)
    crop = regularise.cropped(lambda records: records, 6, draw)
    found = crop(rows)
    assert found.shape == rows.shape
    spans = (found.amax(dim=(1, 2, 3)) - found.amin(dim=(1, 2, 3))).tolist()
    assert spans == pytest.approx([5.0] * 50)  # six rows of the image
    assert len({float(low) for low in found.amin(dim=(1, 2, 3))}) > 3  # from different places
    whole = regularise.cropped(lambda records: records, 12, draw)(rows)
    assert torch.allclose(whole, rows)


@given(seed=st.integers(0, 2**32 - 1), k=st.integers(1, 6))
def test_instahide_mixes_a_record_with_others_and_hides_every_sign(seed: int, k: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    x, rows = torch.rand(20, 1, 4, 4, generator=draw) + 0.5, torch.tensor([3, 0, 3])
    hidden = regularise.InstaHide(k, draw)(x, rows, lambda records: 2 * records)
    assert torch.equal(hidden.rows[0], rows)
    assert hidden.rows.shape == hidden.parts.shape == (k, 3)
    assert torch.allclose(hidden.parts.sum(dim=0), torch.ones(3), atol=1e-5)
    assert float(hidden.parts.min()) >= 0
    assert float(hidden.parts.max()) <= (1 if k == 1 else regularise.LARGEST_PART) + 1e-5
    mixed = torch.einsum("kb,kbchw->bchw", hidden.parts, 2 * x[hidden.rows])
    assert torch.allclose(hidden.records.abs(), mixed, atol=1e-5)


def test_the_signs_of_instahide_are_fair_and_never_the_same_twice() -> None:
    hide, rows = regularise.InstaHide(2, torch.Generator().manual_seed(0)), torch.arange(50)
    once, again = (hide(torch.ones(50, 1, 8, 8), rows, lambda records: records).records for _ in range(2))
    assert abs(float(once.sign().mean())) < 5 / 3200**0.5
    assert abs(float((once.sign() * again.sign()).mean())) < 5 / 3200**0.5


def test_the_loss_of_a_mixture_is_that_of_its_labels_in_its_parts() -> None:
    data = Dataset(np.zeros((6, 1, 8, 8), np.float32), np.array([0, 1, 2, 3, 4, 5]))
    model = build("mlp", (1, 8, 8), 10, 0)
    x, y = torch.from_numpy(data.x), torch.from_numpy(data.y)
    hide = regularise.InstaHide(3, torch.Generator().manual_seed(0))
    found = batch_loss(model, x, y, torch.arange(6), How(hide=hide))
    _, rows, parts = regularise.InstaHide(3, torch.Generator().manual_seed(0))(x, torch.arange(6), lambda one: one)
    soft = torch.einsum("kb,kbc->bc", parts, one_hot(y[rows], 10).float())
    assert torch.allclose(found, cross_entropy(model(x), soft), atol=1e-5)


def trained(**regularised: float | int) -> bytes:
    rng = np.random.default_rng(0)
    data = Dataset(rng.random((30, 1, 8, 8), np.float32), rng.integers(10, size=30))
    model = build("mlp", (1, 8, 8), 10, 0)
    fit(model, data, Recipe(2, 10, 0.1, **regularised), seed=1)  # type: ignore[arg-type]
    return flatten(model)[0].tobytes()


def test_a_seed_decides_training_and_each_option_changes_it() -> None:
    plain = trained()
    assert plain == trained(dropout=0.0, label_smoothing=0.0)
    for option in ({"dropout": 0.5}, {"label_smoothing": 0.2}, {"crop": 6}, {"instahide": 1}, {"instahide": 3}):
        assert trained(**option) == trained(**option) != plain  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("task: {train: {crop: 9}}", "task.train.crop: 9 does not fit digits"),
        ("task: {train: {dropout: 1}}", "dropout"),
        (
            "sites: {count: 4, epsilon: 1}\nprivatise: {kind: dpsgd}\ntask: {train: {label_smoothing: 0.1}}",
            "task.train.label_smoothing: is not supported",
        ),
        (
            "sites: {count: 4, epsilon: 1}\nprivatise: {kind: dpsgd}\ntask: {train: {instahide: 2}}",
            "task.train.instahide: is not supported",
        ),
        ("task: {train: {instahide: 0}}", "instahide"),
    ],
)
def test_what_does_not_fit_is_refused(text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        Federation.parse(text if "sites" in text else f"sites: 4\n{text}")
