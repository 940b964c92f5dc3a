"""What every engine on this machine prepares first: folders, certificates, config copies, middleware processes."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from fl_privacy.config import Address, Federation
from fl_privacy.deploy import environment, forkserver, ledgers, programs, rosters
from fl_privacy.deploy.commands import Ports, Process, processes, variables
from fl_privacy.deploy.parties import parties
from fl_privacy.deploy.place import Place
from fl_privacy.deploy.plan import ServerPlan
from fl_privacy.deploy.processes import Fleet
from fl_privacy.deploy.supervise import OFTEN, Backoff, Supervisor, Watched
from fl_privacy.errors import LaunchError
from fl_privacy.identity.accepted import accept_here
from fl_privacy.identity.keyring import Identity, Keyring
from fl_privacy.identity.pki import Authority
from fl_privacy.ops.log import Log
from fl_privacy.roles import ROLES, RUN
from fl_privacy.tasks import accepted

HOSTS = ("127.0.0.1", "localhost")
ANY_PORT = "127.0.0.1:0"
SIMULATED_SITES = "client_app.forks"


@dataclass
class Workspace:
    """One run on this machine: the transcript in `run_dir`, everything secret under `home/private`."""

    federation: Federation
    run: str
    runs_dir: Path
    data_dir: Path | None
    fleet: Fleet = field(init=False)
    log: Log = field(init=False)
    supervisor: Supervisor = field(init=False)
    addresses: dict[str, list[Address]] = field(default_factory=lambda: defaultdict(list))  # by what they serve as

    def __post_init__(self) -> None:
        self.run_dir = self.runs_dir / self.run
        self.home = self.runs_dir / ".state" / self.run
        self.private = self.home / "private"
        self.config = self.private / "federation.yaml"
        self.sites = ledgers.folder(self.federation, self.runs_dir)
        self.fleet = Fleet(self.run_dir / "logs", self.home / "pids.json")
        self.log = Log("engine", self.fleet.log("engine"))
        self.supervisor = Supervisor(self.fleet, self.log)
        # Unix socket paths are short, and a runs or temporary folder may lie deep.
        self.sockets = Path(tempfile.mkdtemp(prefix="flp-", dir="/tmp" if os.access("/tmp", os.W_OK) else None))
        self.sockets.chmod(0o711)

    @property
    def middleware(self) -> list[Address]:
        return self.addresses["middleware"]

    def load(self, nodes: bool = False) -> None:
        """Begin to load what the processes of any run need, unless an earlier run of this process has.

        SuperNodes, which run shipped code, are forks of one that starts in an environment without secrets.
        """
        if sys.platform != "linux":
            return
        modules = {*programs.modules("flower-superlink"), *(role.module for role in ROLES.values() if role.module)}
        self.fleet.forks[False] = forkserver.shared({*modules, SIMULATED_SITES}, environment.own())
        if nodes:
            modules = {"fl_privacy.deploy.confine", *programs.modules("flower-supernode")}
            self.fleet.forks[True] = forkserver.shared(modules, environment.confined(Path(os.devnull)))
        for server in self.fleet.forks.values():
            server.load()

    def prepare(self) -> None:
        """Folders, config and a certificate for every party; on a resumed run they are there already."""
        try:
            self.private.mkdir(parents=True, exist_ok=True, mode=0o700)
            self.private.chmod(0o700)
            self._keep_init()
            self.config.write_text(self.federation.to_yaml())
            authority = Authority.open(self.runs_dir / "pki")
            for role, name in parties(self.federation):
                place = self.place(role, name)
                place.state.mkdir(parents=True, exist_ok=True, mode=0o700)
                hosts = HOSTS if place.role.listens else ()
                if place.role.has_node and self.federation.task.is_own:
                    accepted.accept(self.federation, place.state)  # whoever runs all sites here chose this code
                authority.keep(Identity(self.federation.name, role, name), place.keys.folder, hosts)
            self._enlist(authority)
        except OSError as error:
            raise LaunchError(f"runs-dir {self.runs_dir}: {error.strerror or error}; use another --runs-dir") from None

    def _enlist(self, authority: Authority) -> None:
        """The run's own roster, with the run's own keys; whoever runs all sites here accepts it for them."""
        file = self.private / "roster.json"
        roster = authority.enlist(self.federation.name, rosters.here(self.federation, authority, self.keys), file)
        for place in (self.place(*party) for party in parties(self.federation)):
            rosters.share(file, place.keys.folder)
            if place.role.has_node:
                accept_here(roster, place.state)

    def _keep_init(self) -> None:
        """The run's own copy of the file that it starts from: a resumed run needs it too."""
        if self.federation.init is not None:
            init = self.federation.init.placed(self.private, "init")
            self.federation = self.federation.model_copy(update={"init": init})

    def keys(self, role: str, name: str) -> Keyring:
        return Keyring(self.private / (f"sites/{name}" if ROLES[role].has_node else name))

    def place(self, role: str, name: str) -> Place:
        """Where a party lives on this machine; it dials whom has been started so far."""
        known = ROLES[role]
        dialled = {serving: self.addresses[serving] for serving in known.dials}
        return Place(
            role=known,
            name=name,
            federation=self.federation,
            config=self.config,
            keys=self.keys(role, name),
            state=self.sites / name if known.has_node else self.private / name / "state",
            run=self.sockets / name,
            node=self.home / "nodes" / name,
            gated=False,
            listen=ANY_PORT,
            superlink=next(iter(dialled.get("superlink", ())), None),
            middleware=tuple(dialled.get("middleware", ())),
            evaluator=next(iter(dialled.get("evaluator", ())), None),
            data=self.data_dir,
            trial=True,
            records=self.runs_dir / RUN / known.records / name if self.federation.audit else None,
        )

    def start(self, place: Place, own: Iterable[Process], renew: Callable[[], None] = lambda: None) -> list[Watched]:
        """Start processes of a party, named after it unless they bear its name; `renew` is called before a restart."""
        place.run.mkdir(exist_ok=True, mode=0o711)
        started = []
        for process in own:
            name = process.name if process.name == place.name else f"{process.name}-{place.name}"
            started.append(Watched(replace(process, name=name), variables(place, process), renew))
            self.supervise(started[-1])
        return started

    def supervise(self, one: Watched) -> None:
        """Start a process, and start it again if it exits; one that keeps exiting fails the run."""
        one.backoff = Backoff(OFTEN)
        self.supervisor.start(one)

    def start_middleware(self) -> None:
        """The route's processes, each on a free port of its own choosing; those that dial others come after them."""
        found = self.federation.route.parties()
        for dials in (False, True):
            wave = []
            for role, name in ((role, name) for role, name in found if bool(ROLES[role].dials) is dials):
                place = self.place(role, name)
                wave += [(ROLES[role].serves, one) for one in self.start(place, processes(place, Ports.free()))]
            for serves, one in wave:
                self.supervisor.wait(one)
                self.addresses[serves].append(one.address)

    def write_server_plan(self, invite_every_round: bool = False) -> None:
        """What the ServerApp finds through the run config's `home`."""
        log = self.fleet.log("server")
        ServerPlan.of(self.place("server", "server"), self.run_dir, log, invite_every_round).write(self.private)

    def clear(self) -> None:
        """Stop everything at once: this SuperLink's record of its nodes ends with the run."""
        try:
            self.fleet.stop()
        finally:
            shutil.rmtree(self.sockets, ignore_errors=True)
