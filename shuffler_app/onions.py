"""A mix of onions: it opens a layer of all of them, and gives them on in a random order."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from fl_privacy.coding import Coding, Payload
from fl_privacy.config import Federation
from fl_privacy.crypto import keys
from fl_privacy.errors import ProtocolError, require
from fl_privacy.identity.keyring import Keyring, certificate_of, peer
from fl_privacy.identity.signing import fingerprint
from fl_privacy.mix import batch, onion
from fl_privacy.mix.batch import Batch, Revealed, Sent
from fl_privacy.mix.onion import Place
from fl_privacy.ops.log import Log
from fl_privacy.round import statements
from fl_privacy.round.attempt import Attempt, RunState
from fl_privacy.round.board import NONCE, OPEN, SUMS
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
from .checked import MAX_WAIT, cut, reply
from .secrets import MixingKeys

LAST = ("last", "last_key", "last_signature")


class Said:
    """What is said in the check of one attempt; readers check the signatures."""

    def __init__(self) -> None:
        self.statements: list[bytes] | None = None
        self.revealed: dict[str, bytes] = {}
        self._changed = asyncio.Event()

    def put(self, statements: list[bytes]) -> None:
        """Once: no site reveals its dummies for two chains."""
        same = self.statements in (None, statements)
        require(same, "statements: others are being checked in this attempt", "FAILED_PRECONDITION")
        self.statements = statements
        self._notify()

    def reveal(self, site: str, statement: bytes) -> None:
        self.revealed.setdefault(site, statement)
        self._notify()

    def all_of(self, sites: Sequence[str]) -> list[bytes] | None:
        return [self.revealed[site] for site in sites] if sites and set(self.revealed) >= set(sites) else None

    async def wait(self, found: Callable[[], list[bytes] | None], seconds: float) -> list[bytes]:
        """What is found, as soon as it is there; nothing if it is not in time."""
        until = time.monotonic() + min(max(0.0, seconds), MAX_WAIT)
        while (said := found()) is None:
            if (left := until - time.monotonic()) <= 0:
                return []
            with suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._changed.wait()
        return said

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


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
        self._checking: dict[str, Said] = {}  # by attempt

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
        """For which keys the site made its onions, and the digest of all of them."""
        if attempt.round.spec.farewell:
            return None
        own = fingerprint(certificate_of(context).public_key())
        found = batch.checked(Sent, header.statement, attempt.terms.name, client, own)
        first = self._index > 0 or found.digest == header.digest.hex()
        require(first, "statement: the site signed for other onions than it sent", "PERMISSION_DENIED")
        return found

    async def reopened(self, state: RunState, attempt: Attempt) -> None:
        """The parts come again, for the same key; what was settled is settled again."""
        before, others = state.attempt, [one for one in self.runs.values() if one is not state]
        known = {one.attempt.terms.name for one in others if one.attempt is not None}
        self._waiting = {name: header for name, header in self._waiting.items() if name in known}
        self._checking = {name: said for name, said in self._checking.items() if name in {*known, attempt.terms.name}}
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
        same = len({attempt.papers[client].keys for client in clients}) == 1
        require(
            same, "keys: sites were given different ones, which would tell their onions apart", "FAILED_PRECONDITION"
        )
        if self._index:
            self._waiting[attempt.terms.name] = header
            return None
        rows = self._rows(attempt, clients)
        taken = batch.first(bytes.fromhex(attempt.papers[client].digest) for client in sorted(clients))
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
        said = batch.checked(Batch, header.statement, attempt.terms.name, before, known)
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
        made = Batch(
            attempt=attempt.terms.name,
            by=self._name,
            key=statements.public(self.signing_key).hex(),
            taken=taken,
            given=digest,
            onions=count,
            layer=self._layer(attempt).public_key().public_bytes_raw().hex(),
            members=self._members(attempt, header),
        )
        header.statement = made.signed(self.signing_key).encode()
        return given.view("<u4")

    def _members(self, attempt: Attempt, header: pb.ReleaseHeader) -> tuple[Sent, ...]:
        """What each site signed, where the mixes are checked."""
        if self._index or not self._onions.checked:
            return ()
        return tuple(attempt.papers[client] for client in sorted(attempt.cohort.of_bits(header.members)))

    def _mixed(self, attempt: Attempt, whole: Payload) -> Payload:
        spec, each, data = attempt.round.spec, self._onions.size(self._index), whole.tobytes()
        place = Place(self.federation.name, spec.run, spec.round, spec.attempt)
        least = len(data) // each
        listed = [data[start : start + each] for start in range(0, len(data), each)]
        order = self._key(attempt, "order")
        own = self._layer(attempt)
        found = onion.passed_on(listed, own, self._name, place, each=each, least=least, order=order)
        return np.frombuffer(b"".join(found), np.uint8)

    async def check(self, request: pb.CheckRequest, context: Any) -> pb.CheckReply:
        """At the first mix, sites and the server say and read what belongs to the check of an open attempt."""
        require(self._index == 0 and self._onions.checked, "check: nothing is checked here", "PERMISSION_DENIED")
        parts = {"server": self._of_server, "site": self._of_site}
        return await parts[peer(context, self.federation.name, *parts).role](request, context)

    async def _of_site(self, request: pb.CheckRequest, context: Any) -> pb.CheckReply:
        site = self._site(context)
        attempt = self._attempt(request.run, request.round, request.attempt)
        self._check_invited(attempt, site)
        said = self._said(attempt)
        if request.stage == NONCE:
            require(len(request.said) == 1 and said.statements is not None, "said: one statement, after the mixes'")
            own = fingerprint(certificate_of(context).public_key())
            batch.checked(Revealed, request.said[0], attempt.terms.name, site, own)
            said.reveal(site, request.said[0])
            return pb.CheckReply(complete=True)
        require(request.stage == SUMS, "stage: unknown here")
        return reply(await said.wait(lambda: said.statements, request.wait), request)

    async def _of_server(self, request: pb.CheckRequest, context: Any) -> pb.CheckReply:
        attempt = self.asked(request, context)
        said = self._said(attempt)
        if request.stage == SUMS:
            require(attempt.result is not None, "check: this mix has given nothing yet", "FAILED_PRECONDITION")
            many = 0 < len(request.said) <= self._onions.mixes and sum(map(len, request.said)) <= batch.MOST
            require(many, "said: more than one statement per mix")
            said.put(list(request.said))
            return pb.CheckReply(complete=True)
        if request.stage == NONCE:
            return reply(await said.wait(lambda: said.all_of(attempt.applied or ()), request.wait), request)
        require(request.stage == OPEN and len(request.said) == 1, "stage: unknown here")
        site = request.said[0].decode("ascii", "replace")
        require(site in said.revealed, "check: this site revealed nothing that could be disputed", "PERMISSION_DENIED")
        (row,) = self._rows(attempt, [site])
        return reply(cut(row.tobytes()), request)

    def _said(self, attempt: Attempt) -> Said:
        if attempt.gone.is_set():
            raise ProtocolError("FAILED_PRECONDITION", "check: the attempt is over")
        return self._checking.setdefault(attempt.terms.name, Said())

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
