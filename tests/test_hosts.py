"""A federation across machines: namespaces with their own addresses, enrolled by hand, with the faults of real ones.

The tests share one federation. Each test uses the current run; when a run ends, the next one starts.
"""

from __future__ import annotations

import datetime as dt
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from commands import Command, cli, json_of
from fl_privacy.deploy.kits.kit import Folder
from fl_privacy.files import write_public
from fl_privacy.identity.keyring import Identity
from fl_privacy.identity.pki import Authority, load_key
from helpers import Keys, eventually
from netns import Host, Network, connects, left, network

PROXY = Path(__file__).with_name("connect_proxy.py")
SITES = ("site-0", "site-1", "site-2", "site-3")
# Starting a ClientApp takes seconds of CPU time, so a busy machine gets a longer deadline.
ROUNDS = 24
DEADLINE = round(15 + 5 * os.getloadavg()[0] / (os.cpu_count() or 1))
CONFIG = f"""
name: hosts
sites: 4
rounds: {ROUNDS}
rounds_per_message: 2
quorum: 2
attempts: 9
deadline: {DEADLINE:g}
task: {{train: {{epochs: 1}}}}
route: {{kind: shuffler, n_min: 2}}
hosts: {{superlink: "superlink.test:9443", shuffler: "shuffler.test:9444"}}
"""
NAMES = {"superlink.test": "10.77.0.2", "shuffler.test": "10.77.0.3"}
CALL = """
import grpc, sys
from pathlib import Path
from fl_privacy.wire import rpc
from fl_privacy.identity.keyring import Identity, Keyring

channel = rpc.channel(sys.argv[1], Keyring(Path(sys.argv[2])), Identity("hosts", "shuffler", "shuffler"))
try:
    channel.unary_unary("/grpc.health.v1.Health/Check", bytes, bytes)(b"", timeout=20)
except grpc.RpcError as error:
    print(error.code().name, error.details())
"""
UP = 60 + 2 * DEADLINE
LONG = 60 + 8 * DEADLINE
pytestmark = pytest.mark.timeout(1200 + 20 * DEADLINE)


@dataclass
class Machines:
    """The federation: a host and a kit for every party, and an authority that is offline."""

    net: Network
    folder: Path
    serving: dict[str, Command] = field(default_factory=dict)
    training: Command | None = None
    results: list[dict[str, Any]] = field(default_factory=list)

    @property
    def authority(self) -> Path:
        return self.folder / "ca"

    @property
    def parties(self) -> list[str]:
        return ["superlink", "shuffler", "server", *SITES]

    def kit(self, name: str) -> Path:
        return self.folder / "kits" / name

    def host(self, name: str) -> Host:
        return self.net.hosts[name]

    def cli(self, name: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        """Run a command on a party's own machine."""
        return self.host(name).cli(*arguments)

    def each(self, names: list[str], *arguments: str) -> dict[str, Any]:
        """Run the same command with `--json` on several machines, each on its own kit."""

        def one(name: str) -> Any:
            words = [word.format(kit=self.kit(name), name=name) for word in arguments]
            done = self.cli(name, *words, "--json")
            assert done.stdout, f"{name}: {done.stderr}"
            return json_of(done)

        with ThreadPoolExecutor(3) as pool:
            return dict(zip(names, pool.map(one, names), strict=True))

    def enrol(self) -> None:
        """Create keys on each machine; only requests and answers are exchanged."""
        self.each(self.parties, "pki", "request", "{kit}")
        asked = [self.kit(name) / f"{name}.request.json" for name in self.parties]
        done = cli("pki", "sign", self.authority, *asked, "--config", self.folder / "federation.yaml")
        assert done.returncode == 0, done.stderr
        self.each(self.parties, "pki", "install", "{kit}", "{kit}/{name}.signed.json")
        self.each(list(SITES), "site", "accept", "{kit}", "--yes")
        for name in SITES:
            policy = self.cli(name, "site", "policy", self.kit(name)).stdout.replace("min_cohort: 3", "min_cohort: 2")
            (self.kit(name) / "policy.yaml").write_text(policy)
        for name in SITES:
            done = self.cli(
                "superlink", "pki", "install", self.kit("superlink"), self.kit(name) / f"{name}.signed.json"
            )
            assert done.returncode == 0, done.stderr

    def serve(self, *names: str) -> None:
        for name in names:
            self.serving[name] = self.host(name).serve("serve", self.kit(name))
        for name in names:
            eventually(lambda name=name: self._up(name), UP)  # type: ignore[misc]

    def _up(self, name: str) -> bool:
        assert self.serving[name].poll() is None, self.serving[name].printed()
        return (self.kit(name) / "run" / "healthy").exists()

    def train(self) -> None:
        """Make sure that a run is in progress; a run that has ended must have succeeded."""
        if self.training is not None and self.training.poll() is None:
            return
        if self.training is not None:
            self.results.append(self._result())
        self.training = self.host("server").serve("train", self.kit("server"), "--json")

    def _result(self) -> dict[str, Any]:
        assert self.training is not None
        done = self.training.end()
        assert done.returncode == 0, done.stderr
        return dict(json_of(done))

    def first_result(self) -> dict[str, Any]:
        """The result of the run with the late, the disconnected and the killed site."""
        self.until(lambda: bool(self.results))
        return self.results[0]

    def until(self, holds: Callable[[], bool], timeout: float = LONG) -> None:
        """Keep runs going until the condition holds."""

        def step() -> bool:
            self.train()
            time.sleep(0.1)
            return holds()

        eventually(step, timeout)

    def events(self, name: str, event: str) -> list[dict[str, Any]]:
        """Events from a role's own log."""
        path = self.kit(name) / "logs" / "events.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [found for line in lines if (found := json.loads(line))["event"] == event]

    def rounds(self, name: str, event: str) -> set[tuple[str, int]]:
        return {(found["run"], found["round"]) for found in self.events(name, event)}

    def takes_part(self, site: str) -> None:
        """Wait until the site takes part at least once from now on."""
        before = self.rounds(site, "uploaded")
        self.until(lambda: self.rounds(site, "uploaded") > before)

    def continues_without(self, site: str) -> None:
        """Wait until a round is released in which the site took no part."""

        def missed() -> set[tuple[str, int]]:
            return self.rounds("shuffler", "released") - self.rounds(site, "uploaded")

        def another() -> bool:
            new = missed() - before
            time.sleep(1.0 if new else 0.0)  # the site may log its upload after the shuffler logs the release
            return bool(new & missed())

        before = missed()
        self.until(another)

    def pids(self, name: str) -> dict[str, int]:
        try:
            return dict(json.loads((self.kit(name) / "run" / "pids.json").read_text()))
        except (OSError, ValueError):
            return {}

    def serial(self, address: str, port: int) -> int:
        """The serial number of the certificate that a machine presents to callers."""
        code = "import ssl, sys; print(ssl.get_server_certificate((sys.argv[1], int(sys.argv[2]))))"
        shown = self.host("server").python(code, address, str(port)).stdout
        return x509.load_pem_x509_certificate(shown.encode()).serial_number

    def own_serial(self, name: str) -> int:
        return x509.load_pem_x509_certificate((self.kit(name) / "keys" / "cert.pem").read_bytes()).serial_number


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    """All parties are enrolled; the SuperLink and the shuffler are up."""
    folder = tmp_path_factory.mktemp("hosts")
    with network() as net:
        for name, address in (("superlink", "10.77.0.2"), ("shuffler", "10.77.0.3"), ("server", "10.77.0.4")):
            net.names(net.host(name, wide=address), NAMES)
        for number, name in enumerate(("site-0", "site-1", "site-3")):
            net.names(net.host(name, wide=f"10.77.0.{10 + number}"), NAMES)
        net.hosts["site-0"].close_to_the_outside()
        # A site that reaches only its proxy and cannot resolve names; the proxy can.
        net.names(net.host("site-2", clinic="10.77.1.2"), {})
        net.names(net.host("proxy", wide="10.77.0.5", clinic="10.77.1.1"), NAMES)
        made = Machines(net, folder)
        (folder / "federation.yaml").write_text(CONFIG)
        assert cli("pki", "init", made.authority, "--federation", "hosts").returncode == 0
        done = cli("provision", folder / "federation.yaml", "--out", folder / "kits", "--pki", made.authority)
        assert done.returncode == 0, done.stderr
        with (made.kit("site-2") / "kit.yaml").open("a") as file:
            file.write("proxy: http://10.77.1.1:3128\n")
        with (folder / "proxy.out").open("wb") as output:
            net.hosts["proxy"].start(sys.executable, PROXY, "10.77.1.1", "3128", output=output)
        made.enrol()
        made.serve("superlink", "shuffler")
        yield made


@pytest.fixture(scope="module")
def running(machines: Machines) -> Machines:
    """Three sites are up, and runs are in progress."""
    machines.serve("site-0", "site-1", "site-2")
    machines.train()
    return machines


def test_every_machine_passes_preflight(machines: Machines) -> None:
    for name, found in machines.each(machines.parties, "preflight", "{kit}").items():
        assert found["ok"], f"{name}: {[check for check in found['checks'] if not check['ok']]}"
        names = {check["name"] for check in found["checks"]}
        if name in ("server", "site-0", "site-2"):
            assert {"clock", "peer", "certificate", "disk", "flower"} <= names


def test_an_expired_or_foreign_certificate_is_refused(machines: Machines, tmp_path: Path) -> None:
    ours = Keys(machines.folder / "test", "hosts")
    foreign = ours.of("site", "site-3")
    ours.authority = Authority.load(machines.authority)
    expired = ours.expired("site", "site-3")
    for name, keys, reason in (("expired", expired, "expired"), ("foreign", foreign, "not signed by ca.pem")):
        kit = tmp_path / name
        shutil.copytree(machines.kit("site-3"), kit)
        for file in ("key.pem", "cert.pem"):
            shutil.copy(keys.folder / file, kit / "keys" / file)
        done = machines.cli("site-3", "preflight", kit, "--json")
        assert done.returncode == 2
        failed = [check for check in json_of(done)["checks"] if not check["ok"]]
        assert any(reason in check["detail"] for check in failed)
        refused = [check["detail"] for check in failed if check["name"] == "peer"]
        assert len(refused) == 2, failed
        assert all("refused our certificate" in detail for detail in refused)
    said = (machines.kit("superlink") / "logs" / "gate.log").read_text()
    assert "certificate has expired" in said
    assert "unable to get local issuer certificate" in said or "certificate signature failure" in said


def test_a_site_opens_no_port_and_nobody_can_call_it(running: Machines) -> None:
    server = running.host("server")
    assert connects(server, NAMES["shuffler.test"], 9444)
    for name in ("site-0", "site-1", "site-2"):
        host = running.host(name)
        listening = host.listening()
        assert listening  # the SuperNode, the relay and the metrics, on loopback only
        assert all(address.startswith("127.") for address in listening), f"{name}: {listening}"
        for port in {int(address.rpartition(":")[2]) for address in listening}:
            assert not connects(server, host.address, port)


def test_a_site_behind_a_firewall_and_one_behind_a_proxy_take_part(running: Machines) -> None:
    running.takes_part("site-0")
    inside = running.host("site-2")
    assert not connects(inside, NAMES["superlink.test"], 9443)
    assert not connects(inside, NAMES["shuffler.test"], 9444)
    running.takes_part("site-2")
    asked = set((running.folder / "proxy.out").read_text().split())
    assert asked == {"listening", "superlink.test:9443", "shuffler.test:9444"}


def test_a_late_site_started_in_the_background_takes_part(running: Machines) -> None:
    running.continues_without("site-3")
    kit = running.kit("site-3")
    down = running.cli("site-3", "site", "status", kit, "--json")
    assert (down.returncode, json_of(down)["state"]) == (1, "down")
    started = running.cli("site-3", "site", "start", kit, "--json")
    assert started.returncode == 0, started.stderr
    assert json_of(started)["state"] == "up"
    assert set(json_of(started)["processes"]) == {"worker", "relay", "supernode"}
    again = running.cli("site-3", "site", "start", kit)
    assert (again.returncode, "already running" in again.stderr) == (2, True)
    running.takes_part("site-3")
    assert running.events("site-3", "uploaded")[0]["round"] > 1  # the run started without it
    found = json_of(running.cli("site-3", "site", "status", kit, "--json"))
    assert (found["state"], found["site"], found["federation"]) == ("up", "site-3", "hosts")


def test_rounds_do_not_wait_for_a_disconnected_site_and_it_comes_back(running: Machines) -> None:
    running.takes_part("site-1")
    running.host("site-1").cut()
    try:
        running.continues_without("site-1")
    finally:
        running.host("site-1").plug_in()
    running.takes_part("site-1")


def test_killed_processes_of_a_site_are_restarted(running: Machines) -> None:
    before = running.pids("site-0")
    for name in ("supernode", "worker"):
        os.kill(before[name], signal.SIGKILL)

    def back() -> bool:
        now = running.pids("site-0")
        return all(now.get(name, before[name]) != before[name] for name in ("supernode", "worker"))

    running.until(back)
    running.takes_part("site-0")
    fallen = {event["process"] for event in running.events("site-0", "fell")}
    assert fallen >= {"supernode", "worker"}


def test_certificates_are_renewed_without_a_restart(running: Machines) -> None:
    """A site's certificate expires during the run; those of the listening parties are replaced."""
    before = {name: running.pids(name) for name in ("superlink", "shuffler", "site-0")}
    folder = Folder.open(running.kit("site-0"))
    key = load_key(folder.keys.key_file).public_key()
    short = Authority.load(running.authority).certify(Identity("hosts", "site", "site-0"), key, days=5 / 86_400)  # type: ignore[arg-type]
    write_public(folder.keys.certificate_file, short.public_bytes(Encoding.PEM))
    time.sleep(max(0.0, (short.not_valid_after_utc - dt.datetime.now(dt.UTC)).total_seconds() + 1))
    running.continues_without("site-0")
    names = ["superlink", "shuffler", "site-0"]
    running.each(names, "pki", "renew", "{kit}")
    done = cli("pki", "sign", running.authority, *(running.kit(n) / f"{n}.request.json" for n in names), "--days", "1")
    assert done.returncode == 0, done.stderr
    running.each(names, "pki", "install", "{kit}", "{kit}/{name}.signed.json")
    for name, port in (("superlink", 9443), ("shuffler", 9444)):
        assert running.serial(NAMES[f"{name}.test"], port) == running.own_serial(name)
    running.takes_part("site-0")
    assert {name: running.pids(name) for name in before} == before


def test_a_revoked_site_is_refused_at_once(running: Machines) -> None:
    if not left(running.kit("site-3")):
        assert running.cli("site-3", "site", "start", running.kit("site-3")).returncode == 0
    done = cli("pki", "revoke", running.authority, "site-3", "--json")
    assert done.returncode == 0, done.stderr
    for name in ("superlink", "shuffler"):
        done = running.cli(name, "pki", "install", running.kit(name), running.authority / "revoked.pem")
        assert done.returncode == 0, done.stderr
    checks = json_of(running.cli("site-3", "preflight", running.kit("site-3"), "--json"))["checks"]
    failed = [check["detail"] for check in checks if not check["ok"]]
    assert any("superlink.test" in detail and "refused our certificate" in detail for detail in failed), failed
    assert "revoked" in (running.kit("superlink") / "logs" / "gate.log").read_text()
    called = running.host("site-3").python(CALL, "shuffler.test:9444", running.kit("site-3") / "keys")
    assert called.stdout.startswith("PERMISSION_DENIED certificate"), called.stderr
    assert "revoked" in called.stdout
    running.continues_without("site-3")


def test_a_stopped_site_leaves_nothing_behind(running: Machines) -> None:
    kit = running.kit("site-3")
    if not left(kit):
        assert running.cli("site-3", "site", "start", kit).returncode == 0
    stopped = running.cli("site-3", "site", "stop", kit, "--json")
    assert (stopped.returncode, json_of(stopped)["state"]) == (0, "down")
    assert left(kit) == []
    assert running.host("site-3").listening() == []


def test_a_site_that_could_not_start_leaves_nothing_behind(running: Machines) -> None:
    kit = running.kit("site-3")
    running.cli("site-3", "site", "stop", kit)
    certificate = kit / "keys" / "cert.pem"
    certificate.rename(kit / "away.pem")
    try:
        done = running.cli("site-3", "site", "start", kit)
        assert done.returncode == 2
        assert "certificate" in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1
        assert left(kit) == []
        assert json_of(running.cli("site-3", "site", "status", kit, "--json"))["state"] == "down"
    finally:
        (kit / "away.pem").rename(certificate)


def test_the_run_completed_and_its_transcript_verifies(running: Machines) -> None:
    found = running.first_result()
    assert (found["status"], found["rounds"]) == ("completed", ROUNDS)
    assert found["accuracy"] > 0.5
    checked = running.cli("server", "transcript", "verify", found["path"])
    assert checked.returncode == 0, checked.stdout + checked.stderr
