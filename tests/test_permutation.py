"""Tazza's permutation: outputs do not change, restoring is exact, and training and averaging commute with it."""

from __future__ import annotations

import copy
import math
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from fl_privacy import kernels
from fl_privacy.combine import mean
from fl_privacy.crypto.stream import Words
from fl_privacy.errors import FederationError
from fl_privacy.steps.permute import tazza
from fl_privacy.steps.permute.rule import Rules, gather, permutations, shuffled
from fl_privacy.tasks.catalog import MODELS
from fl_privacy.vector import Layout, Vector, flatten, load
from permutable import OWN, SHIPPED, batch, model
from profiles import examples

SECRET = bytes(range(32))
CLOSE = 1e-5
NAMES = (*SHIPPED, *OWN)
HIDING_NO_INPUT = {"lenet5", "cnn5x5", "words"}  # one channel, or ids of tokens
every = pytest.mark.parametrize("name", NAMES)


@cache
def rules(name: str) -> Rules:
    return tazza.rules(model(name), batch(name))


def test_every_shipped_model_is_here() -> None:
    assert set(SHIPPED) == set(MODELS)


@every
def test_outputs_do_not_change_and_restoring_is_exact(name: str) -> None:
    module, found = model(name), rules(name)
    vector, layout = flatten(module)
    for round in (1, 2):
        rule = found.draw(SECRET, "run", round)
        assert tazza.difference(module, batch(name, seed=round), rule) <= CLOSE
        moved = tazza.apply(vector, layout, rule)
        assert tazza.invert(moved, layout, rule).tobytes() == vector.tobytes()
        assert tazza.apply(tazza.invert(vector, layout, rule), layout, rule).tobytes() == vector.tobytes()
        np.testing.assert_array_equal(np.sort(moved), np.sort(vector))
    # Only what belongs to the outputs alone stays: it would be another class otherwise.
    assert vector.size - found.moving <= module(batch(name)).shape[1]
    assert found.hides_input is (name not in HIDING_NO_INPUT)


@every
def test_the_trial_would_notice_a_rule_that_is_wrong(name: str) -> None:
    """One axis of one weight in another order than the rest of its group."""
    rule = rules(name).draw(SECRET, "run", 1)
    layers = [entry for entry, axes in rule.tensors.items() if len(axes) > 1 and axes[0] is not None]
    if layers:
        wrong = copy.deepcopy(rule.tensors)
        first = wrong[layers[0]][0]
        assert first is not None
        wrong[layers[0]] = (np.roll(first, 1), *wrong[layers[0]][1:])
        changed = type(rule)(wrong, rule.inputs)
        assert tazza.difference(model(name), batch(name), changed) > 10 * CLOSE


def test_what_moves_is_what_the_paper_says_and_more() -> None:
    kinds = {name: [(kind.size, kind.count) for kind in rules(name).groups if not kind.fixed] for name in NAMES}
    assert kinds["mlp"] == [(64, 1), (64, 1)]  # all 64 pixels in any order, not rows and columns apart
    assert kinds["lenet5"] == [(6, 1), (16, 1), (120, 1), (84, 1)]  # channels
    assert kinds["lstm"] == [(32, 1), (3, 1)]  # one order for the four gates
    gru = dict(zip(("weight_hh_l0", "weight_hh_l0_reverse"), ((24, 8), (24, 8)), strict=True))
    rule = rules("GRU").draw(SECRET, "run", 1)
    for weight, (gated, hidden) in gru.items():
        rows, columns = rule.tensors[f"layers.{weight}"]
        assert rows is not None
        assert columns is not None
        assert (len(rows), len(columns)) == (gated, hidden)
        for gate in range(3):
            np.testing.assert_array_equal(rows[8 * gate : 8 * gate + 8] - 8 * gate, columns)
    both = [rule.tensors[f"layers.{weight}"][1] for weight in gru]
    assert both[0] is not None
    assert not np.array_equal(*both)  # each direction has its own order
    assert (4, 1) in kinds["transformer"]  # heads
    assert (8, 4) in kinds["transformer"]  # and the dimensions of each head in an order of its own


def test_a_head_keeps_its_dimensions_and_query_and_key_agree() -> None:
    rule = rules("transformer").draw(SECRET, "run", 1)
    rows = rule.tensors["layers.0.attend.layers.attention.inputs.weight"][0]
    mixed = rule.tensors["layers.0.attend.layers.attention.out.weight"][1]
    assert rows is not None
    assert mixed is not None
    query, key, value = rows.reshape(3, 4, 8)
    np.testing.assert_array_equal(query, key - 32)
    np.testing.assert_array_equal(value.reshape(-1) - 64, mixed)
    for part in (query, value - 64):
        heads = part // 8
        assert (heads == heads[:, :1]).all()
        assert sorted(heads[:, 0]) == [0, 1, 2, 3]
        assert len({tuple(dimensions) for dimensions in part % 8}) > 1


# Training


def gradient(module: nn.Module, x: Tensor, y: Tensor) -> Vector:
    module.zero_grad()
    outputs = module(x)
    (cross_entropy(outputs, y) if y.dtype == torch.int64 else mse_loss(outputs, y)).backward()
    found = {n: torch.zeros_like(t) if t.grad is None else t.grad for n, t in module.state_dict(keep_vars=True).items()}
    return flatten(found)[0]


def moved_module(name: str, rule: tazza.Rule, layout: Layout) -> nn.Module:
    moved = model(name).eval()
    load(moved, tazza.apply(flatten(moved)[0], layout, rule), layout)
    return moved


def records(name: str, rule: tazza.Rule) -> tuple[Tensor, Tensor, Tensor]:
    x, classes = batch(name, 6), model(name)(batch(name)).shape[1]
    y = torch.arange(6) % classes if classes > 1 else torch.linspace(-1, 1, 6)[:, None]
    return x, torch.from_numpy(rule.records(x.numpy())), y


@every
def test_gradients_commute(name: str) -> None:
    rule, layout = rules(name).draw(SECRET, "run", 1), flatten(model(name))[1]
    x, moved_x, y = records(name, rule)
    plain = gradient(model(name).eval(), x, y)
    moved = gradient(moved_module(name, rule, layout), moved_x, y)
    np.testing.assert_allclose(moved, tazza.apply(plain, layout, rule), atol=CLOSE * float(np.abs(plain).max()))


@pytest.mark.parametrize("optimiser", ["SGD", "Adam"])
@pytest.mark.parametrize("name", ["mlp", "transformer", "LSTM"])
def test_steps_of_an_optimiser_commute(name: str, optimiser: str) -> None:
    rule, (before, layout) = rules(name).draw(SECRET, "run", 1), flatten(model(name))
    x, moved_x, y = records(name, rule)
    ends = []
    for module, inputs in ((model(name).eval(), x), (moved_module(name, rule, layout), moved_x)):
        options = {"lr": 0.05, "momentum": 0.9} if optimiser == "SGD" else {"lr": 1e-3, "eps": 1e-3}
        steps = getattr(torch.optim, optimiser)(module.parameters(), **options)
        for _ in range(5):
            gradient(module, inputs, y)
            steps.step()
        ends.append(flatten(module)[0])
    size = float(np.abs(ends[0] - before).max())
    assert size > 1e-3
    np.testing.assert_allclose(tazza.invert(ends[1], layout, rule), ends[0], atol=CLOSE + 1e-3 * size)


@given(seed=st.integers(0, 2**32), round=st.integers(0, 2**31), count=st.integers(1, 5), exact=st.booleans())
@examples(20)
def test_averaging_commutes_bit_for_bit_and_so_does_a_sum_of_rules(
    seed: int, round: int, count: int, exact: bool
) -> None:
    layout = flatten(model("mlp"))[1]
    rule = rules("mlp").draw(SECRET, "run", round)
    rows = np.random.default_rng(seed).normal(size=(count, layout.size)).astype(np.float32)
    moved = np.stack([tazza.apply(row, layout, rule) for row in rows])
    wanted = tazza.apply(mean.weighted(rows, exact=exact), layout, rule)
    assert mean.weighted(moved, exact=exact).tobytes() == wanted.tobytes()
    np.testing.assert_array_equal(tazza.invert(moved[0], layout, rule), rows[0])


# Rules


def test_a_rule_depends_on_secret_run_and_round_and_on_nothing_else() -> None:
    vector, layout = flatten(model("mlp"))
    made = {
        (secret, run, round): tazza.apply(vector, layout, rules("mlp").draw(secret, run, round)).tobytes()
        for secret in (SECRET, bytes(32))
        for run in ("run", "other")
        for round in (1, 2)
    }
    assert len(set(made.values())) == len(made) == 8
    again = tazza.rules(model("mlp"), batch("mlp", seed=9)).draw(SECRET, "run", 2)
    assert tazza.apply(vector, layout, again).tobytes() == made[SECRET, "run", 2]


@pytest.mark.parametrize("large", [False, True])
def test_permutations_are_uniform(large: bool) -> None:
    """Chi-square over all 24 orders of four: above 60 with probability below 4e-5 if they are."""
    count = 4800
    found = Counter(map(tuple, (_large(count) if large else permutations(4, count, SECRET)).tolist()))
    assert len(found) == math.factorial(4)
    assert sum((times - count / 24) ** 2 / (count / 24) for times in found.values()) < 60


def _large(count: int) -> np.ndarray:
    """The way of groups that are too large for the kernel."""
    return np.stack([shuffled(4, Words(SECRET, stream=number)) for number in range(count)])


def test_a_group_of_more_positions_than_the_kernel_takes() -> None:
    found = permutations(70_000, 1, SECRET)[0]
    assert sorted(found) == list(range(70_000))
    assert (found == np.arange(70_000)).sum() < 12


# What is refused


class Cumulative(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.cumsum(dim=1)


class Two(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x


class Secretive(nn.Module):
    """Looks at a position where no function shows it."""

    def forward(self, x: Tensor) -> Tensor:
        return x * x[0].tolist()[0]


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (Cumulative(), "layer 1.inner: calls cumsum, and what it does to the order of its inputs is not known"),
        (Two(), "layer the model itself: the model gives more than one tensor; return one"),
    ],
)
def test_a_part_that_cannot_be_permuted_is_refused_with_its_layer(layer: nn.Module, message: str) -> None:
    holder = nn.Sequential()
    holder.add_module("inner", layer)
    module = nn.Sequential(nn.Linear(4, 8), holder) if isinstance(layer, Cumulative) else nn.Sequential(layer)
    with pytest.raises(FederationError, match=message):
        tazza.rules(module, torch.randn(2, 4))
    assert module.training


def test_a_model_whose_outputs_change_is_refused() -> None:
    module = nn.Sequential(nn.Linear(4, 8), Secretive(), nn.Linear(8, 2))
    with pytest.raises(FederationError, match="the model gives other outputs when it is permuted; remove permute"):
        tazza.rules(module, torch.randn(2, 4, generator=torch.Generator().manual_seed(1)))


def test_a_vector_or_layout_of_another_model_is_refused() -> None:
    rule = rules("mlp").draw(SECRET, "run", 1)
    vector, layout = flatten(model("mlp"))
    out = np.empty_like(vector)
    assert tazza.apply(vector, layout, rule, out) is out
    with pytest.raises(FederationError, match="pass another vector like it"):
        tazza.apply(vector, layout, rule, vector)
    with pytest.raises(FederationError, match="does not fit a layout"):
        tazza.apply(vector[1:], layout, rule)
    other, theirs = flatten(nn.Sequential())
    assert tazza.apply(other, theirs, rule).size == 0
    wrong = Layout(tuple(type(e)(e.name, (*e.shape[:-1], e.shape[-1] + 1)) for e in layout.entries))
    with pytest.raises(FederationError, match="is not the rule's; derive it again"):
        tazza.apply(np.zeros(wrong.size, np.float32), wrong, rule)


@given(
    shape=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    moved=st.lists(st.booleans(), min_size=4, max_size=4),
    seed=st.integers(0, 2**32),
)
@examples(60)
def test_gathering_is_indexing_with_every_kernel(shape: list[int], moved: list[bool], seed: int) -> None:
    rng = np.random.default_rng(seed)
    axes = [rng.permutation(size) if move else None for size, move in zip(shape, moved, strict=False)]
    source = rng.normal(size=math.prod(shape)).astype(np.float32)
    places = [np.arange(size) if axis is None else axis for size, axis in zip(shape, axes, strict=True)]
    wanted = source.reshape(shape)[np.ix_(*places)].reshape(-1)
    for backend in kernels.BACKENDS:
        out = np.zeros_like(source)
        gather(source, out, shape, axes, kernels.pick("gather", 1, backend))
        assert out.tobytes() == wanted.tobytes()


@pytest.mark.parametrize("backend", kernels.BACKENDS)
def test_gathering_wide_rows_of_three_by_three(backend: str) -> None:
    rng, shape = np.random.default_rng(1), (5, 500, 3, 3)
    source, axes = rng.normal(size=math.prod(shape)).astype(np.float32), [rng.permutation(n) for n in shape[:2]]
    out = np.zeros_like(source)
    gather(source, out, shape, [*axes, None, None], kernels.pick("gather", 1, backend))
    np.testing.assert_array_equal(out.reshape(shape), source.reshape(shape)[axes[0]][:, axes[1]])


def test_the_example_of_the_page_runs() -> None:
    page = (Path(__file__).parent.parent / "docs" / "permutation.md").read_text()
    code = page.partition("```python\n")[2].partition("```")[0]
    names: dict[str, Any] = {}
    exec(code, names)
    assert (names["rules"].hides_input, names["rules"].moving) == (True, 176)
