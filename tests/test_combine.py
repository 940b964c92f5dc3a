"""Means and server optimisers: correct, independent of order, and the same on a shard as on the whole."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, strategies as st
from numpy.typing import NDArray
from pydantic import ValidationError

from fl_privacy.combine import mean, optimiser, robust
from fl_privacy.combine.rules import RULES, Combiner
from fl_privacy.config import Federation
from fl_privacy.errors import FederationError
from fl_privacy.shuffle import parameter
from profiles import examples
from server_app.strategy import Strategy

UNIT32, UNIT64 = 2.0**-24, 2.0**-53  # half a unit in the last place
TINY32 = 2.0**-150  # half the smallest float32

backends = pytest.mark.parametrize("backend", ["numba", "numpy"])
any_float32 = st.floats(width=32, allow_nan=False, allow_infinity=False)


def make(kind: str, **params: float) -> optimiser.Optimiser:
    """The optimiser of a rule."""
    return RULES.get(kind)(**params).optimiser()


def spread(rows: int, columns: int, seed: int) -> NDArray[np.float32]:
    """Entries of very different sizes, for which the order of a sum matters."""
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((rows, columns)) * 10.0 ** rng.uniform(-8, 8, (rows, columns))).astype(np.float32)


@given(rows=st.integers(1, 40), columns=st.integers(0, 300), seed=st.integers(0, 2**32))
@examples(60)
def test_exact_mean_does_not_change_under_a_parameter_shuffle(rows: int, columns: int, seed: int) -> None:
    matrix = spread(rows, columns, seed)
    before = mean.weighted(matrix, exact=True)
    parameter.shuffle(matrix, seed.to_bytes(32, "big"))
    assert mean.weighted(matrix, exact=True).tobytes() == before.tobytes()


def test_fast_mean_does_change_under_a_parameter_shuffle() -> None:
    """So the property above is due to the exact sum, not to the data."""
    matrix = spread(40, 3000, 1).astype(np.float32)
    matrix[::2] = -matrix[1::2] * np.float32(1 + 2**-20)
    before = mean.weighted(matrix)
    parameter.shuffle(matrix, bytes(32))
    assert mean.weighted(matrix).tobytes() != before.tobytes()


@given(rows=st.integers(1, 30), seed=st.integers(0, 2**32), data=st.data())
@examples(60)
def test_exact_mean_does_not_depend_on_the_order_of_pairs(rows: int, seed: int, data: st.DataObject) -> None:
    matrix = spread(rows, 50, seed)
    weights = np.array(data.draw(st.lists(st.floats(1e-6, 1e6), min_size=rows, max_size=rows)))
    order = np.array(data.draw(st.permutations(range(rows))))
    moved = mean.weighted(np.ascontiguousarray(matrix[order]), weights[order], exact=True)
    assert moved.tobytes() == mean.weighted(matrix, weights, exact=True).tobytes()


@given(
    columns=st.lists(st.lists(any_float32, min_size=7, max_size=7), min_size=1, max_size=20),
    weights=st.lists(st.floats(0, 1e9), min_size=7, max_size=7).filter(lambda w: max(w) > 0),
    exact=st.booleans(),
)
@examples(150)
def test_mean_is_within_its_bound_and_the_kernels_agree(
    columns: list[list[float]], weights: list[float], exact: bool
) -> None:
    matrix = np.ascontiguousarray(np.array(columns, dtype=np.float32).T)
    found = mean.weighted(matrix, weights, exact=exact, backend="numba")
    twin = mean.weighted(matrix, weights, exact=exact, backend="numpy")
    assert found.tobytes() == twin.tobytes()
    shares = mean.normalised(weights, 7)
    for column, value in zip(matrix.T.astype(float), found, strict=True):
        products = shares * column
        true, size, rows = math.fsum(products), float(np.abs(products).max()), 7
        # 7 < 2^3 rows: half a multiple of size * 2^(3 - 61) each. Fast: one rounding per sum of at most rows * size.
        summed = rows * size * 2.0 ** (3 - 62) if exact else rows * rows * size * UNIT64
        # Both round the products (to subnormals for the tiniest), and so does fsum.
        summed += rows * (2 * size * UNIT64 + 2.0**-900)
        assert abs(float(value) - true) <= (abs(true) + summed) * UNIT32 + summed + TINY32


@backends
def test_exact_mean_is_the_same_on_a_shard(backend: str) -> None:
    matrix = spread(10, 20_000, 3)
    whole = mean.weighted(matrix, exact=True, backend=backend)
    part = mean.weighted(np.ascontiguousarray(matrix[:, 1::3]), exact=True, backend=backend)
    assert part.tobytes() == whole[1::3].tobytes()


@backends
@pytest.mark.parametrize("rows", [1, 2, 3, 10])
@pytest.mark.parametrize("columns", [0, 1, 4095, 4096, 4097, 2**14 + 1])
def test_mean_at_tile_borders(rows: int, columns: int, backend: str) -> None:
    matrix = np.random.default_rng(0).integers(-1000, 1000, (rows, columns)).astype(np.float32)
    # Small integers: sums are exact in float64, so only weight and result round (1/rows, the products, to float32).
    expected = matrix.astype(np.float64).mean(axis=0)
    for exact in (False, True):
        found = mean.weighted(matrix, exact=exact, backend=backend)
        assert np.all(np.abs(found - expected) <= np.abs(expected) * UNIT32 + 1000 * (rows + 2) * 2 * UNIT64)


def test_extreme_values_neither_overflow_nor_vanish() -> None:
    largest = np.finfo(np.float32).max
    smallest = np.finfo(np.float32).smallest_subnormal
    matrix = np.array([[largest, smallest, 0.0], [largest, smallest, -0.0]], np.float32)
    for exact in (False, True):
        assert mean.weighted(matrix, exact=exact).tolist() == [largest, smallest, 0.0]
        assert mean.weighted(matrix, [1e300, 1e-300], exact=exact).tolist() == [largest, smallest, 0.0]
        assert mean.weighted(matrix, [1.7e308, 1.7e308], exact=exact).tolist() == [largest, smallest, 0.0]


@backends
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("weights", [None, [1.0, 0.0, 1.0]])
@pytest.mark.parametrize("place", [0, 5000, 9999])
def test_values_that_are_not_finite_are_refused(
    backend: str, bad: float, weights: list[float] | None, place: int
) -> None:
    matrix = np.ones((3, 10_000), np.float32)
    matrix[1, place] = bad
    for exact in (False, True):
        with pytest.raises(FederationError, match="not finite"):
            mean.weighted(matrix, weights, exact=exact, backend=backend)


@pytest.mark.parametrize("weights", [[1.0], [1.0, -1.0], [0.0, 0.0], [np.nan, 1.0], [np.inf, 1.0]])
def test_wrong_weights_are_refused(weights: list[float]) -> None:
    with pytest.raises(FederationError, match="weights"):
        mean.weighted(np.ones((2, 3), np.float32), weights)


@pytest.mark.parametrize("matrix", [np.ones((2, 3)), np.ones(3, np.float32), np.ones((0, 3), np.float32)])
def test_wrong_matrices_are_refused(matrix: NDArray[np.float32]) -> None:
    with pytest.raises(FederationError, match="matrix"):
        mean.weighted(matrix)


kinds = pytest.mark.parametrize("kind", ["fedavg", "fedprox", "fedadam", "fedyogi"])


def updates(size: int, count: int) -> list[NDArray[np.float32]]:
    rng = np.random.default_rng(1)
    return [rng.standard_normal(size, dtype=np.float32) * np.float32(10.0**-i) for i in range(count)]


@kinds
def test_a_step_on_a_shard_is_the_shard_of_the_step(kind: str) -> None:
    size = 2**16 + 1001
    whole, part = make(kind), make(kind)
    model = np.random.default_rng(0).standard_normal(size, dtype=np.float32)
    piece = model[2::3].copy()
    for update in updates(size, 4):
        model = whole.step(model, update)
        piece = part.step(piece, np.ascontiguousarray(update[2::3]))
        assert piece.tobytes() == model[2::3].tobytes()


@kinds
def test_a_restored_optimiser_continues_like_an_uninterrupted_one(kind: str) -> None:
    unbroken, before, after = make(kind), make(kind), make(kind)
    model = other = np.zeros(50, np.float32)
    for i, update in enumerate(updates(50, 6)):
        model = unbroken.step(model, update)
        if i == 3:
            after.restore(before.state())
        other = (before if i < 3 else after).step(other, update)
        assert other.tobytes() == model.tobytes()


@kinds
def test_state_is_a_copy_and_inputs_are_not_modified(kind: str) -> None:
    rule = make(kind)
    model, update = np.zeros(5, np.float32), np.ones(5, np.float32)
    rule.step(model, update)
    assert np.array_equal(model, np.zeros(5))
    assert np.array_equal(update, np.ones(5))
    for array in rule.state().values():
        array[:] = np.nan
    assert np.isfinite(rule.step(model, update)).all()


def test_fedavg_adds_the_mean() -> None:
    model, update = np.array([1.0, 2.0], np.float32), np.array([0.5, -4.0], np.float32)
    assert make("fedavg").step(model, update).tolist() == [1.5, -2.0]
    assert make("fedprox", lr=0.5).step(model, update).tolist() == [1.25, 0.0]


@pytest.mark.parametrize("kind", ["fedadam", "fedyogi"])
def test_adaptive_rules_are_algorithm_2(kind: str) -> None:
    """Two steps of one coordinate by hand; each stored number is rounded to float32 once, which costs a few units."""
    eta, beta1, beta2, tau = 0.3, 0.8, 0.9, 0.05
    rule = make(kind, lr=eta, beta1=beta1, beta2=beta2, tau=tau)
    model = np.array([1.0], np.float32)
    x, m, v = 1.0, 0.0, tau**2
    for delta in (0.5, -0.03125):
        m = beta1 * m + (1 - beta1) * delta
        square = delta**2
        v = beta2 * v + (1 - beta2) * square if kind == "fedadam" else v - (1 - beta2) * square * np.sign(v - square)
        x += eta * m / (math.sqrt(v) + tau)
        model = rule.step(model, np.array([delta], np.float32))
        # m, v (halved by the root) and x: at most 8 roundings of terms of at most 2 in two steps.
        assert abs(float(model[0]) - x) <= 8 * 2 * UNIT32


def test_defaults_match_flower() -> None:
    adam, yogi = make("fedadam"), make("fedyogi")
    assert (adam.lr, adam.beta1, adam.beta2, adam.tau) == (0.1, 0.9, 0.99, 1e-3)
    assert (yogi.lr, yogi.beta1, yogi.beta2, yogi.tau) == (0.01, 0.9, 0.99, 1e-3)


def test_wrong_use_is_refused() -> None:
    with pytest.raises(FederationError, match="fedsgd"):
        make("fedsgd")
    for kind, wrong in (("fedavg", {"eta": 0.1}), ("fedadam", {"beta1": 1.0}), ("fedyogi", {"tau": 0.0})):
        with pytest.raises(ValidationError, match=next(iter(wrong))):
            make(kind, **wrong)
    with pytest.raises(FederationError, match="beta1"):
        optimiser.FedAdam(0.1, 1.0, 0.99, 1e-3)
    rule = make("fedadam")
    with pytest.raises(FederationError, match="mean_update"):
        rule.step(np.zeros(3, np.float32), np.zeros(4, np.float32))
    rule.step(np.zeros(3, np.float32), np.zeros(3, np.float32))
    with pytest.raises(FederationError, match="state m"):
        rule.step(np.zeros(4, np.float32), np.zeros(4, np.float32))
    with pytest.raises(FederationError, match="state"):
        rule.restore({"m": np.zeros(3, np.float32)})


@given(rows=st.integers(1, 20), columns=st.integers(1, 60), trim=st.floats(0, 0.49), seed=st.integers(0, 2**32))
@examples(60)
def test_robust_rules_take_the_middle_of_each_column_in_any_order(
    rows: int, columns: int, trim: float, seed: int
) -> None:
    matrix = spread(rows, columns, seed)
    found = robust.median(matrix), robust.trimmed_mean(matrix, trim)
    assert np.allclose(found[0], np.median(matrix.astype(np.float64), axis=0), rtol=2 * UNIT32, atol=TINY32)
    dropped = math.floor(trim * rows)
    kept = np.sort(matrix.astype(np.float64), axis=0)[dropped : rows - dropped]
    assert np.all(kept[0] * (1 - np.sign(kept[0]) * 1e-6) <= found[1] + TINY32)
    assert np.all(found[1] <= kept[-1] * (1 + np.sign(kept[-1]) * 1e-6) + TINY32)
    parameter.shuffle(matrix, seed.to_bytes(32, "big"))
    again = robust.median(matrix), robust.trimmed_mean(matrix, trim)
    assert [one.tobytes() for one in again] == [one.tobytes() for one in found]


def test_one_outlier_moves_the_mean_but_not_the_robust_rules() -> None:
    honest = np.random.default_rng(0).standard_normal((9, 500), dtype=np.float32)
    poisoned = np.vstack([honest, np.full((1, 500), 1e6, np.float32)])
    config = {"sites": 10, "route": {"kind": "server"}}

    def moved(combine: dict[str, object]) -> float:
        combiner = Combiner(Federation.model_validate({**config, "combine": combine}))
        return float(np.abs(combiner.step(np.zeros(500, np.float32), poisoned) - honest.mean(axis=0)).max())

    assert moved({"kind": "fedavg"}) > 1e4
    assert moved({"kind": "median"}) < 2
    assert moved({"kind": "trimmed-mean", "trim": 0.1}) < 1


def test_a_rule_that_a_route_cannot_feed_is_refused() -> None:
    budgets = "sites: {count: 4, epsilon: 1}\nprivatise: {kind: ldp}\n"
    with pytest.raises(FederationError, match=r"combine\.weights.*median; use equal"):
        Federation.parse(budgets + "combine: {kind: median, weights: epsilon}")


def test_a_server_may_hold_several_models_each_with_its_own_moments() -> None:
    federation = Federation.parse("sites: 3\ncombine: {kind: fedadam}")
    strategy, alone = Strategy(federation), Combiner(federation)
    models = {"model": np.zeros(8, np.float32), "cluster-1": np.ones(8, np.float32)}
    for seed in range(3):
        rows = spread(3, 8, seed)
        expected = alone.step(models["model"], rows)
        models = strategy.combine(models, rows, [""] * 3)
        assert models["model"].tobytes() == expected.tobytes()
    again = Strategy(federation)
    again.restore(models, strategy.state())
    rows = spread(3, 8, 9)
    one, two = strategy.combine(models, rows, [""] * 3), again.combine(models, rows, [""] * 3)
    assert [one[name].tobytes() for name in one] == [two[name].tobytes() for name in two]
