"""Membership inference: its bound against closed forms, its guesses against chance, and what it makes of a mask."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, strategies as st
from numpy.typing import NDArray
from scipy.stats import binom
from sklearn.metrics import roc_auc_score

from attacks.membership import guesses
from attacks.membership.bound import PRECISION, epsilon_lower, p_value
from attacks.membership.run import completed, cosines, summary, unusual, weights
from attacks.membership.seen import Join, Part
from fl_privacy.dp import gaussian
from fl_privacy.shard import masks
from profiles import examples

LEVEL = 0.001
DELTA = 1e-5


# The bound


def test_the_bound_has_the_values_that_its_authors_print() -> None:
    """Steinke et al. 2023: the example in Appendix D, and a randomised response that is right three times in four."""
    assert epsilon_lower(1000, 100, 75, 1e-4, 0.05) == pytest.approx(0.673, abs=5e-4)
    assert p_value(100, 100, 75, math.log(3), 0.0) == pytest.approx(0.5535, abs=5e-5)


@given(guessed=st.integers(1, 1000))
def test_without_delta_faultless_guesses_have_a_closed_form(guessed: int) -> None:
    """All of r guesses are right with probability q^r."""
    accuracy = LEVEL ** (1 / guessed)
    exact = max(0.0, math.log(accuracy / (1 - accuracy)))
    assert epsilon_lower(guessed, guessed, guessed, 0.0, LEVEL) == pytest.approx(exact, abs=2 * PRECISION)


@given(guessed=st.integers(1, 400), share=st.floats(0, 1), epsilon=st.floats(0, 5))
def test_a_randomised_response_exceeds_its_own_epsilon_no_more_often_than_the_level(
    guessed: int, share: float, epsilon: float
) -> None:
    """It is the mechanism that the theorem is tight for, so the chance of a wrong bound is known exactly."""
    right = round(share * guessed)
    if epsilon_lower(guessed, guessed, right, 0.0, LEVEL) > epsilon:
        assert binom.sf(right - 1, guessed, 1 / (1 + math.exp(-epsilon))) <= LEVEL


@given(guessed=st.integers(1, 300), spare=st.integers(0, 300), share=st.floats(0, 1), delta=st.floats(0, 1e-3))
def test_more_right_guesses_raise_the_bound_and_delta_and_abstentions_lower_it(
    guessed: int, spare: int, share: float, delta: float
) -> None:
    right = round(share * (guessed - 1))
    bound = epsilon_lower(guessed + spare, guessed, right, delta, LEVEL)
    slack = 2 * PRECISION
    assert bound <= epsilon_lower(guessed + spare, guessed, right + 1, delta, LEVEL) + slack
    assert bound <= epsilon_lower(guessed, guessed, right, delta, LEVEL) + slack
    assert bound <= epsilon_lower(guessed + spare, guessed, right, 0.0, LEVEL) + slack


def audited(epsilon: float, weaker: float, seed: int) -> float:
    """The bound on a Gaussian sum of orthogonal canaries of norm 1, with so many times too little noise."""
    rng, count = np.random.default_rng(seed), 1000
    included = rng.random(count) < 0.5
    seen = included + rng.normal(size=count) * gaussian.sigma(epsilon, DELTA) / weaker
    guess = guesses.thirds(seen)
    right = int(guesses.right(guess, included[:, None])[0])
    return epsilon_lower(count, int(np.count_nonzero(guess)), right, DELTA, LEVEL)


@pytest.mark.parametrize("epsilon", [0.5, 2.0, 8.0])
def test_the_bound_is_below_epsilon_for_the_right_noise_and_finds_noise_that_is_too_small(epsilon: float) -> None:
    """Ten mechanisms: a wrong bound has probability 1 % at most, and in fact far less: the theorem has slack here."""
    assert max(audited(epsilon, 1.0, seed) for seed in range(10)) < epsilon
    if epsilon < 1:  # 667 guesses about 1000 canaries cannot refute much more than 3 at this delta
        assert min(audited(epsilon, 10.0, seed) for seed in range(10)) > epsilon


# Guesses and chance


def planted(
    rounds: int, sites: int, each: int, effect: float, seed: int
) -> tuple[NDArray[np.float64], NDArray[np.str_], NDArray[np.bool_]]:
    """Evidence that is larger for members by so many standard deviations."""
    rng = np.random.default_rng(seed)
    included = rng.random(sites * each) < 0.5
    names = np.repeat([f"site-{i}" for i in range(sites)], each)
    return rng.normal(size=(rounds, sites * each)) + effect * included, names, included


@given(evidence=st.lists(st.floats(-5, 5), min_size=0, max_size=40))
def test_thirds_are_the_largest_and_the_smallest_and_as_many_of_each(evidence: list[float]) -> None:
    values = np.array([*evidence, np.nan])
    guess = guesses.thirds(values)
    assert (guess == 1).sum() == (guess == -1).sum() == len(evidence) // 3
    assert guess[-1] == 0  # nothing was seen of it
    if (guess != 0).any():
        assert values[guess == 1].min() >= values[guess == -1].max()


@given(seed=st.integers(0, 2**32 - 1))
@examples(30)
def test_measures_are_those_of_plain_loops(seed: int) -> None:
    evidence, sites, included = planted(3, 4, 11, 1.0, seed)
    found = guesses.accuracies(evidence, sites, included[:, None])[:, 0]
    for row, accuracy in zip(evidence, found, strict=True):
        by_site = []
        for site in np.unique(sites):
            mine, coins = row[sites == site], included[sites == site]
            order = np.argsort(mine)
            by_site.append((coins[order[-3:]].sum() + (~coins[order[:3]]).sum()) / 6)
        assert accuracy == pytest.approx(np.mean(by_site))
    if 0 < included.sum() < len(included):
        assert guesses.areas(evidence[0], included[:, None])[0] == pytest.approx(roc_auc_score(included, evidence[0]))
        others = np.sort(evidence[0][~included])[::-1]
        limit = others[int(0.1 * len(others))]
        rate = guesses.true_positives(evidence[0], included[:, None], 0.1)[0]
        assert rate == pytest.approx((evidence[0][included] > limit).mean())


def test_relabelled_canaries_keep_the_number_of_members_of_every_site() -> None:
    _, sites, included = planted(1, 5, 20, 0.0, 0)
    labels = guesses.relabelled(included, sites, 50, np.random.default_rng(0))
    assert np.array_equal(labels[:, 0], included)
    for site in np.unique(sites):
        assert set(labels[sites == site].sum(axis=0)) == {included[sites == site].sum()}


def best(effect: float, seed: int, count: int = 99) -> NDArray[np.float64]:
    """The largest accuracy over 20 rounds: with the true labels, and with relabelled ones."""
    evidence, sites, included = planted(20, 4, 24, effect, seed)
    labels = guesses.relabelled(included, sites, count, np.random.default_rng(seed + 1))
    return np.asarray(guesses.accuracies(evidence, sites, labels).max(axis=0))


def test_the_maximum_over_rounds_is_biased_and_relabelled_chance_is_calibrated() -> None:
    """Evidence that knows nothing: the maximum is above one half, as is its chance, and p-values are uniform."""
    trials = 300
    found = [best(0.0, seed) for seed in range(trials)]
    own, chance = np.array([one[0] for one in found]), np.array([one[1:].mean() for one in found])
    assert own.mean() > 0.55
    assert abs(own.mean() - chance.mean()) < 4 * own.std() / math.sqrt(trials)
    p_values = np.array([(one >= one[0]).mean() for one in found])
    for level in (0.05, 0.2):
        # Four deviations of a binomial share; ties make the test conservative, never liberal.
        assert (p_values <= level).mean() < level + 4 * math.sqrt(level / trials)


def test_evidence_that_knows_something_beats_chance() -> None:
    found = best(1.0, 0)
    assert found[0] > found[1:].max()


# Statistics


def test_unseen_coordinates_are_left_out_of_a_cosine_and_not_matched_as_zeros() -> None:
    """Whatever a gradient has where nothing was seen, the cosine is that of the seen coordinates."""
    rng = np.random.default_rng(0)
    gradients, where = rng.normal(size=(5, 40)).astype(np.float32), np.arange(0, 40, 3)
    part = Part(-gradients[2, where], where)
    seen = cosines(part.of(gradients), part.values[None])[:, 0]
    gradients[:, np.setdiff1d(np.arange(40), where)] *= 100
    assert np.array_equal(seen, cosines(part.of(gradients), part.values[None])[:, 0])
    assert seen[2] == pytest.approx(1, abs=1e-6)
    assert seen.argmax() == 2


def test_regression_gives_each_gradient_its_own_share_where_cosines_mistake_one_for_another() -> None:
    """Two canaries pull alike, and only one of them took part."""
    rng = np.random.default_rng(1)
    gradients = rng.normal(size=(6, 500)).astype(np.float32)
    gradients[1] = gradients[0] + 0.3 * gradients[1]  # a near copy
    unit = gradients / np.linalg.norm(gradients, axis=1, keepdims=True)
    update = -(unit[0] + unit[3])[None]
    assert cosines(gradients, update)[1, 0] > 0.6
    found = weights(gradients, update)[:, 0]
    assert set(np.argsort(found)[-2:]) == {0, 3}
    assert found[1] < 0.5 * found[0]


def test_a_statistic_is_measured_in_deviations_of_sites_without_the_canary() -> None:
    others = np.array([[1.0, 3.0] * 5, [10.0, 30.0] * 5])
    found = unusual(np.array([4.0, 40.0]), others)
    assert found[0] == pytest.approx(found[1]) == pytest.approx(2 / others[0].std(ddof=1))
    few = unusual(np.array([4.0, 40.0]), others[:, :2])  # one deviation for all
    assert few[1] == pytest.approx(10 * few[0])


def test_rounds_that_saw_nothing_of_a_site_do_not_count() -> None:
    evidence, sites, _ = planted(3, 2, 9, 0.0, 3)
    evidence[1, sites == "site-0"] = np.nan
    found = summary(evidence, sites)
    assert np.isfinite(found).all()
    assert np.allclose(found[sites == "site-0"], summary(evidence[[0, 2]], sites)[sites == "site-0"])
    evidence[:, sites == "site-0"] = np.nan
    assert np.isnan(summary(evidence, sites)[sites == "site-0"]).all()


@given(size=st.integers(2, 200), aggregators=st.integers(2, 6), data=st.data())
def test_colluders_join_their_coordinates_and_all_of_them_have_the_update(
    size: int, aggregators: int, data: st.DataObject
) -> None:
    owners = masks.owners(size, aggregators, 7)
    update = np.arange(1, size + 1, dtype=np.float32)
    some = data.draw(st.sets(st.integers(0, aggregators - 1), min_size=1))
    coordinates = {k: np.flatnonzero(owners == k) for k in some}
    part = Join(size)([Part(update[where], where) for where in coordinates.values()])
    assert np.array_equal(part.of(update), part.values)
    assert len(part.values) == sum(map(len, coordinates.values()))
    if len(part.values) == size and len(some) > 1:
        assert part.where is None
    model, after = np.zeros(size, np.float32), np.full(size, -1, np.float32)
    whole = completed(part, model, after)
    unseen = np.setdiff1d(np.arange(size), np.concatenate(list(coordinates.values())))
    assert np.array_equal(part.of(whole), part.values)
    assert (whole[unseen] == -1).all()
    assert (completed(part, model, None)[unseen] == 0).all()


@given(size=st.integers(1, 300), most=st.integers(1, 300))
def test_a_thinned_part_has_coordinates_of_the_part(size: int, most: int) -> None:
    update = np.arange(2 * size, dtype=np.float32)
    part = Part(update[::2], np.arange(0, 2 * size, 2)).thinned(most)
    assert len(part.values) == min(size, most) == len(np.unique(part.values))
    assert np.array_equal(part.of(update), part.values)
