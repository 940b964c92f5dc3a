"""Mixing across clients: model, layer and parameter shuffles of a bucket's updates."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fl_privacy.shuffle import layer, model, parameter
from fl_privacy.shuffle.check import Matrix
from fl_privacy.shuffle.rows import reorder

Level = Callable[[Matrix, bytes, Sequence[slice]], None]

LEVELS: dict[str, Level] = {
    "model": lambda matrix, key, layers: model.shuffle(matrix, key),
    "layer": layer.shuffle,
    "parameter": lambda matrix, key, layers: parameter.shuffle(matrix, key),
}

__all__ = ["LEVELS", "Level", "Matrix", "reorder"]
