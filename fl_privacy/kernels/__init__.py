"""Compiled inner loops, each with a numpy twin of the same name that gives bit-identical results.

`pick("permute", entries)` returns the module `permute_numba`, or `permute_numpy` if numba cannot be imported or there
is too little work to justify compiling. Neither is imported before its first use. The environment variable
FL_PRIVACY_KERNELS (numba or numpy) forces one of them.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from functools import cache
from types import ModuleType

from fl_privacy.errors import FederationError

BACKENDS = ("numba", "numpy")
SMALL = 2**20  # below this, the numpy twins take milliseconds; compiling takes seconds in every process


def pick(name: str, entries: int, backend: str | None = None) -> ModuleType:
    """The kernels called `name` for work on this many entries, compiled if that is possible and worthwhile."""
    return importlib.import_module(f"fl_privacy.kernels.{name}_{choose(entries, backend)}")


def choose(entries: int, backend: str | None = None) -> str:
    """The backend for work on this many entries; does not import it."""
    chosen = backend or os.environ.get("FL_PRIVACY_KERNELS") or (_best() if entries >= SMALL else "numpy")
    if chosen not in BACKENDS:
        raise FederationError(f"FL_PRIVACY_KERNELS: {chosen!r} is not a backend; use one of {', '.join(BACKENDS)}")
    return chosen


@cache
def _best() -> str:
    return "numba" if importlib.util.find_spec("numba") else "numpy"
