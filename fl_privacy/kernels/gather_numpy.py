"""Rows, and pieces of each row, in another order, in numpy: reference and fallback."""

from __future__ import annotations

from fl_privacy.kernels.arrays import F32, I64

TOGETHER = 4096  # numbers in a row: below this, a call for each row costs more than a second pass over the memory


def gather(source: F32, out: F32, first: I64, second: I64, piece: int) -> None:
    """out[i, j, :] = source[first[i], second[j], :], both flat, with pieces of this length."""
    shape = first.size, second.size, piece
    whole, made = source.reshape(shape), out.reshape(shape)
    if second.size * piece < TOGETHER:
        whole.take(first, axis=0).take(second, axis=1, out=made, mode="clip")
        return
    for row, at in enumerate(first.tolist()):
        whole[at].take(second, axis=0, out=made[row], mode="clip")
