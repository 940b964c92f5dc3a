"""What one site, or a mailbox, can do to the agreement of the others while fewer than a third of the sites are faulty."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import pytest

from boards import House, Slot, problem_of
from fl_privacy.agreement.conflicts import packed
from fl_privacy.agreement.messages import Statement, Topic, sign
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
    for name in house.names[1:]:
        house.sites[name].show("run", NONCE, 1)
    liar._board.show("run", NONCE, 1, bytes(32))
    house.sites["site-0"]._wanted.set()
    eventually(lambda: {name for name, _ in house.events("equivocated")} >= set(house.names[1:]))
    assert [problem_of(house.sites[name]) for name in house.names[1:]] == ["", "", ""]
    house.stop()
    assert {fields["site"] for _, fields in house.events("equivocated")} == {"site-0"}
    assert not house.events("split")
