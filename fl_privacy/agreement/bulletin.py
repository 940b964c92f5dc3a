"""What a site says to all others, as one sealed text: a newer one takes the place of the one before.

A bulletin holds all that its site has to say now, so that nothing has to be kept for those that are away, and a late or
restarted site reads one text of each. It is encrypted once, under a key of its own, and the key is sealed for every
site. Whoever carries it learns its size, and for whom it is.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

from fl_privacy.agreement.messages import MOST_BYTES
from fl_privacy.agreement.terms import MOST
from fl_privacy.crypto import keys, sealing
from fl_privacy.errors import ProtocolError, require

LARGEST = 4 * MOST_BYTES  # bytes of the text
MESSAGES = 64  # of an agreement, newest last
CHECKS = 8  # runs
ENVELOPE = sealing.OVERHEAD + keys.KEY_BYTES
NUMBER = 2  # bytes of a count or a length
MALFORMED = "bulletin: not one of this form; update both sites"


@dataclass(frozen=True)
class Bulletin:
    """`roster`: the digest of the roster that its site accepted. `known`: the keys of sites that it has seen."""

    roster: str
    known: Mapping[str, bytes] = field(default_factory=dict)
    messages: tuple[bytes, ...] = ()
    checks: Mapping[str, tuple[int, str]] = field(default_factory=dict)  # by run: newest round, and its check value
    evidence: bytes = b""

    def encode(self) -> bytes:
        values = {
            "roster": self.roster,
            "known": {site: key.hex() for site, key in self.known.items()},
            "messages": [message.decode() for message in self.messages],
            "checks": {run: list(check) for run, check in self.checks.items()},
            "evidence": self.evidence.decode(),
        }
        return zlib.compress(json.dumps(values, separators=(",", ":")).encode())

    @classmethod
    def decode(cls, data: bytes) -> Bulletin:
        """Of whatever a site sent; its messages and evidence are not checked here."""
        unpacker = zlib.decompressobj()
        try:
            text = unpacker.decompress(data, LARGEST)
            require(unpacker.eof and not unpacker.unused_data, MALFORMED)
            return cls._parsed(json.loads(text))
        except (zlib.error, ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
            raise ProtocolError("INVALID_ARGUMENT", MALFORMED) from None

    @classmethod
    def _parsed(cls, values: dict[str, Any]) -> Bulletin:
        known = {str(site): bytes.fromhex(key) for site, key in values["known"].items()}
        messages = tuple(str(message).encode() for message in values["messages"])
        checks = {str(run): (int(round), str(check)) for run, (round, check) in values["checks"].items()}
        few = len(known) <= MOST and len(messages) <= MESSAGES and len(checks) <= CHECKS
        require(few and isinstance(values["roster"], str), MALFORMED)
        return cls(values["roster"], known, messages, checks, str(values["evidence"]).encode())


def seal(
    content: bytes, recipients: Mapping[str, X25519PublicKey], signer: ec.EllipticCurvePrivateKey, bound: bytes
) -> bytes:
    """For these sites alone; `bound` says who sends it, and about what."""
    key = keys.fresh()
    body = sealing.encrypt(key, content, bound)
    parts = [len(recipients).to_bytes(NUMBER, "big")]
    for site, card in recipients.items():
        name = site.encode()
        parts += [len(name).to_bytes(NUMBER, "big"), name, sealing.seal(key, card, signer, _own(bound, site, body))]
    return b"".join([*parts, body])


def unseal(
    sealed: bytes, site: str, own: X25519PrivateKey, sender: ec.EllipticCurvePublicKey, bound: bytes
) -> bytes | None:
    """The inverse of `seal` for one of the recipients; None if it was not sealed for this site."""
    place, found = NUMBER, None
    for _ in range(int.from_bytes(sealed[:NUMBER], "big")):
        length = int.from_bytes(sealed[place : place + NUMBER], "big")
        end = place + NUMBER + length + ENVELOPE
        require(end <= len(sealed), MALFORMED)
        if sealed[place + NUMBER : place + NUMBER + length] == site.encode():
            found = sealed[end - ENVELOPE : end]
        place = end
    if found is None:
        return None
    body = sealed[place:]
    key = sealing.unseal(found, own, sender, _own(bound, site, body))
    require(len(key) == keys.KEY_BYTES, MALFORMED)
    return sealing.decrypt(key, body, bound)


def _own(bound: bytes, site: str, body: bytes) -> bytes:
    """What the envelope of one recipient is bound to."""
    return sealing.fields(bound, site, hashlib.sha256(body).digest())


def pieces(sealed: bytes, size: int) -> list[bytes]:
    """Parts of at most `size` bytes beside the mark that says to which text they belong, and how many there are."""
    parts = [sealed[at : at + size] for at in range(0, len(sealed), size)]
    mark = hashlib.sha256(sealed).digest() + len(parts).to_bytes(NUMBER, "big")
    return [mark + part for part in parts]


def joined(parts: list[bytes]) -> bytes | None:
    """The text of these parts in order; None unless they are all parts of one text."""
    length = hashlib.sha256().digest_size + NUMBER
    if not parts or len(parts[0]) < length or any(part[:length] != parts[0][:length] for part in parts):
        return None
    whole, mark = b"".join(part[length:] for part in parts), parts[0][:length]
    return whole if hashlib.sha256(whole).digest() == mark[:-NUMBER] else None


def count_of(part: bytes) -> int:
    """How many parts the text of this one has."""
    return int.from_bytes(part[hashlib.sha256().digest_size :][:NUMBER], "big")
