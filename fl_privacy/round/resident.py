"""A site's end where the sites aggregate: it sends and receives sealed shards by a mailbox, and does its own part."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cached_property, partial
from typing import TYPE_CHECKING, NamedTuple

import grpc
import numpy as np

from fl_privacy.coding import FLOAT32, Payload
from fl_privacy.crypto import keys, sealing
from fl_privacy.errors import FederationError, ProtocolError, require
from fl_privacy.identity.keyring import Identity
from fl_privacy.round import shard_statements
from fl_privacy.round.aggregating import Aggregating, Applied, bound_to, key_bound, sealed_for_all, shard_bound
from fl_privacy.round.letters import Card, Letters
from fl_privacy.round.member import CALL, POLL, Member
from fl_privacy.round.terms import joined
from fl_privacy.scores.form import Counts
from fl_privacy.shard.sealed import NUMBER, SEALED, Content, sizes
from fl_privacy.steps.base import At
from fl_privacy.vector import Vector
from fl_privacy.wire import client, federation_pb2 as pb
from fl_privacy.wire.stream import digest

if TYPE_CHECKING:
    from fl_privacy.routes.cut import Cut
    from fl_privacy.routes.ends import SiteSeat

CARD, CHECK, APPLY, SEND, MODEL = "card", "check", "apply", "send", "model"  # duties
SHARDS = "shards"  # the topic on which sites say what they received
PROOF = "proof"  # and the one on which they show two statements that one site signed
Duty = Callable[[Letters, pb.RoundHeader, Payload], None]
PAUSE = 0.5  # seconds after a duty that failed
LONGEST_REASON = 300


class Resident(Member):
    """One site of a run. It stays until the run is over: others need its shard."""

    stays = True

    def __init__(self, seat: SiteSeat, cut: Cut, models: Cut, aggregating: tuple[str, ...]) -> None:
        """`cut` splits updates as they travel and `models` splits models; the aggregating sites are in order."""
        super().__init__(seat, cut)
        self._cut, self._models, self._aggregating = cut, models, aggregating
        self._received = Received([], [])
        self._letters: Letters | None = None
        self._problem: ProtocolError | None = None  # with the model of the round
        self._stopped: dict[str, ProtocolError] = {}  # runs in which somebody cheated
        self._duties: dict[str, Duty] = {
            CARD: self._publish,
            CHECK: self._check,
            APPLY: self._apply,
            SEND: self._send,
            MODEL: self._cut_model,
        }

    @cached_property
    def _first_shards(self) -> list[Vector]:
        return [shard.copy() for shard in along(self._models, 0).split(self._seat.initial())]

    @cached_property
    def _own(self) -> Aggregating | None:
        """This site's own shard, if it aggregates one."""
        if self._seat.site not in self._aggregating:
            return None
        index = self._aggregating.index(self._seat.site)
        return Aggregating(self._seat, index, self._first_shards[index])

    @property
    def _receivers(self) -> int:
        return len(self._aggregating)

    def admit(self, at: At, model: Vector) -> None:
        if self._problem is not None:
            raise self._problem
        super().admit(at, model)

    def held(self) -> list[bytes]:
        return self._received.held

    def deliver(self, at: At, payload: Payload, counts: Counts | None = None) -> None:
        assert self._terms is not None
        assert self._letters is not None
        self._seat.sent.keep(self._terms, self._journals)
        parts = [payload] * self._receivers if at.farewell else self._cut.at(at.round).split(payload)
        shares = [None] * len(parts) if counts is None else self._shares(at, counts)
        cards, said = self._cards(self._letters), self._said() | {"records": 0}
        missing = [site for site in self._aggregating if site not in cards]
        require(not missing, f"card: {', '.join(missing)} published none, and aggregates", "UNAVAILABLE")
        with self._metrics.phase("uploading"):
            sealed = b"".join(
                self._sealed(at, site, cards[site], Content(part, share, self._seat.records, said["floor"]))
                for site, part, share in zip(self._aggregating, parts, shares, strict=True)
            )
            upload = partial(self._upload, np.frombuffer(sealed, np.uint8), said)
            client.patiently(upload, self._until)

    def _sealed(self, at: At, site: str, card: Card, content: Content) -> bytes:
        assert self._letters is not None
        bound = bound_to(self._federation.name, at.run, at.attempt, self._seat.site, site)
        return sealing.seal(content.encode(at.counts), card.key, self._letters.signer, bound)

    def _upload(self, sealed: Payload, said: dict[str, object]) -> bool:
        left = max(1.0, self._until - time.monotonic())
        return client.submit(self._stubs[0], self._first, sealed, left, SEALED, **said)

    def _digests(self, headers: list[pb.RoundHeader]) -> list[bytes]:
        return self._received.digests

    def _next(self, run: str, seen: pb.RoundHeader, end: float) -> tuple[list[pb.RoundHeader], Vector] | None:
        """The next round and its model, doing what the others need of this site in the meantime."""
        if self._letters is None or self._letters.run != run:
            identity = Identity(self._federation.name, "site", self._seat.site)
            self._letters = Letters(self._stubs[0], identity, run, self._keys)
        while time.monotonic() < end:
            with self._metrics.phase("fetching"):
                header, data = self._ask(run, seen)
            if header.finished:
                return None
            data = np.empty(0, np.uint8) if data is None else data
            self._metrics.moved("in", data.nbytes)
            if header.duty:
                self._do(self._letters, header, data)
            elif header.round:
                return [header], self._model(self._letters, header, data)
        return None

    def _ask(self, run: str, seen: pb.RoundHeader) -> tuple[pb.RoundHeader, Payload | None]:
        request = pb.FetchRequest(run=run, after_round=seen.round, after_attempt=seen.attempt, wait=POLL)
        request.holds = self._own.holds if self._own else ""
        until = time.monotonic() + self._federation.deadline
        call = partial(client.fetch, self._stubs[0], request, POLL + CALL, SEALED, self._most)
        return client.patiently(call, until, grpc.StatusCode.NOT_FOUND)

    @cached_property
    def _most(self) -> int:
        """Bytes of the largest message that an honest mailbox has for this site: a model, or a column of shards."""
        counts, item = self._federation.bytes_of_counts // NUMBER.itemsize, self._federation.coding.type.itemsize
        column = len(self._federation.sites) * max(sizes([item * size for size in self._cut.sizes()], counts))
        return max(column, sum(FLOAT32.nbytes(size) + sealing.TAG for size in self._models.sizes()))

    # What others need of this site

    def _do(self, letters: Letters, header: pb.RoundHeader, data: Payload) -> None:
        """A duty. If it fails, the mailbox hears why, and ends the attempt: nobody waits for it."""
        try:
            if header.run in self._stopped:
                raise self._stopped[header.run]
            require(header.duty in self._duties, f"duty: {header.duty[:20]!r} is unknown")
            require(header.run == letters.run, "run: the mailbox asked for another run")
            self._duties[header.duty](letters, header, data)
        except FederationError as error:
            self._failed(header, str(error))
        except grpc.RpcError as error:
            self._failed(header, client.explain(error))

    def _failed(self, header: pb.RoundHeader, reason: str) -> None:
        self._seat.log("duty-failed", run=header.run, round=header.round, duty=header.duty, reason=reason)
        request = pb.ReportRequest(run=header.run, round=header.round, attempt=header.attempt)
        request.problem = reason[:LONGEST_REASON]
        try:
            self._stubs[0].report(request, timeout=CALL)
        except grpc.RpcError as error:
            self._seat.log("duty-failed", run=header.run, duty="report", reason=client.explain(error))
        time.sleep(PAUSE)

    def _publish(self, letters: Letters, header: pb.RoundHeader, data: Payload) -> None:
        letters.publish()

    def _check(self, letters: Letters, header: pb.RoundHeader, data: Payload) -> None:
        with self._metrics.phase("opening"):
            opened = self._desk.check(header, data, letters, self._cards(letters))
        request = pb.ReportRequest(run=header.run, round=header.round, attempt=header.attempt)
        request.members, request.senders, request.floor = opened.members, opened.senders, opened.floor
        self._stubs[0].report(request, timeout=CALL)

    def _apply(self, letters: Letters, header: pb.RoundHeader, data: Payload) -> None:
        with self._metrics.phase("averaging"):
            made = self._desk.apply(header, letters)
        self._share(letters, header.run, made)
        self._seat.log("aggregated", run=header.run, round=header.round, attempt=header.attempt)

    def _send(self, letters: Letters, header: pb.RoundHeader, data: Payload) -> None:
        """The shard after an earlier round, for sites or a mailbox that lack it."""
        self._share(letters, header.run, self._desk.after(header.run, version_of(header)))

    def _cut_model(self, letters: Letters, header: pb.RoundHeader, data: Payload) -> None:
        """With masks per round an aggregating site that does not train in a round needs its model all the same."""
        require(self._own is not None, "duty: this site aggregates nothing", "PERMISSION_DENIED")
        self._opened(letters, header, data)

    def _share(self, letters: Letters, run: str, made: Applied) -> None:
        header, sealed = sealed_for_all(made, self._federation.name, run, letters, self._cards(letters))
        client.share(self._stubs[0], header, sealed, self._federation.deadline)
        self._metrics.moved("out", sealed.nbytes)

    @property
    def _desk(self) -> Aggregating:
        if self._own is None:
            raise ProtocolError("PERMISSION_DENIED", "duty: this site aggregates nothing")
        return self._own

    def _cards(self, letters: Letters) -> dict[str, Card]:
        return {**letters.cards(), self._seat.site: letters.own_card()}

    # The model

    def _model(self, letters: Letters, header: pb.RoundHeader, data: Payload) -> Vector:
        """The model of a round from its shards; what is wrong with it is said when the round is admitted."""
        self._problem = self._stopped.get(header.run)
        if not version_of(header):
            first = self._first_shards
            self._received = Received([digest(shard) for shard in first], [b""] * len(first))
            return along(self._models, 0).join(first)
        try:
            if self._problem is not None:
                raise self._problem
            return self._opened(letters, header, data)
        except ProtocolError as error:
            self._problem = error
        except grpc.RpcError as error:
            self._problem = ProtocolError("UNAVAILABLE", client.explain(error))
        return along(self._models, 0).join(self._first_shards)

    def _opened(self, letters: Letters, header: pb.RoundHeader, data: Payload) -> Vector:
        """A model from its shards, each as its site signed it and as the others received it."""
        count, found = len(self._aggregating), list[tuple[Vector, bytes]]()
        require(len(header.sealed) == count, f"shards: {len(header.sealed)} came, and the model has {count}")
        cards, sizes = self._cards(letters), self._models.sizes()
        pieces = sealing.split(data.data, [one.length for one in header.sealed])
        for index, (site, one, piece) in enumerate(zip(self._aggregating, header.sealed, pieces, strict=True)):
            try:
                require(site in cards, "card: none was published")
                found.append(self._one(letters, header.run, index, cards[site], one, piece, sizes[index]))
            except ProtocolError as error:
                raise ProtocolError(error.code, f"shard: of {site}: {error}") from None
        said = [one.said for one in header.sealed]
        try:
            self._compare(letters, header.run, said, cards)
        except shard_statements.Equivocation as error:
            self._stopped[header.run] = error
            self._seat.log("stopped", run=header.run, round=header.round, reason=str(error))
            raise
        together = {(one.attempt, one.round, one.members, one.senders) for one in said}
        require(len(together) == 1, "shards: not all of one attempt, or of different sites", "DATA_LOSS")
        newest, version = said[0].round, version_of(header)
        require(newest == version, f"shards: after round {newest}, not {version}", "DATA_LOSS")
        self._received = Received([one.digest for one in said], [held for _, held in found])
        model = along(self._models, version).join([shard for shard, _ in found])
        if self._own is not None and self._federation.route.joins_every_round and not header.farewell:
            mine = along(self._models, version + 1).split(model)[self._own.index]
            self._own.begin(header.run, version, joined(self._received.digests), mine)
        return model

    def _one(
        self, letters: Letters, run: str, index: int, card: Card, one: pb.SealedShard, piece: bytes, size: int
    ) -> tuple[Vector, bytes]:
        """A shard, and what its site holds of us."""
        shard_statements.check(card.signer, run, one.said, index)
        name, own = self._federation.name, self._seat.site
        content = sealing.unseal(one.envelope, letters.secret, card.signer, key_bound(name, run, one.said, own))
        key, held = content[: keys.KEY_BYTES], content[keys.KEY_BYTES :]
        require(len(key) == keys.KEY_BYTES, "envelope: has no key")
        plain = sealing.decrypt(key, piece, shard_bound(name, run, one.said))
        require(len(plain) == 4 * size, f"length: {len(plain)} bytes, {4 * size} are needed")
        shard = np.frombuffer(plain, "<f4").astype(np.float32)
        require(digest(shard) == one.said.digest, "digest: not the shard that was signed", "DATA_LOSS")
        FLOAT32.check(shard)
        return shard, held

    def _compare(self, letters: Letters, run: str, said: list[pb.ShardStatement], cards: dict[str, Card]) -> None:
        """Tell the other sites what we received, and see what they did. Who finds a cheat shows it to all."""
        letters.announce(SHARDS, shard_statements.packed(said))
        signers = [(site, cards[site].signer) for site in self._aggregating]
        try:
            shard_statements.check_proofs(run, letters.announced(PROOF, cards), signers)
            shard_statements.compare(run, said, letters.announced(SHARDS, cards), signers)
        except shard_statements.Equivocation as error:
            letters.announce(PROOF, shard_statements.packed(error.proof))
            raise


class Received(NamedTuple):
    """Of the shards of the newest model: their digests, and what each aggregating site holds of us."""

    digests: list[bytes]
    held: list[bytes]


def version_of(header: pb.RoundHeader) -> int:
    """After which round the model of an attempt is."""
    return header.farewell or header.round - 1


def along(cut: Cut, version: int) -> Cut:
    """A model travels along the masks of the round that made it; the first one, along those of the first round."""
    return cut.at(max(version, 1))
