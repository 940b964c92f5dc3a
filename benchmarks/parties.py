"""Temporary certificates and processes for a benchmark."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fl_privacy.deploy.processes import Fleet
from fl_privacy.identity.keyring import Identity, Keyring
from fl_privacy.identity.pki import Authority

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

    def keys(self, role: str, name: str) -> Keyring:
        return self._authority.issue(Identity(self._federation, role, name), self.folder / name, (HOST,))


@contextmanager
def parties(federation: str) -> Iterator[Parties]:
    """Parties whose processes end and whose keys are removed, whatever happens inside."""
    with tempfile.TemporaryDirectory(prefix="fl-privacy-bench-") as folder:
        made = Parties(Path(folder), federation)
        try:
            yield made
        finally:
            made.fleet.stop()
