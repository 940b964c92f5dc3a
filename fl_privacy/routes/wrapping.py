"""A site's end of route `onions`: an onion for every bit of its update, to the first mix."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np

from fl_privacy.coding import Payload
from fl_privacy.crypto import keys
from fl_privacy.errors import ProtocolError, require
from fl_privacy.identity.pki import load_key
from fl_privacy.mix import bits, dummies, onion
from fl_privacy.mix.batch import DENIED, Batch, Revealed, Sent
from fl_privacy.mix.onion import Hop, Place
from fl_privacy.round import statements
from fl_privacy.round.board import NONCE, SUMS
from fl_privacy.routes.mixes import SEED
from fl_privacy.routes.onions import ONIONS
from fl_privacy.routes.sharing import Part, Sharing
from fl_privacy.steps.base import At
from fl_privacy.wire import client

if TYPE_CHECKING:
    from fl_privacy.routes.ends import SiteSeat
    from fl_privacy.routes.onions import OnionsRoute

INNERMOST = "key of the innermost layer"


class Wrapping(Sharing):
    """One site of a run. The mixes behind the first one get a digest of what that gets: so they know who takes part."""

    def __init__(self, route: OnionsRoute, seat: SiteSeat) -> None:
        super().__init__(route, seat)
        self._dummies = route.dummies_of(seat.federation)
        self._seed = b""  # of the attempt's dummies
        self._signer = load_key(seat.keys.key_file)

    def _parts_of(self, at: At, payload: Payload) -> list[Part]:
        """The same onions if they are sent again: the keys follow from this site's own, the attempt and the update.

        For other keys of mixes or server they are others: two onions under one layer's key would show how they differ.
        """
        if at.farewell:
            return [Part(payload, self._coding)] * len(self._chosen)
        coding, secret = self._route.coding(self._federation), self._secret(at, payload)
        with self._metrics.phase("wrapping"):
            messages = bits.spread(coding.unpack(payload, self._layout.size), coding.moduli)
            hops, place = self._hops(), Place(self._federation.name, at.run, at.round, at.attempt)
            secret = keys.derive(secret, "", 0, onion.keys_digest(hops).hex(), "hops")
            fresh = onion.repeatable(keys.derive(secret, "", 0, "", "layers"))
            listed = [onion.wrapped(one.tobytes(), hops, place, fresh) for one in messages]
            self._seed, count = keys.derive(secret, "", 0, "", "seed"), self._dummies
            listed += [layers[0] for layers in dummies.made(self._seed, count, hops, place)]
            # Their order would tell the first mix which onion is which bit.
            order = onion.permutation(len(listed), keys.derive(secret, "", 0, "", "order"))
            made = b"".join(listed[index] for index in order)
        whole = np.frombuffer(made, np.uint8)
        digest = np.frombuffer(hashlib.sha256(made).digest(), np.uint8)
        return [Part(whole, ONIONS), *[Part(digest, SEED)] * (len(self._chosen) - 1)]

    def _hops(self) -> list[Hop]:
        """Every mix gave its own key, over a connection that only it can have; the server's has its signature."""
        first = self._first
        assert self._terms is not None
        signer = statements.checker(first.last_key, self._terms.recipient, "server")
        good = statements.holds(signer, INNERMOST, self._terms.name, first.last.hex(), first.last_signature)
        require(good, "last: the server did not sign this key for this attempt", "PERMISSION_DENIED")
        points = [self._headers[index].hop for index in self._chosen]
        names = [f"mix-{index}" for index in self._chosen]
        found = zip([*names, onion.SERVER], [*points, first.last], strict=True)
        return [Hop(name, onion.public(point, name)) for name, point in found]

    def _papers(self, at: At, parts: Sequence[Part]) -> list[dict[str, Any]]:
        """Every mix learns what this site sent, and for which keys: who gave it other ones could tell its onions."""
        if at.farewell:
            return [{} for _ in parts]
        known: dict[str, Any] = {"keys": onion.keys_digest(self._hops()).hex(), "digest": parts[0].digest.hex()}
        made = Sent(**known, attempt=at.attempt, by=self._seat.site, key=statements.public(self._signer).hex())
        return [{"statement": made.signed(self._signer).encode()} for _ in parts]

    def _answer(self, at: At, parts: Sequence[Part], terms: Sequence[Mapping[str, Any]]) -> None:
        """Reveal the dummies, once every mix has signed what it took and gave; if that fails, so does the attempt."""
        if at.farewell or not self._route.checked:
            return
        try:
            with self._metrics.phase("answering"):
                said = [Batch.decode(one) for one in self._read(at, SUMS)]
                roster, mixes = self._keys.roster(), [f"mix-{index}" for index in self._chosen]
                dummies.sound(said, mixes, at.attempt, roster.key_of)
                own = [one.digest for one in said[0].members if one.by == self._seat.site]
                if not own:
                    return
                require(own == [parts[0].digest.hex()], "statements: not about what this site sent", DENIED)
                layers = tuple(hop.key.public_bytes_raw().hex() for hop in self._hops())
                known: dict[str, Any] = {"given": said[-1].given, "seed": self._seed.hex(), "layers": layers}
                known |= {"run": at.run, "round": at.round, "federation": self._federation.name}
                known["count"] = self._dummies
                made = Revealed(
                    **known, attempt=at.attempt, by=self._seat.site, key=statements.public(self._signer).hex()
                )
                self._read(at, NONCE, made.signed(self._signer).encode())
        except (ProtocolError, grpc.RpcError) as error:
            reason = client.explain(error) if isinstance(error, grpc.RpcError) else str(error)
            self._seat.log("not-answered", **at.where, reason=reason)
