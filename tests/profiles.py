"""How many examples a property is tested on: all of them in `make test`, a few in `make check`."""

from __future__ import annotations

import os
from typing import Any

from hypothesis import settings

FEW = 20
QUICK = os.environ.get("HYPOTHESIS_PROFILE") == "quick"  # `make check`

# How long an example takes depends more on the other running tests than on the code.
settings.register_profile("side-by-side", deadline=None)
settings.register_profile("quick", deadline=None, max_examples=FEW)
settings.load_profile("quick" if QUICK else "side-by-side")


def examples(count: int, **options: Any) -> settings:
    """Test a property on this many examples, or on a few in `make check`."""
    return settings(max_examples=min(count, FEW) if QUICK else count, **options)
