"""Adaptive privacy buckets (IntraShuffler, Definition 1 and Algorithm 1, lines 3 to 9)."""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Literal

from fl_privacy.errors import FederationError

Label = Literal["min", "mean"]


@dataclass(frozen=True)
class Bucket:
    """Clients shuffled together; `epsilon` is the label that determines their weight at the server."""

    members: tuple[int, ...]
    epsilon: float


def form(
    epsilons: Sequence[float], n_min: int, label: Label = "min", organisations: Sequence[str] = ()
) -> list[Bucket]:
    """Buckets of at least `n_min` clients, in order of epsilon; members are ascending indices.

    With `organisations`, clients of the same one count once; as published, each client is its own.

    Initially, equal budgets form one bucket. While any bucket is too small, the smallest one (on ties, the one with the
    lowest epsilon) joins the neighbour that minimises (|epsilon gap|, size, epsilon). A merged bucket's epsilon is its
    smallest, which never over-trusts an update, or with `label="mean"` the mean of its members.
    """
    parties = organisations or range(len(epsilons))
    _check(epsilons, len(set(parties)), n_min, label)
    chain = _Chain(epsilons, parties, label)
    waiting = [(chain.size(k), tier, k) for k, tier in enumerate(chain.labels) if chain.size(k) < n_min]
    heapq.heapify(waiting)
    while waiting:
        size, _, small = heapq.heappop(waiting)
        if chain.gone[small] or size != chain.size(small):
            continue  # merged since it was queued
        whole = chain.merge(small, chain.nearest(small))
        if chain.size(whole) < n_min:
            heapq.heappush(waiting, (chain.size(whole), chain.labels[whole], whole))
    return chain.buckets()


class _Chain:
    """Groups in order of epsilon with their neighbours, as lists rather than objects because there may be many."""

    def __init__(self, epsilons: Sequence[float], parties: Sequence[Hashable], label: Label) -> None:
        equal: dict[float, list[int]] = defaultdict(list)
        for index, epsilon in enumerate(epsilons):
            equal[float(epsilon)].append(index)
        self.labels = sorted(equal)
        self.members = [equal[epsilon] for epsilon in self.labels]
        self.parties = [{parties[i] for i in members} for members in self.members]
        count = len(self.labels)
        self.left: list[int] = list(range(-1, count - 1))
        self.right: list[int] = [*range(1, count), -1]
        self.gone = [False] * count
        self._mean = label == "mean"

    def size(self, k: int) -> int:
        """How many parties have a client in it."""
        return len(self.parties[k])

    def nearest(self, k: int) -> int:
        """The neighbour to merge with (Algorithm 1, line 7)."""
        left, right = self.left[k], self.right[k]
        if left < 0 or right < 0:
            return max(left, right)
        own, labels = self.labels[k], self.labels
        one = abs(labels[left] - own), self.size(left), labels[left]
        two = abs(labels[right] - own), self.size(right), labels[right]
        return left if one <= two else right

    def merge(self, one: int, two: int) -> int:
        """The lower of two neighbours absorbs the other. The longer list grows, so all merges cost n log n."""
        low, high = min(one, two), max(one, two)
        lower, higher = self.members[low], self.members[high]
        if self._mean:
            total = self.labels[low] * len(lower) + self.labels[high] * len(higher)
            self.labels[low] = total / (len(lower) + len(higher))
        longer, shorter = (lower, higher) if len(lower) >= len(higher) else (higher, lower)
        longer.extend(shorter)
        self.members[low] = longer
        many, few = sorted((self.parties[low], self.parties[high]), key=len, reverse=True)
        many |= few
        self.parties[low] = many
        self.gone[high] = True
        self.right[low] = self.right[high]
        if self.right[high] >= 0:
            self.left[self.right[high]] = low
        return low

    def buckets(self) -> list[Bucket]:
        kept = (k for k, gone in enumerate(self.gone) if not gone)
        return [Bucket(tuple(sorted(self.members[k])), self.labels[k]) for k in kept]


def _check(epsilons: Sequence[float], parties: int, n_min: int, label: str) -> None:
    if label not in ("min", "mean"):
        raise FederationError(f"label: {label!r} is unknown; use min or mean")
    if n_min < 1:
        raise FederationError(f"n_min: {n_min} is not positive; use 2 or more")
    if parties < n_min:
        raise FederationError(f"n_min: {n_min} is more than the {parties} clients; nothing is released")
    for index, epsilon in enumerate(epsilons):
        if not (math.isfinite(epsilon) and epsilon > 0):
            raise FederationError(f"epsilon: {epsilon} of client {index} is not a budget; use a number above 0")
