"""Which updates are mixed together, and which labels the server receives."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Group:
    """Updates shuffled together: their indices, and the tier label of each row of the mixture."""

    members: tuple[int, ...]
    tiers: tuple[str, ...]
