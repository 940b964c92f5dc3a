"""Signatures as text, and the fingerprints of public keys."""

from __future__ import annotations

import base64
import binascii
import hashlib

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from fl_privacy.errors import ProtocolError


def fingerprint(key: object) -> str:
    """Of a public key, to compare over a separate channel."""
    assert isinstance(key, ec.EllipticCurvePublicKey)
    encoded = key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    return "sha256:" + hashlib.sha256(encoded).hexdigest()


def checker(public: bytes, wanted: str | None, who: str) -> ec.EllipticCurvePublicKey:
    """The key of a party, which must be the one that the roster has for it."""
    try:
        key = serialization.load_der_public_key(public)
    except (ValueError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, ec.EllipticCurvePublicKey) or fingerprint(key) != wanted:
        raise ProtocolError("PERMISSION_DENIED", f"{who}: signs with another key than the roster has for it")
    return key


def sign_text(key: ec.EllipticCurvePrivateKey, payload: bytes) -> str:
    return base64.b64encode(key.sign(payload, ec.ECDSA(hashes.SHA256()))).decode()


def verify_text(key: object, signature: str, payload: bytes) -> None:
    """InvalidSignature if the key did not sign this, ValueError if it is no signature at all."""
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise ValueError("not an elliptic-curve key")
    try:
        key.verify(base64.b64decode(signature, validate=True), payload, ec.ECDSA(hashes.SHA256()))
    except binascii.Error:
        raise ValueError("not base64") from None
