"""What a middleware says about an attempt under its signature: that it opened it on these terms, or that it is void.

`journal` is the id of the journal that says so: one that was lost and made again knows nothing of earlier attempts.
"""

from __future__ import annotations

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256

from fl_privacy.identity.signing import checker as checker

OPENED, VOID = "opened", "void"


def sign(key: ec.EllipticCurvePrivateKey, said: str, attempt: str, journal: str) -> bytes:
    return key.sign(_text(said, attempt, journal), ec.ECDSA(SHA256()))


def public(key: ec.EllipticCurvePrivateKey) -> bytes:
    """The key that a statement is checked with, as it travels."""
    return key.public_key().public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)


def holds(key: ec.EllipticCurvePublicKey, said: str, attempt: str, journal: str, signature: bytes) -> bool:
    try:
        key.verify(signature, _text(said, attempt, journal), ec.ECDSA(SHA256()))
    except InvalidSignature:
        return False
    return True


def _text(said: str, attempt: str, journal: str) -> bytes:
    return f"fl-privacy attempt {said}\n{attempt}\n{journal}".encode()
