"""Model-level shuffle: one permutation of the clients (SIA R_M)."""

from __future__ import annotations

from fl_privacy.shuffle import layer
from fl_privacy.shuffle.check import Matrix, check_matrix


def shuffle(matrix: Matrix, key: bytes) -> None:
    """Permute the rows of `matrix`, uniformly and in place: the whole model is one layer."""
    check_matrix(matrix)
    layer.shuffle(matrix, key, [slice(0, matrix.shape[1])])
