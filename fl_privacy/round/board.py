"""What is said in the check of an attempt's sums, at the mix where all read it; readers check the signatures."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cryptography.hazmat.primitives.asymmetric import ec

from fl_privacy.errors import ProtocolError, require
from fl_privacy.mix import evidence
from fl_privacy.mix.evidence import Answered, Key, Opened, Sum
from fl_privacy.round import statements

if TYPE_CHECKING:
    from fl_privacy.identity.roster import Roster

SUMS, NONCE, ANSWERS, RECOUNT, OPEN, SILENT = "sums", "nonce", "answers", "recount", "open", "silent"  # stages
LOST = "check: a mix lost its parts; send them again"  # to a site that waits in the check
PAGE = 2**19  # bytes of what is said in one reply
MOST = 64 * 2**20  # bytes of what is said in one stage
OVERHEAD = 64  # bytes that each part costs besides its own


def keys_in(sums: Sequence[Sum], roster: Roster, mixes: Sequence[str]) -> Key:
    """The keys that come with sums, each the one whose fingerprint the roster has: one honest mix is enough."""

    def key(name: str) -> ec.EllipticCurvePublicKey:
        wanted = roster.key_of("mix" if name in mixes else "site", name)
        for given in {one.keys[name] for one in sums if name in one.keys}:
            with suppress(ProtocolError):
                return statements.checker(bytes.fromhex(given), wanted, name)
        raise ProtocolError("PERMISSION_DENIED", f"{name}: no mix gave the key that the roster has for it")

    return key


def pages(said: Sequence[bytes], after: int) -> tuple[list[bytes], bool]:
    """What fits into one reply from number `after` on, and whether that is the rest."""
    found, room = list[bytes](), PAGE
    for one in said[after:]:
        if found and len(one) > room:
            break
        found.append(one)
        room -= len(one)
    return found, after + len(found) >= len(said)


def gathered(ask: Callable[[int], tuple[Sequence[bytes], bool]], until: float, most: int = MOST) -> list[bytes]:
    """All pages of a reply, in time; `ask` gets the number of parts that are known."""
    found, size = list[bytes](), 0
    while True:
        said, complete = ask(len(found))
        require(all(said), "check: a part of a reply is empty")
        found += said
        size += sum(len(one) + OVERHEAD for one in said)
        require(size <= most, "check: more was said than any check needs", "RESOURCE_EXHAUSTED")
        if complete or not said:
            return found
        require(time.monotonic() < until, "check: a reply did not end in time", "DEADLINE_EXCEEDED")


@dataclass
class Board:
    """Of one attempt: first its sums, then the nonce of every member, then its answers."""

    mixes: tuple[str, ...]
    sums: tuple[Sum, ...] = ()
    key: Key | None = None  # of the parties, from the sums
    which: str = ""  # the digest of the sums
    nonces: dict[str, Opened] = field(default_factory=dict)
    answers: dict[str, Answered] = field(default_factory=dict)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    recount: bytes = b""  # as it was signed
    opening: tuple[bytes, bytes] = (b"", b"")  # the last one: for which answers, and what was opened
    _seed: bytes = b""

    def put_sums(self, sums: Sequence[Sum], attempt: str, key: Key) -> None:
        """Once, and only if there is nothing wrong with them before anything is opened."""
        early = evidence.compared(sums, self.mixes, attempt, key)
        require(not early, "; ".join(map(str, early)), "PERMISSION_DENIED")
        same = not self.sums or [one.text() for one in self.sums] == [one.text() for one in sums]
        require(same, "sums: others are being checked in this attempt", "FAILED_PRECONDITION")
        if not self.sums:
            self.sums, self.key, self.which = tuple(sums), key, evidence.together(sums)
            self.notify()

    def put_nonce(self, site: str, one: Opened) -> None:
        own = [member for member in self._listed() if member.site == site == one.site]
        require(bool(own) and self.key is not None, "nonce: of no site in the sums", "PERMISSION_DENIED")
        assert self.key is not None
        good = evidence.is_nonce(one, own[0], self.which, len(self.mixes), self.key)
        require(good, "nonce: not the one that this site committed to, or opened for other sums", "PERMISSION_DENIED")
        if site not in self.nonces:
            self.nonces[site] = one
            self.notify()

    def put_answers(self, site: str, one: Answered) -> None:
        """Once all nonces are here, and only those for the challenge that they make."""
        member = one.by == site and any(m.site == site for m in self._listed())
        require(member and self.key is not None, "answers: of another site", "PERMISSION_DENIED")
        assert self.key is not None
        own = (one.attempt, one.seed) == (self.sums[0].attempt, self.seed().hex())
        good = own and set(one.answers) == set(self.mixes) and evidence.holds(one, self.key(site))
        require(good, "answers: not those of this site to this challenge", "PERMISSION_DENIED")
        if site not in self.answers:
            self.answers[site] = one
            self.notify()

    def seed(self) -> bytes:
        """Of the challenge; the nonces that it is made of stay."""
        if not self._seed:
            ready = self.said(NONCE) is not None and self.key is not None
            require(ready, "check: not all nonces are here", "FAILED_PRECONDITION")
            assert self.key is not None
            opened = list(self.nonces.values())
            self._seed = evidence.challenge(self.sums, opened, self.sums[0].attempt, self.key)
        return self._seed

    def said(self, stage: str) -> list[bytes] | None:
        """What all have said in a stage; None if not all have."""
        found: Mapping[str, Opened | Answered] = self.nonces if stage == NONCE else self.answers
        if stage == SUMS:
            return [one.encode() for one in self.sums] or None
        members = [member.site for member in self.sums[0].members] if self.sums else []
        return [found[site].encode() for site in members] if members and set(found) >= set(members) else None

    def silent(self) -> list[str]:
        """The members that the others wait for."""
        listed = self.sums[0].sites if self.sums else ()
        closed = [site for site in listed if site not in self.nonces]
        return closed or [site for site in listed if site not in self.answers]

    def notify(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()

    def _listed(self) -> Sequence[evidence.Commitment]:
        if not self.sums:
            raise ProtocolError("FAILED_PRECONDITION", "check: there are no sums yet")
        return self.sums[0].members
