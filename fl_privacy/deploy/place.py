"""Where a party lives on its machine: what a kit and the local engine alike know when they start its processes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fl_privacy.config import Address, Federation
from fl_privacy.identity.keyring import Keyring
from fl_privacy.roles import Role


@dataclass(frozen=True)
class Place:
    """One party's files and addresses. With `gated`, a gate or a relay stands between it and Flower's SuperLink."""

    role: Role
    name: str
    federation: Federation
    config: Path
    keys: Keyring
    state: Path
    run: Path  # what is only true while it runs: sockets, the relay's certificate
    node: Path  # the only folder that its SuperNode, and the code that comes with a run, can read
    gated: bool
    listen: Address | None = None
    superlink: Address | None = None
    middleware: tuple[Address, ...] = ()
    evaluator: Address | None = None
    data: Path | None = None
    records: Path | None = None  # what it records under `audit: true`, with {run} for the run's name
    secret: Path | None = None
    metrics: Address | None = None
    events: Path | None = None
    proxy: str | None = None
    trial: bool = False  # one person runs all sites

    @property
    def socket(self) -> Path:
        """Where a site's worker listens for its ClientApp."""
        return self.run / "worker"

    @property
    def node_key(self) -> Path:
        return self.node / "node.key"

    @property
    def database(self) -> Path:
        """Flower's own state, at the SuperLink."""
        return self.state / "flower.db"
