"""numba's compiler, typed, with a cache on disk where there is a place for one.

The cache goes beside the source, else to the user's cache folder, or to NUMBA_CACHE_DIR if that is set. Where none of
them can be written (a read-only container) numba refuses to cache, and every process compiles for itself (seconds).
Never `parallel=True`: its threading layers do not survive a fork. Callers run these functions in their own threads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

from numba import njit

F = TypeVar("F", bound=Callable[..., Any])


def compiled(function: F) -> F:
    """`function` compiled at its first call, without the interpreter lock and without floating-point shortcuts."""
    try:
        return cast(F, njit(nogil=True, cache=True)(function))
    except RuntimeError:  # "no locator available": there is no writable folder for the cache
        return cast(F, njit(nogil=True)(function))
