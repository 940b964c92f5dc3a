"""The C library's memory, told what streams of 1 MiB chunks do with it. Where it is not glibc, nothing is done."""

from __future__ import annotations

import ctypes

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
CHUNKS = 4 << 20  # larger than any buffer of a stream, smaller than any model worth a mapping of its own
SPARE = 4 << 20  # more would help no upload, and a shuffler has better use for it
DEFAULT = 128 << 10  # glibc's own for both thresholds


def keep_buffers() -> None:
    """Reuse freed chunk buffers. By default each is given back and faulted in again: a tenth of an upload's time.

    One arena: buffers that one thread frees serve the next, where every thread would keep its own.
    """
    _set(CHUNKS, SPARE)


def give_back() -> None:
    """Return freed buffers to the system and keep none, for what comes next needs the memory."""
    _set(DEFAULT, DEFAULT)
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _set(mapped: int, spare: int) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, mapped)
        mallopt(M_TRIM_THRESHOLD, spare)
        mallopt(M_ARENA_MAX, 1)
