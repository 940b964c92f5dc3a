"""A round as one state machine, shared by shuffler and aggregators.

    opened -> collecting -> closed -> released
                 |             (a closed round is released once)
                 +-> failed

The machine holds names and digests, never updates and never a clock: the time is passed in, so that every rule can be
tested without waiting. It does no I/O; whoever drives it keeps the bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from fl_privacy.errors import ProtocolError

MAX_COHORT = 10_000
MAX_LENGTH = 2**33  # numbers in an update as it travels


class Phase(StrEnum):
    OPENED = "opened"
    COLLECTING = "collecting"
    CLOSED = "closed"
    RELEASED = "released"
    FAILED = "failed"


@dataclass(frozen=True)
class RoundSpec:
    """What the server says of a round when it opens it."""

    run: str
    round: int
    attempt: str
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
            "length": 1 <= self.length <= MAX_LENGTH,
        }
        for name, holds in checks.items():
            if not holds:
                raise ProtocolError("INVALID_ARGUMENT", f"{name}: {getattr(self, name)!r} is out of range")


@dataclass(frozen=True)
class Submission:
    """What a client says of its update before it sends it."""

    attempt: str
    layout: str
    length: int
    digest: bytes
    floor: int = 1


@dataclass
class Round:
    """One attempt at one round. `floor` is the middleware's own: the server cannot lower it."""

    spec: RoundSpec
    floor: int
    opened_at: float
    phase: Phase = Phase.OPENED
    reason: str = ""
    _accepted: dict[str, Submission] = field(default_factory=dict)
    _running: dict[str, int] = field(default_factory=dict)
    _ticket: int = 0

    @property
    def accepted(self) -> tuple[str, ...]:
        """The clients whose updates are in, by name: an order that says nothing of who came first."""
        return tuple(sorted(self._accepted))

    @property
    def needed(self) -> int:
        """Fewest submissions that may be released: quorum, our floor and every submission's own."""
        return max(self.spec.quorum, self.floor, *(s.floor for s in self._accepted.values()), 1)

    @property
    def is_over(self) -> bool:
        return self.phase in (Phase.CLOSED, Phase.RELEASED, Phase.FAILED)

    def remaining(self, now: float) -> float:
        """Seconds until the deadline."""
        return max(0.0, self.opened_at + self.spec.deadline - now)

    def begin(self, client: str, submission: Submission, now: float) -> int | None:
        """Admit a submission: a ticket for `commit`, or None if these bytes are in already.

        A newer stream of the same client supersedes its older one.
        """
        if submission.attempt != self.spec.attempt:
            raise ProtocolError("FAILED_PRECONDITION", "attempt: not the one that is open; fetch the round again")
        if submission.layout != self.spec.layout:
            raise ProtocolError("INVALID_ARGUMENT", "layout: another model than this round's; check task and model")
        if submission.length != self.spec.length:
            raise ProtocolError(
                "INVALID_ARGUMENT", f"length: {submission.length} parameters where the round has {self.spec.length}"
            )
        if not 1 <= submission.floor <= self.spec.cohort:
            raise ProtocolError("INVALID_ARGUMENT", f"floor: {submission.floor} in a cohort of {self.spec.cohort}")
        if client in self._accepted:
            if self._accepted[client].digest == submission.digest:
                return None
            raise ProtocolError("ALREADY_EXISTS", "digest: another update of this client is in already")
        self.tick(now)
        self._check_open()
        if client not in self._running and len(self._accepted) + len(self._running) >= self.spec.cohort:
            raise ProtocolError("RESOURCE_EXHAUSTED", f"round {self.spec.round} has its cohort of {self.spec.cohort}")
        self.phase = Phase.COLLECTING
        self._ticket += 1
        self._running[client] = self._ticket
        return self._ticket

    def holds(self, client: str, ticket: int) -> bool:
        """Whether this stream is still the client's current one."""
        return self._running.get(client) == ticket

    def check(self, client: str, ticket: int, now: float) -> None:
        """Whether this stream may go on: nothing is written for a superseded one, nor once the round is over."""
        if not self.holds(client, ticket):
            raise ProtocolError("ABORTED", "superseded by a newer submission of the same client")
        self.tick(now)
        self._check_open()

    def commit(self, client: str, ticket: int, submission: Submission, now: float) -> None:
        """The whole update is in and checked. All or nothing: before this call it did not exist."""
        self.check(client, ticket, now)
        del self._running[client]
        self._accepted[client] = submission
        if len(self._accepted) == self.spec.cohort:
            self._close()

    def abort(self, client: str, ticket: int) -> None:
        """A stream broke off: the round is as if it had not begun."""
        if self.holds(client, ticket):
            del self._running[client]

    def tick(self, now: float) -> Phase:
        """Let the deadline pass if it has."""
        if not self.is_over and now >= self.opened_at + self.spec.deadline:
            self._close()
        return self.phase

    def fail(self, reason: str) -> None:
        """Give the round up, unless it has been released; the first reason stands."""
        if self.phase not in (Phase.RELEASED, Phase.FAILED):
            self.phase, self.reason = Phase.FAILED, reason

    def release(self) -> tuple[str, ...]:
        """Hand out the round, once; returns whose updates are in it."""
        if self.phase is not Phase.CLOSED:
            raise ProtocolError("FAILED_PRECONDITION", f"round {self.spec.round} is {self.phase}: nothing to release")
        self.phase = Phase.RELEASED
        return self.accepted

    def _check_open(self) -> None:
        if self.is_over:
            raise ProtocolError("FAILED_PRECONDITION", f"round {self.spec.round} is {self.phase}; it takes no more")

    def _close(self) -> None:
        count, needed = len(self._accepted), self.needed
        if count >= needed:
            self.phase = Phase.CLOSED
        else:
            self.fail(f"{count} of {self.spec.cohort} updates came, {needed} are needed")
