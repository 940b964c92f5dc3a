"""Tune glibc's memory allocator for streams of 1 MiB chunks. With another C library, nothing is done."""

from __future__ import annotations

import ctypes

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
CHUNKS = 4 << 20  # larger than any buffer of a stream, smaller than a model that deserves its own mapping
SPARE = 4 << 20  # more speeds up no upload, and a shuffler needs the memory
DEFAULT = 128 << 10  # glibc's default for both thresholds


def keep_buffers() -> None:
    """Reuse freed chunk buffers. By default each is returned and faulted in again: a tenth of an upload's time.

    One arena: a buffer that one thread frees serves the next thread, instead of staying with the first.
    """
    _set(CHUNKS, SPARE)


def give_back() -> None:
    """Return freed buffers to the system and keep none: the next step needs the memory."""
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
