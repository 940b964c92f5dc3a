"""Fulcrum: the allocation with a certificate, the paper's exact numbers, and the counterexample to its theorem."""

from __future__ import annotations

import math
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings, strategies as st

from fl_privacy.dp import fulcrum
from fl_privacy.dp.fulcrum import Allocation, allocate, certificate, lower_bound, round_up
from fl_privacy.errors import FederationError
from fl_privacy.report.fulcrum import pareto_figure, sweep_figure
from fl_privacy.theory import fulcrum as theory

CLOSE = 1e-9

levers = st.lists(st.floats(0, 50), min_size=1, max_size=30)
budgets = st.floats(1e-3, 10)
floors = st.lists(st.just(0.0) | st.floats(1e-3, 0.5), min_size=30, max_size=30)


def relative(found: float, wanted: float) -> float:
    return abs(found - wanted) / abs(wanted)


# Optimality


def dual(found: Allocation, weights: np.ndarray, price: float) -> float:
    """Weak duality by a grid search over every site's variance: a bound from below that shares no code with ours."""
    a = found.window / (2 * found.batch**2)
    total = -price * found.budget
    for weight, leverage, floor in zip(weights, found.leverage, found.floor, strict=True):
        free = math.sqrt(weight * a / price)
        s = np.geomspace(max(floor**2, free / 2, 1e-300), max(floor**2, free * 2, 1e-300) * 2, 2001)
        s = np.concatenate([s, [floor**2] if floor else [], [free] if free > floor**2 else []])
        total += weight * leverage + float(np.min(weight * a / s + price * s))
    return total


@given(levers, budgets, floors)
@settings(max_examples=60, deadline=None)
def test_the_allocation_is_feasible_and_its_certificate_proves_that_none_is_better(
    leverage: list[float], budget: float, floor: list[float]
) -> None:
    least = np.array(floor[: len(leverage)])
    assume(math.fsum(least**2) < budget)
    found = allocate(leverage, budget, 100, 64, least)
    assert np.all(found.sigma >= least)
    assert np.all(found.sigma > 0)
    assert relative(math.fsum(found.sigma**2), budget) < CLOSE
    assert relative(found.per_site.max(), found.bound) < CLOSE
    proof = certificate(found)
    assert np.all(proof.weights >= 0)
    assert abs(proof.weights.sum() - 1) < CLOSE
    assert proof.price > 0
    assert relative(lower_bound(found, proof), found.bound) < CLOSE
    assert relative(dual(found, proof.weights, proof.price), found.bound) < CLOSE
    free = found.sigma > least
    assert np.allclose(found.per_site[free], found.bound, rtol=CLOSE)


@given(levers, budgets, st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_no_other_allocation_and_no_other_weights_come_closer(leverage: list[float], budget: float, seed: int) -> None:
    found, rng = allocate(leverage, budget, 100, 64), np.random.default_rng(seed)
    a, levels = fulcrum.scale(100, 64), np.array(leverage)
    for _ in range(5):
        variance = budget * rng.dirichlet(np.full(len(leverage), 3.0))
        assert (a / variance + levels).max() >= found.bound * (1 - CLOSE)
        proof = fulcrum.Certificate(rng.dirichlet(np.ones(len(leverage))), rng.exponential() + 1e-3)
        assert lower_bound(found, proof) <= found.bound * (1 + CLOSE)


@given(levers, budgets)
@settings(max_examples=60, deadline=None)
def test_without_floors_the_closed_form_holds_and_uniform_is_never_better(leverage: list[float], budget: float) -> None:
    found = allocate(leverage, budget, 100, 64)
    a = fulcrum.scale(100, 64)
    above = a / found.sigma**2  # K* - l_i, which subtraction would lose where l is large
    assert np.allclose(above + found.leverage, found.bound, rtol=CLOSE)
    assert found.bound <= found.uniform_bound * (1 + CLOSE)
    if max(leverage) == min(leverage):
        assert np.allclose(found.sigma, found.uniform_sigma, rtol=CLOSE)
        assert abs(found.gap) < CLOSE * found.bound


@given(levers, budgets)
@settings(max_examples=30, deadline=None)
def test_floors_that_do_not_bind_change_nothing(leverage: list[float], budget: float) -> None:
    free = allocate(leverage, budget, 100, 64)
    held = allocate(leverage, budget, 100, 64, free.sigma * 0.999)
    assert np.allclose(free.sigma, held.sigma, rtol=CLOSE)
    assert relative(held.bound, free.bound) < CLOSE


def test_floors_that_spend_the_whole_budget_leave_no_choice() -> None:
    floor = np.array([0.5, 0.25, 0.125])
    found = allocate([0, 1, 5], float(np.sum(floor**2)), 100, 64, floor)
    assert found.sigma.tolist() == floor.tolist()
    assert relative(found.bound, found.per_site.max()) < CLOSE
    assert relative(lower_bound(found, certificate(found)), found.bound) < CLOSE


def test_with_floors_the_bound_may_be_above_the_uniform_one_which_has_none() -> None:
    """What floors take from sites of low leverage, those of high leverage lack."""
    found = allocate([0, 0, 0, 1], 0.5, 100, 64, [0.4, 0.4, 0.4, 0])
    assert found.bound > found.uniform_bound
    assert relative(lower_bound(found, certificate(found)), found.bound) < CLOSE


def test_large_leverage_does_not_cost_digits() -> None:
    found = allocate([1e12, 1e12 - 1, 0], 1e-3, 100, 64)
    assert relative(math.fsum(found.sigma**2), 1e-3) < CLOSE


def test_a_hundred_thousand_sites_take_under_a_second() -> None:
    rng = np.random.default_rng(0)
    leverage, floor = rng.pareto(1.5, 100_000), rng.uniform(0, 1e-3, 100_000)
    allocate(leverage, 0.5, 100, 64, floor)
    start = time.process_time()
    found = allocate(leverage, 0.5, 100, 64, floor)
    assert time.process_time() - start < 1
    assert relative(lower_bound(found, certificate(found)), found.bound) < CLOSE


@given(st.lists(st.floats(1e-6, 1e3), min_size=1), st.integers(1, 16))
@settings(max_examples=60, deadline=None)
def test_rounding_never_lowers_a_sigma_and_leaves_few_values(sigma: list[float], per_doubling: int) -> None:
    rounded = round_up(sigma, per_doubling)
    steps = per_doubling * np.log2(rounded)
    assert np.all(rounded >= np.array(sigma) * (1 - 1e-12))
    assert np.all(rounded <= np.array(sigma) * 2 ** (1 / per_doubling) * (1 + 1e-12))
    assert np.allclose(steps, np.round(steps), atol=1e-9)
    assert np.allclose(round_up(rounded, per_doubling), rounded, rtol=1e-12)


# The paper's numbers


def test_the_star_the_ring_and_the_asymptote() -> None:
    found = {(p.name, p.at): p.allocation.gap for p in theory.eta_sweep()}
    assert f"{theory.asymptote():.4f}" == "1.2207"
    assert f"{found['star', 0.25]:.4f}" == "1.1936"
    assert f"{found['star', 1.0]:.4f}" == "1.1957"
    assert all(abs(found["ring", eta]) < 1e-12 for eta in theory.ETAS)
    for name in theory.GRAPHS:
        gaps = [found[name, eta] for eta in theory.ETAS]
        assert all(first <= second + 1e-12 for first, second in pairwise([0.0, *gaps, theory.asymptote()]))


def test_the_scale_free_graph_is_about_as_printed() -> None:
    """Figure 3 does not give the graph: over seeds, m = 2 gives 1.13 to 1.195 where 1.193 is printed."""
    gaps = [
        point.allocation.gap
        for seed in range(10)
        for point in theory.eta_sweep({"BA": theory.leverages(seed)["BA m=2"]}, [1.0])
    ]
    assert min(gaps) > 1.12
    assert max(gaps) < 1.196
    assert any(f"{gap:.2f}" == "1.19" for gap in gaps)


@pytest.mark.parametrize(
    ("data", "budget", "window", "gap", "percent"),
    [
        ("Fed-ISIC2019", 0.05, 100, "1.967", "21.7"),
        ("Fed-Heart-Disease", 0.4, 50, None, "14.9"),
        ("Fed-Heart-Disease", 0.025, 100, "0.628", None),
    ],
)
def test_the_gaps_of_settings_a_and_b(
    data: str, budget: float, window: int, gap: str | None, percent: str | None
) -> None:
    leverage = np.array(theory.TRAIN_SIZES[data]) / np.mean(theory.TRAIN_SIZES[data])
    found = theory.pareto(leverage, [budget], [window], theory.BATCHES[data])[0].allocation
    assert gap in (None, f"{found.gap:.3f}")
    assert percent in (None, f"{100 * found.gap / found.uniform_bound:.1f}")
    other = theory.pareto(leverage, [budget], [window], 64)[0].allocation  # the batch that the paper states
    assert f"{other.gap:.3f}" != gap
    assert f"{100 * other.gap / other.uniform_bound:.1f}" != percent


def test_the_cells_that_cannot_be_reproduced_still_differ() -> None:
    """If one of them starts to agree, docs/theory.md has to say so."""
    found = {p.name: p.allocation.gap for p in theory.eta_sweep(etas=[1.0])}
    ours = {name: round(found[name], 3) for name in theory.UNREPRODUCED}
    assert ours == {"ER p=0.3": 1.190, "ER p=0.5": 1.189, "ER p=0.7": 1.123, "hierarchical": 0.578}
    assert all(abs(ours[name] - printed) > 0.1 for name, printed in theory.UNREPRODUCED.items())


def test_figures_are_drawn(tmp_path: Path) -> None:
    sweep_figure(tmp_path / "sweep.svg", theory.eta_sweep())
    curves = theory.pareto([1, 2, 3], [0.05, 0.5], [25, 100], 32)
    pareto_figure(tmp_path / "pareto.svg", "three sites", curves)
    assert "hierarchical" in (tmp_path / "sweep.svg").read_text()
    assert "T = 100" in (tmp_path / "pareto.svg").read_text()


# Theorem V.2


def test_theorem_v2_does_not_hold() -> None:
    """Leverage 0, sigma 0.1, batch 64, one round: the bound says 0.012 nats, and the updates tell 0.693."""
    true, claimed = theory.sign_information(0.1), theory.paper_bound(0.1, 1, 64)
    assert f"{true:.3f}" == "0.693"
    assert f"{claimed:.3f}" == "0.012"
    assert true <= theory.dataset_term(0.1, 1)


def test_the_information_of_the_counterexample_is_what_can_be_read() -> None:
    """By simulation: an attacker who looks at the sign of the mean gradient errs in Phi(-1/sigma) of cases."""
    rng, sigma = np.random.default_rng(0), 0.5
    p = rng.integers(2, size=200_000)
    seen = (2 * p - 1) + sigma * rng.normal(size=p.size)
    posterior = 1 / (1 + np.exp(-2 * seen / sigma**2))
    entropy = -posterior * np.log(posterior) - (1 - posterior) * np.log1p(-posterior)
    standard_error = entropy.std() / math.sqrt(p.size)
    assert abs(math.log(2) - entropy.mean() - theory.sign_information(sigma)) < 5 * standard_error


@given(st.floats(0.05, 20), st.integers(1, 200))
@settings(max_examples=40, deadline=None)
def test_the_valid_term_is_above_the_information_of_the_counterexample(sigma: float, window: int) -> None:
    assert theory.sign_information(sigma, window) <= theory.dataset_term(sigma, window)
    assert theory.dataset_term(sigma, window) < theory.dataset_term(sigma, window, batch=16)


# Bad input


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"leverage": [1, -2, 3]}, "leverage: -2 of 'b' is not a finite number of 0 or more; correct it"),
        ({"leverage": [1, 2, math.nan]}, "leverage: nan of 'c' is not a finite number of 0 or more; correct it"),
        ({"leverage": [1, math.inf, 1]}, "leverage: inf of 'b' is not a finite number of 0 or more; correct it"),
        ({"leverage": []}, "leverage: shape (0,) given; give a list with one number per site"),
        ({"leverage": ["x", 1, 2]}, "leverage: not a list of numbers; give one number per site"),
        ({"leverage": [1, 2]}, "names: 3 for 2 sites; give one per site"),
        ({"floor": [0.1]}, "floor: 1 values for 3 sites; give one per site, or one for all"),
        ({"floor": [0.1, -1, 0]}, "floor: -1 of 'b' is not a finite number of 0 or more; correct it"),
        ({"floor": math.nan}, "floor: nan of 'a' is not a finite number of 0 or more; correct it"),
        ({"budget": 0}, "budget: 0 is not a sum of variances; use a number above 0"),
        ({"budget": math.nan}, "budget: nan is not a sum of variances; use a number above 0"),
        ({"budget": 1e-320}, "budget: 9.99989e-321 is out of range for window 100 and batch 64; change it"),
        ({"window": 0}, "window: 0 is not a number of noised steps; use an integer of 1 or more"),
        ({"window": 2.5}, "window: 2.5 is not a number of noised steps; use an integer of 1 or more"),
        ({"batch": -1}, "batch: -1 is not a batch size; use a number above 0"),
        (
            {"floor": [0.9, 0.1, 0.8]},
            "budget: 0.5 does not allow the floors of 'a', 'c'; raise it to 1.46001 or more, or lower these floors",
        ),
        (
            {"floor": [0.9, 0, 0]},
            "budget: 0.5 does not allow the floors of 'a'; raise it above 0.81, or lower these floors",
        ),
    ],
)
def test_bad_input_is_refused_in_one_line(change: dict[str, object], message: str) -> None:
    good = {"leverage": [1, 2, 3], "budget": 0.5, "window": 100, "batch": 64, "names": ["a", "b", "c"]}
    with pytest.raises(FederationError) as error:
        allocate(**{**good, **change})  # type: ignore[arg-type]
    assert str(error.value) == message


def test_the_smallest_feasible_budget_that_is_named_is_feasible() -> None:
    floor = np.random.default_rng(1).uniform(0.1, 1, 40)
    with pytest.raises(FederationError, match=r"and \d+ more; raise it to ([0-9.]+) or more") as error:
        allocate(np.ones(40), 1.0, 10, 8, floor)
    named = float(str(error.value).partition("raise it to ")[2].split()[0])
    found = allocate(np.ones(40), named, 10, 8, floor)
    assert np.all(found.sigma >= floor)
    assert named < 1.00001 * math.fsum(floor**2)


def test_the_multiplier_on_a_sum_is_the_batch_times_sigma() -> None:
    """As `dpsgd` divides: noise multiplier z on a sum over batch B is noise z / B on the mean."""
    import torch

    from fl_privacy.dp.dpsgd import noisy_mean
    from fl_privacy.dp.sampled import Plan

    sigma, batch = 0.3, 16.0
    plan = Plan(0.5, 1, batch, 2.0, fulcrum.noise_multiplier(sigma, batch))
    noise = noisy_mean([torch.zeros(100_000)], plan, bytes(32))[0].double()
    assert abs(float(noise.std()) - sigma * 2.0) < 5 * sigma * 2.0 / math.sqrt(2 * 100_000)
