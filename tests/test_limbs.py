"""Exact sums in limbs: the true sum, in one form, whatever parts it was put together from."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, strategies as st

from fl_privacy.combine import limbs, mean
from fl_privacy.kernels.limbs_numpy import BITS, LIMBS, LOWEST
from helpers import refused
from profiles import examples

any_float32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
columns = st.lists(any_float32, min_size=1, max_size=12)


def true(total: limbs.Limbs) -> list[Fraction]:
    return [sum(Fraction(int(v)) * Fraction(2) ** (LOWEST + BITS * j) for j, v in enumerate(c)) for c in total.T]


@given(column=columns)
@examples(150)
def test_a_sum_is_exact_and_both_kernels_give_it(column: list[float]) -> None:
    matrix = np.array(column, np.float32)[:, None]
    found = limbs.summed(matrix, "numpy")
    assert true(found) == [sum(map(Fraction, column))]
    assert np.array_equal(found, limbs.summed(matrix, "numba"))
    exact, got = Fraction(sum(map(Fraction, column))) / len(column), limbs.mean(found, len(column))[0]
    nearest = np.float32(float(exact))
    assert got == nearest or abs(int(got.view("i4")) - int(nearest.view("i4"))) == 1  # a tie may go either way


@given(column=columns, data=st.data())
@examples(100)
def test_the_mean_has_the_same_bits_from_any_parts_in_any_order(column: list[float], data: st.DataObject) -> None:
    matrix = np.array(data.draw(st.permutations(column)), np.float32)[:, None]
    cuts = sorted(data.draw(st.sets(st.integers(1, len(column)), max_size=4)))
    parts = [limbs.summed(part) for part in np.split(matrix, cuts) if len(part)]
    sent = [limbs.unpacked(limbs.packed(part), 1, len(column)) for part in data.draw(st.permutations(parts))]
    whole = limbs.added(sent)
    assert np.array_equal(whole, limbs.summed(np.array(column, np.float32)[:, None]))
    flat = mean.weighted(np.array(column, np.float32)[:, None], exact=True)
    assert limbs.mean(whole, len(column)).tobytes() == flat.tobytes()


def test_an_update_is_its_own_mean_to_the_bit() -> None:
    bits = np.random.default_rng(0).integers(0, 2**32, 5000, np.uint32).view(np.float32)
    values = bits[np.isfinite(bits)]
    assert np.array_equal(limbs.mean(limbs.summed(values[None]), 1), values)


def test_a_sum_travels_in_the_limbs_that_it_uses() -> None:
    total = limbs.summed(np.full((3, 10), 0.5, np.float32))
    assert limbs.packed(total).size == 11
    assert limbs.packed(limbs.summed(np.zeros((1, 4), np.float32))).size == 5


@pytest.mark.parametrize(
    "data",
    [
        [],
        [0],
        [0, 1],
        [-1, 1, 1, 1],
        [LIMBS, 1, 1, 1],
        [0, *[1] * (3 * (LIMBS + 1))],
        [0, 2 ** (BITS - 1), 0, 0],
        [LIMBS - 1, 3 << BITS, 0, 0],
        [LIMBS - 1, -(2**63), 0, 0],
    ],
)
def test_bytes_that_are_no_sum_are_refused(data: list[int]) -> None:
    with refused("DATA_LOSS"):
        limbs.unpacked(np.array(data, np.int64), 3, 2)
