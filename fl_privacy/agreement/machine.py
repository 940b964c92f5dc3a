"""One site's part in an agreement, as a state machine: messages and named timeouts in, messages and decisions out.

It has no clock and does no I/O. Whoever drives it
- calls `start` once, `receive` with every message that arrives, and `expired` with the name of a timer that is over;
- **writes the state (`saved.save`) to the disk before it sends anything** that a call returned: a site that is killed
  and restored from that says the same again, and never two things that exclude each other;
- carries messages sealed from site to site, because openings and values hold contributions.

Messages may be lost, repeated, delayed and reordered: what matters is sent again whenever the timer `resend` is over.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from cryptography.hazmat.primitives.asymmetric import ec

from fl_privacy.agreement import contributions as parts
from fl_privacy.agreement.ballot import Ballot
from fl_privacy.agreement.conflicts import Proof, Witness
from fl_privacy.agreement.contributions import COMMITMENTS, CONTRIBUTIONS, Outcome
from fl_privacy.agreement.messages import DIGEST, Message, Statement, Topic, decode, encode, sign
from fl_privacy.agreement.terms import Terms, public
from fl_privacy.errors import FederationError, ProtocolError, require

RESEND, DEADLINE = "resend", "deadline"
EARLY = 16  # messages of a site kept for the next sequence number, and how long they may be
EARLY_BYTES = 2**16
BEHIND = (Topic.ASK, Topic.CHANGE)  # what shows that its author has not decided yet


@dataclass(frozen=True)
class Send:
    """To one site, or to all others."""

    data: bytes
    to: str = ""


@dataclass(frozen=True)
class Timer:
    """Call `expired(name)` later: after a time of the driver's choice, doubled so often."""

    name: str
    doublings: int = 0


@dataclass(frozen=True)
class Agreed:
    outcome: Outcome


@dataclass(frozen=True)
class Stopped:
    """There is no agreement, and this site says nothing more."""

    reason: str


@dataclass(frozen=True)
class Named:
    """A site signed two statements that exclude each other."""

    proof: Proof


Output = Send | Timer | Agreed | Stopped | Named


class Agreement:
    """`contribution`: 32 bytes from the operating system (`fl_privacy.crypto.keys.fresh`), new for every agreement."""

    def __init__(self, terms: Terms, site: str, key: ec.EllipticCurvePrivateKey, contribution: bytes) -> None:
        if terms.key_of.get(site) != public(key):
            raise FederationError(f"agreement: {site!r} has another key than the roster's, or is not in it")
        if len(contribution) != DIGEST:
            raise FederationError(f"contribution: {len(contribution)} bytes, {DIGEST} are needed; use keys.fresh()")
        self.terms, self.site, self.contribution = terms, site, contribution
        self.witness = Witness(terms, site)
        self.outcome: Outcome | None = None
        self.stopped = ""
        self.decisions: list[Message] = []
        self._key = key
        self._commitments: dict[str, Statement] = {}
        self._openings: dict[str, bytes] = {}
        self._agreed: dict[str, bytes] = {}  # the commitments
        self._early: dict[str, deque[Message]] = {}
        self._armed = ""
        self._heard: set[str] = set()  # since `resend` was over for the last time but one
        self._heard_last: set[str] = set()
        self._said: Message | None = None  # our commitment, or our opening
        self._out: list[Output] = []
        self.ballot = self._next_ballot()

    @property
    def is_over(self) -> bool:
        return self.outcome is not None or bool(self.stopped)

    @property
    def proofs(self) -> dict[str, Proof]:
        """Who was caught, and the proof."""
        return self.witness.proofs

    def start(self) -> list[Output]:
        """Begin, or continue after a restart."""
        if not self.is_over:
            self._out += [Timer(RESEND), Timer(DEADLINE)]
            self._armed = ""
            self._speak()
            self._resend()
            self.ballot.advance()
        return self._done()

    def receive(self, data: bytes) -> list[Output]:
        """Act on a message. One that its author did not sign for this agreement is refused and changes nothing."""
        if self.stopped:
            return []
        message = decode(data, self.terms)
        said = message.said
        if said.author == self.site:
            return []
        self._heard.add(said.author)
        self._hear(message.statements())
        if said.topic in BEHIND:
            self._help(said)
        if said.height == self._height + 1 and said.topic is not Topic.ASK and len(data) <= EARLY_BYTES:
            self._early.setdefault(said.author, deque(maxlen=EARLY)).append(message)
        elif said.height == self._height and self.outcome is None:
            self._take(message)
        return self._done()

    def expired(self, name: str) -> list[Output]:
        """The time of a timer is over; one that we no longer wait for changes nothing."""
        if self.is_over:
            return []
        if name == RESEND:
            self._heard_last, self._heard = self._heard, set()
            self._out.append(Timer(RESEND))
            self._resend()
        elif name == DEADLINE:
            self._stop()
        elif name == self._view_timer:
            self.ballot.expired(self.ballot.view)
        return self._done()

    def resume(self, decision: Message) -> None:
        """After a restart: what was decided before it."""
        self._decide(decision)
        self._out.clear()
        self.ballot.out.clear()

    def evidence(self) -> bytes:
        """What every site signed, as far as we know. Signatures and digests only; for sites with other check values."""
        return self.witness.evidence()

    def examine(self, evidence: bytes) -> list[Proof]:
        """The sites that another site's evidence proves to have contradicted themselves, and that we did not know."""
        return self.witness.examine(evidence)

    def check_value(self, round: int) -> bytes:
        """To go with this site's upload of a round."""
        if self.outcome is None:
            raise FederationError("agreement: no secret was agreed on yet")
        return parts.check_value(self.terms, self.outcome.secret, round)

    @property
    def _height(self) -> int:
        """The sequence number that is open."""
        return len(self.decisions) + 1

    @property
    def _view_timer(self) -> str:
        return f"view {self._height} {self.ballot.view}"

    @property
    def _before(self) -> bytes:
        return self.decisions[-1].said.content if self.decisions else b""

    def _next_ballot(self) -> Ballot:
        check, fresh = (
            (self._check_commitments, self._fresh_commitments)
            if self._height == COMMITMENTS
            else (self._check_contributions, self._fresh_contributions)
        )
        return Ballot(self.terms, self.site, self._height, self._before, self._sign, check, fresh)

    def _check_commitments(self, value: bytes) -> None:
        parts.commitments_of(self.terms, value)

    def _check_contributions(self, value: bytes) -> None:
        parts.contributions_of(self.terms, self._agreed, value)

    def _fresh_commitments(self) -> bytes | None:
        enough = len(self._commitments) >= len(self.terms.sites) - self.terms.faults
        return parts.of_commitments(self._commitments) if enough else None

    def _fresh_contributions(self) -> bytes | None:
        return parts.of_contributions(self._openings) if len(self._openings) > self.terms.faults else None

    def _take(self, message: Message) -> None:
        said = message.said
        if said.topic is Topic.COMMITMENT:
            self._commitments.setdefault(said.author, said)
            self.ballot.advance()
        elif said.topic is Topic.OPENING:
            right = parts.opens(self.terms, self._agreed, said.author, said.content)
            require(right, f"opening: not what {said.author} committed to, or not among what was agreed on")
            self._openings[said.author] = said.content
            self.ballot.advance()
        else:
            self.ballot.take(message)

    def _done(self) -> list[Output]:
        """Move on if something was decided, and hand out what there is to send."""
        self._collect()
        while self.ballot.decision is not None and self.outcome is None:
            self._decide(self.ballot.decision)
            self._collect()
        timer = self._view_timer if self.ballot.is_armed and not self.is_over else ""
        if timer != self._armed:
            self._armed = timer
            self._out += [Timer(timer, self.ballot.view)] if timer else []
        found, self._out = self._out, []
        return found

    def _collect(self) -> None:
        self._out += [Send(encode(message)) for message in self.ballot.out]
        self.ballot.out.clear()

    def _decide(self, decision: Message) -> None:
        """One sequence number is settled: open what was committed to, or derive the secret."""
        self.decisions.append(decision)
        proposal = () if self.ballot.accepted is None else self.ballot.accepted.statements()
        self._hear([*decision.statements(), *proposal], decided=True)
        if len(self.decisions) == COMMITMENTS:
            self._agreed = parts.commitments_of(self.terms, decision.value)
            self.ballot = self._next_ballot()
            self._speak()
            self._out += [] if self._said is None else [Send(encode(self._said))]
            early, self._early = self._early, {}
            for message in (message for kept in early.values() for message in kept):
                try:
                    self._take(message)
                except ProtocolError:
                    continue  # it was accepted unread; its author's fault
            self.ballot.advance()
        else:
            opened = parts.contributions_of(self.terms, self._agreed, decision.value)
            self.outcome = parts.outcome(self.terms, opened, decision.said.content)
            self._out.append(Agreed(self.outcome))

    def _speak(self) -> None:
        """Commit to our contribution; once the commitments are agreed on, open it if it is among them."""
        if self._height == COMMITMENTS:
            content, topic = parts.commitment(self.terms, self.site, self.contribution), Topic.COMMITMENT
            said = self._sign(Statement(topic, self.site, COMMITMENTS, 0, content))
            self._commitments[self.site] = said
            self._said = Message(said)
        elif parts.opens(self.terms, self._agreed, self.site, self.contribution):
            self._openings[self.site] = self.contribution
            opening = Statement(Topic.OPENING, self.site, CONTRIBUTIONS, 0, self.contribution)
            self._said = Message(self._sign(opening))
        else:
            self._said = None

    def _resend(self) -> None:
        ask = self._sign(Statement(Topic.ASK, self.site, self._height, self.ballot.view, b""))
        spoken = [] if self._said is None else [self._said]
        self._out += [Send(encode(message)) for message in (*spoken, *self.ballot.own, Message(ask))]

    def _help(self, said: Statement) -> None:
        """State transfer: what we decided and this site did not."""
        self._out += [Send(encode(message), said.author) for message in self.decisions[said.height - 1 :]]

    def _hear(self, statements: Iterable[Statement], decided: bool = False) -> None:
        self._out += [Named(proof) for proof in self.witness.hear(statements, decided)]

    def _sign(self, statement: Statement) -> Statement:
        """The only place where this site signs. What contradicts an earlier signature is not signed."""
        against = self.witness.contradicted(statement)
        require(
            against is None, "agreement: this site signed something else before; its state is not its own", "ABORTED"
        )
        signed = self.witness.said_before(statement) or sign(self.terms, self._key, statement)
        self._hear([signed])
        return signed

    def missing(self) -> str:
        """How many sites answered lately, and who did not."""
        heard = {self.site, *self._heard, *self._heard_last}
        silent = [site for site in self.terms.sites if site not in heard]
        came = f"{len(heard)} of {len(self.terms.sites)} sites answered, {self.terms.quorum} are needed"
        return f"{came}; silent: {', '.join(silent)}" if silent else came

    def _stop(self) -> None:
        """Say who is missing: with n / 3 or more silent there is no quorum, and none of us decides alone."""
        missing = self.missing()
        fix = "; start them, then a new agreement" if "silent" in missing else "; start a new agreement"
        self.stopped = f"agreement: none was reached in time; {missing}{fix}"
        self._out.append(Stopped(self.stopped))
