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
    """Both ends of a round, each with its own reference; buffers are reused, as in a worker."""
    keep_buffers()
    size, repeats = (QUICK_COLUMNS, 1) if quick else (COLUMNS, 9)
    update = np.random.default_rng(0).standard_normal(size, dtype=np.float32)
    copy, sender, receiver = np.zeros_like(update), Shift(size, FRACTION), Shift(size, FRACTION)
    message, out = sender.encode(update, KEY), np.zeros_like(update)

    def memcpy() -> None:
        np.copyto(copy, update)

    def encode() -> None:
        subset.cache_clear()
        sender.encode(update, KEY)

    def decode() -> None:
        subset.cache_clear()
        receiver.decode(message, out)

    words = Dsc(kind="dsc", p=FRACTION).coding(None).length(size)  # type: ignore[arg-type]
    return [
        Result("DSC, encode", ratio(encode, memcpy, repeats), 2, "x memcpy"),
        Result("DSC, decode", ratio(decode, memcpy, repeats), 2, "x memcpy"),
        Result("DSC, upload", 100 * words / size, 1.3, "% of the update"),
    ]
