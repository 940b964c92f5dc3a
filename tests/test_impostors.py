"""A site's worker and middleware as real processes: nobody with the wrong certificate gets a call from the site."""

from __future__ import annotations

import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from client_app import pipe
from fl_privacy.config import Federation
from fl_privacy.deploy.processes import Fleet
from fl_privacy.identity import accepted
from fl_privacy.identity.keyring import Identity, Keyring
from fl_privacy.ops.tail import Tail
from helpers import CALL, HOSTS, START, Keys
from serving import Switch

SHUFFLER = Identity("test", "shuffler", "shuffler")

pytestmark = pytest.mark.e2e


@dataclass
class Site:
    """A worker, and a switch that decides who answers when it calls the shuffler."""

    folder: Path
    keys: Keys
    federation: Federation
    fleet: Fleet
    switch: Switch

    def process(self, name: str, module: str, keys: Keyring, *options: str | Path) -> list[str]:
        config = self.folder / "federation.yaml"
        config.write_text(self.federation.to_yaml())
        return [sys.executable, "-m", module, "--config", str(config), "--keys", str(keys.folder), *map(str, options)]

    def serve(self, name: str, keys: Keyring) -> str:
        """A shuffler with these keys; returns its address."""
        self.fleet.start(name, self.process(name, "shuffler_app", keys, "--state", self.folder / name))
        return str(self.fleet.wait_for(name, "listening", START)["address"])

    def start(self) -> None:
        command = ["--site", "site-0", "--middleware", self.switch.address, "--socket", self.folder / "socket"]
        own = self.keys.of("site", "site-0")
        self.fleet.start(
            "worker", self.process("worker", "client_app.worker", own, *command, "--state", self.state, "--trial")
        )

    @property
    def state(self) -> Path:
        return self.folder / "state"

    def ask(self) -> str:
        """Send a ticket as the ClientApp does; why the worker failed."""
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(CALL)
            sock.connect(str(self.folder / "socket"))
            ticket = {"run": "run-1", "federation": self.federation.digest, "first": 1, "last": 1}
            pipe.send(sock, ticket, b"")
            assert pipe.receive(sock)[0] == {"status": "abstain"}
        return str(self.events("worker", "failed")[-1]["reason"])

    def events(self, name: str, event: str) -> list[dict[str, Any]]:
        return [found for found in Tail(self.fleet.children[name].log).poll() if found["event"] == event]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("impostors")
    fleet = Fleet(folder / "logs", folder / "pids.json")
    federation = Federation.parse("name: test\nsites: 3\ndeadline: 1")
    made = Site(folder, Keys(folder / "pki"), federation, fleet, Switch("127.0.0.1:1"))
    made.keys.of("shuffler", "shuffler"), made.keys.of("site", "site-0"), made.keys.of("aggregator", "aggregator-0")
    made.state.mkdir()
    try:
        yield made
    finally:
        fleet.stop()
        made.switch.close()


@pytest.fixture(scope="module")
def worker(site: Site) -> Site:
    accepted.accept(Keyring(site.keys.of("site", "site-0").folder).roster(), site.state)
    site.start()
    site.fleet.wait_for("worker", "listening", START)
    return site


def test_a_worker_does_not_start_without_an_accepted_roster(site: Site) -> None:
    site.start()
    assert site.fleet.children["worker"].process.wait(START) == 2
    assert "serial 3 is not accepted at this site" in site.events("worker", "error")[0]["reason"]
    site.fleet.stop("worker")


def another_role(keys: Keys, folder: Path) -> Keyring:
    return keys.of("aggregator", "aggregator-0")


def another_key(keys: Keys, folder: Path) -> Keyring:
    return keys.equip(keys.authority.issue(SHUFFLER, folder, HOSTS))


def revoked(keys: Keys, folder: Path) -> Keyring:
    keys.authority.revoke(SHUFFLER.uri)
    shutil.copy(keys.authority.revoked_file, keys.of("site", "site-0").revoked_file)
    return keys.of("shuffler", "shuffler")


def test_the_genuine_shuffler_is_called(worker: Site) -> None:
    worker.switch.to(worker.serve("genuine", worker.keys.of("shuffler", "shuffler")))
    assert "NOT_FOUND" in worker.ask()
    worker.fleet.stop("genuine")


@pytest.mark.parametrize(
    ("trick", "reason"),
    [
        (another_role, "aggregator-0: another party than fl-privacy://test/shuffler/shuffler"),
        (another_key, "has another key than the roster's"),
        (revoked, "shuffler/shuffler: revoked"),
    ],
)
def test_another_certificate_of_the_authority_for_the_same_host_is_refused(
    worker: Site, tmp_path: Path, trick: Callable[[Keys, Path], Keyring], reason: str
) -> None:
    """Each is accepted by anyone who only compares authority and host name."""
    worker.switch.to(worker.serve(trick.__name__, trick(worker.keys, tmp_path / "keys")))
    assert reason in worker.ask()
    assert worker.events(trick.__name__, "refused") == []
