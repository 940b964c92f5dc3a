"""What a mix signs about the batch of onions that it passed on: which one it took, which one it gave, how many.

The next mix takes only what the one before it signed for the same attempt. So a server that carries the batches can
neither put in onions of its own nor leave some out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Annotated

from cryptography.hazmat.primitives.asymmetric import ec
from pydantic import Field

from fl_privacy.crypto import sealing
from fl_privacy.errors import require
from fl_privacy.mix.evidence import Hex, Name, Paper
from fl_privacy.round import statements

MOST = 4096  # bytes of a statement
DENIED = "PERMISSION_DENIED"


class Batch(Paper):
    """A mix's statement about one attempt."""

    attempt: Hex
    mix: Name
    taken: Hex  # digest of what came in
    given: Hex  # digest of what went out
    onions: Annotated[int, Field(ge=1)]
    key: Hex  # the mix's public key, of which others have the fingerprint
    signature: Hex = ""

    def text(self) -> bytes:
        return sealing.fields(
            "fl-privacy onions batch 1", self.attempt, self.mix, self.taken, self.given, str(self.onions)
        )

    def by(self, key: ec.EllipticCurvePrivateKey) -> Batch:
        """Signed by this key."""
        return self.model_copy(update={"signature": sealing.signed(key, self.text()).hex()})


def checked(data: bytes, attempt: str, mix: str, fingerprint: str | None) -> Batch:
    """The statement of a mix about an attempt, if it signed it with the key that the roster has for it."""
    require(0 < len(data) <= MOST, f"statement: {len(data)} bytes are none of a mix")
    found = Batch.decode(data)
    require((found.attempt, found.mix) == (attempt, mix), f"statement: not of {mix} in this attempt", DENIED)
    sealing.verify(
        statements.checker(bytes.fromhex(found.key), fingerprint, mix), bytes.fromhex(found.signature), found.text()
    )
    return found


def first(digests: Sequence[bytes]) -> str:
    """What stands for the batch that the first mix takes: what each site sent, in the order of their names."""
    return hashlib.sha256(b"".join(digests)).hexdigest()
