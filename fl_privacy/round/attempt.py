"""What a middleware knows about a run: the open attempt, the model it starts from, which sites have joined."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from fl_privacy.round.counted import Counted
from fl_privacy.round.machine import Phase, Round
from fl_privacy.round.mailbox import Mailbox
from fl_privacy.round.rows import Rows

ABANDONED = 1200.0  # seconds beyond a round's deadline: a server may evaluate for long


@dataclass
class Attempt:
    """One attempt at a round and the updates in it."""

    round: Round
    rows: Rows | None
    counted: Counted
    layers: tuple[int, ...] = ()
    invited: frozenset[str] = frozenset()
    over: asyncio.Event = field(default_factory=asyncio.Event)
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    streams: dict[str, asyncio.Timeout] = field(default_factory=dict)
    settling: asyncio.Task[None] | None = None
    delivered: bool = False
    first_at: float | None = None
    taken: int = 0  # bytes
    given: int = 0

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
        self.rows, self.counted = None, Counted(0, keep=False)
        self.gone.set()

    def awaits(self, site: str) -> bool:
        """Whether the site may still take part."""
        return site in self.invited and not self.round.is_over

    def fail(self, reason: str) -> None:
        self.round.fail(reason)
        self.notice()

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
    model_digest: bytes = b""
    version: int = 0
    finished: bool = False
    joined: set[str] = field(default_factory=set)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    mail: Mailbox = field(default_factory=Mailbox)
    touched: float = 0.0  # when a round was last opened

    def is_abandoned(self, now: float) -> bool:
        """Whether the server has opened no round for so long that sites should stop waiting."""
        if self.attempt is None or not self.attempt.round.is_over:
            return False
        return now > self.touched + self.attempt.round.spec.deadline + ABANDONED

    def notify(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()
