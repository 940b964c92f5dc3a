"""Messages between sites that open no port: left at the middleware, which cannot read them, and fetched from there."""

from __future__ import annotations

from dataclasses import dataclass, field

from fl_privacy.errors import require
from fl_privacy.wire import federation_pb2 as pb

LARGEST = 64 * 1024  # bytes of one message
MOST = 32 * 2**20  # bytes of all messages of a run
PER_SENDER = 4096  # waiting messages of one sender
SHARE = 4 * 2**20  # their bytes: one sender must not take the room of the others
OWN = 2**21  # bytes of one sender for which there is room when several others have filled the mailbox
PAGE = 2**20  # bytes of the messages in one reply
LIFE = 3600.0  # seconds


@dataclass
class Mailbox:
    """The messages of one run. Bounded; messages that nobody fetches expire."""

    _letters: list[tuple[float, int, pb.Letter]] = field(default_factory=list)  # with time and number
    _count: int = 0

    def post(self, letter: pb.Letter, now: float) -> None:
        """Keep a message. What a sender tells everyone takes the place of what it said before on the same topic."""
        self._expire(now)
        fits = 0 < len(letter.content) <= LARGEST and 0 < len(letter.topic) <= 64
        require(fits, f"content: 1 to {LARGEST} bytes with a topic are needed")
        if not letter.recipient:
            self._letters = [kept for kept in self._letters if not _same(kept[2], letter)]
        held = sum(len(other.content) for *_, other in self._letters)
        own = [len(other.content) for *_, other in self._letters if other.sender == letter.sender]
        fair = len(own) < PER_SENDER and sum(own) + len(letter.content) <= SHARE
        room = (held + len(letter.content) <= MOST or sum(own) + len(letter.content) <= OWN) and fair
        require(room, "mailbox: full; wait until messages are fetched", "RESOURCE_EXHAUSTED")
        self._count += 1
        self._letters.append((now, self._count, letter))

    def pickup(self, site: str, topic: str, now: float, after: int = 0) -> tuple[list[pb.Letter], int]:
        """The messages waiting for a site, without its own ones. A message to everyone stays for the others.

        No more than fit into one reply: with the number to ask on from, or 0 if these are all.
        """
        self._expire(now)
        page, room = dict[int, pb.Letter](), PAGE
        for _, number, one in self._letters:
            if number > after and one.topic == topic and one.recipient in (site, "") and one.sender != site:
                room -= one.ByteSize()
                if room < 0:
                    break
                page[number] = one
        else:
            room = 0
        self._letters = [kept for kept in self._letters if kept[1] not in page or not kept[2].recipient]
        return list(page.values()), max(page, default=0) if room < 0 else 0

    def said(self, topic: str) -> set[str]:
        """Who has told everyone something on a topic."""
        return {one.sender for *_, one in self._letters if one.topic == topic and not one.recipient}

    def _expire(self, now: float) -> None:
        self._letters = [kept for kept in self._letters if now - kept[0] < LIFE]


def _same(one: pb.Letter, other: pb.Letter) -> bool:
    return (one.recipient, one.sender, one.topic) == (other.recipient, other.sender, other.topic)
