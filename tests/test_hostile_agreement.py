"""What one site, or a mailbox, can do to the agreement of the others while fewer than a third of the sites are faulty."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import pytest

from boards import House, Slot


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
