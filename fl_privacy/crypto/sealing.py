"""Content that one party can read and another one signed, in a size that depends on nothing but the content's.

`bound` is what both ends know of it beside the content: what was sealed for one purpose, sender or recipient does not
open for another.
"""

from __future__ import annotations

from collections.abc import Sequence

from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from fl_privacy.errors import ProtocolError, require

POINT = 32  # bytes of an X25519 key
SIGNATURE = 72  # bytes of the longest signature with P-256; shorter ones are padded
TAG = 16
NONCE = bytes(12)  # every message has its own key
OVERHEAD = 1 + SIGNATURE + POINT + TAG
DENIED = "PERMISSION_DENIED"


def fields(*parts: str | bytes) -> bytes:
    """Parts as one text; each is prefixed with its length, so they cannot be confused."""
    encoded = [part.encode() if isinstance(part, str) else part for part in parts]
    return b"".join(len(part).to_bytes(4, "big") + part for part in encoded)


def seal(content: bytes, recipient: X25519PublicKey, signer: ec.EllipticCurvePrivateKey, bound: bytes) -> bytes:
    """Encrypted under a fresh X25519 key, and signed with what it is bound to."""
    once = X25519PrivateKey.generate()
    point = once.public_key().public_bytes_raw()
    sealed = encrypt(_key(once.exchange(recipient), bound + point), content, bound)
    return signed(signer, bound + point + sealed) + point + sealed


def unseal(sealed: bytes, own: X25519PrivateKey, sender: ec.EllipticCurvePublicKey, bound: bytes) -> bytes:
    """The inverse of `seal`; refuses what the sender did not seal for us, with exactly this bound."""
    require(len(sealed) >= OVERHEAD, f"seal: {len(sealed)} bytes are too few")
    signature, rest = sealed[: 1 + SIGNATURE], sealed[1 + SIGNATURE :]
    verify(sender, signature, bound + rest)
    try:
        shared = own.exchange(X25519PublicKey.from_public_bytes(rest[:POINT]))
    except ValueError:
        raise ProtocolError("INVALID_ARGUMENT", "seal: not an X25519 key") from None
    return decrypt(_key(shared, bound + rest[:POINT]), rest[POINT:], bound)


def encrypt(key: bytes, content: bytes, bound: bytes) -> bytes:
    """Under a key that is used once."""
    return ChaCha20Poly1305(key).encrypt(NONCE, content, bound)


def decrypt(key: bytes, sealed: bytes, bound: bytes) -> bytes:
    try:
        return ChaCha20Poly1305(key).decrypt(NONCE, sealed, bound)
    except InvalidTag:
        raise ProtocolError(DENIED, "seal: was made for another recipient") from None


def signed(signer: ec.EllipticCurvePrivateKey, data: bytes) -> bytes:
    """A signature of fixed size: its length, then as many bytes as the longest one has."""
    signature = signer.sign(data, ec.ECDSA(SHA256()))
    return bytes([len(signature)]) + signature.ljust(SIGNATURE, b"\0")


def verify(key: ec.EllipticCurvePublicKey, signature: bytes, data: bytes) -> None:
    whole = len(signature) == 1 + SIGNATURE and 0 < signature[0] <= SIGNATURE
    require(whole, "signature: not one of this form")
    try:
        key.verify(signature[1 : 1 + signature[0]], data, ec.ECDSA(SHA256()))
    except InvalidSignature:
        raise ProtocolError(DENIED, "signature: the sender did not sign this for us, here and now") from None


def split(data: bytes | memoryview, sizes: Sequence[int]) -> list[bytes]:
    """Pieces of these sizes, which must be all of the data."""
    require(len(data) == sum(sizes), f"length: {len(data)} bytes, {sum(sizes)} are needed")
    ends = [sum(sizes[: index + 1]) for index in range(len(sizes))]
    return [bytes(data[end - size : end]) for end, size in zip(ends, sizes, strict=True)]


def _key(shared: bytes, bound: bytes) -> bytes:
    return HKDF(SHA256(), 32, salt=None, info=bound).derive(shared)
