"""Which updates are mixed together, and which labels the server receives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fl_privacy.config import ShufflerRoute
from fl_privacy.shuffle import buckets


@dataclass(frozen=True)
class Group:
    """Updates shuffled together: their indices, and the tier label of each row of the mixture."""

    members: tuple[int, ...]
    tiers: tuple[str, ...]


def groups(tiers: Sequence[str], route: ShufflerRoute) -> list[Group]:
    """The mixing sets of a round.

    With buckets, IntraShuffler's (Algorithm 1). Whole models keep their tier, so each tier is its own set (Shuffle-DP).
    Otherwise all are mixed, and the labels, sorted by epsilon, no longer describe the rows they are attached to
    (Table 4's "No Bucket").
    """
    everyone = tuple(range(len(tiers)))
    if not any(tiers):
        return [Group(everyone, ("",) * len(tiers))]
    if route.buckets != "none":
        made = buckets.form([float(tier) for tier in tiers], route.n_min, route.label)
        return [Group(b.members, (f"{b.epsilon:g}",) * len(b.members)) for b in made]
    if route.level == "model":
        equal = {tier: tuple(i for i in everyone if tiers[i] == tier) for tier in tiers}
        return [Group(equal[tier], (tier,) * len(equal[tier])) for tier in sorted(equal, key=float)]
    return [Group(everyone, tuple(sorted(tiers, key=float)))]
