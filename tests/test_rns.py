"""Residue numbers: the optimal moduli, and sums of residues that decode to the sum of the integers, always."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, strategies as st

from fl_privacy.errors import FederationError, ProtocolError
from fl_privacy.kernels import residues_numpy
from fl_privacy.kernels.packed import BLOCK, SHARED, bits_of, parts
from fl_privacy.rns import moduli, residues
from fl_privacy.rns.coding import Modular
from fl_privacy.rns.integers import Integers
from profiles import examples

BACKENDS = ("numba", "numpy")

# n, r, smallest sum of m, smallest sum of m - 1, and the paper's figure, which is the sum of the first primes.
TABLE = (
    (10, 3, 40, 35),
    (10, 4, 53, 47),
    (10, 5, 64, 57),
    (1000, 8, 157, 147),
    (10_000, 8, 172, 161),
    (1000, 12, 250, 237),
    (10_000, 12, 276, 263),
    (1000, 16, 358, 343),
    (10_000, 16, 386, 371),
)
PAPER = ((1000, 8, 160), (1000, 12, 281), (10_000, 12, 328), (1000, 16, 381), (10_000, 16, 440))  # Table 9


# Moduli


@pytest.mark.parametrize(("n", "r", "as_published", "shortest"), TABLE)
def test_bits_per_parameter_are_the_smallest_possible(n: int, r: int, as_published: int, shortest: int) -> None:
    least = moduli.least(n, r)
    published, chosen = moduli.optimal(least, spare=0), moduli.optimal(least)
    assert (sum(published), residues.unary_bits(chosen)) == (as_published, shortest)
    for found in (published, chosen):
        residues.check_moduli(found)
        assert math.prod(found) >= least


@pytest.mark.parametrize(("n", "r", "bits"), PAPER)
def test_the_papers_bits_are_sums_of_the_first_primes(n: int, r: int, bits: int) -> None:
    assert sum(moduli.primes(moduli.least(n, r))) == bits


@pytest.mark.parametrize(("n", "r", "bits"), [(10, 4, 41), (10, 5, 58)])
def test_some_of_the_papers_bits_hold_too_small_a_product(n: int, r: int, bits: int) -> None:
    """They follow the inequality in the header of Algorithm 1, which is the wrong way round."""
    chosen = next(found for k in range(1, 20) if sum(found := first_primes(k)) == bits)
    assert math.prod(chosen) < n * (10**r - 1) < moduli.least(n, r)


def first_primes(count: int) -> tuple[int, ...]:
    return tuple(itertools.islice((p for p in itertools.count(2) if all(p % q for q in range(2, p))), count))


def coprime_sets(most: int, smallest: int = 2) -> Iterator[tuple[int, ...]]:
    """All sets of pairwise coprime numbers from `smallest` with a sum of m - 1 of at most `most`."""
    yield ()
    for m in range(smallest, most + 2):
        for rest in coprime_sets(most - (m - 1), m + 1):
            if all(math.gcd(m, other) == 1 for other in rest):
                yield (m, *rest)


@pytest.mark.parametrize("spare", [0, 1])
def test_no_set_of_coprime_numbers_is_better(spare: int) -> None:
    """Brute force over all sets, also those with moduli that are no powers of primes."""
    best: dict[int, int] = {}
    for chosen in coprime_sets(22):
        if chosen:
            cost = sum(chosen) - spare * len(chosen)
            best[cost] = max(best.get(cost, 0), math.prod(chosen))
    for least in range(2, max(best.values()) + 1):
        smallest = min(cost for cost, product in best.items() if product >= least)
        assert sum(moduli.optimal(least, spare)) - spare * len(moduli.optimal(least, spare)) == smallest


@given(n=st.integers(1, 10_000), r=st.integers(1, 16))
@examples(25)
def test_moduli_hold_the_sum_of_any_number_of_sites(n: int, r: int) -> None:
    least = moduli.least(n, r)
    for chosen in (moduli.optimal(least), moduli.primes(least)):
        residues.check_moduli(chosen)
        assert math.prod(chosen) >= least
    assert residues.unary_bits(moduli.optimal(least)) <= residues.unary_bits(moduli.primes(least))
    (plain,) = moduli.power_of_two(least)
    assert plain >= least > plain // 2


@pytest.mark.parametrize("least", [0, 1, 2**256 + 1])
def test_impossible_products_are_refused(least: int) -> None:
    with pytest.raises(FederationError, match="moduli"):
        moduli.optimal(least)


@pytest.mark.parametrize("chosen", [(), (1,), (4, 6), (3, 3), (2**33 - 1,), (2**64,)])
def test_moduli_that_do_not_decode_are_refused(chosen: tuple[int, ...]) -> None:
    with pytest.raises(FederationError, match="moduli"):
        residues.check_moduli(chosen)


# Exact sums


def coding(n: int, integers: Integers, chosen: moduli.Moduli) -> Modular:
    return Modular("test", "<u4", 0, moduli=chosen, integers=integers, most=n)


CHOICES = st.sampled_from([moduli.optimal, moduli.primes, moduli.power_of_two])


@st.composite
def sums(draw: st.DrawFn) -> tuple[Modular, list[np.ndarray], float]:
    """A coding, updates that fit it, and a range: extreme values, multiples of moduli, and whatever else."""
    n = draw(st.integers(1, 12))
    integers = draw(st.one_of(st.builds(Integers.decimal, st.integers(1, 16)), st.just(Integers.int8())))
    least = moduli.least_for(n, integers.largest)
    chosen = draw(CHOICES)(least)
    if max(chosen) > residues.INT64:
        chosen = moduli.optimal(least)
    bound = draw(st.sampled_from([1.0, 0.5, 2.0**-7, 3.7, 1e-3]))
    size = draw(st.sampled_from([1, 5, 31, 32, 33, 100]))
    extreme = [0.0, bound, -bound, 2 * bound, -1e30, bound * (1 - 2**-24), -bound * (1 - 2**-24), bound / 3]
    value = st.one_of(st.sampled_from(extreme), st.floats(-1, 1, width=32).map(lambda x: x * bound))
    rows = [np.array(draw(st.lists(value, min_size=size, max_size=size)), np.float32) for _ in range(n)]
    return coding(n, integers, chosen), rows, bound


def integers_of(used: Modular, update: np.ndarray, bound: float) -> list[int]:
    """In plain Python, as the notes define them."""
    found = []
    for value in update.tolist():
        scaled = value * (used.integers.factor / bound)
        whole = round(scaled) if used.integers.nearest else math.trunc(scaled)
        found.append(max(-used.integers.largest, min(used.integers.largest, whole)))
    return found


@pytest.mark.parametrize("r", range(1, 19))
def test_the_largest_integer_is_what_the_end_of_the_range_becomes(r: int) -> None:
    integers = Integers.decimal(r)
    assert integers.largest == float(integers.largest)  # exactly: updates are cut off at it in float64
    assert 10**r - 200 < integers.largest < 10**r
    assert r > 15 or integers.largest == 10**r - 1
    used = coding(1, integers, moduli.optimal(moduli.least_for(1, integers.largest)))
    update = np.array([1.0, -1.0, 2.0], np.float32)
    total = used.add([used.encode(update, 1.0)[0]], update.size, True)
    assert [int(x) for x in residues.decode(total, used.moduli)[:-1]] == [
        sign * integers.largest for sign in (1, -1, 1)
    ]
    used.decode_sum(total, 1, 1.0)


@given(case=sums())
@examples(120)
def test_the_decoded_sum_is_the_sum_of_the_integers(case: tuple[Modular, list[np.ndarray], float]) -> None:
    used, updates, bound = case
    expected = [sum(column) for column in zip(*(integers_of(used, u, bound) for u in updates), strict=True)]
    packed = [used.encode(update, bound) for update in updates]
    for reduced in (True, False):
        try:
            total = used.add([p for p, _ in packed], updates[0].size, reduced)
        except FederationError:  # unreduced sums modulo 2^63 have no room
            assert not reduced
            assert max(used.moduli) * len(updates) > 2**64
            continue
        assert [int(x) for x in residues.decode(total, used.moduli)[:-1]] == expected
        decoded = used.decode_sum(total, len(updates), bound)
        unit = used.integers.unit(bound)
        assert np.array_equal(decoded.total, np.array([np.float64(x) * unit for x in expected]).astype(np.float32))
        cut = sum(cut for _, cut in packed) / (len(updates) * updates[0].size)
        assert cut <= decoded.clamped * (1 + 1e-12) <= (cut + 1 / used.integers.largest) * (1 + 1e-12)


@pytest.mark.parametrize(
    "chosen",
    [(3, 5, 7, 8, 11, 13, 17), (2**18,), (2**32,), (5, 7, 9, 11, 13, 16, 17, 19, 29, 31), (2**41,), (7, 30011)],
)
@pytest.mark.parametrize("size", [1, 32, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 70])
def test_kernels_give_the_same_bits(chosen: tuple[int, ...], size: int) -> None:
    rng = np.random.default_rng(size)
    integers = Integers.decimal(3)
    update = np.concatenate([[2, -2, 0, np.inf], rng.normal(size=size + 4, scale=0.4)])[4 * (size < 4) :][:size]
    update = np.nan_to_num(update, posinf=1e30).astype(np.float32)
    both = [residues.encode(update, integers, 1.0, chosen, extra=1, backend=b) for b in BACKENDS]
    assert np.array_equal(both[0][0], both[1][0])
    assert both[0][1] == both[1][1] == np.count_nonzero(np.abs(update) >= 1)
    packed, count = both[0][0], size + 1
    plain = residues.of(np.append(residues_numpy.quantise(update, 1e3, 999, False)[0], 0), chosen)
    for backend in BACKENDS:
        assert np.array_equal(residues.unpack(packed, chosen, count, backend=backend), plain)
        assert np.array_equal(residues.pack(plain, chosen, backend=backend), packed)
        residues.check(packed, chosen, backend=backend)
        for reduced in (True, False):
            total = residues.add([packed] * 5, chosen, count, reduced=reduced, backend=backend)
            expected = 5 * plain.astype(np.uint64)
            wanted = expected % np.array(chosen, np.uint64)[:, None] if reduced else expected
            assert np.array_equal(total, wanted)
            out = np.empty(size, np.float32)
            residues.scaled(total, chosen, 5, 1e-3, 5 * 999, out, backend=backend)
            assert np.array_equal(out, (residues.decode(total, chosen)[:-1] * 1e-3).astype(np.float32))
        out = np.empty(size, np.float32)
        residues.scaled_packed(packed, chosen, count, 1e-3, 999, out, backend=backend)
        assert np.array_equal(out, (residues.decode(plain, chosen)[:-1] * 1e-3).astype(np.float32))


def test_large_updates_are_exact_too() -> None:
    """Above the size at which kernels are compiled, and not a multiple of a block."""
    size, n = 2**20 + 4321, 3
    rng = np.random.default_rng(5)
    updates = [rng.normal(size=size, scale=0.5).astype(np.float32) for _ in range(n)]
    for chosen in (moduli.optimal(moduli.least(n, 5)), moduli.power_of_two(moduli.least(n, 5)), (2**32,)):
        used = coding(n, Integers.decimal(5), chosen)
        packed = [used.encode(update, 1.0)[0] for update in updates]
        expected = sum(residues_numpy.quantise(update, 1e5, 99999, False)[0] for update in updates)
        total = used.add(packed, size, True)
        assert np.array_equal(residues.decode(total, chosen)[:-1], expected)
        for decoded in (used.decode_sum(total, n, 1.0), used.decode_packed(used.pack(total), size, n, 1.0)):
            assert np.array_equal(decoded.total, (expected * used.integers.unit(1.0)).astype(np.float32))


@given(
    data=st.data(),
    chosen=st.sampled_from([(3, 5, 7, 8, 11, 13, 17), (2**20,), (2**41,), (5, 7, 9, 11, 13, 16, 17, 19, 29, 31)]),
)
@examples(40)
def test_one_column_can_be_written_and_read(data: st.DataObject, chosen: tuple[int, ...]) -> None:
    count = data.draw(st.sampled_from([1, 33, BLOCK, BLOCK + 5]))
    column = data.draw(st.integers(0, count - 1))
    integer = data.draw(st.integers(-(10**6), 10**6))
    packed = residues.pack(np.zeros((len(chosen), count), residues.width(chosen, 1)), chosen)
    residues.put(packed, chosen, count, column, integer)
    expected = np.array([[integer % m] for m in chosen])
    assert np.array_equal(residues.get(packed, chosen, count, column), expected)
    found = residues.unpack(packed, chosen, count)
    assert np.array_equal(found[:, column : column + 1], expected)
    assert np.count_nonzero(np.delete(found, column, axis=1)) == 0


def test_packed_residues_take_the_bits_they_need() -> None:
    for n, r, *_ in TABLE:
        chosen = moduli.optimal(moduli.least(n, r))
        assert bits_of(chosen) == sum(math.ceil(math.log2(m)) for m in chosen)
        assert residues.words(chosen, 32 * 10_000) == 10_000 * bits_of(chosen)
        assert all(part.bits <= SHARED or len(part.fields) == 1 for part in parts(chosen))


# Hostile input


def used() -> Modular:
    return coding(4, Integers.decimal(2), moduli.optimal(moduli.least(4, 2)))


def test_residues_that_are_not_below_their_modulus_are_refused() -> None:
    code, update = used(), np.full(50, 0.25, np.float32)
    assert any(m & (m - 1) for m in code.moduli)
    for row, modulus in enumerate(code.moduli):
        if not modulus & (modulus - 1):
            continue  # every number of so many bits is a residue
        packed, _ = code.encode(update, 1.0)
        wrong = code.unpack(packed, 50)
        wrong[row, 49] = modulus
        with pytest.raises(FederationError, match="below it"):
            code.pack(wrong)
        out = np.empty_like(packed)
        for backend in BACKENDS:
            residues_numpy.pack(wrong, code.moduli, out)
            for refused in (
                lambda out=out, backend=backend: residues.unpack(out, code.moduli, 51, backend=backend),
                lambda out=out, backend=backend: residues.check(out, code.moduli, backend=backend),
                lambda out=out: code.check(out),
                lambda out=out, packed=packed: code.check(np.stack([packed, out])),
                lambda out=out, packed=packed: code.add([packed, out], 50, True),
            ):
                with pytest.raises(ProtocolError, match="not below"):
                    refused()


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_pads_the_last_lane_must_be_zero(backend: str) -> None:
    chosen = used().moduli
    packed = residues.pack(np.zeros((len(chosen), 40), np.uint32), chosen)
    residues.put(packed, chosen, 64, 63, 1)
    with pytest.raises(ProtocolError, match="pads"):
        residues.unpack(packed, chosen, 40, backend=backend)


@pytest.mark.parametrize("length", [0, 1, 7, 10_000])
def test_a_payload_of_the_wrong_length_is_refused(length: int) -> None:
    code = used()
    with pytest.raises(ProtocolError, match="not the residues"):
        code.unpack(np.zeros(length, np.uint32), 50)
    with pytest.raises(ProtocolError, match="not the residues"):
        code.unpack(np.zeros(code.length(50), np.int64), 50)


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_altered_residue_of_a_sum_does_not_decode(backend: str) -> None:
    """The product of the moduli has room to spare, so most alterations give an impossible sum."""
    chosen = (101, 103, 107)
    out = np.empty(1, np.float32)
    for shift in range(1, 101):
        altered = residues.of(np.array([250]), chosen)
        altered[0, 0] = (altered[0, 0] + shift) % 101
        with pytest.raises(ProtocolError, match="altered"):
            residues.scaled(altered, chosen, 3, 1e-2, 3 * 99, out, backend=backend)


def test_sums_larger_than_their_terms_are_refused() -> None:
    code = used()
    packed, _ = code.encode(np.zeros(5, np.float32), 1.0)
    total = code.add([packed] * 3, 5, False)
    total[1, 2] = 3 * (code.moduli[1] - 1) + 1
    with pytest.raises(ProtocolError, match="larger than"):
        code.decode_sum(total, 3, 1.0)


def test_more_updates_than_there_is_room_for_are_refused() -> None:
    code = used()
    packed, _ = code.encode(np.zeros(5, np.float32), 1.0)
    with pytest.raises(ProtocolError, match="has room for 4"):
        code.decode_sum(code.add([packed] * 5, 5, True), 5, 1.0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_an_update_that_is_not_finite_is_refused(value: float, backend: str) -> None:
    update = np.zeros(10, np.float32)
    update[3] = value
    with pytest.raises(FederationError, match="not finite"):
        residues.encode(update, Integers.decimal(2), 1.0, used().moduli, backend=backend)


def test_an_impossible_share_of_clamped_coordinates_is_refused() -> None:
    code = used()
    packed, _ = code.encode(np.zeros(5, np.float32), 1.0)
    total = code.add([packed], 5, True)
    total[:, 5] = residues.of(np.array([-1]), code.moduli)[:, 0]
    with pytest.raises(ProtocolError, match="share"):
        code.decode_sum(total, 1, 1.0)


def test_rows_of_residues_are_not_updates() -> None:
    with pytest.raises(FederationError, match="decode_sum"):
        used().decode(np.zeros((2, 3), np.uint32), 3)
