"""Sites that aggregate, against a hostile server, mailbox or site: no count of one site, nobody framed or shut out."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import grpc
import numpy as np
import pytest

from fl_privacy.coding import Payload
from fl_privacy.config.evaluate import form_of
from fl_privacy.errors import ProtocolError, RoundFailed
from fl_privacy.identity.pki import load_key
from fl_privacy.round import aggregating, shard_statements, statements
from fl_privacy.round.journal import Entry, Journal
from fl_privacy.round.letters import CARD, Card, Letters
from fl_privacy.round.resident import SHARDS, Resident
from fl_privacy.round.terms import FIELDS, Terms, joined
from fl_privacy.scores.form import Counts
from fl_privacy.shard import sealed
from fl_privacy.steps.base import At
from fl_privacy.wire import federation_pb2 as pb
from fl_privacy.wire.stream import digest
from helpers import CALL, Deployment
from residents import House, federation
from test_placement import ALL, _deployed, house

FAILS = (RoundFailed, ProtocolError, grpc.RpcError)


@pytest.fixture
def mailbox(tmp_path: Path) -> Iterator[Deployment]:
    """Five sites, of which three aggregate."""
    yield from _deployed(tmp_path / "mailbox", federation(sites=5, aggregators=3, deadline=8.0))


def played(here: House, *attempts: tuple[int, int], **options: Any) -> list[int | None]:
    """How many updates each of these (round, attempt) has; None if it failed."""
    found = list[int | None]()
    for round, number in attempts:
        try:
            found.append(here.play(round, number=number, **options).count)
        except FAILS:
            found.append(None)
    return found


def copied(message: Any, **changes: Any) -> Any:
    made = type(message)()
    made.CopyFrom(message)
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def test_one_set_of_senders_is_counted_per_attempt_also_after_a_restart(tmp_path: Path) -> None:
    """Sums over two sets would differ by one site's counts."""
    journal = Journal(tmp_path)
    for attempt in ("a", "b"):
        journal.open(Entry("run", 1, attempt, "model", True))
        assert journal.release(attempt, ALL, b"\x0f", (), ())
    for again in (journal, Journal(tmp_path)):
        assert not any(again.release("a", ALL, b"\x0f", (), senders) for senders in (ALL, ALL[:3]))
        assert not again.release("b", ALL, b"\x0f", (), ALL[1:])
        assert again.release("a", ALL, b"\x0f", (), ())


class ChoosesSenders(Resident):
    """Says which senders' counts it could open, and lies."""

    senders: ClassVar[int] = 0b11111

    def _check(self, letters: Letters, header: pb.RoundHeader, data: Payload) -> None:
        opened = self._desk.check(header, data, letters, self._cards(letters))
        request = pb.ReportRequest(run=header.run, round=header.round, attempt=header.attempt)
        request.members, request.senders = opened.members, bytes([self.senders])
        self._stubs[0].report(request, timeout=CALL)


def test_a_server_and_an_aggregating_site_get_no_counts_of_one_site(mailbox: Deployment, tmp_path: Path) -> None:
    here, length = house(mailbox, tmp_path, "counts", site_1=ChoosesSenders), form_of(mailbox.federation).length
    here.enter()
    ChoosesSenders.senders = 0
    assert here.play(1).count == 5
    sums = []
    for number, senders in ((1, 0), (2, 0), (1, 0b11111), (2, 0b01111)):
        ChoosesSenders.senders = senders
        try:
            sums.append(here.play(2, number=number, counts=length, farewell=1).counts)
        except FAILS:
            sums.append(None)
    here.leave()
    assert sums == [None] * 4


class Changes(Resident):
    """Sends another update whenever it is asked again."""

    calls: ClassVar[list[str]] = []

    def deliver(self, at: At, payload: Payload, counts: Counts | None = None) -> None:
        self.calls.append(at.attempt)
        super().deliver(at, payload + np.float32(self.calls.count(at.attempt)), counts)


def test_attempts_that_are_played_again_make_no_honest_site_look_like_a_cheat(
    mailbox: Deployment, tmp_path: Path
) -> None:
    here = house(mailbox, tmp_path, "framed", site_4=Changes)
    here.enter()
    assert played(here, (1, 1), (1, 2), (1, 1), (1, 3)) == [5, 5, None, 5]
    here.leave()
    assert mailbox.events("stopped") == []


class Nested(Resident):
    """Its card is sixty thousand opening brackets."""

    def _publish(self, letters: Letters, header: pb.RoundHeader, data: Payload) -> None:
        letters._post("", CARD, b"[" * 60_000)


def test_a_card_that_cannot_be_parsed_shuts_out_only_its_sender(mailbox: Deployment, tmp_path: Path) -> None:
    here = house(mailbox, tmp_path, "nested", site_4=Nested)
    here.enter()
    assert here.play(1).count == 4
    here.leave()
    assert [guest.problems for name, guest in here.guests.items() if name != "site-4"] == [[]] * 4


class Floods(Resident):
    """Fills the box of one site with letters that look like cards."""

    def _publish(self, letters: Letters, header: pb.RoundHeader, data: Payload) -> None:
        super()._publish(letters, header, data)
        for _ in range(40):
            letters._post("site-0", CARD, b"x" * 65_000)


def test_letters_to_one_site_do_not_keep_it_from_reading_cards(mailbox: Deployment, tmp_path: Path) -> None:
    here = house(mailbox, tmp_path, "flood", site_4=Floods)
    here.enter()
    assert played(here, (1, 1), (2, 1)) == [5, 5]
    here.leave()


class Demanding(Resident):
    """Demands a floor that nobody can meet, of one aggregating site only; then it stays away."""

    def _sealed(self, at: At, site: str, card: Card, content: sealed.Content) -> bytes:
        return super()._sealed(at, site, card, content._replace(floor=99) if site == "site-1" else content)


def test_a_floor_for_one_aggregating_site_leaves_out_its_sender_and_blocks_nobody(
    mailbox: Deployment, tmp_path: Path
) -> None:
    here = house(mailbox, tmp_path, "floor", site_4=Demanding)
    here.enter()
    assert here.play(1).count == 4
    here.guests["site-4"].sends = lambda at: False
    assert here.play(2).count == 4
    here.leave()
    (refused,) = here.guests["site-1"].log.events("shard-refused")
    assert refused["site"] == "site-4"
    assert refused["reason"].startswith("floor: 99")
    assert [event["sites"] for event in mailbox.events("left-out")] == [["site-4"]]


class SignsOtherMembers(Resident):
    """Signs the same shard again, with other members."""

    def _share(self, letters: Letters, run: str, made: aggregating.Applied) -> None:
        super()._share(letters, run, made)
        if made.round == 1:
            said = shard_statements.sign(letters.signer, run, copied(made.said, members=b"\x0f"))
            super()._share(letters, run, aggregating.Applied(1, said, made.shard, made.decoder))


def test_a_second_statement_stops_the_run_also_if_only_the_members_differ(mailbox: Deployment, tmp_path: Path) -> None:
    here = house(mailbox, tmp_path, "members", site_1=SignsOtherMembers)
    here.enter()
    played(here, (1, 1), (2, 1))
    assert played(here, (2, 2), (3, 1)) == [None, None]
    here.leave()
    assert [event["reason"].split(" in attempt")[0] for event in mailbox.events("stopped")] == [
        "shard: site-1 signed two different shards"
    ]


class SignsAmiss(Resident):
    """Signs its shard of round 1 for another round, and then without a digest."""

    changes: ClassVar[list[dict[str, Any]]] = []

    def _share(self, letters: Letters, run: str, made: aggregating.Applied) -> None:
        said = copied(made.said, **(self.changes.pop(0) if self.changes else {}))
        said = shard_statements.sign(letters.signer, run, said)
        super()._share(letters, run, aggregating.Applied(made.round, said, made.shard, made.decoder, made.counts))


def test_a_statement_that_would_stop_every_site_is_refused_and_its_signer_named(
    mailbox: Deployment, tmp_path: Path
) -> None:
    SignsAmiss.changes = [{"round": 7}, {"digest": b""}]
    here = house(mailbox, tmp_path, "amiss", site_1=SignsAmiss)
    here.enter()
    for number in (1, 2):
        with pytest.raises(RoundFailed, match=r"site-1: .*signed for another round, or without a digest"):
            here.play(1, number=number)
    assert played(here, (1, 3), (2, 1)) == [5, 5]
    here.leave()


class Whispers(Resident):
    """Announces another statement once the first sites have compared theirs."""

    compared, announced = threading.Barrier(2), threading.Event()

    def _compare(self, letters: Letters, run: str, said: list[pb.ShardStatement], cards: dict[str, Card]) -> None:
        super()._compare(letters, run, said, cards)
        if said[1].round == 1 and not self.announced.is_set():
            self.compared.wait(30)
            other = shard_statements.sign(letters.signer, run, copied(said[1], digest=b"z" * 32))
            letters.announce(SHARDS, shard_statements.packed([said[0], other, *said[2:]]))
            self.announced.set()


class ComparesEarly(Resident):
    def _compare(self, letters: Letters, run: str, said: list[pb.ShardStatement], cards: dict[str, Card]) -> None:
        super()._compare(letters, run, said, cards)
        if said[1].round == 1 and not Whispers.announced.is_set():
            Whispers.compared.wait(30)


class ComparesLate(Resident):
    def _compare(self, letters: Letters, run: str, said: list[pb.ShardStatement], cards: dict[str, Card]) -> None:
        assert Whispers.announced.wait(30)
        super()._compare(letters, run, said, cards)


def test_whoever_finds_a_cheat_shows_it_to_all_and_aggregates_no_more(mailbox: Deployment, tmp_path: Path) -> None:
    """One site sees it in the first attempt at round 2; the others see its proof in the second."""
    kinds: dict[str, type[Resident]] = {"site_0": ComparesEarly, "site_1": Whispers, "site_2": ComparesLate}
    here = house(mailbox, tmp_path, "whisper", **kinds)
    here.enter()
    assert played(here, (1, 1), (2, 1), (2, 2)) == [5, None, None]
    here.leave()
    named = "shard: site-1 signed two different shards"
    found = {name for name, guest in here.guests.items() if any(named in problem for problem in guest.problems)}
    assert "site-2" in found
    assert len(found) > 1  # the attempts end before every site has looked
    assert [event["round"] for event in here.guests["site-2"].log.events("aggregated")] == [1]
    assert any(named in event["reason"] for event in here.guests["site-2"].log.events("duty-failed", "stopped"))


def test_a_proof_convinces_every_site_and_a_forged_one_nobody(mailbox: Deployment) -> None:
    keys = [load_key(mailbox.keys.of("site", name).key_file) for name in ALL[:3]]
    signers = [(name, key.public_key()) for name, key in zip(ALL, keys, strict=False)]

    def said(key: Any, **changes: Any) -> pb.ShardStatement:
        fields = {"attempt": "a", "round": 1, "index": 1, "digest": b"a" * 32, **changes}
        return shard_statements.sign(key, "run", pb.ShardStatement(**fields))

    def shown(*pair: pb.ShardStatement) -> None:
        shard_statements.check_proofs("run", {"site-3": shard_statements.packed(pair)}, signers)

    shown(said(keys[1]), said(keys[1]))
    shown(said(keys[1]), said(keys[1], attempt="b", digest=b"b" * 32))
    shown(said(keys[1]), said(keys[2], digest=b"b" * 32))
    shown(said(keys[1], index=7), said(keys[1], index=7, digest=b"b" * 32))
    shown(said(keys[1]))
    with pytest.raises(shard_statements.Equivocation, match="site-1 signed two different shards"):
        shown(said(keys[1]), said(keys[1], senders=b"\x01"))


class Stale(Resident):
    """A mailbox shows it an old model, whole, as the last one."""

    old: ClassVar[list[tuple[pb.RoundHeader, Payload]]] = []
    key: ClassVar[Any] = None

    def _ask(self, run: str, seen: pb.RoundHeader) -> tuple[pb.RoundHeader, Payload | None]:
        header, data = super()._ask(run, seen)
        if not header.duty and header.round == 2 and data is not None:
            self.old.append((copied(header), data.copy()))
        if not header.duty and header.round == 3:
            was, data = self.old[0]
            del header.sealed[:]
            header.sealed.extend(was.sealed)
            header.model, header.digest = joined([one.said.digest for one in was.sealed]), digest(data)
            header.attempt = Terms(**{name: getattr(header, name) for name in FIELDS}).name
            header.signature = statements.sign(self.key, statements.OPENED, header.attempt, header.journal)
        return header, data


def test_an_old_model_is_not_taken_for_the_last_one(mailbox: Deployment, tmp_path: Path) -> None:
    Stale.key = load_key(mailbox.keys.of("mailbox", "mailbox").key_file)
    here = house(mailbox, tmp_path, "stale", site_3=Stale)
    here.enter()
    assert played(here, (1, 1), (2, 1)) == [5, 5]
    played(here, (3, 1), farewell=2, counts=form_of(mailbox.federation).length)
    here.leave()
    assert set(here.guests["site-3"].problems) == {"shards: after round 1, not 2"}


class Huge(Resident):
    def deliver(self, at: At, payload: Payload, counts: Counts | None = None) -> None:
        super().deliver(at, np.full_like(payload, 3.4e38), counts)


def test_updates_that_overflow_fail_the_round_before_anything_is_signed(mailbox: Deployment, tmp_path: Path) -> None:
    here = house(mailbox, tmp_path, "huge", site_3=Huge, site_4=Huge)
    here.enter()
    counts = played(here, *((round, 1) for round in range(1, 5)))
    here.leave()
    assert counts[-1] is None
    failed = [event for guest in here.guests.values() for event in guest.log.events("duty-failed")]
    assert any("not finite" in event["reason"] for event in failed)
    assert all(np.isfinite(model).all() for guest in here.guests.values() for model in guest.models.values())
