"""Two signed statements of one site that no correct site makes both: a proof that anyone can check with the terms."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fl_privacy.agreement.messages import VOTES, Message, Statement, Topic, as_list, loads, parse_statement
from fl_privacy.agreement.terms import Terms
from fl_privacy.errors import ProtocolError, require

KEPT = (Topic.COMMITMENT, *VOTES, Topic.CHANGE)  # openings are secret, and the others bind nobody
MOST = 256  # statements kept of another site: four for each sequence number and view
LONGEST = 512  # bytes that one takes at most


def conflict(one: Statement, other: Statement) -> str:
    """Why no correct site says both, or "".

    Besides two different statements for one place: a site that commits to a value has prepared it, so a view change
    of its to a later view must claim that value's view, or a later one. It commits to nothing in a view that it left.
    """
    if one.author != other.author or one.height != other.height:
        return ""
    if one.topic is other.topic is Topic.COMMITMENT and one.content != other.content:
        return "two commitments"
    same = one.view == other.view and one.content != other.content
    if same and one.topic in VOTES and other.topic in VOTES:
        return f"two values in view {one.view}"
    if same and one.topic is other.topic is Topic.CHANGE:
        return f"two view changes to view {one.view}"
    forgotten = _forgets(one, other) or _forgets(other, one)
    return "a view change that hides a commit" if forgotten else ""


def _forgets(commit: Statement, change: Statement) -> bool:
    if commit.topic is not Topic.COMMIT or change.topic is not Topic.CHANGE or change.view <= commit.view:
        return False
    claim = change.claim
    return claim is None or claim[0] < commit.view or (claim[0] == commit.view and claim[1] != commit.content)


@dataclass(frozen=True)
class Proof:
    """That a site signed two statements that exclude each other."""

    first: Statement
    second: Statement

    @property
    def site(self) -> str:
        return self.first.author

    def reason(self, terms: Terms) -> str:
        """What the site did, or "" if this proves nothing under these terms."""
        genuine = self.first.is_genuine(terms) and self.second.is_genuine(terms)
        return conflict(self.first, self.second) if genuine else ""

    def encode(self) -> bytes:
        return packed([self.first, self.second])

    @classmethod
    def decode(cls, data: bytes) -> Proof:
        found = unpacked(data)
        require(len(found) == 2, "proof: two statements are needed")
        return cls(*found)


def packed(statements: Iterable[Statement]) -> bytes:
    return json.dumps([as_list(Message(said))[:6] for said in statements], separators=(",", ":")).encode()


def unpacked(data: bytes) -> list[Statement]:
    found = loads(data)
    require(isinstance(found, list), "evidence: not a list of statements")
    return [parse_statement(entry) for entry in found]


class Witness:
    """Remembers what every site signed, and finds out who contradicts itself."""

    def __init__(self, terms: Terms, own: str = "") -> None:
        self._terms, self._own = terms, own
        self._said: dict[str, dict[tuple[Topic, int, int, bytes], Statement]] = {site: {} for site in terms.sites}
        self.proofs: dict[str, Proof] = {}

    def hear(self, statements: Iterable[Statement], decided: bool = False) -> list[Proof]:
        """Keep genuine statements; returns the first proof against each site that was not known to be faulty.

        Those behind what was `decided` have room however much their authors said before: they prove a split.
        """
        found = []
        for said in statements:
            place = (said.topic, said.height, said.view, said.content)
            kept = self._said[said.author]
            if said.topic not in KEPT or place in kept:
                continue
            against = self.contradicted(said)
            if against is not None and said.author not in self.proofs:
                self.proofs[said.author] = Proof(against, said)
                found.append(self.proofs[said.author])
            if decided or len(kept) < MOST or said.author == self._own:
                kept[place] = said
        return found

    def contradicted(self, said: Statement) -> Statement | None:
        """What its author said before that excludes this."""
        return next((old for old in self._said[said.author].values() if conflict(old, said)), None)

    def said_before(self, said: Statement) -> Statement | None:
        """The same statement as its author signed it before."""
        return self._said[said.author].get((said.topic, said.height, said.view, said.content))

    def evidence(self) -> bytes:
        """Everything that was heard, for another site or a third party. It holds signatures and digests, no secret."""
        return packed(self.statements())

    def statements(self) -> Sequence[Statement]:
        proofs = [said for proof in self.proofs.values() for said in (proof.first, proof.second)]
        return [*(said for kept in self._said.values() for said in kept.values()), *proofs]

    def examine(self, data: bytes) -> list[Proof]:
        """What another site's evidence adds. A statement that is not genuine is refused, and all of it with it."""
        most = LONGEST * 2 * MOST * len(self._terms.sites)
        require(len(data) <= most, f"evidence: {len(data)} bytes, at most {most} are allowed")
        statements = unpacked(data)
        for said in statements:
            if said.topic not in KEPT or not said.is_genuine(self._terms):
                raise ProtocolError("PERMISSION_DENIED", "evidence: not signed by the site that it names")
        return self.hear(statements)
