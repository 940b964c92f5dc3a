"""Bulletins of the sites of an agreement at a mailbox: what others say that is new, and what this site says."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from cryptography.hazmat.primitives import serialization

from fl_privacy.agreement import bulletin as sealed
from fl_privacy.agreement.bulletin import CHECKS, MESSAGES, Bulletin
from fl_privacy.agreement.terms import Terms
from fl_privacy.crypto import sealing
from fl_privacy.errors import ProtocolError
from fl_privacy.round.letters import Card, Letters
from fl_privacy.round.mailbox import LARGEST

TOPIC = "agreement"
PIECE = LARGEST - 1024  # leaves room for a letter's signature and marks
MOST_PIECES = 64
RENEW = 60.0  # seconds: the mailbox may have lost it, and it keeps nothing for more than an hour


def run_of(roster: str) -> str:
    """Under which name the mailbox keeps the letters of a roster's agreement."""
    return f"{TOPIC}-{roster}"


@dataclass(frozen=True)
class News:
    """A message that was not taken before. One that is refused now may be good once another site's key is known."""

    data: bytes
    taken: Callable[[], None]


class Noticeboard:
    """One site's bulletin, and what it read in those of the others."""

    def __init__(self, letters: Letters, terms: Terms) -> None:
        self._letters, self._terms = letters, terms
        self.bulletins: dict[str, Bulletin] = {}  # the newest of every other site
        self.evidence = b""
        self._messages: dict[bytes, None] = {}
        self._checks: dict[str, tuple[int, str]] = {}
        self._cards: dict[str, Card] = {}
        self._read: dict[str, bytes] = {}  # by site: digest of its sealed bulletin
        self._taken: set[bytes] = set()  # digests of messages that are on a board
        self._refused: set[bytes] = set()  # likewise, and not worth another look before something changes
        self._keys = 0  # that were known at the last look
        self._last: tuple[Bulletin, frozenset[tuple[str, bytes]]] | None = None
        self._due = 0.0
        self._card_due = 0.0

    def news(self) -> Iterator[News]:
        """What others say that was not taken yet."""
        now = time.monotonic()
        if self._card_due <= now:
            self._letters.publish()
            self._card_due = now + RENEW
        # Another roster may be in force by now: only the keys of this one are written to.
        cards = {site: card for site, card in self._letters.cards().items() if self._terms.learn(site, _der(card))}
        if set(self._cards) - set(cards):  # the mailbox was restarted: it has lost ours too
            self._card_due = self._due = 0.0
        self._cards = cards
        for site, data in self._texts().items():
            digest = hashlib.sha256(data).digest()
            if self._read.get(site) != digest and (found := self._opened(site, data)) is not None:
                self.bulletins[site], self._read[site] = found, digest
        for found in self.bulletins.values():
            for other, key in found.known.items():
                self._learn(other, key)
        there = {hashlib.sha256(message).digest(): message for b in self.bulletins.values() for message in b.messages}
        self._taken &= there.keys()
        self._refused = self._refused & there.keys() if self._keys == len(self._terms.key_of) else set()
        self._keys = len(self._terms.key_of)
        for mark in [mark for mark in there if mark not in self._taken and mark not in self._refused]:
            self._refused.add(mark)
            yield News(there[mark], lambda mark=mark: self._taken.add(mark))  # type: ignore[misc]

    def moved(self) -> None:
        """What was refused may be good now."""
        self._refused.clear()

    @property
    def shown(self) -> Mapping[str, tuple[int, str]]:
        """By run: this site's newest round, and the check value of its upload."""
        return self._checks

    def again(self) -> None:
        """Hand out all messages once more: some may have come before they could be used."""
        self._taken.clear()
        self._refused.clear()

    def say(self, message: bytes) -> None:
        """Keep the newest messages; what was said before and is said again is the newest."""
        self._messages.pop(message, None)
        self._messages[message] = None
        while len(self._messages) > MESSAGES:
            self._messages.pop(next(iter(self._messages)))

    def show(self, run: str, nonce: bytes, round: int, value: bytes) -> None:
        place = f"{run} {nonce.hex()}"
        self._checks.pop(place, None)
        self._checks[place] = round, value.hex()
        while len(self._checks) > CHECKS:
            self._checks.pop(next(iter(self._checks)))

    def publish(self) -> bool:
        """Put up what there is to say, if that or who can read it changed, or the last time was long ago."""
        made = Bulletin(
            self._terms.roster, dict(self._terms.key_of), tuple(self._messages), dict(self._checks), self.evidence
        )
        readers = frozenset((site, card.key.public_bytes_raw()) for site, card in self._cards.items())
        now = time.monotonic()
        if (made, readers) == self._last and now < self._due:
            return False
        recipients = {site: card.key for site, card in self._cards.items()}
        text = sealed.seal(made.encode(), recipients, self._letters.signer, self._bound(self._letters.own))
        parts = sealed.pieces(text, PIECE)
        if len(parts) > MOST_PIECES:
            raise ProtocolError("RESOURCE_EXHAUSTED", f"bulletin: {len(text)} bytes are too many for the mailbox")
        for number, part in reversed(list(enumerate(parts))):  # the first says how many there are
            self._letters.announce(f"{TOPIC} {number}", part)
        changed = (made, readers) != self._last
        self._last, self._due = (made, readers), now + RENEW
        return changed

    def _texts(self) -> dict[str, bytes]:
        """The sealed bulletins that are whole."""
        first = self._letters.announced(f"{TOPIC} 0", self._cards)
        counts = {site: min(sealed.count_of(part), MOST_PIECES) for site, part in first.items()}
        parts = {site: [part] for site, part in first.items()}
        for number in range(1, max(counts.values(), default=0)):
            for site, part in self._letters.announced(f"{TOPIC} {number}", self._cards).items():
                if number < counts.get(site, 0) and len(parts[site]) == number:
                    parts[site].append(part)
        whole = {site: sealed.joined(found) for site, found in parts.items() if len(found) == counts[site]}
        return {site: text for site, text in whole.items() if text is not None}

    def _opened(self, site: str, data: bytes) -> Bulletin | None:
        """A bulletin for us under the roster that we accepted; None for anything else."""
        try:
            text = sealed.unseal(
                data, self._letters.own, self._letters.secret, self._cards[site].signer, self._bound(site)
            )
            found = None if text is None else Bulletin.decode(text)
        except ProtocolError:
            return None
        return found if found is not None and found.roster == self._terms.roster else None

    def _learn(self, site: str, key: bytes) -> None:
        if site in self._terms.sites and site not in self._terms.key_of:
            self._terms.learn(site, key)

    def _bound(self, sender: str) -> bytes:
        return sealing.fields("fl-privacy bulletin 1", self._letters.run, self._terms.scope, sender)


def _der(card: Card) -> bytes:
    return card.signer.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
