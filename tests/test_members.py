"""The SuperLink's list of members follows the folder `nodes/`, even if Flower rejects single keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from fl_privacy.deploy.kits.members import Members, keys_in


def public() -> bytes:
    key = ec.generate_private_key(ec.SECP384R1()).public_key()
    return key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)


def answer(code: int) -> httpx.HTTPStatusError:
    request = httpx.Request("POST", "https://here/")
    return httpx.HTTPStatusError("no", request=request, response=httpx.Response(code, request=request))


class Flower:
    """Flower's control API: it never accepts a key that was registered before."""

    def __init__(self) -> None:
        self.members: dict[bytes, int] = {}
        self.used: set[bytes] = set()
        self.error: httpx.HTTPError | None = None
        self.asked = 0

    def nodes(self) -> dict[bytes, int]:
        self.asked += 1
        return dict(self.members)

    def register(self, key: bytes, name: str) -> None:
        if self.error is not None:
            raise self.error
        if key in self.used:
            raise answer(412)
        self.used.add(key)
        self.members[key] = len(self.used)

    def unregister(self, node: int) -> None:
        self.members = {key: number for key, number in self.members.items() if number != node}


class Membership:
    def __init__(self, folder: Path) -> None:
        self.folder, self.flower = folder, Flower()
        self.events: list[tuple[str, dict[str, Any]]] = []
        control: Any = self.flower
        log: Any = lambda event, **fields: self.events.append((event, fields))  # noqa: E731
        self.members = Members(control, folder, log)

    def put(self, name: str, data: bytes) -> None:
        (self.folder / f"{name}.pub").write_bytes(data)

    def keep(self, times: int = 5) -> list[str]:
        """The events reported while nothing else changes."""
        before = len(self.events)
        for _ in range(times):
            self.members.keep()
        return [event for event, _ in self.events[before:]]


@pytest.fixture
def membership(tmp_path: Path) -> Membership:
    return Membership(tmp_path)


def test_joining_is_adding_a_file_and_leaving_is_deleting_it(membership: Membership) -> None:
    keys = {name: public() for name in ("site-0", "site-1")}
    for name, key in keys.items():
        membership.put(name, key)
    assert membership.keep() == ["joined", "joined"]
    (membership.folder / "site-0.pub").unlink()
    assert membership.keep() == ["removed"]
    assert set(membership.flower.members) == {keys["site-1"]}
    assert membership.flower.asked == 2


def test_a_refused_key_is_reported_once_with_the_fix_and_blocks_nobody(membership: Membership) -> None:
    """A site that was removed comes back with its old key while another leaves and a third joins."""
    old, leaving, joining = public(), public(), public()
    membership.put("a-back", old)
    membership.put("b-leaving", leaving)
    membership.keep()
    (membership.folder / "a-back.pub").unlink()
    membership.keep()
    membership.put("a-back", old)
    membership.put("c-joining", joining)
    (membership.folder / "b-leaving.pub").unlink()
    assert membership.keep(50) == ["removed", "joined", "refused"]
    assert set(membership.flower.members) == {joining}
    _, reported = membership.events[-1]
    assert reported["site"] == "a-back"
    assert "delete node/node.key" in reported["reason"]
    assert "pki renew" in reported["reason"]
    asked = membership.flower.asked
    membership.put("d", public())
    assert membership.keep() == ["joined"]
    assert membership.flower.asked == asked + 1
    membership.put("a-back", public())
    assert membership.keep() == ["joined"]


def test_an_unreachable_superlink_is_retried_and_reported_once(membership: Membership) -> None:
    membership.put("site-0", public())
    membership.put("site-1", b"not a key")
    for error, times in ((httpx.ConnectError("x"), 1), (httpx.ReadTimeout("x"), 1), (answer(503), 1)):
        membership.flower.error = error
        assert membership.keep(50) == ["members"] * times
    membership.flower.error = None
    assert membership.keep(50) == ["joined", "refused"]
    membership.flower.error = httpx.ConnectError("x")
    membership.put("site-2", public())
    assert membership.keep() == ["members"]


def test_an_invalid_key_is_named_and_skipped(tmp_path: Path) -> None:
    """Garbage, a folder, a link to nowhere, a key on a curve that nobody supports: each is one line."""
    good = public()
    (tmp_path / "good.pub").write_bytes(good)
    (tmp_path / "garbage.pub").write_bytes(b"\xff")
    (tmp_path / "folder.pub").mkdir()
    (tmp_path / "nowhere.pub").symlink_to(tmp_path / "gone")
    (tmp_path / "odd.pub").write_bytes(ODD)
    found, refused = keys_in(tmp_path)
    assert found == {good: "good"}
    assert {one.site for one in refused} == {"garbage", "folder", "nowhere", "odd"}
    membership = Membership(tmp_path)
    assert sorted(membership.keep()) == ["joined", *["refused"] * 4]


# An elliptic-curve key whose curve has an object identifier that does not exist (1.3.132.0.99).
ODD = b"""-----BEGIN PUBLIC KEY-----
MBYwEAYHKoZIzj0CAQYFK4EEAGMDAgAE
-----END PUBLIC KEY-----
"""


def test_flower_accepts_no_key_twice(tmp_path: Path) -> None:
    """What the error message says about Flower is true for the installed version."""
    from flwr.server.superlink.linkstate import LinkStateFactory
    from flwr.supercore.object_store import ObjectStoreFactory
    from flwr.superlink.federation import NoOpFederationManager

    database = str(tmp_path / "state.db")
    state = LinkStateFactory(database, NoOpFederationManager(), ObjectStoreFactory(database)).state()
    key = public()
    node = state.create_node("owner", "owner", key, 30.0)
    state.delete_node("owner", node)
    with pytest.raises(ValueError, match="already in use"):
        state.create_node("owner", "owner", key, 30.0)
