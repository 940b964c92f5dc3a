"""What the sites of one roster have agreed on, as the steps of an update use it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from fl_privacy.agreement.terms import Terms
from fl_privacy.crypto import keys

CHECK_BYTES = keys.KEY_BYTES


@dataclass(frozen=True)
class Agreed:
    """A secret that holds for one roster. Every run derives its own from it."""

    secret: bytes = field(repr=False)
    terms: Terms

    def of_run(self, run: str, nonce: bytes) -> bytes:
        """The secret of a run; a second run of the same name has another nonce."""
        return keys.derive(self.secret, run, 0, nonce.hex(), "secret of a run")

    def check_value(self, run: str, nonce: bytes, round: int) -> bytes:
        """What a site shows with its upload: equal for sites of one roster and secret, and tells neither."""
        return keys.derive(self.secret, run, round, f"{nonce.hex()} {self.terms.scope.hex()}", "upload check")


@dataclass(frozen=True)
class Repeatable(Agreed):
    """The same for all runs, under `reproducible: true`: an engine and another one give the same bits."""

    def of_run(self, run: str, nonce: bytes) -> bytes:
        return keys.derive(self.secret, "", 0, "", "secret of a run")


class Secrets(Protocol):
    """A site's way to the agreed secret."""

    def agreed(self) -> Agreed:
        """The secret of the roster that the site accepted. Waits; ProtocolError if there is none in time, or two."""

    def show(self, run: str, nonce: bytes, round: int) -> None:
        """Tell the other sites the check value of an upload."""


@dataclass(frozen=True)
class Seeded:
    """Nothing is agreed on: the secret is from the config's seed, and none. For runs that are not private anyway."""

    seed: int
    terms: Callable[[], Terms]

    def agreed(self) -> Agreed:
        return Repeatable(keys.derive(self.seed.to_bytes(32, "big"), "", 0, "", "agreed secret"), self.terms())

    def show(self, run: str, nonce: bytes, round: int) -> None:
        """All sites have the same seed."""
