"""Masks: disjoint, complete, nearly equal and random; vectors survive split and join."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st
from scipy import stats

from fl_privacy.errors import FederationError
from fl_privacy.shard import masks
from profiles import examples

LEAST_P = 1e-6

dimensions = st.one_of(st.integers(0, 300), st.sampled_from([1023, 1024, 1025, 2**15 - 1, 2**15, 2**15 + 1, 70_000]))


@given(
    d=dimensions, aggregators=st.one_of(st.integers(1, 9), st.sampled_from([255, 256, 257, 400])), seed=st.integers()
)
@examples(60)
def test_masks_are_disjoint_complete_and_nearly_equal(d: int, aggregators: int, seed: int) -> None:
    owners = masks.owners(d, aggregators, seed)
    counts = np.bincount(owners, minlength=aggregators)
    # One owner per coordinate is disjoint and complete by construction; each must also be one of the aggregators.
    assert owners.shape == (d,)
    assert counts.size == aggregators
    assert counts.max() - counts.min() <= 1
    assert counts.tolist() == masks.sizes(d, aggregators)


@given(
    d=dimensions,
    aggregators=st.sampled_from([1, 2, 3, 7, 256, 300]),
    seed=st.binary(max_size=8),
    reuse=st.booleans(),
)
@examples(60)
def test_join_undoes_split_and_the_kernels_agree(d: int, aggregators: int, seed: bytes, reuse: bool) -> None:
    owners = masks.owners(d, aggregators, seed)
    vector = np.random.default_rng(d).standard_normal(d, dtype=np.float32)
    out = (np.empty(d, np.float32), np.empty(d, np.float32)) if reuse else (None, None)
    shards = masks.split(vector, owners, aggregators, out=out[0], backend="numba")
    twins = masks.split(vector, owners, aggregators, backend="numpy")
    assert len(shards) == aggregators
    for a, (shard, twin) in enumerate(zip(shards, twins, strict=True)):
        assert np.array_equal(shard, vector[owners == a])
        assert np.array_equal(shard, twin)
    separate = [shard.copy() for shard in shards]
    assert np.array_equal(masks.join(separate, owners, out=out[1], backend="numba"), vector)
    assert np.array_equal(masks.join(shards, owners, backend="numpy"), vector)


def test_owners_are_uniform_and_independent_of_position() -> None:
    """Over many seeds, six neighbours with three owners of two each take all 90 assignments equally often."""
    seen = [tuple(masks.owners(6, 3, seed).tolist()) for seed in range(18_000)]
    cells = {assignment: i for i, assignment in enumerate(sorted(set(seen)))}
    assert len(cells) == 90
    assert stats.chisquare(np.bincount([cells[one] for one in seen])).pvalue > LEAST_P


def test_owners_of_neighbours_are_independent() -> None:
    owners = masks.owners(300_000, 3, 5).astype(int)
    # Sampling without replacement from 300 000 changes a cell's expectation by one part in 10^5: invisible here.
    assert stats.chisquare(np.bincount(3 * owners[0::2] + owners[1::2])).pvalue > LEAST_P


def test_the_seed_determines_the_masks() -> None:
    assert np.array_equal(masks.owners(1000, 3, 1), masks.owners(1000, 3, 1))
    kinds = [1, 2, -1, b"1", b"", 2**200]
    assert len({masks.owners(1000, 3, seed).tobytes() for seed in kinds}) == len(kinds)


def test_known_masks_never_change() -> None:
    """Parties with different versions must agree on the masks."""
    assert masks.owners(12, 3, 1).tolist() == KNOWN


def test_ties_are_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    real = masks._keys

    def tied(d: int, seed: int | bytes, attempt: int) -> np.ndarray:
        return real(d, seed, attempt) if attempt else np.zeros(d, np.uint64)

    monkeypatch.setattr(masks, "_keys", tied)
    assert np.bincount(masks.owners(10, 3, 1)).tolist() == [4, 3, 3]


@pytest.mark.parametrize("backend", ["numba", "numpy"])
def test_masks_that_do_not_fit_are_refused(backend: str) -> None:
    vector = np.zeros(6, np.float32)
    uneven = np.array([0, 0, 0, 0, 1, 1], np.uint8)
    with pytest.raises(FederationError, match="of these sizes"):
        masks.split(vector, uneven, 2, backend=backend)
    with pytest.raises(FederationError, match="of these sizes"):
        masks.join([vector[:3], vector[:3]], uneven, backend=backend)
    with pytest.raises(FederationError, match="aggregator 1 of 1"):
        masks.split(vector, uneven, 1, backend=backend)
    with pytest.raises(FederationError, match="vector"):
        masks.split(np.zeros(5, np.float32), uneven, 2, backend=backend)
    with pytest.raises(FederationError, match="shard 1"):
        masks.join([vector[:3], vector[:2]], uneven, backend=backend)
    with pytest.raises(FederationError, match="out"):
        masks.split(vector, masks.owners(6, 2, 1), 2, out=vector, backend=backend)


@pytest.mark.parametrize(("d", "aggregators"), [(5, 0), (5, 2**16 + 1), (-1, 3), (2**32, 3)])
def test_impossible_masks_are_refused(d: int, aggregators: int) -> None:
    with pytest.raises(FederationError):
        masks.owners(d, aggregators, 1)


KNOWN = [1, 1, 2, 1, 0, 0, 0, 2, 0, 1, 2, 2]


@given(st.integers(0, 300), st.lists(st.floats(0.01, 100), min_size=1, max_size=6), st.integers(0, 2**32))
def test_unequal_shards_are_disjoint_complete_and_in_proportion(d: int, shares: list[float], seed: int) -> None:
    aggregators = len(shares)
    owners = masks.owners(d, aggregators, seed, shares)
    counts = masks.sizes(d, aggregators, shares)
    assert np.bincount(owners, minlength=aggregators).tolist() == counts
    assert sum(counts) == d
    assert all(abs(count - d * share / sum(shares)) < 1 + 1e-9 * d for count, share in zip(counts, shares, strict=True))
    vector = np.arange(d, dtype=np.float32)
    parts = masks.split(vector, owners, aggregators, shares=shares)
    assert np.array_equal(masks.join(parts, owners, shares=shares), vector)


@pytest.mark.parametrize("shares", [[1.0], [1.0, 0.0], [1.0, -1.0], [1.0, float("inf")], [1.0, float("nan")]])
def test_impossible_shares_are_refused(shares: list[float]) -> None:
    with pytest.raises(FederationError, match="shares"):
        masks.owners(10, 2, 1, shares)
