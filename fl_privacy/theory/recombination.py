"""The number of ways to recombine shuffled updates (IntraShuffler, Proposition 2 and Table 6).

A large space does not prove safety: an attacker need not search it (see attacks/privacy_inference/unmixing.py).
"""

from __future__ import annotations

import math

from fl_privacy.errors import FederationError


def one_update(members: int, parameters: int) -> float:
    """log10 of n^d: candidates for one site's update in a bucket of n, each coordinate chosen freely."""
    if members < 1 or parameters < 1:
        raise FederationError(f"bucket: {members} members, {parameters} parameters; both must be positive")
    return parameters * math.log10(members)
