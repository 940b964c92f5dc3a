"""Aggregators at the sites: sealed shards by a mailbox that cannot read them; whoever cheats is left out or named."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import grpc
import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from hypothesis import given, settings, strategies as st

from fl_privacy.coding import FLOAT32, Payload
from fl_privacy.config import Federation
from fl_privacy.config.evaluate import form_of
from fl_privacy.crypto import sealing
from fl_privacy.errors import ConfigError, ProtocolError, RoundFailed
from fl_privacy.identity.keyring import Identity
from fl_privacy.identity.pki import load_key
from fl_privacy.round import aggregating, shard_statements
from fl_privacy.round.letters import Card, Letters
from fl_privacy.round.resident import Resident
from fl_privacy.shard import sealed
from fl_privacy.steps.base import At
from fl_privacy.wire import client, federation_pb2 as pb
from helpers import CALL, Deployment, Keys, deploy, eventually, kill, status
from residents import D, House, averaged, federation, initial, update_of
from serving import Noted

ALL = ("site-0", "site-1", "site-2", "site-3")


@pytest.fixture(scope="module")
def mailbox(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    yield from _deployed(tmp_path_factory.mktemp("mailbox"), federation())


def _deployed(folder: Path, config: Federation) -> Iterator[Deployment]:
    keys = Keys(folder / "pki")
    for role, name in (("server", "server"), ("mailbox", "mailbox"), *(("site", name) for name in config.site_names)):
        keys.of(role, name)
    made = deploy(folder, keys, config, "mailbox")
    yield made
    made.stop()


def house(mailbox: Deployment, folder: Path, run: str, **kinds: type[Resident]) -> House:
    return House(mailbox, folder, run, {name.replace("_", "-"): kind for name, kind in kinds.items()})


def test_the_model_is_that_of_one_average_bit_for_bit_and_counts_add_up(mailbox: Deployment, tmp_path: Path) -> None:
    here, length = house(mailbox, tmp_path, "whole"), form_of(mailbox.federation).length
    here.enter()
    calls = list[str]()
    here.server._round._stubs = [Noted(stub, calls) for stub in here.server._round._stubs]
    outcomes = [here.play(round, counts=length) for round in (1, 2, 3)]
    each = here.federation.route.exchanges
    assert tuple(calls) == (3 * each)[1:]  # the server makes the first model's shards itself
    last = here.play(4, counts=length, farewell=3)
    here.leave()
    expected = initial()
    for round in (1, 2, 3):
        assert np.array_equal(here.model(round), expected)
        expected = averaged(expected, ALL, round, here.federation)
    assert np.array_equal(here.model(4), expected)
    assert [one.count for one in outcomes] == [4, 4, 4]
    assert last.counts is not None
    assert np.array_equal(last.counts, 4 * np.arange(length, dtype=np.uint64))
    assert [guest.problems for guest in here.guests.values()] == [[]] * 4


def test_the_mailbox_never_holds_an_update_or_a_model(mailbox: Deployment, tmp_path: Path) -> None:
    """Everything that it is sent and sends, as it leaves or reaches the sites, has no number of either in it."""
    seen: list[bytes] = []

    class Watched(Resident):
        def _upload(self, sealed: Payload, said: Any) -> bool:
            seen.append(sealed.tobytes())
            return super()._upload(sealed, said)

        def _ask(self, run: str, last: pb.RoundHeader) -> Any:
            header, data = super()._ask(run, last)
            seen.append(header.SerializeToString() + (b"" if data is None else data.tobytes()))
            return header, data

    here = house(mailbox, tmp_path, "sealed", **dict.fromkeys(("site_0", "site_1", "site_2", "site_3"), Watched))
    here.enter()
    here.play(1)
    here.play(2)
    here.leave()
    secret = [update_of(site, round) for site in ALL for round in (1, 2)] + [here.model(2)]
    numbers = {number.tobytes() for vector in secret for number in vector}
    carried = b"".join(seen)
    assert len(carried) > 2 * 4 * 4 * D
    # Four bytes may come by chance, 2^-32 per place and number: pairs of neighbours in a shard would not.
    found = [number for number in numbers if number in carried]
    assert len(found) <= 2


def test_a_site_that_sends_nothing_is_left_out(mailbox: Deployment, tmp_path: Path) -> None:
    """It aggregates all the same."""
    here = house(mailbox, tmp_path, "absent")
    here.guests["site-3"].sends = lambda at: at.round != 1
    here.enter()
    assert (here.play(1).count, here.play(2).count) == (3, 4)
    here.leave()
    assert np.array_equal(here.model(2), averaged(initial(), ALL[:3], 1, here.federation))


class ForAnother(Resident):
    """Seals the shard of each aggregating site for the next one."""

    def _sealed(self, at: At, site: str, card: Card, content: Any) -> bytes:
        assert self._letters is not None
        other = self._aggregating[(self._aggregating.index(site) + 1) % len(self._aggregating)]
        return super()._sealed(at, site, self._cards(self._letters)[other], content)


class OfAnotherRound(Resident):
    def _sealed(self, at: At, site: str, card: Card, content: Any) -> bytes:
        return super()._sealed(At(at.run, at.round, "0" * 64), site, card, content)


class UnderAnotherName(Resident):
    """Signs with a key that the roster does not have."""

    def _sealed(self, at: At, site: str, card: Card, content: sealed.Content) -> bytes:
        bound = aggregating.bound_to(self._federation.name, at.run, at.attempt, self._seat.site, site)
        return sealing.seal(content.encode(at.counts), card.key, ec.generate_private_key(ec.SECP256R1()), bound)


class NotFinite(Resident):
    def deliver(self, at: At, payload: Payload, counts: Any = None) -> None:
        super().deliver(at, np.full_like(payload, np.nan), counts)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (ForAnother, "made for another recipient"),
        (OfAnotherRound, "did not sign this for us"),
        (UnderAnotherName, "did not sign this for us"),
        (NotFinite, "not finite"),
    ],
)
def test_a_bad_sealed_shard_is_refused_everywhere_and_the_round_goes_on_without_it(
    mailbox: Deployment, tmp_path: Path, kind: type[Resident], reason: str
) -> None:
    here = house(mailbox, tmp_path, f"bad-{kind.__name__}", site_1=kind)
    here.enter()
    assert here.play(1).count == 3
    here.play(2)
    here.leave()
    assert np.array_equal(here.model(2), averaged(initial(), ("site-0", "site-2", "site-3"), 1, here.federation))
    refusals = here.guests["site-0"].log.events("shard-refused")
    assert {event["site"] for event in refusals} == {"site-1"}
    assert reason in refusals[0]["reason"]


class TooShort(Resident):
    def _upload(self, sealed: Payload, said: Any) -> bool:
        return super()._upload(sealed[:-1], said)


def test_sealed_shards_of_a_wrong_length_are_refused(mailbox: Deployment, tmp_path: Path) -> None:
    here = house(mailbox, tmp_path, "short", site_2=TooShort)
    here.enter()
    assert here.play(1).count == 3
    here.leave()
    assert "length" in here.guests["site-2"].problems[0]


class TwoShards(Resident):
    """Answers twice: the second time with another shard."""

    answered = threading.Event()

    def _share(self, letters: Letters, run: str, made: Any) -> None:
        super()._share(letters, run, made)
        if made.round == 1:
            said = pb.ShardStatement()
            said.CopyFrom(made.said)
            said.digest = bytes(32)
            other = aggregating.Applied(1, shard_statements.sign(letters.signer, run, said), made.shard, made.decoder)
            try:
                super()._share(letters, run, other)
            finally:
                self.answered.set()


class After(Resident):
    """Lets the round go on until the other one has answered twice."""

    def _share(self, letters: Letters, run: str, made: Any) -> None:
        assert TwoShards.answered.wait(30)
        super()._share(letters, run, made)


def test_a_site_that_answers_twice_stops_the_run_and_is_named(mailbox: Deployment, tmp_path: Path) -> None:
    here = house(mailbox, tmp_path, "twice", site_2=TwoShards, site_3=After)
    here.enter()
    with pytest.raises((grpc.RpcError, RoundFailed)) as caught:
        _ = here.play(1), here.play(2)
    error = caught.value
    said = str(error.details()) if isinstance(error, grpc.RpcError) else str(error)
    assert "site-2 signed two different shards" in said
    with pytest.raises(grpc.RpcError) as later:  # and it does not start again
        here.play(1, number=2)
    assert later.value.code() is grpc.StatusCode.PERMISSION_DENIED
    here.leave()


def test_the_mailbox_refuses_what_is_not_an_aggregating_site_s_to_say(mailbox: Deployment, tmp_path: Path) -> None:
    here = house(mailbox, tmp_path, "calls")
    here.enter()
    here.play(1)
    signer = load_key(mailbox.keys.of("site", "site-1").key_file)
    said = shard_statements.sign(signer, "calls", pb.ShardStatement(attempt="f" * 64, index=1, digest=bytes(32)))

    def shared(by: tuple[str, str], **changes: Any) -> str:
        header = pb.ShareHeader(**{"run": "calls", "round": 1, "said": said, **changes})
        return status(client.share, mailbox.party(*by).stub, header, np.zeros(4, np.uint8), CALL)

    def reported(by: tuple[str, str], **changes: Any) -> str:
        request = pb.ReportRequest(**{"run": "calls", "round": 1, "attempt": "f" * 64, **changes})
        return status(mailbox.party(*by).stub.report, request, timeout=CALL)

    one, other, server = ("site", "site-1"), ("site", "site-2"), ("server", "server")
    assert shared(server) == reported(server) == "PERMISSION_DENIED"
    assert shared(other) == "INVALID_ARGUMENT"  # another site's shard
    assert shared(one, said=pb.ShardStatement(index=1)) == "INVALID_ARGUMENT"  # not signed
    assert shared(one) == reported(one) == "FAILED_PRECONDITION"  # of another attempt
    assert shared(one, run="nowhere") == reported(one, run="nowhere") == "NOT_FOUND"
    assert here.play(2).count == 4
    here.leave()


class OtherContent(Resident):
    """Gives the sites another shard than it signs."""

    def _share(self, letters: Letters, run: str, made: Any) -> None:
        changed = None if made.shard is None else made.shard + 1
        super()._share(letters, run, aggregating.Applied(made.round, made.said, changed, made.decoder, made.counts))


def test_a_shard_other_than_the_signed_one_is_refused_by_every_site_with_its_name(
    mailbox: Deployment, tmp_path: Path
) -> None:
    here = house(mailbox, tmp_path, "other", site_1=OtherContent)
    here.enter()
    here.play(1)
    with pytest.raises(RoundFailed, match="updates came"):
        here.play(2)
    here.leave()
    for name in ("site-0", "site-2", "site-3"):
        found = set(here.guests[name].problems)
        found.discard("shard: of site-1: card: none was published")  # a finished run has no mail any more
        assert found == {"shard: of site-1: digest: not the shard that was signed"}


def test_sites_that_were_shown_different_shards_name_who_signed_them(mailbox: Deployment, tmp_path: Path) -> None:
    """Mailbox and site-1 cheat together: only what the sites tell each other shows it."""
    keys = mailbox.keys
    signers = []
    for name in ALL:
        identity = Identity("test", "site", name)
        letters = Letters(mailbox.party("site", name).stub, identity, "compare", keys.of("site", name))
        signers.append((name, letters))
    said = [_statement(letters, "compare", index, b"a" * 32) for index, (_, letters) in enumerate(signers)]
    keyed = [(name, letters.signer.public_key()) for name, letters in signers]
    same = shard_statements.packed(said)
    shard_statements.compare("compare", said, {"site-3": same, "site-2": b"junk"}, keyed)
    lies = [*said[:1], _statement(signers[1][1], "compare", 1, b"b" * 32), *said[2:]]
    with pytest.raises(shard_statements.Equivocation, match="site-1 signed two different shards"):
        shard_statements.compare("compare", said, {"site-3": shard_statements.packed(lies)}, keyed)
    forged = [*said[:1], _statement(signers[3][1], "compare", 1, b"b" * 32), *said[2:]]
    shard_statements.compare("compare", said, {"site-3": shard_statements.packed(forged)}, keyed)


def _statement(letters: Letters, run: str, index: int, content: bytes) -> pb.ShardStatement:
    return shard_statements.sign(letters.signer, run, pb.ShardStatement(attempt="a", index=index, digest=content))


def test_an_aggregating_site_keeps_the_floor_and_one_set_per_model(mailbox: Deployment, tmp_path: Path) -> None:
    """Whatever the mailbox says."""

    class Greedy(Resident):
        """Gets the duty to apply fewer updates first, and other ones afterwards."""

        refused: ClassVar[list[str]] = []

        def _apply(self, letters: Letters, header: pb.RoundHeader, data: Payload) -> None:
            for members in (b"\x03", b"\x10"):
                fewer = pb.RoundHeader()
                fewer.CopyFrom(header)
                fewer.members, fewer.senders = members, b"\0"
                with pytest.raises(ProtocolError) as caught:
                    self._desk.apply(fewer, letters)
                self.refused.append(str(caught.value))
            opened = self._desk._opened
            super()._apply(letters, header, data)
            self._desk._opened = opened
            less = pb.RoundHeader()
            less.CopyFrom(header)
            less.members = b"\x07"
            with pytest.raises(ProtocolError) as caught:
                self._desk.apply(less, letters)
            self.refused.append(str(caught.value))

    here = house(mailbox, tmp_path, "greedy", site_0=Greedy)
    here.enter()
    assert here.play(1).count == 4
    here.leave()
    few, bits, other = Greedy.refused
    assert "too few" in few
    assert "one bit for each" in bits
    assert "released for other sites" in other


def test_an_aggregating_site_whose_folder_was_deleted_adds_up_another_set_if_the_mailbox_cheats(
    mailbox: Deployment, tmp_path: Path
) -> None:
    """Not protected: the difference of its two sums is the update of the site that was left out."""

    class Forgetful(Resident):
        found: ClassVar[list[np.ndarray]] = []

        def _apply(self, letters: Letters, header: pb.RoundHeader, data: Payload) -> None:
            opened = self._desk._opened
            super()._apply(letters, header, data)
            first = self._first_shards[0]
            whole = self._desk.after(header.run, header.round).shard
            shutil.rmtree(tmp_path / "site-0" / "aggregator")
            del self.__dict__["_own"]
            self._desk._opened = opened
            less = pb.RoundHeader()
            less.CopyFrom(header)
            less.members = b"\x07"
            part = self._desk.apply(less, letters).shard
            assert whole is not None
            assert part is not None
            self.found[:] = 4 * (whole - first) - 3 * (part - first), self._models.split(update_of("site-3", 1))[0]

    here = house(mailbox, tmp_path, "forgetful", site_0=Forgetful)
    here.enter()
    assert here.play(1).count == 4
    here.leave()
    shown, update = Forgetful.found
    np.testing.assert_allclose(shown, update, atol=1e-5)


class Crashes(Resident):
    """Ends when it has applied a round, before anybody hears of it."""

    def _share(self, letters: Letters, run: str, made: Any) -> None:
        raise RuntimeError("killed")


def test_a_site_that_is_killed_after_it_applied_a_round_says_the_same_again(
    mailbox: Deployment, tmp_path: Path
) -> None:
    here = house(mailbox, tmp_path, "restarted", site_2=Crashes)
    here.enter()
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(here.play, 1)
        eventually(lambda: here.guests["site-2"].problems == ["left: killed"])
        (kept,) = (tmp_path / "site-2").glob("aggregator/shards/restarted/*")
        before = kept.read_bytes()
        here.guests["site-2"].kind = Resident
        here.enter("site-2")
        assert first.result().count == 4
    here.play(2)
    here.leave()
    assert kept.read_bytes() == before
    assert np.array_equal(here.model(2), averaged(initial(), ALL, 1, here.federation))


def test_a_killed_mailbox_gets_again_what_it_lost(tmp_path: Path) -> None:
    """Cards and sealed shards were in its memory alone: sites publish and send them again."""
    running = _deployed(tmp_path / "m", federation())
    made = next(running)
    here = house(made, tmp_path / "sites", "killed")
    here.enter()
    here.play(1)
    port = made.address
    kill(made)
    again = deploy(tmp_path / "m", made.keys, made.federation, "mailbox", options=("--listen", port))
    try:
        assert here.play(2).count == 4
        here.play(3)
        here.leave()
        one = averaged(initial(), ALL, 1, here.federation)
        assert np.array_equal(here.model(3), averaged(one, ALL, 2, here.federation))
    finally:
        again.stop()
        running.close()


def test_an_aggregating_site_that_is_gone_fails_the_attempt_and_is_named(tmp_path: Path) -> None:
    config = federation(sites=4, aggregators=4, deadline=4.0)
    running = _deployed(tmp_path / "m", config)
    made = next(running)

    class Gone(Resident):
        def _check(self, letters: Letters, header: pb.RoundHeader, data: Payload) -> None:
            """Does nothing."""

    here = house(made, tmp_path / "sites", "gone", site_1=Gone)
    here.enter()
    with pytest.raises(RoundFailed, match=r"did not answer in time: .*site-1"):
        here.play(1)
    here.leave()
    running.close()
    assert not list((tmp_path / "sites").glob("*/aggregator/shards/gone/*"))


# What a config may ask for


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"route": {"aggregators": 5}}, "5 given for 4 sites"),
        ({"sites": 100, "route": {"aggregators": 100}}, "too many to compare; use 40"),
        ({"sites": 501}, "up to 500 sites"),
        ({"route": {"settlement": "partial"}}, "does not support settlement: partial"),
        ({"audit": True}, "does not support audit"),
        ({"evaluate": "server"}, "set evaluate: sites"),
        ({"rounds_per_message": 1}, "must stay for all rounds"),
    ],
)
def test_what_is_not_supported_is_refused_when_the_config_is_read(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        federation(**changes)


# The parts


@settings(deadline=None, max_examples=20)
@given(content=st.binary(max_size=200), flipped=st.integers(0, 10_000))
def test_a_seal_opens_only_unchanged_and_for_what_it_is_bound_to(content: bytes, flipped: int) -> None:
    own, signer = X25519PrivateKey.generate(), ec.generate_private_key(ec.SECP256R1())
    made = sealing.seal(content, own.public_key(), signer, b"here")
    assert len(made) == len(content) + sealing.OVERHEAD
    assert sealing.unseal(made, own, signer.public_key(), b"here") == content
    place = flipped % len(made)
    changed = made[:place] + bytes([made[place] ^ 1]) + made[place + 1 :]
    for args in ((changed, own, b"here"), (made, X25519PrivateKey.generate(), b"here"), (made, own, b"there")):
        if args[0] is changed and made[0] < place <= sealing.SIGNATURE:
            continue  # padding
        with pytest.raises(ProtocolError):
            sealing.unseal(args[0], args[1], signer.public_key(), args[2])


@given(length=st.integers(0, 50), counts=st.integers(0, 5), counted=st.booleans(), floor=st.integers(1, 9))
def test_a_shard_is_of_one_size_whatever_it_says_and_comes_back(
    length: int, counts: int, counted: bool, floor: int
) -> None:
    numbers = np.arange(counts, dtype=np.uint64) + 1 if counted and counts else None
    payload = np.arange(length, dtype=np.float32)
    data = sealed.Content(payload, numbers, 7, floor).encode(counts)
    assert [len(data) + sealing.OVERHEAD] == sealed.sizes([4 * length], counts)
    back = sealed.Content.decode(data, FLOAT32, length, counts)
    assert (back.records, back.floor) == (7, floor)
    assert np.array_equal(back.payload, payload)
    assert (back.counts is None) == (numbers is None)
    with pytest.raises(ProtocolError, match="length"):
        sealed.Content.decode(data + b"\0", FLOAT32, length, counts)


def test_a_site_without_a_folder_cannot_aggregate(mailbox: Deployment, tmp_path: Path) -> None:
    end = house(mailbox, tmp_path, "folderless").guests["site-0"].end()
    object.__setattr__(end._seat, "state", None)
    with pytest.raises(ConfigError, match="--state"):
        end._desk.after("folderless", 1)
    assert end._first_shards[0].size == -(-D // 4) or end._first_shards[0].size == D // 4
