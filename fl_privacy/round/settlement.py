"""Which updates the aggregators of a round apply: what all of them have, or what each of them has."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import and_
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

if TYPE_CHECKING:
    from fl_privacy.wire.client import Release

CLOSED, FAILED = "closed", "failed"


class Decision(NamedTuple):
    """Whose updates and whose counts an aggregator applies, one bit per site; or why it applies nothing."""

    members: bytes = b""
    senders: bytes = b""
    problem: str = ""

    @property
    def updates(self) -> int:
        return _count(self.members)


class Settlement(Protocol):
    """The server asks it when a round is over at every aggregator."""

    tolerant: bool  # an aggregator may be missing

    def decide(self, releases: Sequence[Release], quorum: int) -> list[Decision]:
        """One decision per aggregator; a round fails if all of them are problems."""


class Intersection:
    """A round counts with the updates that every aggregator has: a site that sends to some of them only is left out."""

    tolerant = False

    def decide(self, releases: Sequence[Release], quorum: int) -> list[Decision]:
        return [self._common(releases, quorum)] * len(releases)

    def _common(self, releases: Sequence[Release], quorum: int) -> Decision:
        failed = sorted({release.reason for release in releases if release.phase != CLOSED})
        if failed:
            return Decision(problem=failed[0] or "an aggregator did not close the round")
        members = _common(release.members for release in releases)
        senders = _common([members, *(release.senders for release in releases)])
        count = _count(members)
        few = "" if count >= quorum else f"all aggregators have {count} updates, {quorum} are needed"
        return Decision(members, senders, few)


class Partial:
    """Every shard is combined from the updates that reached its aggregator; a shard without enough keeps its value.

    Counts are shared over all aggregators, so they count only where every aggregator has the sender's.
    """

    tolerant = True

    def decide(self, releases: Sequence[Release], quorum: int) -> list[Decision]:
        whole = all(release.phase == CLOSED for release in releases)
        senders = _common(part for release in releases for part in (release.members, release.senders)) if whole else b""
        return [self._own(release, quorum, senders or bytes(len(release.members))) for release in releases]

    def _own(self, release: Release, quorum: int, senders: bytes) -> Decision:
        if release.phase != CLOSED:
            return Decision(problem=release.reason or "the aggregator did not close the round")
        count = _count(release.members)
        few = "" if count >= quorum else f"the aggregator has {count} updates, {quorum} are needed"
        return Decision(release.members, senders, few)


@dataclass(frozen=True)
class Failures:
    """Aggregators and links between a site and an aggregator that fail at random, to measure what that costs."""

    aggregators: float
    links: float
    seed: int

    def of(self, releases: Sequence[Release], round: int, again: int = 0) -> list[Release]:
        """What is left of a round, from a public seed, so that it repeats; `again` counts earlier attempts at it."""
        rng = np.random.default_rng([self.seed, round, again])
        missing = set(rng.permutation(len(releases))[: self._missing(len(releases), rng)].tolist())
        return [self._left(release, index in missing, rng) for index, release in enumerate(releases)]

    def _missing(self, count: int, rng: np.random.Generator) -> int:
        """A fixed proportion of the aggregators (ERIS, F.5), rounded at random; never all of them."""
        return min(int(self.aggregators * count + rng.random()), count - 1)

    def _left(self, release: Release, missing: bool, rng: np.random.Generator) -> Release:
        broken = rng.random(8 * len(release.members)) < self.links
        if release.phase != CLOSED or missing:
            return replace(release, phase=FAILED, reason=release.reason or "failed on purpose (route.failures)")
        mask = np.packbits(~broken, bitorder="little").tobytes()
        return replace(release, members=_common([release.members, mask]), senders=_common([release.senders, mask]))


def _common(bits: Iterable[bytes]) -> bytes:
    """The sites that are in all of them."""
    first, *others = bits
    number = reduce(and_, (int.from_bytes(one, "little") for one in others), int.from_bytes(first, "little"))
    return number.to_bytes(len(first), "little")


def _count(bits: bytes) -> int:
    return int.from_bytes(bits, "little").bit_count()


SETTLEMENTS: dict[str, Settlement] = {"all": Intersection(), "partial": Partial()}
