"""Single-use keys: fresh ones, and ones that two parties derive from a shared secret."""

from __future__ import annotations

import secrets

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from fl_privacy.errors import FederationError

KEY_BYTES = 32
SECRET_BYTES = 16


def fresh() -> bytes:
    """A new random key from the operating system."""
    return secrets.token_bytes(KEY_BYTES)


def derive(secret: bytes, run: str, round: int, attempt: str, purpose: str) -> bytes:
    """The key for one purpose in one attempt of one round: HKDF-SHA256 (RFC 5869) of the secret."""
    if len(secret) < SECRET_BYTES:
        raise FederationError(f"secret: {len(secret)} bytes given, at least {SECRET_BYTES} needed; use keys.fresh()")
    fields = [b"fl-privacy shuffle 1", run.encode(), str(round).encode(), attempt.encode(), purpose.encode()]
    # Length prefixes keep ("ab", "c") and ("a", "bc") apart.
    info = b"".join(len(field).to_bytes(4, "big") + field for field in fields)
    return HKDF(algorithm=SHA256(), length=KEY_BYTES, salt=None, info=info).derive(secret)


def check_key(key: bytes) -> None:
    """Raise unless `key` has the type and length of a key."""
    if not isinstance(key, bytes) or len(key) != KEY_BYTES:
        size = f"{len(key)} bytes" if isinstance(key, bytes) else type(key).__name__
        raise FederationError(f"key: {size} given, {KEY_BYTES} bytes needed; use fl_privacy.crypto.keys")
