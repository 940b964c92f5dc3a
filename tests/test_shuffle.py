"""Shuffles: uniform, reproducible from their key, identical in every kernel, and lossless."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, strategies as st
from numpy.typing import NDArray
from scipy import stats

from fl_privacy.crypto import keys
from fl_privacy.errors import FederationError
from fl_privacy.shuffle import LEVELS, draws, layer, model, parameter, reorder
from profiles import QUICK, examples

# Keys are fixed, so results never change; a correct shuffle fails for one choice of keys in a million.
LEAST_P = 1e-6

Shuffle = Callable[[NDArray[np.float32], bytes], None]


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def numbered(rows: int, columns: int) -> NDArray[np.float32]:
    """Every entry is the number of its row: a shuffled column is its permutation."""
    return np.repeat(np.arange(rows, dtype=np.float32)[:, None], columns, axis=1)


def codes(matrix: NDArray[np.float32]) -> NDArray[np.int64]:
    """The permutation of each column as one number."""
    rows = matrix.shape[0]
    index = {p: i for i, p in enumerate(itertools.permutations(range(rows)))}
    table = np.full(rows**rows, -1)
    for p, i in index.items():
        table[sum(v * rows**k for k, v in enumerate(p))] = i
    return table[(matrix.astype(np.int64) * (rows ** np.arange(rows))[:, None]).sum(axis=0)]


def p_uniform(cells: NDArray[np.int64], count: int) -> float:
    return float(stats.chisquare(np.bincount(cells, minlength=count)).pvalue)


def p_joint(shuffle: Shuffle, columns: int = 60_000) -> float:
    """Neighbouring columns of three rows: 36 pairs of permutations."""
    matrix = numbered(3, columns)
    shuffle(matrix, key(7))
    code = codes(matrix)
    return p_uniform(6 * code[0::2] + code[1::2], 36)


@pytest.mark.parametrize("backend", ["numba", "numpy"])
@pytest.mark.parametrize("rows", [3, 4])
def test_every_permutation_is_equally_likely(rows: int, backend: str) -> None:
    matrix = numbered(rows, 120_000)
    parameter.shuffle(matrix, key(rows), backend=backend)
    count = len(list(itertools.permutations(range(rows))))
    assert p_uniform(codes(matrix), count) > LEAST_P


@pytest.mark.parametrize("rows", [10, 20, 30])
def test_every_row_goes_to_every_position_equally_often(rows: int) -> None:
    matrix = numbered(rows, 100_000)
    parameter.shuffle(matrix, key(rows))
    for row in range(rows):
        # Bonferroni over the rows.
        assert p_uniform(matrix[row].astype(np.int64), rows) > LEAST_P / rows


def test_neighbouring_columns_are_independent() -> None:
    assert p_joint(parameter.shuffle) > LEAST_P


def test_joint_test_finds_one_permutation_for_all_columns() -> None:
    assert p_joint(model.shuffle) < LEAST_P


def test_joint_test_finds_a_permutation_used_for_two_columns() -> None:
    def weak(matrix: NDArray[np.float32], secret: bytes) -> None:
        half = np.ascontiguousarray(matrix[:, ::2])
        parameter.shuffle(half, secret)
        matrix[:] = np.repeat(half, 2, axis=1)[:, : matrix.shape[1]]

    assert p_joint(weak) < LEAST_P


def test_columns_at_block_borders_are_independent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parameter, "BLOCK_COLUMNS", 8)
    matrix = numbered(3, 8 * 8_000)
    parameter.shuffle(matrix, key(9))
    code = codes(matrix)
    assert p_uniform(6 * code[7:-8:8] + code[8::8], 36) > LEAST_P


def test_result_does_not_depend_on_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, pieces = numbered(20, 1_001), numbered(20, 1_001)
    parameter.shuffle(whole, key(1))
    monkeypatch.setattr(parameter, "BLOCK_COLUMNS", 16)
    parameter.shuffle(pieces, key(1))
    assert np.array_equal(whole, pieces)


@pytest.mark.parametrize("backend", ["numba", "numpy"])
@pytest.mark.parametrize(("rows", "bits"), [(3, 4), (4, 5), (4, 6)])
def test_rejection_makes_short_words_uniform(
    rows: int, bits: int, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 16 to 64 words for 6 or 24 permutations, a quarter to a third of the words are rejected."""
    monkeypatch.setattr(parameter, "plan", lambda n: draws.build(n, bits))
    matrix = numbered(rows, 20_000)
    parameter.shuffle(matrix, key(bits), backend=backend)
    assert p_uniform(codes(matrix), {3: 6, 4: 24}[rows]) > LEAST_P


def test_without_rejection_short_words_are_biased(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parameter, "plan", lambda n: draws.build(n, 4))
    monkeypatch.setattr(parameter, "accept", lambda *_: None)
    matrix = numbered(3, 20_000)
    parameter.shuffle(matrix, key(4))
    assert p_uniform(codes(matrix), 6) < LEAST_P


@given(st.integers(2, draws.MAX_ROWS))
@examples(50)
def test_plan_serves_every_radix_once_without_overflow(rows: int) -> None:
    found = draws.plan(rows)
    assert found.tops[0] == rows
    assert found.tops[-1] == 1
    assert np.all(np.diff(found.tops) < 0)
    assert rows * (2**found.bits - 1) < 2**64
    assert int(found.products.max()) <= draws.LARGEST_PRODUCT
    for top, below, product in zip(found.tops, found.tops[1:], found.products, strict=False):
        assert int(product) == int(np.prod(np.arange(below + 1, top + 1, dtype=object)))


@given(
    rows=st.sampled_from([2, 3, 5, 10, 13, 20, 24, 25, 33, 70]),
    columns=st.sampled_from([1, 2, 1023, 1024, 1025, 2**11, 2**13 + 1, 2**14 - 1, 2**14, 2**14 + 1]),
    secret=st.binary(min_size=32, max_size=32),
    threads=st.sampled_from([1, 2, 3]),
)
@examples(60)
def test_kernels_and_threads_agree_and_keep_every_column(rows: int, columns: int, secret: bytes, threads: int) -> None:
    # Any bits, including NaNs: a shuffle moves entries and computes nothing.
    source = np.random.default_rng(columns).integers(0, 2**32, (rows, columns), dtype=np.uint32)
    compiled, twin = source.copy(), source.copy()
    parameter.shuffle(compiled.view(np.float32), secret, threads=threads, backend="numba")
    parameter.shuffle(twin.view(np.float32), secret, backend="numpy")
    assert np.array_equal(compiled, twin)
    assert np.array_equal(np.sort(compiled, axis=0), np.sort(source, axis=0))


@pytest.mark.parametrize("rows", [4096] if QUICK else [4096, 65536])
def test_many_rows(rows: int) -> None:
    matrix = numbered(rows, 5)
    parameter.shuffle(matrix, key(3))
    twin = numbered(rows, 5)
    parameter.shuffle(twin, key(3), backend="numpy")
    assert np.array_equal(matrix, twin)
    assert np.array_equal(np.sort(matrix, axis=0), numbered(rows, 5))
    assert not np.array_equal(matrix[:, 0], matrix[:, 1])


def test_known_result_never_changes() -> None:
    """A checkpointed run must resume with the same permutations under a later version."""
    matrix = numbered(5, 4)
    parameter.shuffle(matrix, bytes(range(32)))
    assert matrix.astype(int).tolist() == KNOWN


def test_the_key_determines_the_result() -> None:
    first, again, other = numbered(10, 500), numbered(10, 500), numbered(10, 500)
    parameter.shuffle(first, key(1))
    parameter.shuffle(again, key(1))
    parameter.shuffle(other, key(2))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


@pytest.mark.parametrize("shape", [(1, 7), (5, 0), (0, 4), (0, 0)])
@pytest.mark.parametrize("level", LEVELS)
def test_nothing_to_shuffle(shape: tuple[int, int], level: str) -> None:
    matrix = np.ones(shape, np.float32)
    LEVELS[level](matrix, key(1), [slice(0, shape[1])], None)
    assert np.array_equal(matrix, np.ones(shape, np.float32))


def read_only() -> NDArray[np.float32]:
    matrix = np.zeros((2, 3), np.float32)
    matrix.flags.writeable = False
    return matrix


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    ("matrix", "secret", "words"),
    [
        (np.zeros(3, np.float32), key(1), "two-dimensional"),
        (np.zeros((2, 3)), key(1), "float32"),
        (np.zeros((2, 6), np.float32)[:, ::2], key(1), "contiguous"),
        (read_only(), key(1), "read-only"),
        (np.zeros((draws.MAX_ROWS + 1, 1), np.float32), key(1), "rows"),
        (np.zeros((2, 3), np.float32), b"short", "5 bytes"),
        (np.zeros((2, 3), np.float32), "x" * 32, "str"),
    ],
)
def test_wrong_arguments_are_refused_in_one_line(level: str, matrix: object, secret: object, words: str) -> None:
    with pytest.raises(FederationError, match=words) as caught:
        LEVELS[level](matrix, secret, [slice(0, 3)], None)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_model_shuffle_is_uniform_over_rows() -> None:
    cells = []
    for number in range(3_000):
        matrix = numbered(3, 2)
        model.shuffle(matrix, key(number))
        assert np.array_equal(matrix[:, 0], matrix[:, 1])
        cells.append(codes(matrix)[0])
    assert p_uniform(np.array(cells), 6) > LEAST_P


def test_layer_shuffle_permutes_each_layer_as_a_whole_and_independently() -> None:
    width, count = 3, 20_000
    layers = [slice(i * width, (i + 1) * width) for i in range(count)]
    matrix = numbered(3, width * count)
    layer.shuffle(matrix, key(5), layers)
    code = codes(matrix).reshape(count, width)
    assert np.all(code == code[:, :1])
    assert p_uniform(6 * code[0::2, 0] + code[1::2, 0], 36) > LEAST_P


@pytest.mark.parametrize("layers", [[slice(0, 2)], [slice(0, 2), slice(3, 4)], [slice(0, 3), slice(2, 4)], []])
def test_layers_must_cover_the_matrix(layers: list[slice]) -> None:
    with pytest.raises(FederationError, match="layers"):
        layer.shuffle(numbered(3, 4), key(1), layers)


@given(st.integers(1, 12), st.integers(0, 40), st.data())
@examples(60)
def test_reorder_is_a_row_gather(rows: int, columns: int, data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(rows)))[: data.draw(st.integers(0, rows))]
    matrix = np.random.default_rng(0).random((rows, columns), dtype=np.float32)
    expected = matrix[list(order)].copy()
    view = reorder(matrix, order)
    assert np.array_equal(view, expected)
    assert view.base is matrix


@pytest.mark.parametrize("order", [[0, 0], [3], [-1]])
def test_reorder_refuses_what_is_not_distinct_rows(order: list[int]) -> None:
    with pytest.raises(FederationError, match="order"):
        reorder(numbered(3, 4), order)


def test_reorder_through_several_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fl_privacy.shuffle.rows.BUFFER_ENTRIES", 16)
    matrix = np.arange(40, dtype=np.float32).reshape(4, 10)
    expected = matrix[[3, 1, 0]].copy()
    assert np.array_equal(reorder(matrix, [3, 1, 0]), expected)


def test_derived_keys_are_bound_to_every_field() -> None:
    base = {"secret": b"s" * 32, "run": "ab", "round": 1, "attempt": "c", "purpose": "shuffle"}
    changes = [{}, {"secret": b"t" * 32}, {"run": "a"}, {"round": 2}, {"attempt": "d"}, {"purpose": "x"}]
    moved = {"run": "a", "attempt": "bc"}, {"attempt": "cs", "purpose": "huffle"}
    found = {keys.derive(**{**base, **change}) for change in [*changes, *moved]}  # type: ignore[arg-type]
    assert len(found) == len(changes) + len(moved)
    assert {len(one) for one in found} == {32}
    assert keys.derive(**base) == keys.derive(**base)  # type: ignore[arg-type]


def test_fresh_keys_differ_and_short_secrets_are_refused() -> None:
    assert len({keys.fresh() for _ in range(100)}) == 100
    with pytest.raises(FederationError, match="secret"):
        keys.derive(b"short", "run", 1, "a", "p")


def python(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **environment}, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


SHUFFLE = "import numpy as np; from fl_privacy.shuffle import parameter; m = np.arange(20, dtype=np.float32)" + (
    ".reshape(4, 5).copy(); parameter.shuffle(m, bytes(32)); print(m.tolist())"
)


def test_importing_does_not_load_numba() -> None:
    assert python("import sys, fl_privacy.shuffle.parameter; print('numba' in sys.modules)") == "False"


def test_without_numba_the_numpy_twin_gives_the_same_result() -> None:
    assert python("import sys; sys.modules['numba'] = None; " + SHUFFLE) == python(SHUFFLE)


def test_without_a_writable_cache_it_compiles_anyway() -> None:
    broken = "from numba.core import caching; caching.CacheImpl._locator_classes = []; "
    assert python(broken + SHUFFLE) == python(SHUFFLE)


KNOWN = [[3, 2, 4, 3], [0, 1, 2, 1], [1, 3, 1, 0], [4, 4, 3, 2], [2, 0, 0, 4]]
