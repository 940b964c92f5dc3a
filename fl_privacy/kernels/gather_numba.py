"""Rows, and pieces of each row, in another order, compiled.

A row is copied to a buffer first: reading it from its start to its end lets the processor fetch ahead, and the pieces
are then taken from its cache.
"""

from __future__ import annotations

import numpy as np

from fl_privacy.kernels.arrays import F32, I64
from fl_privacy.kernels.jit import compiled


@compiled
def _single(source: F32, out: F32, first: I64, second: I64, row: F32) -> None:
    width = second.size
    for i in range(first.size):
        row[:] = source[first[i] * width : (first[i] + 1) * width]
        made = out[i * width : (i + 1) * width]
        for j in range(width):
            made[j] = row[second[j]]


@compiled
def _nine(source: F32, out: F32, first: I64, second: I64, row: F32) -> None:
    width = second.size * 9
    for i in range(first.size):
        row[:] = source[first[i] * width : (first[i] + 1) * width]
        made = out[i * width : (i + 1) * width]
        for j in range(second.size):
            a, b = j * 9, second[j] * 9
            for k in range(9):  # a constant: the compiler unrolls it
                made[a + k] = row[b + k]


@compiled
def _pieces(source: F32, out: F32, first: I64, second: I64, row: F32, piece: int) -> None:
    width = second.size * piece
    for i in range(first.size):
        row[:] = source[first[i] * width : (first[i] + 1) * width]
        made = out[i * width : (i + 1) * width]
        for j in range(second.size):
            a, b = j * piece, second[j] * piece
            for k in range(piece):
                made[a + k] = row[b + k]


def gather(source: F32, out: F32, first: I64, second: I64, piece: int) -> None:
    """out[i, j, :] = source[first[i], second[j], :], both flat, with pieces of this length; 3 x 3 is the usual one."""
    row = np.empty(second.size * piece, np.float32)
    if piece == 1:
        _single(source, out, first, second, row)
    elif piece == 9:
        _nine(source, out, first, second, row)
    else:
        _pieces(source, out, first, second, row, piece)
