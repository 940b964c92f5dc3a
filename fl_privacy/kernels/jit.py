"""numba's compiler, typed, with a cache on disk if there is a writable place for one.

The cache goes next to the source, else to the user's cache folder, or to NUMBA_CACHE_DIR if that is set. If none
is writable (a read-only container), numba does not cache, and every process compiles again (seconds).
Never `parallel=True`: its threading layers do not survive a fork. Callers run these functions in their own threads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

from numba import njit

F = TypeVar("F", bound=Callable[..., Any])


def compiled(function: F) -> F:
    """Compile `function` at its first call, without the interpreter lock and without fast-math."""
    try:
        return cast(F, njit(nogil=True, cache=True)(function))
    except RuntimeError:  # "no locator available": there is no writable folder for the cache
        return cast(F, njit(nogil=True)(function))
