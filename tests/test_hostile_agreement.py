"""What one site can do to the agreement of the others while fewer than a third of the sites are faulty."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from boards import House, Slot, problem_of
from fl_privacy.agreement.conflicts import MOST, Witness, packed
from fl_privacy.agreement.messages import Message, Statement, Topic, encode, sign
from fl_privacy.agreement.terms import Terms, public
from fl_privacy.identity.pki import load_key
from helpers import eventually

NONCE = bytes(16)


class Away(grpc.RpcError):
    """The mailbox does not answer."""

    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.UNAVAILABLE

    def details(self) -> str:
        return "connection refused"


def test_sites_that_start_before_the_mailbox_agree_once_it_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A first look that fails must not lose what a site has to say, nor its timers."""
    house, calls, plain = House(tmp_path), dict[str, int](), Slot.post

    def post(self: Slot, letter: Any, timeout: float = 0) -> Any:
        calls[self.site] = calls.get(self.site, 0) + 1
        if calls[self.site] <= 2:
            raise Away
        return plain(self, letter, timeout)

    monkeypatch.setattr(Slot, "post", post)
    house.start()
    assert len({site.agreed().secret for site in house.sites.values()}) == 1
    house.stop()


def test_one_site_that_contradicts_itself_and_shows_a_wrong_check_value_stops_nobody(tmp_path: Path) -> None:
    """Two secrets take more than f equivocators: one could otherwise stop every run alone."""
    house = House(tmp_path)
    house.start()
    assert len({site.agreed().secret for site in house.sites.values()}) == 1
    liar = house.sites["site-0"]._part
    assert liar is not None
    key = load_key(house.keys.of("site", "site-0").key_file)
    two = [sign(liar.terms, key, Statement(Topic.COMMIT, "site-0", 1, 9, bytes([value]) * 32)) for value in (1, 2)]
    liar.agreement.evidence = lambda: packed(two)  # type: ignore[method-assign]
    looks, other = list[bytes](), house.sites["site-1"]._part
    assert other is not None
    plain = other.agreement.examine
    other.agreement.examine = lambda data: looks.append(data) or plain(data)  # type: ignore[method-assign,func-returns-value]
    for name in house.names[1:]:
        house.sites[name].show("run", NONCE, 1)
    liar._board.show("run", NONCE, 1, bytes(32))
    house.sites["site-0"]._wanted.set()
    eventually(lambda: {name for name, _ in house.events("equivocated")} >= set(house.names[1:]))
    assert [problem_of(house.sites[name]) for name in house.names[1:] * 3] == [""] * 9
    assert looks.count(packed(two)) == 1
    house.stop()
    assert {fields["site"] for _, fields in house.events("equivocated")} == {"site-0"}
    assert not house.events("split")


def test_what_is_refused_is_not_checked_again_every_turn_and_what_is_gone_is_forgotten(tmp_path: Path) -> None:
    """A bulletin of thousands of signatures, the last one wrong, would keep every other site's processor busy."""
    house, seen = House(tmp_path), list[bytes]()
    house.start()
    assert len({site.agreed().secret for site in house.sites.values()}) == 1
    liar, other = (house.sites[name]._part for name in ("site-0", "site-1"))
    assert liar is not None
    assert other is not None
    plain = other.agreement.receive

    def receive(data: bytes) -> Any:
        seen.append(data)
        return plain(data)

    other.agreement.receive = receive  # type: ignore[method-assign]
    for number in range(3):
        key = load_key(house.keys.of("site", "site-0").key_file)
        ask = sign(liar.terms, key, Statement(Topic.ASK, "site-0", 2, number, b""))
        liar._board._messages = {b"junk": None, encode(Message(ask)): None}
        house.sites["site-0"]._wanted.set()
        eventually(lambda number=number: len(seen) >= 2 + number)  # type: ignore[misc]
    for _ in range(10):
        house.sites["site-1"].agreed()  # a turn each
    house.stop()
    assert 1 <= seen.count(b"junk") <= 2  # again when the timer of the last resend is over
    on_boards = sum(len(found.messages) for found in other._board.bulletins.values())
    assert len(other._board._taken) <= on_boards


def test_who_says_a_lot_is_still_proven_to_have_signed_for_two_decisions() -> None:
    """Room for what each site says is bounded; what a decision stands on is kept whatever came before it."""
    keys = {f"site-{index}": ec.generate_private_key(ec.SECP256R1()) for index in range(4)}
    terms = Terms("run", 0, "ab" * 32, tuple((site, public(key)) for site, key in keys.items()))

    def commit(view: int, content: int) -> Statement:
        return sign(terms, keys["site-0"], Statement(Topic.COMMIT, "site-0", 1, view, bytes([content]) * 32))

    witness = Witness(terms, "site-1")
    noise = [commit(view, 7) for view in range(1, MOST + 1)]
    assert witness.hear(noise) == []
    assert witness.hear([commit(0, 1)], decided=True) == []
    assert len(witness.statements()) == MOST + 1
    (proof,) = witness.examine(packed([commit(0, 2)]))
    assert (proof.site, proof.reason(terms)) == ("site-0", "two values in view 0")


def test_a_bulletin_is_sealed_for_no_key_of_a_later_roster(tmp_path: Path) -> None:
    """The authority may certify another key for a site, and a new roster come into force while a part is at work."""
    house = House(tmp_path)
    house.start()
    assert len({site.agreed().secret for site in house.sites.values()}) == 1
    part = house.sites["site-0"]._part
    house.stop()
    assert part is not None
    letters = part._board._letters
    cards = letters.cards()
    cards["site-1"] = replace(cards["site-1"], signer=ec.generate_private_key(ec.SECP256R1()).public_key())
    letters.cards = lambda: cards  # type: ignore[method-assign]
    list(part._board.news())
    assert set(part._board._cards) == {"site-2", "site-3"}
