"""Sealed, signed messages from site to site over a middleware that cannot read them.

A site publishes a card: an X25519 key, signed by the key of its certificate. A message is encrypted to the
recipient's card under its own key, and signed by the sender over run, topic, sender and recipient: it cannot be
read, changed or delivered to anyone else. The middleware can only withhold it. An announcement is signed and for all.
"""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from dataclasses import dataclass
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

from fl_privacy.crypto import keys, sealing
from fl_privacy.errors import FederationError, ProtocolError
from fl_privacy.identity.keyring import Identity, Keyring
from fl_privacy.identity.pki import load_key
from fl_privacy.wire import federation_pb2 as pb
from fl_privacy.wire.rpc import Stub

CARD = "card"
CALL = 20.0
MOST_PAGES = 64  # of waiting messages


@dataclass(frozen=True)
class Card:
    """What others need to write to a site: the key of its certificate, and its encryption key for this run."""

    certificate: x509.Certificate
    signer: ec.EllipticCurvePublicKey
    key: X25519PublicKey


class Letters:
    """One site's messages in one run. After a restart it reads what was sealed for it before."""

    def __init__(self, stub: Stub, identity: Identity, run: str, keyring: Keyring) -> None:
        self._stub, self._own, self.run, self._keys = stub, identity, run, keyring
        secret = keys.derive(keyring.key_file.read_bytes(), run, 0, identity.uri, "mail")
        self._known: dict[tuple[str, bytes], Card] = {}
        self._heard: dict[tuple[str, str], tuple[ec.EllipticCurvePublicKey, bytes]] = {}  # by topic and sender
        self.secret, self.signer = X25519PrivateKey.from_private_bytes(secret), load_key(keyring.key_file)

    @property
    def own(self) -> str:
        """This site's name."""
        return self._own.name

    def publish(self) -> None:
        """Let the other sites write to this one."""
        self._post("", CARD, self._made_card())

    def own_card(self) -> Card:
        key = self.signer.public_key()
        certificate = x509.load_pem_x509_certificate(self._keys.certificate_file.read_bytes())
        return Card(certificate, key, self.secret.public_key())

    def send(self, recipient: str, topic: str, content: bytes) -> None:
        """Leave a message that only the recipient can read; it must have published its card."""
        card = self.cards().get(recipient)
        if card is None:
            raise FederationError(f"mail: {recipient!r} has published no card yet; try again later")
        bound = self._bound(topic, self._own.name, recipient)
        self._post(recipient, topic, sealing.seal(content, card.key, self.signer, bound))

    def receive(self, topic: str) -> list[tuple[str, bytes]]:
        """(sender, content) of every genuine message waiting for this site; others are dropped."""
        cards = self.cards()
        known = [(letter, cards[letter.sender]) for letter in self._pickup(topic) if letter.sender in cards]
        opened = [(letter.sender, self._opened(letter, card)) for letter, card in known]
        return [(sender, content) for sender, content in opened if content is not None]

    def announce(self, topic: str, content: bytes) -> None:
        """Tell every site; a newer announcement takes the place of an older one on the same topic."""
        self._post("", topic, sealing.signed(self.signer, self._bound(topic, self._own.name, "") + content) + content)

    def announced(self, topic: str, cards: dict[str, Card]) -> dict[str, bytes]:
        """What every other site announced; what it did not sign is dropped."""
        found = dict[str, bytes]()
        for letter in self._told_all(topic):
            signature, content = letter.content[: 1 + sealing.SIGNATURE], letter.content[1 + sealing.SIGNATURE :]
            try:
                signer = cards[letter.sender].signer
                if self._heard.get((topic, letter.sender)) != (signer, letter.content):  # unless it was just checked
                    sealing.verify(signer, signature, self._bound(topic, letter.sender, "") + content)
                    self._heard[topic, letter.sender] = signer, letter.content
                found[letter.sender] = content
            except (ProtocolError, KeyError):
                continue
        return found

    def cards(self) -> dict[str, Card]:
        """The newest card of every other site, if its certificate and signature hold."""
        found = [(letter.sender, self._card(letter)) for letter in self._told_all(CARD)]
        return {sender: card for sender, card in found if card is not None}

    def _made_card(self) -> bytes:
        key = self.secret.public_key().public_bytes_raw()
        signature = b64encode(sealing.signed(self.signer, self._bound(CARD, self._own.name, "") + key)).decode()
        certificate = self._keys.certificate_file.read_text()
        fields = {"certificate": certificate, "key": b64encode(key).decode(), "signature": signature}
        return json.dumps(fields).encode()

    def _card(self, letter: pb.Letter) -> Card | None:
        """A card whose signatures were checked before is only checked for revocation and the roster."""
        known = self._known.get((letter.sender, letter.content))
        try:
            if known is not None:
                self._keys.admit(known.certificate)
                return known
            fields: dict[str, Any] = json.loads(letter.content)
            key = b64decode(fields["key"], validate=True)
            certificate = x509.load_pem_x509_certificate(fields["certificate"].encode())
            authority = x509.load_pem_x509_certificate(self._keys.authority_file.read_bytes())
            certificate.verify_directly_issued_by(authority)
            signer = certificate.public_key()
            ours = self._keys.admit(certificate) == Identity(self._own.federation, self._own.role, letter.sender)
            if not ours or not isinstance(signer, ec.EllipticCurvePublicKey):
                return None
            sealing.verify(signer, b64decode(fields["signature"]), self._bound(CARD, letter.sender, "") + key)
            made = Card(certificate, signer, X25519PublicKey.from_public_bytes(key))
            self._known = {place: card for place, card in self._known.items() if place[0] != letter.sender}
            self._known[letter.sender, letter.content] = made
            return made
        except Exception:  # a hostile site chooses what is parsed here
            return None

    def _opened(self, letter: pb.Letter, card: Card) -> bytes | None:
        bound = self._bound(letter.topic, letter.sender, self._own.name)
        try:
            return sealing.unseal(letter.content, self.secret, card.signer, bound)
        except ProtocolError:
            return None

    def _bound(self, topic: str, sender: str, recipient: str) -> bytes:
        """What a message is bound to."""
        return sealing.fields("fl-privacy letter 2", self._own.federation, self.run, topic, sender, recipient)

    def _post(self, recipient: str, topic: str, content: bytes) -> None:
        self._stub.post(pb.Letter(run=self.run, recipient=recipient, topic=topic, content=content), timeout=CALL)

    def _told_all(self, topic: str) -> list[pb.Letter]:
        return [letter for letter in self._pickup(topic) if not letter.recipient]

    def _pickup(self, topic: str) -> list[pb.Letter]:
        found, after = list[pb.Letter](), 0
        for _ in range(MOST_PAGES):
            page = self._stub.pickup(pb.PickupRequest(run=self.run, topic=topic, after=after), timeout=CALL)
            found += page.letters
            if page.last <= after:
                break
            after = page.last
        return found
