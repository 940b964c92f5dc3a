"""A mix of onions: it opens a layer of all of them, and gives them on in a random order."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from fl_privacy.coding import Coding, Payload
from fl_privacy.config import Federation
from fl_privacy.crypto import keys
from fl_privacy.errors import ProtocolError, require
from fl_privacy.identity.keyring import Keyring
from fl_privacy.mix import batch, onion
from fl_privacy.mix.batch import Batch
from fl_privacy.mix.onion import Place
from fl_privacy.ops.log import Log
from fl_privacy.round import statements
from fl_privacy.round.attempt import Attempt, RunState
from fl_privacy.round.service import Offer, Parts, first
from fl_privacy.routes.base import only
from fl_privacy.routes.mixes import SEED
from fl_privacy.routes.onions import ONIONS, OnionsRoute
from fl_privacy.transcript.events import Event, filed, rows_of
from fl_privacy.transcript.recorder import RunRecorder
from fl_privacy.vector import Vector
from fl_privacy.wire import federation_pb2 as pb
from fl_privacy.wire.stream import Receiver, header_of

from .adding import Mix
from .secrets import MixingKeys

LAST = ("last", "last_key", "last_signature")


class OnionMix(Mix):
    """The first one knows who sent what it opens, the others only who took part. None of them can read a bit.

    The key of its layer and its order are of one attempt, and forgotten with it.
    """

    def __init__(
        self,
        name: str,
        federation: Federation,
        keys: Keyring,
        state: Path,
        log: Log,
        recorder: RunRecorder | None = None,
    ) -> None:
        super().__init__(name, federation, keys, state, log, recorder)
        self._onions = only(federation.route, OnionsRoute, "mixes")
        self._secrets = MixingKeys(state, keys.key_file.read_bytes())
        self._innermost: dict[str, tuple[str, dict[str, bytes]]] = {}  # by run: of its newest attempt
        self._waiting: dict[str, pb.ReleaseHeader] = {}  # by attempt: settled, and the batch is not here yet
        self._passing = asyncio.Lock()

    def _own_route(self, federation: Federation) -> OnionsRoute:
        return only(federation.route, OnionsRoute, "mixes")

    def received(self, header: pb.RoundHeader) -> Coding:
        if header.farewell:
            return self.coding
        return ONIONS if self._index == 0 else SEED

    async def prepare(self, state: RunState, header: pb.RoundHeader, parts: Parts) -> Vector:
        self._onions.check_size(self.federation, header.parameters)
        given = {name: bytes(getattr(header, name)) for name in LAST}
        require(max(map(len, given.values())) <= 512, "last: no key with a signature")
        model = await super().prepare(state, header, parts)
        self._innermost = {run: one for run, one in self._innermost.items() if run in self.runs}
        self._innermost[state.name] = header.attempt, given
        return model

    def signed_by(self, attempt: Attempt, client: str, header: pb.VectorHeader, context: Any) -> object:
        """For which keys the site made its onions."""
        if attempt.round.spec.farewell:
            return None
        require(len(header.root) == hashlib.sha256().digest_size, "root: no digest of the keys of all layers")
        return bytes(header.root)

    async def reopened(self, state: RunState, attempt: Attempt) -> None:
        """The parts come again, for the same key; what was settled is settled again."""
        self._waiting, before = {}, state.attempt
        if before is not None and before.terms.name != attempt.terms.name:
            await asyncio.to_thread(self._secrets.forget, before.terms.name)
        if not attempt.round.spec.farewell:
            await asyncio.to_thread(self._keep_key, attempt.terms.name)

    def _keep_key(self, attempt: str) -> None:
        """On the disk before a site gets it, and not made twice."""
        if self.journal.released(attempt) is not None:
            self._secrets.check(attempt)
        self._secrets.of(attempt)

    def _key(self, attempt: Attempt, purpose: str) -> bytes:
        spec = attempt.round.spec
        return keys.derive(self._secrets.of(spec.attempt), spec.run, spec.round, spec.attempt, purpose)

    def _layer(self, attempt: Attempt) -> X25519PrivateKey:
        return X25519PrivateKey.from_private_bytes(self._key(attempt, "layer"))

    async def due(self, state: RunState, request: pb.FetchRequest, site: str) -> Offer | None:
        found = await super().due(state, request, site)
        if found is None or state.attempt is None or found[0].farewell:
            return found
        header, model = found
        name, innermost = self._innermost.get(state.name, ("", {}))
        require(name == header.attempt == state.attempt.terms.name, "round: a newer one is being opened", "UNAVAILABLE")
        own = await asyncio.to_thread(self._layer, state.attempt)
        header.hop = own.public_key().public_bytes_raw()
        for field, value in innermost.items():
            setattr(header, field, value)
        return header, model

    async def settle(self, request: pb.SettleRequest, context: Any) -> pb.SettleReply:
        reply = await super().settle(request, context)
        if not request.commit:
            self._waiting.pop(request.attempt, None)
            await asyncio.to_thread(self._secrets.forget, request.attempt)
        return reply

    async def _output(self, attempt: Attempt, clients: Sequence[str], header: pb.ReleaseHeader) -> Payload | None:
        """The first mix has its batch; the others wait for what the one before them gives."""
        same = len({attempt.papers[client] for client in clients}) == 1
        require(
            same, "keys: sites were given different ones, by which their onions could be told", "FAILED_PRECONDITION"
        )
        if self._index:
            self._waiting[attempt.terms.name] = header
            return None
        rows = self._rows(attempt, clients)
        taken = batch.first(attempt.round.digests(clients))
        return await self._passed(attempt, header, np.concatenate(rows), taken)

    async def relay(self, parts: Parts, context: Any) -> pb.Empty:
        """The server brings what the mix before this one gave: exactly the onions of the sites that were settled on."""
        self._peer(context, "server")
        header = header_of(await first(parts), "vector")
        attempt = self.asked(header, context)
        require(self._index > 0, "relay: the first mix takes onions from sites only", "PERMISSION_DENIED")
        require(header.dtype == ONIONS.name, f"dtype: {header.dtype[:20]!r} is not {ONIONS.name}")
        if attempt.settling is not None:
            await asyncio.shield(attempt.settling)
        require(attempt.applied is not None, "relay: the round is not settled yet", "FAILED_PRECONDITION")
        length = self._count(attempt) * self._onions.size(self._index)
        few = f"relay: {header.length:,} bytes are not the {length:,} of {len(attempt.applied or ())} sites"
        require(header.length == length, few, "FAILED_PRECONDITION")
        before = f"mix-{self._index - 1}"
        known = self.keys.roster().key_of("mix", before)
        said = batch.checked(header.statement, attempt.terms.name, before, known)
        good = said.given == header.digest.hex() and said.onions == self._count(attempt)
        require(good, f"relay: {before} gave other onions", "PERMISSION_DENIED")
        async with self._passing:
            await self._take(attempt, header, parts)
        return pb.Empty()

    async def _take(self, attempt: Attempt, header: pb.VectorHeader, parts: Parts) -> None:
        """One batch per attempt, also after a restart: another one, or the same in another order, would show more."""
        await self.journalled(self.journal.sign, attempt.terms.name, header.digest.hex())
        if attempt.result is not None:
            return
        waiting = self._waiting.get(attempt.terms.name)
        if waiting is None or attempt.gone.is_set():
            raise ProtocolError("FAILED_PRECONDITION", "relay: the attempt is over")
        whole = np.empty(header.length, np.uint8)
        receiver = Receiver(whole, header.digest, ONIONS)
        async with asyncio.timeout(self.federation.deadline):
            async for part in parts:
                receiver.feed(part)
        receiver.finish()
        await asyncio.to_thread(self._record_batch, attempt, whole)
        given = await self._passed(attempt, waiting, whole, header.digest.hex())
        waiting.length = given.size
        if not attempt.gone.is_set():
            attempt.result = waiting, given

    def _count(self, attempt: Attempt) -> int:
        """Onions of the sites that were settled on: the threshold, and nothing beside them counts."""
        return len(attempt.applied or ()) * self._onions.onions(self.federation, attempt.parameters)

    async def _passed(self, attempt: Attempt, header: pb.ReleaseHeader, whole: Payload, taken: str) -> Payload:
        """A layer further and in a random order, with this mix's signature."""
        with self.metrics.phase("mixing"):
            given = await asyncio.to_thread(self._mixed, attempt, whole)
        count, digest = whole.size // self._onions.size(self._index), hashlib.sha256(given.data).hexdigest()
        own = statements.public(self.signing_key).hex()
        made = Batch(attempt=attempt.terms.name, mix=self._name, taken=taken, given=digest, onions=count, key=own)
        header.statement = made.by(self.signing_key).encode()
        return given.view("<u4")

    def _mixed(self, attempt: Attempt, whole: Payload) -> Payload:
        spec, each, data = attempt.round.spec, self._onions.size(self._index), whole.tobytes()
        place = Place(self.federation.name, spec.run, spec.round, spec.attempt)
        least = len(data) // each
        listed = [data[start : start + each] for start in range(0, len(data), each)]
        order = self._key(attempt, "order")
        own = self._layer(attempt)
        found = onion.passed_on(listed, own, self._name, place, each=each, least=least, order=order)
        return np.frombuffer(b"".join(found), np.uint8)

    def _record(self, attempt: Attempt, clients: Sequence[str]) -> None:
        """The first mix records what came; the others once their batch is here."""
        if self._index == 0 or attempt.round.spec.farewell:
            super()._record(attempt, clients)

    def _record_batch(self, attempt: Attempt, whole: Payload) -> None:
        clients = attempt.applied or ()
        events: list[Event] = list(rows_of(clients))
        arrays = attempt.counted.stored(clients) | {"onions": whole, "digests": np.stack(self._rows(attempt, clients))}
        if self.recorder is not None:
            self.recorder.record(**filed(attempt.round.spec), arrays=arrays, events=events)
