"""Adaptive buckets: IntraShuffler's Algorithm 1."""

from __future__ import annotations

import time
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, strategies as st

from fl_privacy.errors import FederationError
from fl_privacy.shuffle.buckets import Bucket, form
from fl_privacy.theory import recombination

GRID = (0.5, 1.0, 2.0, 4.0, 8.0)

budgets = st.lists(st.sampled_from(GRID) | st.floats(1e-3, 100), min_size=1, max_size=60)


@given(epsilons=budgets, data=st.data())
def test_buckets_partition_the_clients_in_order_and_none_is_small(epsilons: list[float], data: st.DataObject) -> None:
    n_min = data.draw(st.integers(1, len(epsilons)))
    buckets = form(epsilons, n_min)
    assert sorted(i for b in buckets for i in b.members) == list(range(len(epsilons)))
    assert all(len(b.members) >= n_min for b in buckets)
    assert all(b.members == tuple(sorted(b.members)) for b in buckets)
    for lower, higher in pairwise(buckets):
        assert max(epsilons[i] for i in lower.members) < min(epsilons[i] for i in higher.members)


@given(epsilons=budgets)
def test_the_label_never_over_trusts(epsilons: list[float]) -> None:
    for bucket in form(epsilons, max(1, len(epsilons) // 3)):
        assert bucket.epsilon == min(epsilons[i] for i in bucket.members)


@given(epsilons=budgets, seed=st.integers(0, 2**32 - 1))
def test_the_order_of_clients_does_not_matter(epsilons: list[float], seed: int) -> None:
    """The same clients in another order make the same buckets."""
    order = np.random.default_rng(seed).permutation(len(epsilons))
    n_min = max(1, len(epsilons) // 4)
    plain = {frozenset(b.members) for b in form(epsilons, n_min)}
    shuffled = form([epsilons[i] for i in order], n_min)
    assert {frozenset(int(order[i]) for i in b.members) for b in shuffled} == plain


def reference(epsilons: list[float], n_min: int) -> list[Bucket]:
    """Algorithm 1 read line by line, in quadratic time."""
    groups = [[e, [i for i, x in enumerate(epsilons) if x == e]] for e in sorted(set(epsilons))]
    while True:
        small = [k for k, (_, members) in enumerate(groups) if len(members) < n_min]
        if not small:
            return [Bucket(tuple(sorted(m)), e) for e, m in groups]
        k = min(small, key=lambda k: (len(groups[k][1]), groups[k][0]))
        adjacent = [j for j in (k - 1, k + 1) if 0 <= j < len(groups)]
        near = min(adjacent, key=lambda j: (abs(groups[j][0] - groups[k][0]), len(groups[j][1]), groups[j][0]))
        low, high = sorted((k, near))
        groups[low : high + 1] = [[groups[low][0], groups[low][1] + groups[high][1]]]


@given(epsilons=budgets, data=st.data())
def test_it_is_algorithm_1(epsilons: list[float], data: st.DataObject) -> None:
    n_min = data.draw(st.integers(1, len(epsilons)))
    assert form(epsilons, n_min) == reference(epsilons, n_min)


def test_known_merges() -> None:
    assert form([0.5, 8, 0.5, 8], 2) == [Bucket((0, 2), 0.5), Bucket((1, 3), 8.0)]
    assert form([0.5, 1, 8, 8], 2) == [Bucket((0, 1), 0.5), Bucket((2, 3), 8.0)]
    # 2 is equally far from 1 and 3: it joins the smaller neighbour, or the lower epsilon if they are of equal size.
    assert form([1, 1, 2, 3, 3, 3], 2) == [Bucket((0, 1, 2), 1.0), Bucket((3, 4, 5), 3.0)]
    assert form([1, 1, 2, 3, 3], 2) == [Bucket((0, 1, 2), 1.0), Bucket((3, 4), 3.0)]
    assert form([1, 3], 2, label="mean") == [Bucket((0, 1), 2.0)]


@pytest.mark.parametrize("epsilons", [[0.0, 1], [-1.0, 1], [float("nan"), 1], [float("inf"), 1]])
def test_an_invalid_budget_is_refused(epsilons: list[float]) -> None:
    with pytest.raises(FederationError, match="epsilon"):
        form(epsilons, 1)


@pytest.mark.parametrize("n_min", [0, -1, 3])
def test_an_impossible_n_min_is_refused(n_min: int) -> None:
    with pytest.raises(FederationError, match="n_min"):
        form([1.0, 2.0], n_min)


@pytest.mark.parametrize("distinct", [5, 100_000])
def test_a_hundred_thousand_budgets_do_not_take_quadratic_time(distinct: int) -> None:
    epsilons = (np.random.default_rng(0).integers(0, distinct, 100_000) + 1.0).tolist()
    began = time.process_time()
    form(epsilons, 10)
    assert time.process_time() - began < 5  # a tenth of a second; comparing every pair would take minutes


@pytest.mark.parametrize(("members", "exponent"), [(4, 6020.6), (8, 9030.9), (16, 12041.2)])
def test_the_recombination_space_matches_the_paper(members: int, exponent: float) -> None:
    """Table 6, with 10^4 parameters."""
    assert recombination.one_update(members, 10_000) == pytest.approx(exponent, abs=0.05)
    with pytest.raises(FederationError, match="positive"):
        recombination.one_update(0, 1)
