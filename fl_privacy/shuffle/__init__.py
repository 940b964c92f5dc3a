"""Mixing across clients: model, layer and parameter shuffles of a bucket's updates."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fl_privacy.shuffle import layer, model, parameter
from fl_privacy.shuffle.check import Matrix
from fl_privacy.shuffle.rows import reorder

Level = Callable[[Matrix, bytes, Sequence[slice], str | None], None]

# Arguments: matrix, key, layers, and the backend for levels that use kernels.
LEVELS: dict[str, Level] = {
    "model": lambda matrix, key, layers, backend: model.shuffle(matrix, key),
    "layer": lambda matrix, key, layers, backend: layer.shuffle(matrix, key, layers),
    "parameter": lambda matrix, key, layers, backend: parameter.shuffle(matrix, key, backend=backend),
}

__all__ = ["LEVELS", "Level", "Matrix", "reorder"]
