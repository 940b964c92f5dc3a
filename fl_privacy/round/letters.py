"""Sealed, signed messages from site to site over a middleware that cannot read them.

A site publishes a card: a fresh X25519 key, signed by the key of its certificate. A message is encrypted to the
recipient's card under its own key, and signed by the sender over run, topic, sender and recipient: it cannot be
read, changed or delivered to anyone else. The middleware can only withhold it.
"""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from dataclasses import dataclass
from typing import Any

from cryptography import x509
from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from fl_privacy.errors import FederationError, ProtocolError
from fl_privacy.identity.keyring import Identity, Keyring
from fl_privacy.identity.pki import load_key
from fl_privacy.wire import federation_pb2 as pb
from fl_privacy.wire.rpc import Stub

CARD = "card"
CALL = 20.0
POINT = 32  # bytes of an X25519 key
NONCE = bytes(12)  # every message has its own key


@dataclass(frozen=True)
class Card:
    """What others need to write to a site: its certificate and its current encryption key."""

    certificate: x509.Certificate
    key: X25519PublicKey


class Letters:
    """One site's messages in one run."""

    def __init__(self, stub: Stub, identity: Identity, run: str, keys: Keyring) -> None:
        self._stub, self._own, self._run, self._keys = stub, identity, run, keys
        self._secret = X25519PrivateKey.generate()
        self._signer = load_key(keys.key_file)

    def publish(self) -> None:
        """Let the other sites write to this one."""
        key = self._secret.public_key().public_bytes_raw()
        signature = b64encode(self._sign(self._bound(CARD, self._own.name, "") + key)).decode()
        certificate = self._keys.certificate_file.read_text()
        fields = {"certificate": certificate, "key": b64encode(key).decode(), "signature": signature}
        self._post("", CARD, json.dumps(fields).encode())

    def send(self, recipient: str, topic: str, content: bytes) -> None:
        """Leave a message that only the recipient can read; it must have published its card."""
        card = self.cards().get(recipient)
        if card is None:
            raise FederationError(f"mail: {recipient!r} has published no card yet; try again later")
        once, bound = X25519PrivateKey.generate(), self._bound(topic, self._own.name, recipient)
        point = once.public_key().public_bytes_raw()
        sealed = ChaCha20Poly1305(_key(once.exchange(card.key), bound + point)).encrypt(NONCE, content, bound)
        signature = self._sign(bound + point + sealed)
        self._post(recipient, topic, bytes([len(signature)]) + signature + point + sealed)

    def receive(self, topic: str) -> list[tuple[str, bytes]]:
        """(sender, content) of every genuine message waiting for this site; others are dropped."""
        cards = self.cards()
        known = [(letter, cards[letter.sender]) for letter in self._pickup(topic) if letter.sender in cards]
        opened = [(letter.sender, self._opened(letter, card)) for letter, card in known]
        return [(sender, content) for sender, content in opened if content is not None]

    def cards(self) -> dict[str, Card]:
        """The newest card of every other site, if its certificate and signature hold."""
        found = [(letter.sender, self._card(letter)) for letter in self._pickup(CARD)]
        return {sender: card for sender, card in found if card is not None}

    def _card(self, letter: pb.Letter) -> Card | None:
        try:
            fields: dict[str, Any] = json.loads(letter.content)
            key = b64decode(fields["key"], validate=True)
            certificate = x509.load_pem_x509_certificate(fields["certificate"].encode())
            authority = x509.load_pem_x509_certificate(self._keys.authority_file.read_bytes())
            certificate.verify_directly_issued_by(authority)
            if self._keys.admit(certificate) != Identity(self._own.federation, self._own.role, letter.sender):
                return None
            _verify(certificate, b64decode(fields["signature"]), self._bound(CARD, letter.sender, "") + key)
            return Card(certificate, X25519PublicKey.from_public_bytes(key))
        except (ValueError, TypeError, KeyError, AttributeError, InvalidSignature, ProtocolError):
            return None

    def _opened(self, letter: pb.Letter, card: Card) -> bytes | None:
        bound, end = self._bound(letter.topic, letter.sender, self._own.name), 1 + sum(letter.content[:1])
        signature, rest = letter.content[1:end], letter.content[end:]
        try:
            _verify(card.certificate, signature, bound + rest)
            shared = self._secret.exchange(X25519PublicKey.from_public_bytes(rest[:POINT]))
            return ChaCha20Poly1305(_key(shared, bound + rest[:POINT])).decrypt(NONCE, rest[POINT:], bound)
        except (ValueError, TypeError, InvalidSignature, InvalidTag):
            return None

    def _bound(self, topic: str, sender: str, recipient: str) -> bytes:
        """What a message is bound to; each field is prefixed with its length, so they cannot be confused."""
        fields = ("fl-privacy letter 1", self._own.federation, self._run, topic, sender, recipient)
        return b"".join(len(field.encode()).to_bytes(4, "big") + field.encode() for field in fields)

    def _sign(self, data: bytes) -> bytes:
        return self._signer.sign(data, ec.ECDSA(SHA256()))

    def _post(self, recipient: str, topic: str, content: bytes) -> None:
        self._stub.post(pb.Letter(run=self._run, recipient=recipient, topic=topic, content=content), timeout=CALL)

    def _pickup(self, topic: str) -> list[pb.Letter]:
        return list(self._stub.pickup(pb.PickupRequest(run=self._run, topic=topic), timeout=CALL).letters)


def _key(shared: bytes, bound: bytes) -> bytes:
    return HKDF(SHA256(), 32, salt=None, info=bound).derive(shared)


def _verify(certificate: x509.Certificate, signature: bytes, data: bytes) -> None:
    key = certificate.public_key()
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise ValueError("not an elliptic-curve key")
    key.verify(signature, data, ec.ECDSA(SHA256()))
