"""A round as one state machine, shared by shuffler and aggregators.

    opened -> collecting -> closed -> released
                 |             (a closed round is released once)
                 +-> failed

The machine holds names and digests, never updates and never a clock: the time is passed in, so that every rule can be
tested without waiting. It does no I/O; whoever drives it keeps the bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from fl_privacy.errors import require
from fl_privacy.scores.form import LONGEST
from fl_privacy.steps.base import At

MAX_COHORT = 10_000
MAX_LENGTH = 2**33  # numbers in an update as it travels
SUPERSEDED = "superseded by a newer submission of the same client"


class Phase(StrEnum):
    OPENED = "opened"
    COLLECTING = "collecting"
    CLOSED = "closed"
    RELEASED = "released"
    FAILED = "failed"


@dataclass(frozen=True)
class RoundSpec(At):
    """What the server says about a round when it opens it."""

    cohort: int
    quorum: int
    deadline: float
    layout: str
    length: int
    seed: int = 0

    def __post_init__(self) -> None:
        checks = {
            "run": 0 < len(self.run) <= 128,
            "round": 1 <= self.round <= 2**31,
            "attempt": 0 < len(self.attempt) <= 128,
            "cohort": 1 <= self.cohort <= MAX_COHORT,
            "quorum": 1 <= self.quorum <= self.cohort,
            "deadline": 0 < self.deadline <= 86_400,
            "layout": 0 < len(self.layout) <= 128,
            "length": (0 if self.farewell else 1) <= self.length <= MAX_LENGTH,
            "counts": 0 <= self.counts <= LONGEST,
            "farewell": 0 <= self.farewell < self.round,
            "best": 0 <= self.best < self.round,
        }
        for name, holds in checks.items():
            require(holds, f"{name}: {getattr(self, name)!r} is out of range")


@dataclass(frozen=True)
class Submission:
    """What a client says about its update before it sends it."""

    attempt: str
    layout: str
    length: int
    digest: bytes
    floor: int = 1


Divide = Callable[[Sequence[str], Sequence[str], int], Iterable[Sequence[int]]]


def all_together(clients: Sequence[str], organisations: Sequence[str], least: int) -> Iterable[Sequence[int]]:
    return [range(len(clients))]


@dataclass
class Round:
    """One attempt at one round. `floor` is the middleware's own: the server cannot lower it.

    Floors count organisations, which `organisations` gives for every site: two sites of one hospital count once.
    They hold for every set that `divide` makes of the clients, their organisations and the floor: what is mixed or
    added up apart from the rest must hide its members by itself.
    """

    spec: RoundSpec
    floor: int
    opened_at: float
    organisations: Mapping[str, str] = field(default_factory=dict)
    divide: Divide = all_together
    phase: Phase = Phase.OPENED
    reason: str = ""
    _accepted: dict[str, Submission] = field(default_factory=dict)
    _abstained: set[str] = field(default_factory=set)
    _running: dict[str, int] = field(default_factory=dict)
    _ticket: int = 0
    _met: dict[int, bool] = field(default_factory=dict, compare=False, repr=False)  # by floor

    @property
    def accepted(self) -> tuple[str, ...]:
        """The clients whose updates were accepted, by name: this order does not reveal who came first."""
        return tuple(sorted(self._accepted))

    @property
    def heard(self) -> frozenset[str]:
        """The clients that have answered: with an update, or that they send none."""
        return frozenset(self._accepted) | self._abstained

    @property
    def least(self) -> int:
        """Fewest organisations in a sum that may be released: the larger of our floor and every submission's own."""
        return max(self.floor, *(s.floor for s in self._accepted.values()), 1)

    def may_release(self, clients: Iterable[str]) -> bool:
        """Whether these are of enough organisations to hide each other."""
        return len(set(self.run_by(clients))) >= self.least

    def run_by(self, clients: Iterable[str]) -> list[str]:
        """The organisation of each of these clients."""
        return [self.organisations.get(client, client) for client in clients]

    def hides(self, clients: Sequence[str]) -> bool:
        """Whether these updates may leave in the sets that are made of them; counts alone leave as one sum."""
        if self.spec.farewell or not self.may_release(clients):
            return self.may_release(clients)
        sets = self.divide(clients, self.run_by(clients), self.least)
        return all(self.may_release([clients[i] for i in members]) for members in sets)

    def _has(self, floor: int) -> bool:
        """Whether the whole cohort could be released with this floor: one that nobody can meet would fail the round."""
        if floor not in self._met:
            sites = sorted(self.organisations)
            parties = self.run_by(sites)
            met = not sites or len(set(parties)) >= floor
            if met and sites and not self.spec.farewell:
                sets = self.divide(sites, parties, floor)
                met = all(len({parties[i] for i in members}) >= floor for members in sets)
            self._met[floor] = met
        return self._met[floor]

    def digests(self, clients: Iterable[str]) -> list[bytes]:
        """What each of these clients sent."""
        return [self._accepted[client].digest for client in clients]

    @property
    def is_over(self) -> bool:
        return self.phase in (Phase.CLOSED, Phase.RELEASED, Phase.FAILED)

    def remaining(self, now: float) -> float:
        """Seconds until the deadline."""
        return max(0.0, self.opened_at + self.spec.deadline - now)

    def begin(self, client: str, submission: Submission, now: float) -> int | None:
        """Admit a submission: a ticket for `commit`, or None if these bytes were accepted before.

        A newer stream of the same client supersedes its older one.
        """
        spec = self.spec
        reopened = "attempt: not the one that is open; fetch the round again"
        require(submission.attempt == spec.attempt, reopened, "FAILED_PRECONDITION")
        require(submission.layout == spec.layout, "layout: another model than this round's; check task and model")
        require(submission.length == spec.length, f"length: {submission.length}, but the round has {spec.length}")
        asked = f"floor: {submission.floor}, which the whole cohort, or its smallest tier, does not have"
        require(1 <= submission.floor <= spec.cohort and self._has(submission.floor), asked)
        if client in self._accepted:
            same = self._accepted[client].digest == submission.digest
            require(same, "digest: another update of this client was accepted before", "ALREADY_EXISTS")
            return None
        self.tick(now)
        self._check_open()
        require(client not in self._abstained, "round: this site said that it sends nothing", "FAILED_PRECONDITION")
        free = client in self._running or len(self._accepted) + len(self._running) < spec.cohort
        require(free, f"round {spec.round} has its cohort of {spec.cohort}", "RESOURCE_EXHAUSTED")
        self.phase = Phase.COLLECTING
        self._ticket += 1
        self._running[client] = self._ticket
        return self._ticket

    def holds(self, client: str, ticket: int) -> bool:
        """Whether this stream is still the client's current one."""
        return self._running.get(client) == ticket

    def check(self, client: str, ticket: int, now: float) -> None:
        """Refuse to continue a stream that was superseded, or whose round is over: nothing more is written."""
        require(self.holds(client, ticket), SUPERSEDED, "ABORTED")
        self.tick(now)
        self._check_open()

    def commit(self, client: str, ticket: int, submission: Submission, now: float) -> None:
        """The whole update has arrived and was checked. All or nothing: before this call it does not count."""
        self.check(client, ticket, now)
        del self._running[client]
        self._accepted[client] = submission
        self._close_if_settled()

    def abstain(self, client: str, attempt: str, now: float) -> None:
        """A site sends nothing in this attempt: nobody has to wait for it."""
        require(attempt == self.spec.attempt, "attempt: not the one that is open", "FAILED_PRECONDITION")
        require(client not in self._accepted, "round: this site's update was accepted", "FAILED_PRECONDITION")
        self.tick(now)
        if not self.is_over:
            self._running.pop(client, None)
            self._abstained.add(client)
            self._close_if_settled()

    def abort(self, client: str, ticket: int) -> None:
        """A stream broke off: the round continues as if it had never started."""
        if self.holds(client, ticket):
            del self._running[client]

    def tick(self, now: float) -> Phase:
        """Close the round if its deadline has passed."""
        if not self.is_over and now >= self.opened_at + self.spec.deadline:
            self._close()
        return self.phase

    def fail(self, reason: str) -> None:
        """Give up the round, unless it was released; the first reason is kept."""
        if self.phase not in (Phase.RELEASED, Phase.FAILED):
            self.phase, self.reason = Phase.FAILED, reason

    def release(self) -> tuple[str, ...]:
        """Hand out the round, once; returns whose updates are in it."""
        closed = self.phase is Phase.CLOSED
        require(closed, f"round {self.spec.round} is {self.phase}: nothing to release", "FAILED_PRECONDITION")
        self.phase = Phase.RELEASED
        return self.accepted

    def revoke(self, reason: str) -> None:
        """Nothing left after all: the release was refused, or broke off before it began."""
        self.phase, self.reason = Phase.FAILED, reason

    def _check_open(self) -> None:
        over = f"round {self.spec.round} is {self.phase}; it accepts no more updates"
        require(not self.is_over, over, "FAILED_PRECONDITION")

    def _close_if_settled(self) -> None:
        """All sites have answered, or too few are left to complete the round."""
        left = self.spec.cohort - len(self._abstained)
        if len(self.heard) == self.spec.cohort or left < self.spec.quorum:
            self._close()

    def _close(self) -> None:
        came = f"{len(self._accepted)} of {self.spec.cohort} updates came"
        if len(self._accepted) < self.spec.quorum:
            self.fail(f"{came}, {self.spec.quorum} are needed")
        elif not self.may_release(self._accepted):
            self.fail(f"{came}, from fewer than {self.least} organisations")
        elif not self.hides(self.accepted):
            self.fail(f"{came}, of a tier from fewer than {self.least} organisations; use route.buckets")
        else:
            self.phase = Phase.CLOSED
