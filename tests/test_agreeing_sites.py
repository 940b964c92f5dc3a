"""Sites agree on a secret over a mailbox that cannot read it: killed, late, replaced and split."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from boards import House, Post, problem_of
from fl_privacy.agreement import bulletin
from fl_privacy.agreement.bulletin import Bulletin
from fl_privacy.agreement.conflicts import Proof
from fl_privacy.agreement.terms import Terms, public
from fl_privacy.errors import FederationError, ProtocolError
from fl_privacy.identity.keyring import Keyring
from fl_privacy.identity.pki import load_key
from fl_privacy.round.letters import Letters
from helpers import eventually, refused

NONCE = bytes(16)


def secrets_of(house: House, *names: str) -> set[bytes]:
    return {house.sites[name].agreed().secret for name in names or house.sites}


def forms(secret: bytes) -> list[bytes]:
    return [secret, secret.hex().encode()]


def disk_of(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file())


def test_neither_the_mailbox_nor_a_disk_holds_a_byte_of_the_secret(tmp_path: Path) -> None:
    house = House(tmp_path)
    house.start()
    found = secrets_of(house)
    parts = [site._part.agreement.contribution for site in house.sites.values() if site._part]
    house.stop()
    assert len(found) == 1
    assert len(parts) == 4
    seen, kept = b"".join(house.post.seen), disk_of(tmp_path)
    assert len(seen) > 10_000
    for hidden in (*found, *parts):
        assert not any(form in seen or form in kept for form in forms(hidden))
    files = list((tmp_path / "state").glob("*/agreement/*"))
    assert len(files) == 4
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}


def test_restarted_sites_and_a_late_one_have_the_same_secret(tmp_path: Path) -> None:
    house = House(tmp_path)
    house.start(*house.names[:3])
    before = secrets_of(house)
    house.stop()
    house.post.boxes.clear()  # the mailbox too
    house.start()
    assert secrets_of(house) == before
    assert len(before) == 1
    house.stop()
    assert not house.events("equivocated")


class Killed(BaseException):
    """The process is gone."""


@pytest.mark.parametrize("step", range(1, 8))
def test_a_site_killed_at_any_message_continues_from_its_disk(
    step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before what it says is out, and after: each with what is on its disk then."""
    house, left = House(tmp_path), [step]
    first = house.names[0]

    def deadly(self: Any, text: str, content: bytes, announce: Any = None) -> None:
        if self.own == first and left[0] >= 0:
            left[0] -= 1
            if left[0] == 0:
                left[0] = -1
                if step % 2:
                    plain(self, text, content)
                raise Killed
        plain(self, text, content)

    plain = Letters.announce
    monkeypatch.setattr(Letters, "announce", deadly)
    monkeypatch.setattr("threading.excepthook", lambda args: None)
    house.start()
    eventually(lambda: left[0] < 0)
    house.sites[first]._thread.join()
    house.start(first)
    assert len(secrets_of(house)) == 1
    house.stop()
    assert not house.events("equivocated")


def test_with_a_third_silent_a_round_ends_and_says_who_is_missing(tmp_path: Path) -> None:
    house = House(tmp_path, wait=2.0)
    house.start(*house.names[:2])
    reason = problem_of(house.sites["site-0"])
    house.stop()
    assert "2 of 4 sites answered, 3 are needed; silent: site-2, site-3" in reason


def test_a_mailbox_that_withholds_one_site_s_letters_stops_nobody_else(tmp_path: Path) -> None:
    house = House(tmp_path)
    house.post.hidden = {name: {"site-3"} for name in house.names[:3]}
    house.start()
    assert len(secrets_of(house, *house.names[:3])) == 1
    part = house.sites["site-3"]._part
    house.stop()
    assert part is not None
    assert part.agreed is None  # nobody seals a bulletin for a site without a card: it is as if it were silent


def test_a_new_roster_has_another_secret_and_who_is_removed_is_not_told(tmp_path: Path) -> None:
    house = House(tmp_path, 5)
    house.start()
    before = secrets_of(house)
    house.stop("site-4")
    del house.keys.members["site", "site-4"]
    house.keys.authority.enlist("test", house.keys.members.values(), house.keys.roster_file)
    house.names.remove("site-4")
    house.accept()
    after = secrets_of(house)
    house.names.append("site-4")
    house.wait = 1.0
    house.start("site-4")
    reason = problem_of(house.sites["site-4"])
    house.stop()
    assert len(before) == len(after) == 1
    assert before != after
    assert "not accepted" in reason or "not begun" in reason


def test_a_split_stops_the_run_and_names_who_signed_for_both(tmp_path: Path) -> None:
    """site-0 and site-1, half of four, agree on one secret with site-2 and on another with site-3."""
    house = House(tmp_path)
    first, second = Post(), Post()
    for post, honest in ((first, "site-2"), (second, "site-3")):
        house.post = post
        for name in ("site-0", "site-1"):  # each time as if it had not spoken before
            for path in (house.state(name) / "agreement").glob("*"):
                path.unlink()
        house.start("site-0", "site-1", honest)
        assert len(secrets_of(house)) == 1
        house.stop()
    house.post = Post()
    house.start("site-2", "site-3")
    assert len(secrets_of(house)) == 2  # nobody has shown anything yet
    for site in house.sites.values():
        site.show("run", NONCE, 1)
    for name in ("site-2", "site-3"):
        eventually(lambda name=name: problem_of(house.sites[name]) != "")  # type: ignore[misc]
        found = problem_of(house.sites[name])
        assert "proven to have contradicted themselves: site-0, site-1" in found
    house.stop()
    splits = house.events("split")
    assert {name for name, _ in splits} == {"site-2", "site-3"}
    proofs = sorted((house.state("site-2") / "agreement").glob("*.proof"))
    assert [path.name.split(".")[1] for path in proofs] == ["site-0", "site-1"]
    roster = Keyring(house.keys.of("site", "site-2").folder).roster()
    terms = Terms.of_roster(roster, f"test-{roster.serial}", 0)
    for name in house.names:
        assert terms.learn(name, public(load_key(house.keys.of("site", name).key_file)))
    assert all(Proof.decode(path.read_bytes()).reason(terms) for path in proofs)


def test_one_site_that_shows_a_wrong_check_value_stops_nobody(tmp_path: Path) -> None:
    house = House(tmp_path)
    house.start()
    secrets_of(house)
    part = house.sites["site-0"]._part
    assert part is not None
    for name, site in house.sites.items():
        if name != "site-0":
            site.show("run", NONCE, 1)
    part._board.show("run", NONCE, 1, bytes(32))
    house.sites["site-0"]._wanted.set()
    eventually(lambda: len(house.events("other-check-value")) >= 3)
    assert len(secrets_of(house, "site-1", "site-2", "site-3")) == 1
    house.stop()
    assert {fields["site"] for _, fields in house.events("other-check-value")} == {"site-0"}


def test_a_bulletin_opens_for_its_readers_alone_and_only_as_it_was_sent(tmp_path: Path) -> None:
    house = House(tmp_path)
    signer, other = (load_key(house.keys.of("site", name).key_file) for name in ("site-0", "site-1"))
    cards = {name: X25519PrivateKey.generate() for name in ("site-1", "site-2")}
    made = Bulletin("ab" * 32, {"site-0": b"k"}, (b"one", b"two"), {"run 00": (3, "ff")}, b"[]")
    sealed = bulletin.seal(made.encode(), {n: c.public_key() for n, c in cards.items()}, signer, b"bound")
    for name, card in cards.items():
        text = bulletin.unseal(sealed, name, card, signer.public_key(), b"bound")
        assert text is not None
        assert Bulletin.decode(text) == made
    card = cards["site-1"]
    assert bulletin.unseal(sealed, "site-3", card, signer.public_key(), b"bound") is None
    with refused("PERMISSION_DENIED"):
        bulletin.unseal(sealed, "site-1", card, other.public_key(), b"bound")  # of another site
    with refused("PERMISSION_DENIED"):
        bulletin.unseal(sealed, "site-1", card, signer.public_key(), b"other")  # of another roster
    with refused("PERMISSION_DENIED"):
        bulletin.unseal(sealed[:-1] + bytes([sealed[-1] ^ 1]), "site-1", card, signer.public_key(), b"bound")
    for junk in (b"", b"\xff" * 40, sealed[:20], b"\0\0"):
        with suppress(ProtocolError):
            assert bulletin.unseal(junk, "site-1", card, signer.public_key(), b"bound") is None
        with pytest.raises(ProtocolError):
            Bulletin.decode(junk)
    parts = bulletin.pieces(sealed, 100)
    assert bulletin.joined(parts) == sealed
    assert bulletin.joined(parts[1:]) is None
    assert bulletin.count_of(parts[0]) == len(parts)


def test_a_damaged_state_file_stops_the_site(tmp_path: Path) -> None:
    house = House(tmp_path, wait=2.0)
    house.start()
    secrets_of(house)
    house.stop()
    (file,) = (house.state("site-0") / "agreement").glob("*.sealed")
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    house.start("site-0")
    reason = problem_of(house.sites["site-0"])
    house.stop()
    assert "its file is damaged" in reason


def test_fewer_than_four_sites_cannot_agree(tmp_path: Path) -> None:
    house = House(tmp_path, 3, wait=1.0)
    house.start()
    reason = problem_of(house.sites["site-0"])
    house.stop()
    assert "3 sites cannot bear one faulty site; at least 4 are needed" in reason
    with pytest.raises(FederationError):
        Terms.of_roster(Keyring(house.keys.of("site", "site-0").folder).roster(), "run", 0)


def test_only_the_key_that_the_roster_lists_is_learned(tmp_path: Path) -> None:
    house = House(tmp_path)
    terms = Terms.of_roster(Keyring(house.keys.of("site", "site-0").folder).roster(), "run", 0)
    keys = {name: house.keys.of("site", name).key_file for name in house.names}
    assert terms.learn("site-0", public(load_key(keys["site-0"])))
    assert not terms.learn("site-0", public(load_key(keys["site-1"])))
    assert not terms.learn("site-9", public(load_key(keys["site-1"])))
    assert not terms.learn("site-1", b"not a key")
    assert set(terms.key_of) == {"site-0"}
    whole = Terms.of_roster(Keyring(house.keys.of("site", "site-0").folder).roster(), "run", 0)
    for name, file in keys.items():
        whole.learn(name, public(load_key(file)))
    given = Terms("run", 0, whole.roster, tuple((name, public(load_key(file))) for name, file in keys.items()))
    assert given.scope == whole.scope == terms.scope
