"""Which updates are mixed with which, and what the server is told of the result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fl_privacy.config import ShufflerRoute
from fl_privacy.shuffle import buckets


@dataclass(frozen=True)
class Group:
    """Updates that are shuffled together: their indices, and the tier that each row of the mixture is labelled with."""

    members: tuple[int, ...]
    tiers: tuple[str, ...]


def groups(tiers: Sequence[str], route: ShufflerRoute) -> list[Group]:
    """The mixing sets of a round.

    Buckets: IntraShuffler's (Algorithm 1). Whole models keep their tier, so each tier is a set of its own (Shuffle-DP).
    Else all are mixed, and the labels, in rising order, no longer say anything of the rows they stand at (Table 4's
    "No Bucket").
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
