"""Which updates are mixed with which, and what the server is told of the result."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Group:
    """Updates that are shuffled together: their indices, and the tier that each row of the mixture is labelled with."""

    members: tuple[int, ...]
    tiers: tuple[str, ...]
