"""Noise: normal to the far tails, independent, reproducible from its key, and the same in every kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st
from numpy.typing import NDArray
from scipy import special, stats

from fl_privacy import kernels
from fl_privacy.crypto.stream import Words
from fl_privacy.dp import noise
from fl_privacy.errors import FederationError
from profiles import QUICK, examples

# Keys are fixed, so results never change; a correct sampler fails for one choice of keys in a million.
LEAST_P = 1e-6
MANY = 4_000_000 if QUICK else 20_000_000
TAIL = float(noise.TAIL)

Draw = Callable[[int], NDArray[np.float32]]  # piece number -> 2^22 samples
PIECE = 2**22


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


@pytest.fixture(scope="module")
def samples() -> NDArray[np.float32]:
    return noise.standard_normal(MANY, key(1), backend="numba")


def p_beyond(z: float) -> float:
    """The probability that a standard normal statistic is at least this far from 0."""
    return float(2 * stats.norm.sf(abs(z)))


def p_bins(values: NDArray[np.float32], edges: NDArray[np.float64], total: int) -> float:
    """Chi-square of the bins between `edges`; `values` are those of all `total` samples outside the widest bin."""
    counts = np.bincount(np.searchsorted(edges, values), minlength=edges.size + 1)
    expected = np.diff(special.ndtr(edges), prepend=0.0, append=1.0)
    counts[np.argmax(expected)] += total - values.size
    return float(stats.chisquare(counts, expected / expected.sum() * total).pvalue)


def p_tails(draw: Draw, pieces: int = 24) -> float:
    """Samples beyond 3, 4 and 5 sigma on both sides, out of 10^8."""
    edges = np.array([-5.0, -4.0, -3.0, 3.0, 4.0, 5.0])
    far = [values[np.abs(values) > 3] for values in map(draw, range(pieces))]
    return p_bins(np.concatenate(far), edges, pieces * PIECE)


def normal_piece(number: int) -> NDArray[np.float32]:
    return noise.standard_normal(PIECE, key(100 + number), backend="numba")


def tail(count: int, number: int) -> NDArray[np.float64]:
    """Samples of the tail only."""
    return noise._Sampler(key(number), kernels.pick("normal", count, "numpy"))._tails(count, 0)


class Short(Words):
    """Words with 16 random bits: enough for a layer and little else."""

    def take(self, count: int) -> NDArray[np.uint64]:
        words = super().take(count)
        words &= np.uint64(0xFC00_0000_0000_03FF)
        return words


@pytest.fixture
def short_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noise, "Words", Short)


SIZES = st.one_of(
    st.integers(0, 3000), st.sampled_from([noise.BLOCK - 1, noise.BLOCK, noise.BLOCK + 1, 2 * noise.BLOCK + 1])
)


@examples(60)
@given(size=SIZES, number=st.integers(0, 2**256 - 1))
def test_kernels_give_the_same_bits(size: int, number: int) -> None:
    one, two = (noise.standard_normal(size, key(number), backend=backend) for backend in kernels.BACKENDS)
    assert one.dtype == two.dtype == np.float32
    assert one.tobytes() == two.tobytes()


def test_kernels_give_the_same_bits_for_many(samples: NDArray[np.float32]) -> None:
    # Thousands of tail samples, and samples drawn three times: all the rare branches.
    size = MANY // 5
    assert noise.standard_normal(size, key(1), backend="numpy").tobytes() == samples[:size].tobytes()


@pytest.mark.parametrize("backend", kernels.BACKENDS)
def test_extreme_words(backend: str) -> None:
    """A fraction at either end of the base layer is doubtful and symmetric; the smallest ones are not zero."""
    words = np.array([2**63, 2**63 - 2**10, 2**64 - 2**10, 0], np.uint64)
    out, index, doubtful = np.empty(4, np.float32), np.empty(4, np.int64), np.empty(4, np.uint64)
    layers, kernel = noise.ziggurat(), kernels.pick("normal", 4, backend)
    assert kernel.fill(words, 7, layers.widths, layers.limits, out, index, doubtful, 0) == 2
    assert index[:2].tolist() == [7, 8]
    assert doubtful[:2].tolist() == words[:2].tolist()
    assert out[0] == -out[1] == np.float32(-layers.edges[0])
    assert out[2] == -out[3] == np.float32(-layers.widths[0])


@examples(40)
@given(size=st.integers(1, 20_000), block=st.integers(1, 5000), room=st.integers(0, 5000), number=st.integers(0, 99))
def test_block_sizes_do_not_matter(size: int, block: int, room: int, number: int) -> None:
    expected = noise.standard_normal(size, key(number))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(noise, "BLOCK", max(block, size // 100))
        patch.setattr(noise, "DOUBTFUL", noise.BLOCK + room)
        assert noise.standard_normal(size, key(number)).tobytes() == expected.tobytes()


@examples(30)
@given(sizes=st.tuples(SIZES, SIZES), number=st.integers(0, 99))
def test_a_longer_sample_starts_with_the_shorter_one(sizes: tuple[int, int], number: int) -> None:
    few, many = (noise.standard_normal(size, key(number)) for size in sorted(sizes))
    assert few.tobytes() == many[: few.size].tobytes()


def test_known_samples() -> None:
    """A key gives the same noise in every version of the code."""
    known = [1.9258693, 0.5985487, 0.023772733, 0.11622043]
    assert noise.standard_normal(4, key(1)).tolist() == np.float32(known).tolist()


def test_the_key_determines_the_noise() -> None:
    one, again, other = (noise.standard_normal(10_000, key(number)) for number in (1, 1, 2))
    assert np.array_equal(one, again)
    # Two different float32 samples agree with a probability below 2^-20.
    assert np.count_nonzero(one == other) < 3
    assert abs(np.corrcoef(one, other)[0, 1]) < stats.norm.isf(LEAST_P / 2) / 100


def test_layers_have_equal_areas_and_end_at_one() -> None:
    layers = noise.ziggurat()
    area = float(noise.AREA)
    rest = np.sqrt(np.pi / 2) * special.erfc(TAIL / np.sqrt(2))
    # Rounding: a height to 2^-54, which is at most 2^-44 of a layer's height of 1 / 1024; the rest is less.
    assert np.exp(-(TAIL**2) / 2) * TAIL + rest == pytest.approx(area, rel=2**-44)
    assert np.diff(layers.heights) * layers.edges[:-1] == pytest.approx(area, rel=2**-42)
    assert np.exp(-(layers.edges[1:] ** 2) / 2) == pytest.approx(layers.heights[1:], rel=2**-48)
    assert layers.limits / 2.0**54 == pytest.approx(layers.edges[1:] / layers.edges[:-1], rel=2**-50)
    assert (np.diff(layers.edges) < 0).all()


def test_distribution_function(samples: NDArray[np.float32]) -> None:
    # Rounding to float32 moves the function by 2^-24 at most: nothing at this size.
    assert stats.kstest(samples[:1_000_000].astype(np.float64), special.ndtr, method="asymp").pvalue > LEAST_P


def test_every_layer_has_its_share(samples: NDArray[np.float32]) -> None:
    inner = noise.ziggurat().edges[1:-1]
    edges = np.concatenate([[-5.0, -4.5], -inner, [0.0], inner[::-1], [4.5, 5.0]])
    assert p_bins(samples, edges, MANY) > LEAST_P


def test_far_tails() -> None:
    assert p_tails(normal_piece) > LEAST_P


@pytest.mark.usefixtures("short_words")
def test_tail_test_finds_short_words() -> None:
    assert p_tails(normal_piece) < LEAST_P


def test_tail_test_finds_short_uniforms() -> None:
    """Box-Muller with 16-bit uniforms ends at 4.7 sigma."""

    def box_muller(number: int) -> NDArray[np.float32]:
        uniforms = np.random.default_rng(number).integers(0, 2**16, (2, PIECE // 2), np.uint16)
        radius, angle = (uniforms + np.float32(1)) / np.float32(2**16)
        radius, angle = np.sqrt(-2 * np.log(radius)), 2 * np.pi * angle
        return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])

    assert p_tails(box_muller) < LEAST_P


def test_tail_beyond_six_sigma() -> None:
    values = tail(4_000_000, 3)
    start, edges = special.ndtr(-TAIL), np.array([4.5, 5.0, 5.5, 6.0, 6.3])
    expected = -np.diff(special.ndtr(-edges), prepend=start, append=0.0) / start
    counts = np.bincount(np.searchsorted(edges, values), minlength=edges.size + 1)
    assert stats.chisquare(counts, expected / expected.sum() * values.size).pvalue > LEAST_P
    assert values.max() > 6.3
    assert stats.kstest(special.ndtr(-values[:500_000]) / start, "uniform", method="asymp").pvalue > LEAST_P


def test_tail_values_do_not_repeat() -> None:
    # 2e8 pairs, and float64 has 10^15 values between 4 and 5: two agree with a probability of 10^-6 at most.
    assert np.unique(tail(20_000, 4)).size == 20_000


@pytest.mark.usefixtures("short_words")
def test_repeated_tail_values_are_found() -> None:
    assert np.unique(tail(20_000, 4)).size < 20_000


def test_tail_reaches_thirteen_sigma(monkeypatch: pytest.MonkeyPatch) -> None:
    """Needs uniforms of 2^-54 and, to accept it, 2^-64."""
    monkeypatch.setattr(Words, "take", lambda self, count: np.array([2**10, 0], np.uint64))
    assert tail(1, 0)[0] == pytest.approx(TAIL + 54 * np.log(2) / TAIL, rel=2**-12)


def test_moments(samples: NDArray[np.float32]) -> None:
    """Mean, variance and fourth moment; x, x^2 and x^4 have variances 1, 2 and 96."""
    sums = np.zeros(4)
    for piece in np.array_split(samples, 20):
        x = piece.astype(np.float64)
        sums += [x.sum(), (x**2).sum() - x.size, (x**3).sum(), (x**4).sum() - 3 * x.size]
    for total, variance in zip(sums, (1, 2, 15, 96), strict=True):
        assert p_beyond(total / np.sqrt(variance * MANY)) > LEAST_P


@pytest.mark.parametrize("lag", [1, 2, noise.BLOCK])
def test_neighbours_are_independent(samples: NDArray[np.float32], lag: int) -> None:
    """Products of neighbours, of their squares and of one with the other's square: variances 1, 4 and 2."""
    x = samples[:4_000_000].astype(np.float64)
    one, two = x[:-lag], x[lag:]
    for product, variance in ((one * two, 1), ((one**2 - 1) * (two**2 - 1), 4), (one * (two**2 - 1), 2)):
        assert p_beyond(product.sum() / np.sqrt(variance * product.size)) > LEAST_P


def test_no_word_is_used_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every stream has one reader: draws, wedges, tails of three depths, and repeated attempts at a tail."""
    streams: list[int] = []

    class Recorded(Words):
        def __init__(self, key: bytes, stream: int = 0) -> None:
            streams.append(stream)
            super().__init__(key, stream)

    monkeypatch.setattr(noise, "Words", Recorded)
    noise.standard_normal(4_000_000, key(1))
    assert len(streams) > 7
    assert len(set(streams)) == len(streams)


def test_out_is_filled_and_returned() -> None:
    out = np.full(12, np.nan, np.float32)
    assert noise.standard_normal(10, key(1), out=out[1:11]).base is out
    assert np.array_equal(out[1:11], noise.standard_normal(10, key(1)))
    assert np.isnan(out[[0, -1]]).all()


def test_uniforms_have_53_bits() -> None:
    values = noise._fractions(Words(key(5)).take(200_000 if QUICK else 1_000_000))
    steps = values * 2.0**53
    assert values.dtype == np.float64
    assert (values >= 0).all()
    assert (values < 1).all()
    assert np.array_equal(steps, np.floor(steps))
    assert stats.kstest(values, "uniform", method="asymp").pvalue > LEAST_P
    bits = (steps.astype(np.int64)[:, None] >> np.arange(53)) & 1
    deviations = (bits.sum(axis=0) - values.size / 2) / np.sqrt(values.size / 4)
    assert min(map(p_beyond, deviations)) > LEAST_P / 53


@examples(50)
@given(count=st.integers(0, 70_000), step=st.integers(0, 2**53), number=st.integers(0, 99))
def test_poisson_sample_is_a_comparison_with_uniforms(count: int, step: int, number: int) -> None:
    rate = step / 2**53
    chosen = noise.poisson_sample(count, rate, key(number))
    assert chosen.dtype == np.int64
    assert np.array_equal(chosen, np.flatnonzero(noise._fractions(Words(key(number)).take(count or 1)[:count]) < rate))


@pytest.mark.parametrize("rate", [1e-4, 0.01, 0.3, 0.999])
def test_poisson_sample_has_its_rate(rate: float) -> None:
    count = 2_000_000
    chosen = noise.poisson_sample(count, rate, key(6))
    assert stats.binomtest(chosen.size, count, rate).pvalue > LEAST_P
    # Chosen or not says nothing about the next index.
    picked = np.zeros(count, bool)
    picked[chosen] = True
    assert stats.binomtest(int((picked[0::2] & picked[1::2]).sum()), count // 2, rate**2).pvalue > LEAST_P


def test_poisson_sample_at_the_ends() -> None:
    assert noise.poisson_sample(100, 0.0, key(1)).size == 0
    assert noise.poisson_sample(100, 2**-54, key(1)).size == 0
    assert np.array_equal(noise.poisson_sample(70_000, 1.0, key(1)), np.arange(70_000))


READ_ONLY = np.zeros(4, np.float32)
READ_ONLY.flags.writeable = False


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda: noise.standard_normal(-1, key(1)), "size: -1"),
        (lambda: noise.standard_normal(1.5, key(1)), "size: 1.5"),  # type: ignore[arg-type]
        (lambda: noise.standard_normal(True, key(1)), "size: True"),
        (lambda: noise.standard_normal(4, b"short"), "key: 5 bytes"),
        (lambda: noise.standard_normal(4, key(1), backend="cuda"), "'cuda' is not a backend"),
        (lambda: noise.standard_normal(4, key(1), out=np.zeros(4)), "out: float64"),  # type: ignore[arg-type]
        (lambda: noise.standard_normal(4, key(1), out=np.zeros(5, np.float32)), r"out: float32 \(5,\)"),
        (lambda: noise.standard_normal(4, key(1), out=np.zeros(8, np.float32)[::2]), "out: not contiguous"),
        (lambda: noise.standard_normal(4, key(1), out=READ_ONLY), "read-only"),
        (lambda: noise.poisson_sample(1, 0.5, "key"), "key: str"),  # type: ignore[arg-type]
        (lambda: noise.poisson_sample(-1, 0.5, key(1)), "count: -1"),
        (lambda: noise.poisson_sample(1, 1.1, key(1)), "rate: 1.1"),
        (lambda: noise.poisson_sample(1, "0.5", key(1)), "rate: '0.5'"),  # type: ignore[arg-type]
        (lambda: noise.poisson_sample(1, float("nan"), key(1)), "rate: nan"),
        (lambda: noise.poisson_sample(1, 0.5, b""), "key: 0 bytes"),
    ],
)
def test_wrong_arguments_are_named_in_one_line(call: Callable[[], Any], field: str) -> None:
    with pytest.raises(FederationError, match=field) as error:
        call()
    assert "\n" not in str(error.value)
