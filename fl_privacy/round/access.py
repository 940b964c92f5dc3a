"""Who may call a shuffler or aggregator, and about which run and attempt."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import ContextVar
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fl_privacy.dp.witness import Witnesses
from fl_privacy.errors import ProtocolError, require
from fl_privacy.identity.keyring import Keyring, certificate_of, peer
from fl_privacy.identity.pki import load_key
from fl_privacy.identity.signing import fingerprint
from fl_privacy.ops.log import Log
from fl_privacy.ops.metrics import OFF, Metrics
from fl_privacy.round.attempt import Attempt, RunState
from fl_privacy.round.journal import Journal
from fl_privacy.transcript.recorder import RunRecorder
from fl_privacy.wire import federation_pb2 as pb

if TYPE_CHECKING:
    from fl_privacy.config import Federation

MAX_RUNS = 8
_caller: ContextVar[str | None] = ContextVar("caller", default=None)  # whose call this task answers


class Access:
    """The runs that a party knows, and the checks of whoever asks about them."""

    metrics: Metrics = OFF

    def __init__(
        self, federation: Federation, keys: Keyring, state: Path, log: Log, recorder: RunRecorder | None = None
    ) -> None:
        self.federation, self.coding, self.log, self.recorder = federation, federation.coding, log, recorder
        self.keys, self.journal, self.witnesses = keys, Journal(state), Witnesses(state)
        self.runs: dict[str, RunState] = {}
        # A privatised update must state its budget: the server weights it by that, and buckets are formed from it.
        self._tiers = {site.name: site.tier for site in federation.sites}
        self._tasks: set[asyncio.Task[None]] = set()
        self._writing = asyncio.Lock()

    @cached_property
    def signing_key(self) -> Any:
        return load_key(self.keys.key_file)

    def refused(self, error: ProtocolError) -> None:
        """Called for every request that is refused."""
        self.metrics.reject(error.code, str(error))
        self.log.rate_limited("refused", code=error.code, reason=str(error), own={"peer": _caller.get()})

    async def journalled(self, event: Callable[..., Any], *facts: Any) -> Any:
        """Write to the journal without holding up other calls; one at a time."""
        async with self._writing:
            return await asyncio.to_thread(event, *facts)

    def _peer(self, context: Any, role: str) -> str:
        """The caller's name, if it has this role."""
        name = peer(context, self.federation.name, role).name
        _caller.set(name)
        return name

    def _check_own(self, state: RunState, context: Any) -> None:
        """A run is continued and ended by the server that opened it, as long as the roster has that server's key."""
        if state.attempt is not None:
            owner, key = state.attempt.terms.recipient, fingerprint(certificate_of(context).public_key())
            mine = key == owner or all(member.key != owner for member in self.keys.roster().members)
            require(mine, "run: was opened by another server", "PERMISSION_DENIED")

    def _site(self, context: Any) -> str:
        """The calling site's name; a certificate outlives a site's membership."""
        name = self._peer(context, "site")
        require(name in self.federation.site_names, f"site {name!r} is not in this federation", "PERMISSION_DENIED")
        return name

    def _join(self, state: RunState, site: str) -> None:
        """Log a site's first call in a run, for our own operator only: nobody else may learn when a site came."""
        if site not in state.joined:
            state.joined.add(site)
            self.log.own("joined", run=state.name, site=site)

    def asked(self, request: pb.CollectRequest | pb.SettleRequest | pb.CheckRequest, context: Any) -> Attempt:
        """The attempt that the server asks about; it must be the server that opened it."""
        self._peer(context, "server")
        attempt = self._attempt(request.run, request.round, request.attempt)
        same = fingerprint(certificate_of(context).public_key()) == attempt.terms.recipient
        require(same, "attempt: was opened by another server", "PERMISSION_DENIED")
        return attempt

    def _state(self, run: str, create: bool = False) -> RunState:
        if run in self.runs:
            return self.runs[run]
        require(create, "run: not known here", "NOT_FOUND")
        require(0 < len(run) <= 128, "run: a name of 1 to 128 characters is needed")
        over = [name for name, state in self.runs.items() if state.is_over]
        over.sort(key=lambda name: self.runs[name].is_awaited)
        for name in over[: max(0, len(self.runs) - MAX_RUNS + 1)]:
            del self.runs[name]
        require(len(self.runs) < MAX_RUNS, f"run: {MAX_RUNS} runs are already open", "RESOURCE_EXHAUSTED")
        return self.runs.setdefault(run, RunState(run))

    def _attempt(self, run: str, round: int, name: str | None = None) -> Attempt:
        """The open attempt at a round, which must be the one of this name if one is given."""
        attempt = self._state(run).attempt
        if attempt is None or attempt.round.spec.round != round:
            raise ProtocolError("NOT_FOUND", f"round: {round} is not open")
        ours = name in (None, attempt.round.spec.attempt)
        require(ours, "attempt: not the one that is open", "FAILED_PRECONDITION")
        return attempt
