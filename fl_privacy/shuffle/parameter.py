"""Parameter-level shuffle: every coordinate gets its own permutation of the clients (IntraShuffler, SIA R_P).

Word w of column c is word c W + w of the key's stream, with W words per column (`draws`): the result depends only on
the key and the shape, not on the block size, the number of threads or the kernel.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial

from fl_privacy import kernels
from fl_privacy.crypto.keys import check_key
from fl_privacy.crypto.stream import Words
from fl_privacy.errors import FederationError
from fl_privacy.shuffle.check import Matrix, check_matrix
from fl_privacy.shuffle.draws import accept, plan

BLOCK_ENTRIES = 2**18  # a block of the matrix takes 1 MiB
BLOCK_COLUMNS = 2**14


def shuffle(matrix: Matrix, key: bytes, *, threads: int = 1, backend: str | None = None) -> None:
    """Permute every column of `matrix` independently, uniformly and in place; `key` is single-use.

    `backend` (numba or numpy) and `threads` change the speed, never the result.
    """
    check_matrix(matrix)
    check_key(key)
    if threads < 1:
        raise FederationError(f"threads: {threads} is not positive; use 1 or more")
    rows, columns = matrix.shape
    if rows < 2 or columns == 0:
        return
    block = block_columns(rows)
    share = -(-columns // (block * threads)) * block
    task = partial(_span, matrix, key, block, backend)
    spans = [(start, min(start + share, columns)) for start in range(0, columns, share)]
    if len(spans) == 1:
        task(spans[0])
        return
    with ThreadPoolExecutor(len(spans)) as pool:
        list(pool.map(task, spans))


def block_columns(rows: int) -> int:
    """Columns shuffled at a time: a power of two (streams start at even words), smaller for many rows."""
    return max(2, min(BLOCK_COLUMNS, 1 << (BLOCK_ENTRIES // rows).bit_length() - 1))


def _span(matrix: Matrix, key: bytes, block: int, backend: str | None, span: tuple[int, int]) -> None:
    """Shuffle the columns of `span`, block by block."""
    draws, kernel = plan(matrix.shape[0]), kernels.pick("permute", matrix.size, backend)
    stream = Words(key, start=span[0] * draws.words)
    entries = matrix.view("uint32")
    for first in range(span[0], span[1], block):
        width = min(block, span[1] - first)
        words = stream.take(width * draws.words).reshape(width, draws.words)
        accept(words, key, first, draws, kernel)
        kernel.permute(entries, first, words, draws.tops, draws.bits)
