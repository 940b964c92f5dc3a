"""What is signed about batches of onions: by a site about its own, by a mix about the one that it took and gave.

The next mix takes only what the one before it signed for the same attempt. So a server that carries the batches can
neither put in onions of its own nor leave some out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Annotated, Self, TypeVar

from cryptography.hazmat.primitives.asymmetric import ec
from pydantic import Field

from fl_privacy.crypto import sealing
from fl_privacy.errors import require
from fl_privacy.identity.signing import checker
from fl_privacy.mix.evidence import Hex, Name, Paper

MOST = 1 << 20  # bytes of a statement
MEMBER = 800  # bytes of a site in the first mix's statement, at most
DENIED = "PERMISSION_DENIED"


class Signed(Paper):
    """A statement of one party about one attempt."""

    attempt: Hex
    by: Name
    key: Hex  # the signer's public key, of which others have the fingerprint
    signature: Hex = ""

    def text(self) -> bytes:
        said = self.model_dump_json(exclude={"signature", "key"})
        return sealing.fields("fl-privacy onions 1", type(self).__name__, said)

    def signed(self, key: ec.EllipticCurvePrivateKey) -> Self:
        return self.model_copy(update={"signature": sealing.signed(key, self.text()).hex()})

    def check(self, attempt: str, by: str, fingerprint: str | None) -> None:
        """Refuse what this party did not sign about this attempt with the key that the roster has for it."""
        require((self.attempt, self.by) == (attempt, by), f"statement: not of {by} in this attempt", DENIED)
        key = checker(bytes.fromhex(self.key), fingerprint, by)
        sealing.verify(key, bytes.fromhex(self.signature), self.text())


class Sent(Signed):
    """Of a site: for which keys its onions are made, and the digest of all of them."""

    keys: Hex
    digest: Hex


class Batch(Signed):
    """Of a mix: what it took and gave. The first one also says what every site sent, where that is checked."""

    taken: Hex
    given: Hex
    onions: Annotated[int, Field(ge=1)]
    layer: Hex  # its public key for this attempt
    members: tuple[Sent, ...] = ()


class Revealed(Signed):
    """Of a site: what its dummies were made of, once the mixes had signed; `given` is the last one's batch.

    It says all that the dummies follow from: whoever judges takes nothing of it from the server.
    """

    federation: str
    run: str
    round: int
    count: int  # dummies of this site
    given: Hex
    seed: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    layers: tuple[Hex, ...]  # the keys that the mixes gave it, and at the end the server's


S = TypeVar("S", bound=Signed)


def checked(kind: type[S], data: bytes, attempt: str, by: str, fingerprint: str | None) -> S:
    """A statement of a party about an attempt."""
    require(0 < len(data) <= MOST, f"statement: {len(data)} bytes are none of {by}")
    found = kind.decode(data)
    found.check(attempt, by, fingerprint)
    return found


def first(digests: Iterable[bytes]) -> str:
    """What stands for the batch that the first mix takes: what each site sent, in the order of their names."""
    return hashlib.sha256(b"".join(digests)).hexdigest()
