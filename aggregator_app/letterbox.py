"""A mailbox beside a route whose updates do not pass through it: it only carries what sites write to each other.

Sites may write before a run is opened: what they have to agree on comes first. They write under the digest of the
roster that is in force.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, ClassVar, NoReturn

import numpy as np
from numpy.typing import NDArray

from fl_privacy.errors import ProtocolError, require
from fl_privacy.round.attempt import Attempt, RunState
from fl_privacy.round.noticeboard import run_of
from fl_privacy.round.service import Middleware, Parts
from fl_privacy.wire import federation_pb2 as pb


class Letterbox(Middleware):
    """No round is ever opened here."""

    blind: ClassVar[bool] = True

    async def open(self, parts: Parts, context: Any) -> NoReturn:
        raise ProtocolError("UNIMPLEMENTED", "open: updates of this federation's route do not pass through the mailbox")

    async def prepare(self, state: RunState, header: pb.RoundHeader, parts: Parts) -> NDArray[np.float32]:
        raise ProtocolError("UNIMPLEMENTED", "open: not here")

    async def hand_out(self, state: RunState, attempt: Attempt) -> AsyncIterator[pb.Chunk | memoryview]:
        raise ProtocolError("UNIMPLEMENTED", "collect: not here")
        yield pb.Chunk()

    async def settle(self, request: pb.SettleRequest, context: Any) -> pb.SettleReply:
        raise ProtocolError("UNIMPLEMENTED", "settle: not here")

    async def reopened(self, state: RunState, attempt: Attempt) -> None:
        """Never called."""

    async def post(self, request: pb.Letter, context: Any) -> pb.Empty:
        self._site(context)
        self._begin(request.run)
        return await super().post(request, context)

    async def pickup(self, request: pb.PickupRequest, context: Any) -> pb.Letters:
        self._site(context)
        self._begin(request.run)
        return await super().pickup(request, context)

    def _begin(self, run: str) -> None:
        """The letters of one roster; those of the one before are dropped with it."""
        if run in self.runs:
            return
        ours = run_of(self.keys.roster().digest)
        require(run == ours, "letters: not of the roster in force here; install the newest roster.json", "NOT_FOUND")
        self.runs.clear()
        self.runs[run] = RunState(run)
