"""Shifted compression of one large model: CPU time and bytes, relative to a memcpy of the update and to its own."""

from __future__ import annotations

import numpy as np

from benchmarks.kernels import COLUMNS, KEY, QUICK_COLUMNS, ratio
from benchmarks.result import Result
from fl_privacy.shard.subset import subset
from fl_privacy.steps.compress.dsc import Dsc, Shift
from fl_privacy.wire.buffers import keep_buffers

FRACTION = 0.01


def run(quick: bool = False) -> list[Result]:
    """Both ends of a round, each with its own reference; every message draws other coordinates.

    As in a worker, buffers are reused, and an update is dropped before the next one is decoded.
    """
    keep_buffers()
    size, repeats = (QUICK_COLUMNS, 1) if quick else (COLUMNS, 9)
    update = np.random.default_rng(0).standard_normal(size, dtype=np.float32)
    copy, sender, receiver = np.zeros_like(update), Shift(size, FRACTION), Shift(size, FRACTION)
    drawn = [KEY[n:] + KEY[:n] for n in range(repeats + 1)]
    messages = iter([Shift(size, FRACTION).encode(update, key) for key in drawn])
    unused = iter(drawn)

    def memcpy() -> None:
        np.copyto(copy, update)

    def encode() -> None:
        subset.cache_clear()  # of what the other end or an earlier message drew
        sender.encode(update, next(unused))

    def decode() -> None:
        subset.cache_clear()
        receiver.decode(next(messages))

    words = Dsc(kind="dsc", p=FRACTION).coding(None).length(size)  # type: ignore[arg-type]
    return [
        Result("DSC, encode", ratio(encode, memcpy, repeats), 2, "x memcpy"),
        Result("DSC, decode", ratio(decode, memcpy, repeats), 2, "x memcpy"),
        Result("DSC, upload", 100 * words / size, 1.3, "% of the update"),
    ]
