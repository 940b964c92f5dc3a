"""Temporary certificates and processes for a benchmark."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fl_privacy.deploy.processes import Fleet
from fl_privacy.deploy.rosters import share
from fl_privacy.identity.keyring import Identity, Keyring, holder
from fl_privacy.identity.pki import Authority, load_certificate
from fl_privacy.identity.roster import Member

HOST = "127.0.0.1"
PARAMETERS = 11_237_432  # a ResNet-18 for ten classes: 45 MB
QUICK_PARAMETERS = 2**21
MEGABYTE = 10**6


class Parties:
    """A folder with an authority, the certificates it issues on demand, and the processes that use them."""

    def __init__(self, folder: Path, federation: str) -> None:
        self.folder = folder
        self.fleet = Fleet(folder / "logs", folder / "pids.json")
        self._federation = federation
        self._authority = Authority.open(folder / "pki")

    def identity(self, role: str, name: str) -> Identity:
        return Identity(self._federation, role, name)

    def keys(self, *parties: tuple[str, str]) -> list[Keyring]:
        """Keys of parties that know each other, and nobody else."""
        made = [self._authority.issue(self.identity(*party), self.folder / party[1], (HOST,)) for party in parties]
        holders = [holder(load_certificate(keys.certificate_file)) for keys in made]
        self._authority.enlist(self._federation, [Member(who.role, who.name, key) for who, key in holders])
        for keys in made:
            share(self._authority.roster_file(self._federation), keys.folder)
        return made


@contextmanager
def parties(federation: str) -> Iterator[Parties]:
    """Parties whose processes end and whose keys are removed, whatever happens inside."""
    with tempfile.TemporaryDirectory(prefix="fl-privacy-bench-") as folder:
        made = Parties(Path(folder), federation)
        try:
            yield made
        finally:
            made.fleet.stop()
