"""A site's end of route `onions`: an onion for every bit of its update, to the first mix."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey

from fl_privacy.coding import Payload
from fl_privacy.crypto import keys
from fl_privacy.errors import ProtocolError, require
from fl_privacy.mix import bits, onion
from fl_privacy.mix.onion import Hop, Place
from fl_privacy.round import statements
from fl_privacy.routes.mixes import SEED
from fl_privacy.routes.onions import ONIONS
from fl_privacy.routes.sharing import Part, Sharing
from fl_privacy.steps.base import At

if TYPE_CHECKING:
    from fl_privacy.routes.base import SiteSeat
    from fl_privacy.routes.onions import OnionsRoute

INNERMOST = "key of the innermost layer"


class Wrapping(Sharing):
    """One site of a run. The mixes behind the first one get a digest of what that gets: so they know who takes part."""

    def __init__(self, route: OnionsRoute, seat: SiteSeat) -> None:
        super().__init__(route, seat)

    def _parts_of(self, at: At, payload: Payload) -> list[Part]:
        """The same onions if they are sent again: the keys follow from this site's own, the attempt and the update."""
        if at.farewell:
            return [Part(payload, self._coding)] * len(self._chosen)
        coding, secret = self._route.coding(self._federation), self._secret(at, payload)
        with self._metrics.phase("wrapping"):
            messages = bits.spread(coding.unpack(payload, self._layout.size), coding.moduli)
            # Their order would tell the first mix which onion is which bit.
            order = onion.permutation(len(messages), keys.derive(secret, "", 0, "", "order"))
            hops, place = self._hops(), Place(self._federation.name, at.run, at.round, at.attempt)
            fresh = onion.repeatable(keys.derive(secret, "", 0, "", "layers"))
            made = b"".join(onion.wrapped(messages[index].tobytes(), hops, place, fresh) for index in order)
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
        return [Hop(name, _key(name, point)) for name, point in found]

    def _papers(self, at: At, parts: Sequence[Part]) -> list[dict[str, Any]]:
        """Every mix learns for which keys the onions are: one that gave this site other keys could tell its onions."""
        if at.farewell:
            return [{} for _ in parts]
        return [{"root": onion.keys_digest(self._hops())} for _ in parts]


def _key(name: str, point: bytes) -> X25519PublicKey:
    try:
        return X25519PublicKey.from_public_bytes(point)
    except ValueError:
        raise ProtocolError("INVALID_ARGUMENT", f"{name}: gave no key for its layer") from None
