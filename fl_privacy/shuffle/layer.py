"""Layer-level shuffle: one permutation of the clients per layer (SIA R_L)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fl_privacy.crypto.keys import check_key
from fl_privacy.errors import FederationError
from fl_privacy.shuffle import parameter
from fl_privacy.shuffle.check import Matrix, check_matrix
from fl_privacy.shuffle.rows import gather


def shuffle(matrix: Matrix, key: bytes, layers: Sequence[slice]) -> None:
    """Permute the rows of every layer independently, in place; the layers must be contiguous and cover the matrix."""
    check_matrix(matrix)
    check_key(key)
    _check_cover(layers, matrix.shape[1])
    for layer, order in zip(layers, permutations(matrix.shape[0], len(layers), key), strict=True):
        gather(matrix, order, layer)


def permutations(rows: int, count: int, key: bytes) -> NDArray[np.int64]:
    """`count` independent uniform permutations: the parameter shuffle of as many columns 0, 1, ..., rows - 1."""
    # float32 holds every row number exactly, up to 2^24.
    numbers = np.repeat(np.arange(rows, dtype=np.float32)[:, None], count, axis=1)
    parameter.shuffle(numbers, key)
    return np.ascontiguousarray(numbers.T, dtype=np.int64)


def _check_cover(layers: Sequence[slice], columns: int) -> None:
    """Raise unless the layers cover all columns: a coordinate outside every layer would stay unshuffled."""
    end = 0
    for layer in layers:
        if layer.start != end or layer.step not in (None, 1) or layer.stop < end:
            raise FederationError(f"layers: {layer} does not follow coordinate {end}; pass the layout's layers")
        end = layer.stop
    if end != columns:
        raise FederationError(f"layers: cover {end} of {columns} coordinates; pass the layout's layers")
