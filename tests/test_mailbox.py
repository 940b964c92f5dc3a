"""Messages between sites through the middleware: only the recipient can read them, nobody can change or move them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fl_privacy.config import Federation
from fl_privacy.errors import FederationError, ProtocolError
from fl_privacy.identity.keyring import Identity
from fl_privacy.round import mailbox
from fl_privacy.round.letters import Letters
from fl_privacy.round.mailbox import Mailbox
from fl_privacy.wire import federation_pb2 as pb
from helpers import CALL, Deployment, Keys, deploy, open_round, round_header, status

SITES = ("alice", "bob", "carol")


@pytest.fixture(scope="module")
def shuffler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    federation = Federation.model_validate({"name": "test", "sites": [{"name": name} for name in SITES]})
    folder = tmp_path_factory.mktemp("mail")
    deployment = deploy(folder, Keys(folder / "pki"), federation, "shuffler")
    yield deployment
    deployment.stop()


def letters(shuffler: Deployment, name: str, run: str) -> Letters:
    party = shuffler.party("site", name)
    return Letters(party.stub, Identity("test", "site", name), run, shuffler.keys.of("site", name))


@pytest.fixture
def three(shuffler: Deployment, request: pytest.FixtureRequest) -> Iterator[tuple[Letters, Letters, Letters]]:
    """Three sites in their own run, each with its card published."""
    run = request.node.name.replace("[", "-").replace("]", "")[:60]
    open_round(shuffler.server, round_header(run, 1, 4))
    alice, bob, carol = (letters(shuffler, name, run) for name in SITES)
    for one in (alice, bob, carol):
        one.publish()
    yield alice, bob, carol
    shuffler.server.finish(pb.FinishRequest(run=run), timeout=CALL)


def test_a_message_reaches_only_its_recipient_and_only_once(three: tuple[Letters, Letters, Letters]) -> None:
    alice, bob, carol = three
    alice.send("bob", "rule", b"seven")
    carol.send("bob", "rule", b"eleven")
    assert carol.receive("rule") == []
    assert sorted(bob.receive("rule")) == [("alice", b"seven"), ("carol", b"eleven")]
    assert bob.receive("rule") == []


def test_the_middleware_holds_nothing_readable(shuffler: Deployment, three: tuple[Letters, Letters, Letters]) -> None:
    alice, _, _ = three
    alice.send("bob", "rule", b"a secret of twenty-four")
    request = pb.PickupRequest(run=alice.run, topic="rule")
    (letter,) = shuffler.party("site", "bob").stub.pickup(request, timeout=CALL).letters
    assert b"secret" not in letter.content
    assert letter.sender == "alice"


@pytest.mark.parametrize("change", ["content", "signature", "topic", "sender"])
def test_a_changed_or_moved_message_is_dropped(
    change: str, shuffler: Deployment, three: tuple[Letters, Letters, Letters]
) -> None:
    """A site plays a malicious middleware and posts what it received: only the honest message arrives."""
    alice, bob, carol = three
    alice.send("bob", "rule", b"seven")
    stub = shuffler.party("site", "bob").stub
    (letter,) = stub.pickup(pb.PickupRequest(run=alice.run, topic="rule"), timeout=CALL).letters
    place = {"content": len(letter.content) - 1, "signature": 5}.get(change)
    if place is not None:
        letter.content = letter.content[:place] + bytes([letter.content[place] ^ 1]) + letter.content[place + 1 :]
    forged = pb.Letter(run=alice.run, recipient="bob", topic="rule", content=letter.content)
    if change == "topic":
        forged.topic = "other"
    poster = "carol" if change == "sender" else "alice"
    shuffler.party("site", poster).stub.post(forged, timeout=CALL)
    assert bob.receive(forged.topic) == []
    carol.send("bob", "rule", b"eleven")
    assert bob.receive("rule") == [("carol", b"eleven")]


def test_a_card_forged_by_another_site_is_rejected(
    shuffler: Deployment, three: tuple[Letters, Letters, Letters]
) -> None:
    """Carol posts Bob's card under her own name and a card of her own in his name: neither replaces his."""
    alice, bob, carol = three
    carol._own = Identity("test", "site", "bob")
    carol.publish()
    assert "carol" not in alice.cards() or alice.cards()["carol"].certificate != alice.cards()["bob"].certificate
    alice.send("bob", "rule", b"seven")
    assert bob.receive("rule") == [("alice", b"seven")]


def test_a_site_without_a_card_cannot_receive_messages(shuffler: Deployment) -> None:
    open_round(shuffler.server, round_header("cards", 1, 4))
    with pytest.raises(FederationError, match="no card"):
        letters(shuffler, "alice", "cards").send("bob", "rule", b"seven")
    shuffler.server.finish(pb.FinishRequest(run="cards"), timeout=CALL)


def test_only_sites_of_the_federation_can_post_and_only_to_each_other(shuffler: Deployment) -> None:
    open_round(shuffler.server, round_header("posts", 1, 4))

    def posted(by: tuple[str, str], **changes: object) -> str:
        letter = pb.Letter(**{"run": "posts", "recipient": "bob", "topic": "t", "content": b"x", **changes})
        return status(shuffler.party(*by).stub.post, letter, timeout=CALL)

    alice = ("site", "alice")
    assert posted(("server", "server")) == "PERMISSION_DENIED"
    assert posted(alice, recipient="mallory") == "NOT_FOUND"
    assert posted(alice, run="nowhere") == "NOT_FOUND"
    assert posted(alice, content=bytes(2**17)) == "INVALID_ARGUMENT"
    assert posted(alice) == "OK"
    shuffler.server.finish(pb.FinishRequest(run="posts"), timeout=CALL)


def test_no_sender_takes_the_room_of_the_others() -> None:
    box, letter = Mailbox(), {"recipient": "b", "topic": "t", "content": bytes(mailbox.LARGEST)}
    for _ in range(mailbox.SHARE // mailbox.LARGEST):
        box.post(pb.Letter(sender="a", **letter), 0.0)
    with pytest.raises(ProtocolError, match="full"):
        box.post(pb.Letter(sender="a", **letter), 0.0)
    box.post(pb.Letter(sender="c", **letter), 0.0)


def test_several_senders_together_do_not_take_the_room_of_the_others() -> None:
    box, letter = Mailbox(), {"recipient": "b", "topic": "t", "content": bytes(mailbox.LARGEST)}
    for number in range(mailbox.MOST // mailbox.SHARE):  # eight are fewer than a third of 25
        for _ in range(mailbox.SHARE // mailbox.LARGEST):
            box.post(pb.Letter(sender=f"liar-{number}", **letter), 0.0)
    for _ in range(mailbox.OWN // mailbox.LARGEST):
        box.post(pb.Letter(sender="c", **letter), 0.0)
    with pytest.raises(ProtocolError, match="full"):
        box.post(pb.Letter(sender="c", **letter), 0.0)


def test_a_mailbox_is_bounded_and_its_messages_expire(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(mailbox, "PER_SENDER", 2)
    box = Mailbox()
    for now in (0.0, 1.0):
        box.post(pb.Letter(sender="a", recipient="b", topic="t", content=b"x"), now)
    with pytest.raises(ProtocolError, match="full"):
        box.post(pb.Letter(sender="a", recipient="b", topic="t", content=b"x"), 2.0)
    box.post(pb.Letter(sender="c", recipient="", topic="t", content=b"y"), 2.0)
    assert len(box.pickup("b", "t", mailbox.LIFE + 0.5)[0]) == 2
    assert [one.sender for one in box.pickup("d", "t", mailbox.LIFE + 0.5)[0]] == ["c"]
    assert box.pickup("b", "t", mailbox.LIFE + 3) == ([], 0)
