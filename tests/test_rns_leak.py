"""What residue sums tell: the exact meter, its figures, and a posterior that cannot know more than there is."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, strategies as st

from fl_privacy.errors import FederationError
from fl_privacy.rns import moduli
from fl_privacy.rns.meter import beyond, leak, sum_of_residues
from fl_privacy.rns.posterior import bits, posterior
from fl_privacy.theory import rns_leak
from profiles import examples

SMALL = (3, 4, 5)


# The meter


def test_the_figures_for_two_sites() -> None:
    found = rns_leak(2, range(-9, 10), SMALL)
    rounded = [round(bits, 2) for bits in (found.inputs, found.given_sum, found.given_published)]
    assert rounded == [8.50, 3.53, 1.84]
    assert found.given_carry_safe == found.given_sum
    assert (round(found.known_from_published, 2), round(found.known_from_sum, 3)) == (0.42, 0.017)
    assert found.known_from_carry_safe == found.known_from_sum


def test_the_figures_for_three_sites() -> None:
    found = rns_leak(3, range(-9, 10), SMALL)
    rounded = [round(bits, 2) for bits in (found.inputs, found.given_sum, found.given_published)]
    assert rounded == [12.74, 7.46, 4.69]
    assert found.given_carry_safe == found.given_sum


cases = st.tuples(
    st.integers(1, 4),
    st.sets(st.integers(-12, 12), min_size=1, max_size=8),
    st.sampled_from([SMALL, (2, 3, 5, 7), (8, 9), (101,), (4, 7, 9)]),
)


@given(case=cases)
@examples(60)
def test_the_meter_is_the_entropy_by_definition(case: tuple[int, set[int], tuple[int, ...]]) -> None:
    """Against plain enumeration of all ordered inputs."""
    n, values, chosen = case
    found = leak(n, sorted(values), chosen)
    every = list(itertools.product(values, repeat=n))
    releases = {
        "sum": [sum(x) for x in every],
        "published": [tuple(sum(v % m for v in x) for m in chosen) for x in every],
        "carry_safe": [tuple(sum(v % m for v in x) % m for m in chosen) for x in every],
    }
    for name, seen in releases.items():
        counts = Counter(seen)
        entropy = sum(c * math.log2(c) for c in counts.values()) / len(every)
        fitting: dict[object, set[tuple[int, ...]]] = {}
        for x, y in zip(every, seen, strict=True):
            fitting.setdefault(y, set()).add(tuple(sorted(x)))
        known = sum(len(fitting[y]) == 1 for y in seen) / len(every)
        assert getattr(found, f"given_{name}") == pytest.approx(entropy, abs=1e-9)
        assert getattr(found, {"sum": "known_from_sum"}.get(name, f"known_from_{name}")) == pytest.approx(known)
    assert found.given_published <= found.given_carry_safe + 1e-9
    assert found.given_published <= found.given_sum + 1e-9


@given(n=st.integers(1, 4), top=st.integers(1, 9))
@examples(30)
def test_the_carry_safe_form_tells_exactly_the_sum(n: int, top: int) -> None:
    """With moduli that hold the sum, for every number of sites and range: not a bit more or less."""
    least = moduli.least_for(n, top)
    for chosen in (moduli.optimal(least), moduli.primes(least), moduli.power_of_two(least)):
        found = leak(n, range(-top, top + 1), chosen)
        assert found.given_carry_safe == found.given_sum
        assert found.known_from_carry_safe == found.known_from_sum


def test_plain_fixed_point_modulo_a_power_of_two_leaks_too_if_it_is_not_reduced() -> None:
    """Its unreduced sum tells how many values are negative."""
    found = leak(3, range(-4, 5), (32,))
    assert found.given_published < found.given_sum == found.given_carry_safe


def test_too_many_inputs_are_refused() -> None:
    with pytest.raises(FederationError, match="too many to enumerate"):
        leak(10, range(-99, 100), SMALL)
    with pytest.raises(FederationError, match="different"):
        leak(2, [1, 1], SMALL)


def test_counts_tell_exactly_what_the_shuffled_bits_tell() -> None:
    """Algorithm 1 literally, over every input and every order of the bits: the posterior given the shuffled bits is
    that given the count, because each order of the same bits is equally likely whatever the inputs are."""
    modulus, values = 4, range(-2, 3)
    joint: Counter[tuple[tuple[int, ...], tuple[int, int]]] = Counter()
    for x in itertools.product(values, repeat=2):
        unary = [bit for v in x for bit in [1] * (v % modulus) + [0] * (modulus - 1 - v % modulus)]
        for order in itertools.permutations(range(len(unary))):
            joint[tuple(unary[i] for i in order), x] += 1
    for shuffled in {y for y, _ in joint}:
        total = sum(weight for (y, _), weight in joint.items() if y == shuffled)
        given_bits = {x: weight / total for (y, x), weight in joint.items() if y == shuffled}
        fitting = [x for x in itertools.product(values, repeat=2) if sum(v % modulus for v in x) == sum(shuffled)]
        assert given_bits == pytest.approx({x: 1 / len(fitting) for x in fitting})


# Any size


def test_sums_of_residues_have_their_distribution() -> None:
    for n, modulus in ((2, 3), (3, 5), (5, 2)):
        counts = Counter(sum(x) for x in itertools.product(range(modulus), repeat=n))
        expected = [counts[s] / modulus**n for s in range(n * (modulus - 1) + 1)]
        assert sum_of_residues(n, np.full(modulus, 1 / modulus)) == pytest.approx(expected, abs=1e-12)


def test_the_leak_of_uniform_residues_is_what_the_meter_finds() -> None:
    """Values over whole periods of all moduli have uniform, independent residues."""
    for n in (2, 3):
        chosen = (3, 4)
        exact = leak(n, range(-12, 12), chosen)
        published = exact.inputs - exact.given_published  # H(S), as the inputs decide it
        reduced = exact.inputs - exact.given_carry_safe
        assert beyond(n, chosen).together == pytest.approx(published - reduced, abs=1e-9)


def test_the_leak_about_one_value_shrinks_with_the_number_of_sites_and_that_about_all_grows() -> None:
    found = [beyond(n, moduli.optimal(moduli.least(n, 4))) for n in (2, 5, 10, 50, 1000)]
    assert all(a.single > b.single for a, b in itertools.pairwise(found))
    assert all(a.together < b.together for a, b in itertools.pairwise(found))
    assert beyond(1, SMALL).together == 0


def test_many_residues_sum_to_a_gaussian() -> None:
    below, above = beyond(500, (5, 7, 31)), beyond(501, (5, 7, 31))
    assert below.together == pytest.approx(above.together, abs=0.01)
    assert below.single == pytest.approx(above.single, rel=0.02)


# The posterior


def drawn(n: int, largest: int, count: int, deviation: float | None, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """A prior, and values drawn from it, [n, count]."""
    values = np.arange(-largest, largest + 1)
    prior = np.ones(values.size) if deviation is None else np.exp(-0.5 * (values / deviation) ** 2)
    prior /= prior.sum()
    return prior, np.random.default_rng(seed).choice(values, size=(n, count), p=prior)


def sums_of(values: np.ndarray, chosen: tuple[int, ...]) -> np.ndarray:
    return np.stack([(values % m).sum(axis=0) for m in chosen]).astype(np.uint64)


@pytest.mark.parametrize("deviation", [None, 3.0])
def test_for_two_sites_the_posterior_is_exact(deviation: float | None) -> None:
    largest = 9
    prior, x = drawn(2, largest, 40, deviation, 1)
    sums = sums_of(x, SMALL)
    for reduced in (False, True):
        found = posterior(sums, 2, prior, SMALL, reduced=reduced)
        for column in range(x.shape[1]):
            weights = np.zeros(2 * largest + 1)
            for a, b in itertools.product(range(-largest, largest + 1), repeat=2):
                fits = (
                    a + b == x[:, column].sum()
                    if reduced
                    else all(a % m + b % m == s for m, s in zip(SMALL, sums[:, column], strict=True))
                )
                weights[a + largest] += fits * prior[a + largest] * prior[b + largest]
            assert found[column] == pytest.approx(weights / weights.sum(), abs=1e-9)


def test_the_bits_of_the_posterior_are_the_meters() -> None:
    """For two sites: surprise of one value, averaged over all inputs, against conditional entropy by enumeration."""
    values = range(-9, 10)
    x = np.array(list(itertools.product(values, repeat=2))).T
    prior = np.full(19, 1 / 19)
    joint = Counter((tuple(s), a) for s, a in zip(sums_of(x, SMALL).T.tolist(), x[0].tolist(), strict=True))
    totals = Counter(tuple(s) for s in sums_of(x, SMALL).T.tolist())
    entropy = -sum(c * math.log2(c / totals[s]) for (s, _), c in joint.items()) / x.shape[1]
    assert bits(posterior(sums_of(x, SMALL), 2, prior, SMALL), x[0]) == pytest.approx(entropy)


@pytest.mark.parametrize(("n", "deviation"), [(2, None), (3, None), (10, None), (10, 100.0)])
def test_published_sums_tell_about_one_value_what_plan_says(n: int, deviation: float | None) -> None:
    largest, count = 999, 1500
    chosen = moduli.optimal(moduli.least_for(n, largest))
    prior, x = drawn(n, largest, count, deviation, 2)
    sums = sums_of(x, chosen)
    safe = bits(posterior(sums, n, prior, chosen, reduced=True), x[0])
    published = bits(posterior(sums, n, prior, chosen), x[0])
    assert safe - published == pytest.approx(beyond(n, chosen).single, abs=0.25)
    again = bits(posterior(sums % np.array(chosen, np.uint64)[:, None], n, prior, chosen, reduced=True), x[0])
    assert again == safe  # the carry-safe form is all that this one needs


def test_an_impossible_prior_is_refused() -> None:
    with pytest.raises(FederationError, match="prior"):
        posterior(np.zeros((3, 1), np.uint64), 2, np.ones(4) / 4, SMALL)
    with pytest.raises(FederationError, match="prior"):
        posterior(np.zeros((3, 1), np.uint64), 2, np.ones(5), SMALL)


def test_shares_that_are_not_reduced_leak() -> None:
    """Two values with the same sum, each as two uniform shares: the reduced sum of all shares is the same, and the
    unreduced one has a distribution that tells the values apart."""

    def seen(values: tuple[int, int], reduced: bool) -> Counter[int]:
        shares = itertools.product(range(7), repeat=2)
        totals = [a + (values[0] - a) % 7 + b + (values[1] - b) % 7 for a, b in shares]
        return Counter(total % 7 if reduced else total for total in totals)

    assert seen((0, 6), reduced=True) == seen((3, 3), reduced=True)
    assert seen((0, 6), reduced=False) != seen((3, 3), reduced=False)
