"""PBFT (Castro and Liskov 1999) for one sequence number: pre-prepare, prepare, commit, and views with other heads.

A value is prepared once a quorum voted for it in one view, and decided once a quorum committed to it in one view. A
site that changes the view says what it prepared last, with the votes. A new head must propose the value of the latest
such claim among a quorum of view changes, which travel with its proposal. So what may have been decided in one view is
all that can be decided in later ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fl_privacy.agreement.contributions import digest
from fl_privacy.agreement.messages import Message, Statement, Topic, claiming
from fl_privacy.agreement.terms import Terms
from fl_privacy.crypto.sealing import DENIED
from fl_privacy.errors import require

AHEAD = 64  # views ahead of ours of which votes are kept


def check_votes(terms: Terms, votes: Sequence[Message], topics: Sequence[Topic], like: Statement) -> None:
    """Votes of a quorum of sites for the content of `like`, at its sequence number and view."""
    good = {
        vote.said.author
        for vote in votes
        if vote.said.topic in topics
        and (vote.said.height, vote.said.view, vote.said.content) == (like.height, like.view, like.content)
    }
    why = f"certificate: signed by {len(good)} sites, {terms.quorum} are needed"
    require(len(good) == len(votes) >= terms.quorum, why, DENIED)


def check_change(terms: Terms, change: Message) -> None:
    """A view change that claims a prepared value shows the votes for it."""
    said, claim = change.said, change.said.claim
    require(said.topic is Topic.CHANGE and said.view > 0, "view change: expected one")
    if claim is None:
        require(not change.support, "view change: votes for nothing")
        return
    require(claim[0] < said.view, "view change: claims a value of a later view")
    like = Statement(Topic.PREPARE, said.author, said.height, *claim)
    check_votes(terms, change.support, (Topic.PROPOSE, Topic.PREPARE), like)


def latest(changes: Sequence[Message]) -> bytes | None:
    """The digest that a new head must propose: the latest claim's; None if nobody prepared anything."""
    claims = [change.said.claim for change in changes if change.said.claim is not None]
    return max(claims, key=lambda claim: claim[0])[1] if claims else None


class Ballot:
    """One site's part. `out` collects what it has to send to all sites; the caller empties it."""

    def __init__(
        self,
        terms: Terms,
        site: str,
        height: int,
        before: bytes,
        sign: Callable[[Statement], Statement],
        check: Callable[[bytes], object],
        fresh: Callable[[], bytes | None],
    ) -> None:
        """`check` raises if a value is not one to agree on; `fresh` is one to propose, once there is one."""
        self._terms, self._site, self.height, self._before = terms, site, height, before
        self._sign, self._check, self._fresh = sign, check, fresh
        self.view = 0
        self.accepted: Message | None = None  # the head's proposal of this view
        self.prepared: Message | None = None  # our commit of the last view in which we prepared, value and votes
        self.decision: Message | None = None
        self.own: list[Message] = []  # what we said in this view, to be sent again
        self.out: list[Message] = []
        self._votes: dict[int, dict[str, Message]] = {}
        self._commits: dict[int, dict[str, Message]] = {}
        self._changes: dict[str, Message] = {}

    def digest(self, value: bytes) -> bytes:
        return digest(self._terms, self.height, self._before, value)

    @property
    def is_armed(self) -> bool:
        """Whether the view's time runs: a quorum has reached it, so that it can succeed."""
        there = [change for change in self._changes.values() if change.said.view >= self.view]
        return self.decision is None and (self.view == 0 or len(there) >= self._terms.quorum)

    def take(self, message: Message) -> None:
        """Act on a message of this sequence number. Everything in it is known to be signed by whom it says."""
        said = message.said
        if self.decision is not None:
            return
        if said.topic is Topic.PROPOSE:
            self._proposed(message)
        elif said.topic is Topic.CHANGE:
            self._changed(message)
        elif said.topic is Topic.DECIDED:
            self._decided(message)
        elif said.topic in (Topic.PREPARE, Topic.COMMIT):
            self._voted(message.bare)
        self.advance()

    def expired(self, view: int) -> None:
        """The time of a view is over: on to the next, with another head."""
        if view == self.view and self.is_armed:
            self._enter(view + 1)
            self.advance()

    def resume(self, view: int, accepted: Message | None, prepared: Message | None, own: Sequence[Message]) -> None:
        """After a restart: continue in the view that this site was in, with what it said there."""
        self.view, self.accepted, self.prepared, self.own = view, accepted, prepared, list(own)
        for vote in () if prepared is None else (prepared.bare, *prepared.support):
            self._voted(vote)
        for message in own if accepted is None else (accepted, *own):
            if message.said.topic is Topic.CHANGE:
                self._changes[self._site] = message
            else:
                self._voted(message.bare)

    def advance(self) -> None:
        """Whatever can be done with what has arrived."""
        while self._decide() or self._join() or self._propose() or self._prepare():
            pass

    def _proposed(self, message: Message) -> None:
        said, view = message.said, message.said.view
        require(said.author == self._terms.head(self.height, view), "proposal: not of this view's head", DENIED)
        require(said.content == self.digest(message.value), "proposal: another value than its digest says")
        if view < self.view or (view == self.view and self.accepted is not None):
            return
        self._check_proof(message)
        self._check(message.value)
        if view > self.view:
            self._enter(view)
        self.accepted = message
        self._voted(message.bare)
        if said.author != self._site:
            self._say(Topic.PREPARE, view, said.content)

    def _check_proof(self, message: Message) -> None:
        """A proposal of a later view proves by a quorum of view changes that nothing else can have been decided."""
        said, changes = message.said, message.support
        if said.view == 0:
            require(not changes, "proposal: view 0 needs no view changes")
            return
        for change in changes:
            right = (change.said.height, change.said.view) == (said.height, said.view)
            require(right, "proposal: its view changes are for another view", DENIED)
            check_change(self._terms, change)
        authors = {change.said.author for change in changes}
        why = f"proposal: view changes of {len(authors)} sites, {self._terms.quorum} are needed"
        require(len(authors) == len(changes) >= self._terms.quorum, why, DENIED)
        require(latest(changes) in (None, said.content), "proposal: not the value that was prepared last", DENIED)

    def _changed(self, message: Message) -> None:
        check_change(self._terms, message)
        claim, before = message.said.claim, self._changes.get(message.said.author)
        whole = claim is None or self.digest(message.value) == claim[1]
        require(whole, "view change: without the value that it claims")
        if before is None or before.said.view < message.said.view:
            self._changes[message.said.author] = message

    def _decided(self, message: Message) -> None:
        """Another site shows a quorum of commits: a checkpoint, with the value that it stands for."""
        said = message.said
        require(
            said.content == self.digest(message.value), "decision: not a value for what we agreed on before", DENIED
        )
        check_votes(self._terms, message.support, (Topic.COMMIT,), said)
        self._check(message.value)
        self._conclude(said.view, message.value, message.support)

    def _voted(self, vote: Message) -> None:
        """The first vote of a site in a view counts; another one for something else is for the witness."""
        said = vote.said
        if said.view <= self.view + AHEAD:
            votes = self._commits if said.topic is Topic.COMMIT else self._votes
            votes.setdefault(said.view, {}).setdefault(said.author, vote)

    def _enter(self, view: int) -> None:
        """Leave the view: from here on nothing is said in it."""
        self.view, self.accepted, self.own = view, None, []
        last = self.prepared
        content = b"" if last is None else claiming(last.said.view, last.said.content)
        value, votes = (b"", ()) if last is None else (last.value, last.support)
        self._changes[self._site] = self._say(Topic.CHANGE, view, content, value, votes)

    def _join(self) -> bool:
        """A correct site has reached a later view: go there."""
        views = sorted((change.said.view for change in self._changes.values()), reverse=True)
        target = views[self._terms.faults] if len(views) > self._terms.faults else 0
        if target <= self.view or self.decision is not None:
            return False
        self._enter(target)
        return True

    def _propose(self) -> bool:
        is_head = self._terms.head(self.height, self.view) == self._site
        if not is_head or self.accepted is not None or self.decision is not None:
            return False
        changes = [change for change in self._changes.values() if change.said.view == self.view] if self.view else []
        if self.view and len(changes) < self._terms.quorum:
            return False
        wanted = latest(changes)
        known = {change.said.claim[1]: change.value for change in changes if change.said.claim is not None}
        value = self._fresh() if wanted is None else known[wanted]
        if value is None:
            return False
        proof = tuple(Message(change.said, support=change.support) for change in changes)
        self.accepted = self._say(Topic.PROPOSE, self.view, self.digest(value), value, proof)
        self._voted(self.accepted.bare)
        return True

    def _prepare(self) -> bool:
        """Commit to what a quorum voted for in this view."""
        if self.accepted is None or (self.prepared is not None and self.prepared.said.view == self.view):
            return False
        votes = self._for(self._votes, self.view, self.accepted.said.content)
        if len(votes) < self._terms.quorum:
            return False
        commit = self._say(Topic.COMMIT, self.view, self.accepted.said.content)
        self.prepared = Message(commit.said, self.accepted.value, votes)
        self._voted(commit)
        return True

    def _decide(self) -> bool:
        """What a quorum committed to in one view is decided, if we know the value; otherwise we ask for it."""
        known = {last.said.content: last.value for last in (self.accepted, self.prepared) if last is not None}
        for view in [] if self.decision is not None else self._commits:
            for content, value in known.items():
                commits = self._for(self._commits, view, content)
                if len(commits) >= self._terms.quorum:
                    self._conclude(view, value, commits)
                    return True
        return False

    def _conclude(self, view: int, value: bytes, commits: tuple[Message, ...]) -> None:
        said = Statement(Topic.DECIDED, self._site, self.height, view, self.digest(value))
        self.decision = Message(self._sign(said), value, commits)
        self.own = []

    def _for(self, votes: dict[int, dict[str, Message]], view: int, content: bytes) -> tuple[Message, ...]:
        return tuple(vote for vote in votes.get(view, {}).values() if vote.said.content == content)

    def _say(
        self, topic: Topic, view: int, content: bytes, value: bytes = b"", support: tuple[Message, ...] = ()
    ) -> Message:
        said = self._sign(Statement(topic, self._site, self.height, view, content))
        message = Message(said, value, support)
        self.own.append(message)
        self.out.append(message)
        if topic is Topic.PREPARE:
            self._voted(message)
        return message
