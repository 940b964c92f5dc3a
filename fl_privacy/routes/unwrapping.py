"""The server's end of route `onions`: it carries the batch from mix to mix, opens the last layer and counts bits."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from fl_privacy.coding import Payload
from fl_privacy.crypto import keys
from fl_privacy.errors import ProtocolError, RoundFailed, require
from fl_privacy.identity.pki import load_key
from fl_privacy.mix import batch, bits, onion
from fl_privacy.mix.batch import Batch
from fl_privacy.mix.dummies import MESSAGE
from fl_privacy.mix.onion import Place
from fl_privacy.round import statements
from fl_privacy.routes.ends import Ask, Outcome, ServerSeat
from fl_privacy.routes.onions import BITS, ONIONS
from fl_privacy.routes.totals import AtServer, Mixes
from fl_privacy.routes.wrapping import INNERMOST
from fl_privacy.vector import Vector
from fl_privacy.wire import client, federation_pb2 as pb

if TYPE_CHECKING:
    from fl_privacy.routes.onions import OnionsRoute


# A mix that was restarted knows the run again once the attempt is opened again.
GONE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.NOT_FOUND)


class Chain(Mixes):
    """One batch of onions, from mix to mix."""

    def given(self, ask: Ask, index: int) -> client.Release:
        """The batch that a mix gives."""
        return self.receive(self._stubs[index].collect(pb.CollectRequest(**ask.where), timeout=self._patience))

    def relay(self, ask: Ask, index: int, onions: Payload, statement: bytes) -> None:
        """Hand a mix what the one before it gave, again if it was restarted."""
        call = partial(
            client.relay, self._stubs[index], onions, self._patience, ONIONS, **ask.where, statement=statement
        )
        client.patiently(call, time.monotonic() + self._federation.deadline)


class Unwrapping(AtServer):
    """The server sees whose updates were counted, every batch, and the bits in an order that tells nobody's."""

    def __init__(self, route: OnionsRoute, seat: ServerSeat) -> None:
        super().__init__(route, seat)
        self._keys, self._onions = seat.keys, route.onions(seat.federation, self._size)
        self._dummies = route.dummies_of(seat.federation)
        self._batches: list[tuple[Batch, Payload]] = []  # of the attempt: what every mix gave, and signed
        self._round: Chain = Chain(seat, stages=1 + route.mixes)

    def _own(self, ask: Ask) -> X25519PrivateKey:
        """The key of the innermost layer, in this attempt."""
        secret = keys.derive(self._keys.key_file.read_bytes(), ask.run, ask.round, ask.attempt, INNERMOST)
        return X25519PrivateKey.from_private_bytes(secret)

    def _also(self, ask: Ask) -> Mapping[str, Any]:
        point, signer = self._own(ask).public_key().public_bytes_raw(), load_key(self._keys.key_file)
        signature = statements.sign(signer, INNERMOST, ask.attempt, point.hex())
        return {"last": point, "last_key": statements.public(signer), "last_signature": signature}

    def _add(self, ask: Ask, outcome: Outcome, model: Vector, settled: Sequence[str]) -> None:
        self._batches.clear()
        onions = self._passed(ask, 0, outcome.count, "")
        for index in range(1, self._route.mixes):
            data, statement = onions
            before = hashlib.sha256(data.data).hexdigest()
            try:
                self._round.relay(ask, index, data, statement)
            except grpc.RpcError as error:
                if error.code() in GONE:
                    raise
                self._check(ask)  # who changed them may be named
                reason = f"mix-{index} refused what mix-{index - 1} gave: {client.explain(error)}"
                raise RoundFailed(reason, ask.terms.number + 1) from None
            onions = self._passed(ask, index, outcome.count, before)
            outcome.received += data.nbytes
        data, _ = onions
        outcome.received += data.nbytes
        self._check(ask)
        messages = self._opened(ask, data)
        outcome.seen[BITS] = messages
        coding, columns = self._coding, self._columns
        try:
            messages = bits.without(messages, MESSAGE, outcome.count * self._dummies)
            sums = bits.counted(messages, coding.moduli, columns, outcome.count)
            summed = coding.decode_sum(sums, outcome.count, coding.bound_at(model))
        except ProtocolError as error:
            raise RoundFailed(str(error), ask.terms.number + 1) from None
        outcome.mean = (summed.total / np.float32(outcome.count)).astype(np.float32)
        outcome.noted["clamped"] = float(f"{summed.clamped:.3g}")

    def _check(self, ask: Ask) -> None:
        """Have the mixes checked, if the route says so."""

    def _passed(self, ask: Ask, index: int, sites: int, before: str) -> tuple[Payload, bytes]:
        """What a mix gave, and its statement, which must be about exactly this batch and the one before."""
        name, release = f"mix-{index}", self._round.given(ask, index)
        if release.rows is None:
            raise RoundFailed(release.reason or f"{name} gave no onions")
        data, count = np.ascontiguousarray(release.rows).view(np.uint8), sites * self._onions
        try:
            require(data.size == count * self._route_size(index + 1), f"{data.size:,} bytes are not {count:,} onions")
            known = self._keys.roster().key_of("mix", name)
            said = batch.checked(Batch, release.statement, ask.attempt, name, known)
            given = (said.given, said.onions) == (hashlib.sha256(data.data).hexdigest(), count)
            require(given and before in ("", said.taken), "it signed for other onions than it took and gave")
        except ProtocolError as error:
            raise RoundFailed(f"{name}: {error}", ask.terms.number + 1) from None
        self._batches.append((said, data))
        return data, release.statement

    def _route_size(self, mix: int) -> int:
        route: Any = self._route
        return int(route.size(mix))

    def _opened(self, ask: Ask, data: Payload) -> bits.Messages:
        own, place = self._own(ask), Place(self._federation.name, ask.run, ask.round, ask.attempt)
        each = self._route_size(self._route.mixes)
        whole = data.tobytes()
        try:
            found = b"".join(
                onion.opened(whole[start : start + each], own, onion.SERVER, place)
                for start in range(0, len(whole), each)
            )
        except ProtocolError as error:
            why = f"an innermost layer does not open ({error}); a mix or a site sent another one"
            raise RoundFailed(why, ask.terms.number + 1) from None
        return np.frombuffer(found, np.uint8).reshape(-1, bits.SIZE)
