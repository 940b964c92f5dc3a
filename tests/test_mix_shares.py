"""Shares add up to what was split, are uniform, and never alike for other values; the check answers exactly."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from fl_privacy.crypto import keys
from fl_privacy.errors import FederationError, ProtocolError
from fl_privacy.mix import check, shares
from fl_privacy.mix.shares import Residues

MODULI = st.sampled_from(
    [
        (2,),
        (3, 4, 5),
        (4, 5, 7, 9, 11, 13),
        (2**16,),
        (2**21,),
        (2**32,),
        (2**40,),
        (2**64,),
        (65521, 65519),
        (2**24, 3),
    ]
)
BACKENDS = ("numpy", "numba")


def residues(moduli: tuple[int, ...], count: int, seed: int) -> Residues:
    rng = np.random.default_rng(seed)
    rows = [rng.integers(0, m - 1, count, dtype=np.uint64, endpoint=True) for m in moduli]
    return np.stack(rows).astype(shares.dtype_of(moduli))


@settings(max_examples=60, deadline=None)
@given(moduli=MODULI, count=st.integers(1, 300), parts=st.integers(2, 5), seed=st.integers(0, 2**31))
def test_shares_add_up_to_the_values(moduli: tuple[int, ...], count: int, parts: int, seed: int) -> None:
    values, key = residues(moduli, count, seed), hashlib.sha256(str(seed).encode()).digest()
    seeds, data = shares.split(values, moduli, parts, key)
    assert len(seeds) == parts - 1
    shares.check(data, moduli)
    assert np.array_equal(
        shares.added([data, *(shares.expanded([one], moduli, count) for one in seeds)], moduli), values
    )
    assert np.array_equal(shares.added([data, shares.expanded(seeds, moduli, count)], moduli), values)


@pytest.mark.parametrize("moduli", [(3, 4, 5, 7), (2**32,), (2**18,), (65521,)])
def test_compiled_and_numpy_kernels_give_the_same_bits(
    moduli: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    values, found = residues(moduli, 200_001, 1), []
    for backend in BACKENDS:
        monkeypatch.setenv("FL_PRIVACY_KERNELS", backend)
        seeds, data = shares.split(values, moduli, 3, b"k" * 32)
        found.append((seeds, data.tobytes(), check.answers(data, moduli, b"c" * 32).tobytes()))
    assert found[0] == found[1]


@pytest.mark.parametrize("moduli", [(3, 4, 5), (4, 5, 7, 9, 11, 13), (2**3,), (13,)])
def test_any_shares_but_all_are_uniform_whatever_the_values(moduli: tuple[int, ...]) -> None:
    """Chi-square of every share of constant values against uniform, at p = 1e-6 (normal approximation: 4.9 sigma)."""
    count = 60_000
    values = np.ones((len(moduli), count), shares.dtype_of(moduli))
    seeds, data = shares.split(values, moduli, 3, b"u" * 32)
    for share in (data, *(shares.expanded([one], moduli, count) for one in seeds)):
        for row, m in zip(share, moduli, strict=True):
            expected = count / m
            statistic = ((np.bincount(row, minlength=m) - expected) ** 2 / expected).sum()
            assert abs(statistic - (m - 1)) < 4.9 * (2 * (m - 1)) ** 0.5 + 8


def test_two_residues_of_one_value_are_drawn_independently() -> None:
    """Residues of a group come from one word: their pairs are uniform too."""
    found = shares.expanded([b"p" * 32], (3, 4), 60_000)
    counts = np.bincount(found[0].astype(int) * 4 + found[1], minlength=12)
    assert ((counts - 5000) ** 2 / 5000).sum() < 45  # 11 degrees of freedom, p = 5e-6


def test_rejected_words_are_replaced_without_bias() -> None:
    """With a product close to 2^24, one word in 256 and more is drawn again."""
    product = 16_777_213
    found = shares.expanded([keys.fresh()], (product,), 400_000)[0]
    counts = np.bincount(found.astype(np.int64) * 16 // product, minlength=16)
    assert int(found.max()) < product
    assert ((counts - 25_000) ** 2 / 25_000).sum() < 60  # 15 degrees of freedom


def test_other_keys_and_other_parts_give_other_noise() -> None:
    values = residues((5, 7), 100, 0)
    found = {shares.split(values, (5, 7), 3, bytes([key]) * 32)[1].tobytes() for key in range(5)}
    assert len(found) == 5


@pytest.mark.parametrize("moduli", [(1,), (2**24 + 1,), (0, 3)])
def test_moduli_without_uniform_numbers_are_refused(moduli: tuple[int, ...]) -> None:
    with pytest.raises(FederationError, match="moduli"):
        shares.expanded([b"s" * 32], moduli, 3)


def test_what_is_no_residue_is_refused() -> None:
    with pytest.raises(ProtocolError, match="below their modulus 4"):
        shares.check(np.array([[2, 1], [3, 4]], np.uint16), (3, 4))
    with pytest.raises(ProtocolError, match="1 rows for 2 moduli"):
        shares.check(np.array([[2, 1]], np.uint16), (3, 4))
    with pytest.raises(FederationError, match="1 shares"):
        shares.split(np.array([[2, 1]], np.uint16), (3,), 1, b"k" * 32)


@settings(max_examples=40, deadline=None)
@given(moduli=MODULI, count=st.integers(1, 200), challenges=st.integers(1, 64), seed=st.integers(0, 2**31))
def test_answers_are_the_sums_over_the_subsets(moduli: tuple[int, ...], count: int, challenges: int, seed: int) -> None:
    values, key = residues(moduli, count + challenges, seed), hashlib.sha256(str(seed).encode()).digest()
    words = check.Words(key).take(count + count % 2)[:count]
    for row, m, answers in zip(values, moduli, check.answers(values, moduli, key, challenges), strict=True):
        for c, answer in enumerate(answers):
            chosen = [int(value) for value, word in zip(row[:count], words, strict=True) if int(word) >> c & 1]
            assert int(answer) == (sum(chosen) + int(row[count + c])) % m


@settings(max_examples=40, deadline=None)
@given(moduli=MODULI, seed=st.integers(0, 2**31))
def test_an_honest_sum_always_passes(moduli: tuple[int, ...], seed: int) -> None:
    held = [residues(moduli, 100, seed + site) for site in range(4)]
    key = hashlib.sha256(str(seed).encode()).digest()
    own = check.answers(shares.added(held, moduli), moduli, key)
    assert check.passes(own, [check.answers(one, moduli, key) for one in held], moduli)


@pytest.mark.parametrize("difference", [1, 2**31, 2**32 - 1, 2**16])
def test_zero_divisors_hide_no_difference(difference: int) -> None:
    """Modulo 2^32, an inner product with random factors would miss 2^31 half of the time; 40 subsets never do."""
    held = [residues((2**32,), 100, site) for site in range(3)]
    total = shares.added(held, (2**32,))
    total[0, 7] = (int(total[0, 7]) + difference) % 2**32
    for trial in range(50):
        key = bytes([trial]) * 32
        answers = [check.answers(one, (2**32,), key) for one in held]
        assert not check.passes(check.answers(total, (2**32,), key), answers, (2**32,))
