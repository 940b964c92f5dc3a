"""An aggregator that runs at a site: it opens its shard of every update, combines them, and seals the new shard.

It gives nothing to anybody but the new shard and a sum of counts, and holds itself to the rules of an aggregator
process: the attempt's terms, the floors, one set of sites per model, and a journal that outlives the process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fl_privacy.coding import Decoder, Payload
from fl_privacy.crypto import keys, sealing
from fl_privacy.errors import ConfigError, ProtocolError, require
from fl_privacy.round import opening, shard_statements
from fl_privacy.round.checkpoints import Arrays
from fl_privacy.round.cohort import Cohort
from fl_privacy.round.counted import Counted, sent
from fl_privacy.round.journal import Entry, Journal
from fl_privacy.round.letters import Card, Letters
from fl_privacy.round.service import check_records
from fl_privacy.round.shard_store import DECODER, MODEL, SHARD, START, ShardStore, stepped
from fl_privacy.round.terms import Terms, joined
from fl_privacy.shard import sealed
from fl_privacy.vector import Vector
from fl_privacy.wire import federation_pb2 as pb
from fl_privacy.wire.stream import digest

if TYPE_CHECKING:
    from fl_privacy.routes.ends import SiteSeat

FOLDER = "aggregator"  # in the site's own folder
SAID, STATEMENT = "said", "statement"
CLOSED = "FAILED_PRECONDITION"


@dataclass
class Opened:
    """What this site has of an attempt's updates, until it is applied or another one takes its place."""

    terms: Terms
    cohort: Cohort
    model: Vector
    kept: Mapping[str, Arrays]
    decoder: Decoder
    counted: Counted
    shards: dict[str, sealed.Content] = field(default_factory=dict)

    @property
    def members(self) -> bytes:
        return self.cohort.bits(self.shards)

    @property
    def senders(self) -> bytes:
        return self.cohort.bits(set(self.counted.sites) & self.shards.keys())

    @property
    def floor(self) -> int:
        """The largest that a sender demands."""
        return max((one.floor for one in self.shards.values()), default=0)


@dataclass(frozen=True)
class Applied:
    """A shard after a round, and what the others get of it."""

    round: int
    said: pb.ShardStatement
    shard: Vector | None  # none at a farewell
    decoder: Decoder
    counts: bytes = b""


class Aggregating:
    """Shard `index` of a run's model, at one site."""

    def __init__(self, seat: SiteSeat, index: int, first: Vector) -> None:
        """`first` is the shard of the initial model."""
        self._seat, self._federation, self.index, self._first = seat, seat.federation, index, first
        self._coding, self._cuts = seat.federation.coding, seat.federation.route.joins_every_round
        self._opened: Opened | None = None

    @cached_property
    def _folder(self) -> Path:
        if self._seat.state is None:
            raise ConfigError("state: a site that aggregates needs a folder of its own; give its worker --state")
        return self._seat.state / FOLDER

    @cached_property
    def _journal(self) -> Journal:
        return Journal(self._folder)

    @cached_property
    def _store(self) -> ShardStore:
        return ShardStore(self._folder / "shards")

    @property
    def holds(self) -> str:
        """The attempt whose updates are open here."""
        return self._opened.terms.name if self._opened else ""

    def check(self, header: pb.RoundHeader, column: Payload, letters: Letters, cards: Mapping[str, Card]) -> Opened:
        """Open the shards of an attempt. One that does not open, or has no place here, is left out and logged."""
        cohort, roster = opening.cohort_of(header, self._federation), self._seat.keys.roster()
        model, kept = self._after(header.run, header.farewell or header.round - 1)
        ours = len(header.shards) > self.index and header.shards[self.index] == digest(model)
        require(ours, "shards: another model than this site has a shard of", CLOSED)
        whole = joined(list(header.shards))
        model = self._start(header, kept, whole) if self._cuts and not header.farewell else model
        server = roster.key_of("server", "server") or ""
        facts = (cohort, whole, server, self._federation, roster)
        opened = Opened(opening.terms_of(header, *facts), cohort, model, kept, *self._receivers(header, model, kept))
        accepted = cohort.of_bits(header.members)
        length = 0 if header.farewell else self._coding.length(model.size)
        (size,) = sealed.sizes([length * self._coding.type.itemsize], header.counts)
        for site, piece in zip(accepted, sealing.split(column.data, [size] * len(accepted)), strict=True):
            try:
                bound = bound_to(self._federation.name, header.run, header.attempt, site, self._seat.site)
                require(site in cards, "card: this site has published none")
                content = sealing.unseal(piece, letters.secret, cards[site].signer, bound)
                self._admit(opened, site, sealed.Content.decode(content, self._coding, length, header.counts))
            except ProtocolError as error:
                self._seat.log("shard-refused", run=header.run, round=header.round, site=site, reason=str(error))
        self._leave_out(opened)
        self._opened = opened
        return opened

    def _start(self, header: pb.RoundHeader, kept: Mapping[str, Arrays], whole: bytes) -> Vector:
        """With masks per round: this site's shard of that model, cut along the masks of the round."""
        if header.round == 1:
            return self._first
        there = START in kept and kept[START][MODEL].tobytes() == whole
        require(there, "shard: this site has not received the model that the round starts from", CLOSED)
        return kept[START][SHARD]

    def begin(self, run: str, after: int, whole: bytes, start: Vector) -> None:
        """Keep the shard that the next round starts from, cut from the model of that digest."""
        if after not in self._store.rounds(run):
            raise ProtocolError(CLOSED, f"shard: this site has none after round {after}")
        known = self._store.load(run, after)[1].get(START, {})
        if MODEL not in known or known[MODEL].tobytes() != whole:
            self._store.add_start(run, after, start, whole)

    def _leave_out(self, opened: Opened) -> None:
        """Senders that demand more organisations than there are: they would hold back the others for nothing."""
        while opened.floor > (there := self._seat.keys.roster().organisations(list(opened.shards))):
            for site in [site for site, one in opened.shards.items() if one.floor > there]:
                reason = f"floor: {opened.shards.pop(site).floor}, and there are {there} organisations"
                self._seat.log("shard-refused", run=opened.terms.run, site=site, reason=reason)

    def _receivers(self, header: pb.RoundHeader, model: Vector, kept: Mapping[str, Arrays]) -> tuple[Decoder, Counted]:
        decoder = self._coding.decoder(model.size)
        if not header.farewell:
            decoder.restore(kept.get(DECODER, {}))
        return decoder, Counted(header.counts)

    def _admit(self, opened: Opened, site: str, content: sealed.Content) -> None:
        check_records(content.records, self._federation.combine.weights == "records")
        if not opened.terms.farewell:
            opened.decoder.check(site, content.payload)
        opened.shards[site] = content
        if content.counts is not None:
            opened.counted.add(site, content.counts)

    def apply(self, header: pb.RoundHeader, letters: Letters) -> Applied:
        """Combine the updates that all aggregating sites have; the journal has it first, and it happens once."""
        opened = self._opened
        if opened is None or opened.terms.name != header.attempt:
            raise ProtocolError(CLOSED, "attempt: its updates are not open here")
        terms, cohort = opened.terms, opened.cohort
        members, senders = cohort.of_bits(header.members), cohort.of_bits(header.senders)
        ours = set(members) <= set(opened.shards) and set(senders) <= set(opened.counted.sites) & set(members)
        require(ours, "members: not all of them are here", CLOSED)
        self._check_floor(opened, members)
        self._journal.open(Entry(terms.run, terms.round, terms.name, terms.model.hex(), terms.farewell > 0))
        free = self._journal.release(terms.name, members, header.members, (), senders)
        told = senders if free and self._hides(opened, members, senders) else ()
        counts = sent(opened.counted.total(told)) if told else b""
        bits = {"members": header.members, "senders": header.senders}
        said = pb.ShardStatement(attempt=terms.name, round=terms.round, index=self.index, **bits)
        if terms.farewell:
            made = Applied(terms.round, self._signed(letters, terms.run, said), None, opened.decoder, counts)
        else:
            made = self._again(terms, counts) or self._step(opened, members, said, letters, counts)
        self._opened = None
        return made

    def _check_floor(self, opened: Opened, members: Sequence[str]) -> None:
        enough = len(members) >= opened.terms.quorum and self._hides(opened, members, members)
        require(enough, f"members: {len(members)} are too few", CLOSED)

    def _hides(self, opened: Opened, members: Sequence[str], sites: Sequence[str]) -> bool:
        """Whether these are of as many organisations as the federation, and every member, demands."""
        floor = max(self._federation.floor, *(opened.shards[site].floor for site in members), 1)
        return self._seat.keys.roster().organisations(sites) >= floor

    def _step(
        self, opened: Opened, members: Sequence[str], said: pb.ShardStatement, letters: Letters, counts: bytes
    ) -> Applied:
        terms, chosen = opened.terms, [opened.shards[site] for site in members]
        matrix = np.stack([one.payload for one in chosen])
        tiers = [self._federation.site(site).tier for site in members]
        rows = (matrix, members, terms.round, tiers, [one.records for one in chosen])
        shard, kept = stepped(self._federation, opened.model, opened.kept, opened.decoder, *rows)
        require(bool(np.isfinite(shard).all()), "shard: the updates add up to a number that is not finite", CLOSED)
        said.digest = digest(shard)
        self._signed(letters, terms.run, said)
        record = {STATEMENT: np.frombuffer(said.SerializeToString(), np.uint8)}
        self._store.save(terms.run, terms.round, shard, {**kept, SAID: record}, terms.best)
        return Applied(terms.round, said, shard, opened.decoder, counts)

    def _again(self, terms: Terms, counts: bytes) -> Applied | None:
        """What was made of this attempt before, if it was: a second statement about it would be another one."""
        if terms.round not in self._store.rounds(terms.run):
            return None
        made = self.after(terms.run, terms.round)
        return replace(made, counts=counts) if made.said.attempt == terms.name else None

    def after(self, run: str, round: int) -> Applied:
        """The shard after a round, with what was said of it."""
        shard, kept = self._after(run, round)
        decoder = self._coding.decoder(shard.size)
        decoder.restore(kept.get(DECODER, {}))
        require(SAID in kept, f"shard: this site has none after round {round}", CLOSED)
        said = pb.ShardStatement.FromString(kept[SAID][STATEMENT].tobytes())
        return Applied(round, said, shard, decoder)

    def _signed(self, letters: Letters, run: str, said: pb.ShardStatement) -> pb.ShardStatement:
        self._journal.sign(said.attempt, shard_statements.fingerprint(run, said))
        return shard_statements.sign(letters.signer, run, said)

    def _after(self, run: str, round: int) -> tuple[Vector, Mapping[str, Arrays]]:
        return (self._first, {}) if round == 0 else self._store.load(run, round)


def sealed_for_all(
    made: Applied, federation: str, run: str, letters: Letters, cards: Mapping[str, Card]
) -> tuple[pb.ShareHeader, Payload]:
    """A shard encrypted once, with the key to it sealed for every site that has a card."""
    header = pb.ShareHeader(run=run, round=made.round, said=made.said, counts=made.counts)
    if made.shard is None:
        return header, np.empty(0, np.uint8)
    key = keys.fresh()
    for site, card in cards.items():
        content = key + made.decoder.held(site)
        bound = key_bound(federation, run, made.said, site)
        header.envelopes.append(pb.Envelope(site=site, sealed=sealing.seal(content, card.key, letters.signer, bound)))
    data = sealing.encrypt(key, made.shard.tobytes(), shard_bound(federation, run, made.said))
    return header, np.frombuffer(data, np.uint8)


def bound_to(federation: str, run: str, attempt: str, sender: str, recipient: str) -> bytes:
    """What a sealed shard of an update is good for, and nothing else."""
    return sealing.fields("fl-privacy sealed shard 1", federation, run, attempt, sender, recipient)


def key_bound(federation: str, run: str, said: pb.ShardStatement, site: str) -> bytes:
    return sealing.fields("fl-privacy shard key 1", federation, run, said.attempt, str(said.index), said.digest, site)


def shard_bound(federation: str, run: str, said: pb.ShardStatement) -> bytes:
    return sealing.fields("fl-privacy shard of a model 1", federation, run, said.attempt, str(said.index), said.digest)
