"""What every engine on this machine prepares first: folders, certificates, config copies, middleware processes."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from fl_privacy.config import Federation, ShardsRoute, ShufflerRoute
from fl_privacy.deploy.kits.kit import observers, parties
from fl_privacy.deploy.plan import ServerPlan
from fl_privacy.deploy.processes import Fleet
from fl_privacy.errors import LaunchError
from fl_privacy.identity.keyring import LISTENING, Identity, Keyring
from fl_privacy.identity.pki import Authority

HOSTS = ("127.0.0.1", "localhost")
START = 90.0
# Files of this user are out of reach for root without capabilities, which is how SuperNodes run here.
PRIVATE_UID = 61183


def new_run_name(federation: Federation) -> str:
    return f"{federation.name}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class Ground:
    """One run on this machine: the transcript in `run_dir`, everything secret under `home/private`."""

    federation: Federation
    run: str
    runs_dir: Path
    data_dir: Path | None
    fleet: Fleet = field(init=False)
    middleware: list[str] = field(default_factory=list)
    evaluator: str | None = None

    def __post_init__(self) -> None:
        self.run_dir = self.runs_dir / self.run
        self.home = self.runs_dir / ".state" / self.run
        self.private = self.home / "private"
        self.config = self.private / "federation.yaml"
        # Not of one run: a budget is spent over all runs that a site takes part in.
        self.sites = self.runs_dir / "sites" / self.federation.name
        self.fleet = Fleet(self.run_dir / "logs", self.home / "pids.json")
        # Unix socket paths are short, Ray's take most of them, and a runs or temporary folder may lie deep.
        self.sockets = Path(tempfile.mkdtemp(prefix="flp-", dir="/tmp" if os.access("/tmp", os.W_OK) else None))
        self.sockets.chmod(0o711)

    def prepare(self) -> None:
        """Folders, config and a certificate for every party; on a resumed run they are there already."""
        try:
            self.private.mkdir(parents=True, exist_ok=True, mode=0o700)
            self.private.chmod(0o700)
            self.config.write_text(self.federation.to_yaml())
            for name in self.federation.site_names:
                (self.sites / name).mkdir(parents=True, exist_ok=True, mode=0o700)
            pki = self.runs_dir / "pki"
            authority = Authority.open(pki)
            for role, name in parties(self.federation):
                # Only who listens may be dialled: a site's certificate must not pass for the shuffler's.
                hosts = HOSTS if role in LISTENING else ()
                authority.keep(Identity(self.federation.name, role, name), self.keys(role, name).folder, hosts)
        except OSError as error:
            raise LaunchError(
                f"runs-dir {self.runs_dir}: {error.strerror or error}; choose another --runs-dir"
            ) from None
        if os.geteuid() == 0:
            for folder in (self.private, pki, self.sites):
                _give(folder, PRIVATE_UID)

    def keys(self, role: str, name: str) -> Keyring:
        return Keyring(self.private / (f"sites/{name}" if role == "site" else name))

    def start_middleware(self) -> None:
        """Shuffler, or aggregators and evaluator, each on a free port of its own choosing."""
        if isinstance(self.federation.route, ShufflerRoute):
            self._start("shuffler", "shuffler", ["-m", "shuffler_app"])
            self.middleware = [self._address("shuffler")]
        if isinstance(self.federation.route, ShardsRoute):
            names = [f"aggregator-{k}" for k in range(self.federation.route.aggregators)]
            for k, name in enumerate(names):
                state = ["--state", str(self.private / name / "state")]
                self._start(name, "aggregator", ["-m", "aggregator_app", "--index", str(k), *state])
            self.middleware = [self._address(name) for name in names]
            command = ["-m", "aggregator_app.evaluator", "--aggregators", *self.middleware, *self.data_arguments()]
            self._start("evaluator", "evaluator", command)
            self.evaluator = self._address("evaluator")

    def data_arguments(self) -> list[str]:
        return ["--data-dir", str(self.data_dir)] if self.data_dir else []

    def _start(self, name: str, role: str, command: list[str]) -> None:
        common = ["--config", str(self.config), "--keys", str(self.keys(role, name).folder), "--run", self.run]
        view = ["--view", str(self.run_dir / "views" / name)] if self.federation.audit else []
        self.fleet.start(name, [sys.executable, *command, *common, *view])

    def _address(self, name: str) -> str:
        return str(self.fleet.wait_for(name, "listening", START)["address"])

    def write_server_plan(self, invite_every_round: bool = False) -> None:
        """What the ServerApp finds through the run config's `home`."""
        plan = ServerPlan(
            run=self.run,
            run_dir=self.run_dir,
            config=self.config,
            keys=self.keys("server", "server").folder,
            log=self.fleet.log("server"),
            middleware=self.middleware,
            evaluator=self.evaluator,
            data_dir=self.data_dir,
            observers=observers(self.federation),
            invite_every_round=invite_every_round,
        )
        (self.private / "server.json").write_text(plan.model_dump_json(indent=2))

    def clear(self) -> None:
        """Stop everything, in Flower's order: SuperNodes before the SuperLink."""
        try:
            self.fleet.stop("supernode")
            self.fleet.stop("superlink")
            self.fleet.stop()
        finally:
            shutil.rmtree(self.sockets, ignore_errors=True)


def _give(folder: Path, uid: int) -> None:
    folder.chmod(0o700)
    os.chown(folder, uid, -1)
    for path in folder.rglob("*"):
        os.chown(path, uid, -1, follow_symlinks=False)
