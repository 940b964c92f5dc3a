"""What a middleware knows about a run: the open attempt, the model it starts from, which sites have joined."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_privacy.coding import FLOAT32, Coding, Decoder, Payload
from fl_privacy.errors import ProtocolError, require
from fl_privacy.round.cohort import Cohort
from fl_privacy.round.counted import Counted
from fl_privacy.round.machine import Phase, Round
from fl_privacy.round.mailbox import Mailbox
from fl_privacy.round.rows import Rows
from fl_privacy.round.terms import Terms
from fl_privacy.wire import federation_pb2 as pb

ABANDONED = 1200.0  # seconds beyond a round's deadline: a server may evaluate for long


@dataclass
class Attempt:
    """One attempt at a round and the updates in it."""

    round: Round
    terms: Terms
    cohort: Cohort
    signature: bytes  # ours, under its name
    model: NDArray[np.float32] | None  # that the round starts from
    rows: Rows | None
    counted: Counted
    decoder: Decoder
    coding: Coding = FLOAT32  # of what each site sends us
    layers: tuple[int, ...] = ()
    parameters: int = 0  # of the model, as the server says when it opens it
    model_digest: bytes = b""
    applied: tuple[str, ...] | None = None  # an aggregator has combined the updates of these sites
    over: asyncio.Event = field(default_factory=asyncio.Event)
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    streams: dict[str, asyncio.Timeout] = field(default_factory=dict)
    settling: asyncio.Task[None] | None = None
    delivered: bool = False
    first_at: float | None = None
    taken: int = 0  # bytes
    given: int = 0
    result: tuple[pb.ReleaseHeader, Payload] | None = None  # what a shuffler releases, until it has arrived
    reply: pb.SettleReply = field(default_factory=pb.SettleReply)  # of an aggregator that applied it
    again: bool = False  # another aggregator lacks it, so that the sites must send it again
    repeated: set[str] = field(default_factory=set)  # who did
    papers: dict[str, Any] = field(default_factory=dict)  # what each site signed about its part, on routes with a check

    def notice(self) -> None:
        """If the round is over: wake everyone who waits for it, end the streams, drop what will not be released."""
        if not self.round.is_over:
            return
        self.over.set()
        for client in list(self.streams):
            self.cut(client)
        if self.round.phase is Phase.FAILED:
            self.forget()

    def forget(self) -> None:
        """Drop the updates and counts."""
        self.rows, self.result, self.counted = None, None, Counted(0)
        self.gone.set()

    def repeat(self) -> None:
        """Offer the attempt to its sites once more, whether or not their updates are here."""
        self.again, self.repeated = True, set()

    def awaits(self, site: str) -> bool:
        """Whether the site should send its update."""
        if site not in self.cohort.sites:
            return False
        missing = site not in self.round.heard and not self.round.is_over
        return missing or (self.again and site not in self.repeated)

    def fail(self, reason: str) -> None:
        self.round.fail(reason)
        self.notice()

    def check_chosen(self, chosen: tuple[str, ...], senders: tuple[str, ...]) -> None:
        """The server may leave out what not all of us have, but never go below quorum and floor."""
        round = self.round
        require(round.phase is Phase.CLOSED, f"round {round.spec.round} is {round.phase}", "FAILED_PRECONDITION")
        ours = set(chosen) <= set(round.accepted) and set(senders) <= set(self.counted.sites) & set(chosen)
        require(ours, "members: not all of them are here")
        enough = len(chosen) >= round.spec.quorum and round.may_release(chosen)
        require(enough, f"members: {len(chosen)} are too few", "FAILED_PRECONDITION")

    def cut(self, client: str) -> None:
        """End the client's stream: one that hangs would hold the round's memory."""
        if client in self.streams:
            self.streams.pop(client).reschedule(asyncio.get_running_loop().time())


@dataclass
class RunState:
    """One run as this middleware sees it."""

    name: str
    attempt: Attempt | None = None
    model: NDArray[np.float32] | None = None
    version: int = 0
    finished: bool = False
    joined: set[str] = field(default_factory=set)
    heads: dict[str, bytes] = field(default_factory=dict)  # by site: of what it recorded, under `audit: true`
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    mail: Mailbox = field(default_factory=Mailbox)
    touched: float = 0.0  # when a round was last opened
    receiving: asyncio.Timeout | None = None  # the call that sends a model

    def is_open(self, attempt: str) -> bool:
        """Whether this attempt is under way, or is over and can still be collected."""
        now = self.attempt
        if now is None or now.terms.name != attempt or now.round.phase is Phase.FAILED:
            return False
        return now.applied is not None or not now.gone.is_set()

    @property
    def is_over(self) -> bool:
        """Whether no attempt is under way."""
        return self.attempt is None or self.attempt.round.is_over

    @property
    def is_awaited(self) -> bool:
        """Whether the server may still want what its last attempt gave."""
        return self.attempt is not None and not self.attempt.gone.is_set()

    @asynccontextmanager
    async def alone(self, seconds: float) -> AsyncIterator[None]:
        """Receive a model, in time. Calls that hang would each hold one, so a newer call takes an older one's place."""
        if self.receiving is not None and not self.receiving.expired():
            self.receiving.reschedule(asyncio.get_running_loop().time())
        mine = self.receiving = asyncio.timeout(seconds)
        try:
            async with mine:
                yield
        except TimeoutError:
            raise ProtocolError("ABORTED", "model: did not arrive in time, or a newer call sends it") from None
        finally:
            if self.receiving is mine:
                self.receiving = None

    def is_abandoned(self, now: float) -> bool:
        """Whether the server has opened no round for so long that sites should stop waiting."""
        if self.attempt is None or not self.attempt.round.is_over:
            return False
        return now > self.touched + self.attempt.round.spec.deadline + ABANDONED

    def notify(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()
