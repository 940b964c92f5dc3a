"""Messages between sites that open no port: left at the middleware, which cannot read them, and fetched from there."""

from __future__ import annotations

from dataclasses import dataclass, field

from fl_privacy.errors import ProtocolError
from fl_privacy.wire import federation_pb2 as pb

LARGEST = 64 * 1024  # bytes of one message
MOST = 32 * 2**20  # bytes of all messages of a run
PER_SENDER = 4096  # messages of one sender that wait
LIFE = 3600.0  # seconds


@dataclass
class Mailbox:
    """The messages of one run. Bounded; what nobody fetches expires."""

    _letters: list[tuple[float, pb.Letter]] = field(default_factory=list)

    def post(self, letter: pb.Letter, now: float) -> None:
        self._expire(now)
        if not 0 < len(letter.content) <= LARGEST or not 0 < len(letter.topic) <= 64:
            raise ProtocolError("INVALID_ARGUMENT", f"content: 1 to {LARGEST} bytes with a topic are needed")
        held = sum(len(other.content) for _, other in self._letters)
        own = sum(other.sender == letter.sender for _, other in self._letters)
        if held + len(letter.content) > MOST or own >= PER_SENDER:
            raise ProtocolError("RESOURCE_EXHAUSTED", "mailbox: full; wait until messages are fetched")
        self._letters.append((now, letter))

    def pickup(self, site: str, topic: str, now: float) -> list[pb.Letter]:
        """What waits for a site. A message to everyone stays for the others; one of its own is not its mail."""
        self._expire(now)
        found = [one for _, one in self._letters if one.topic == topic and one.recipient in (site, "")]
        taken = {id(one) for one in found if one.recipient}
        self._letters = [(at, one) for at, one in self._letters if id(one) not in taken]
        return [one for one in found if one.sender != site]

    def _expire(self, now: float) -> None:
        self._letters = [(at, one) for at, one in self._letters if now - at < LIFE]
