"""For tests: machines made of network namespaces, with their own addresses and cables that can be cut."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import psutil
import pytest

from commands import Command, cli

PREFIX = "flp"
ETC = Path("/etc/netns")
PATH = os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"))
GRACE = 10.0


def _program(name: str) -> str:
    found = shutil.which(name, path=PATH)
    if found is None:
        pytest.skip(f"network namespaces: no `{name}` on this machine")
    return found


def _ip(*arguments: str) -> str:
    done = subprocess.run([_program("ip"), *arguments], capture_output=True, text=True, timeout=30)
    if done.returncode:
        raise OSError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


@dataclass
class Host:
    """One machine: a namespace. `wires` are the network's ends of its cables."""

    name: str
    namespace: str
    address: str
    wires: list[tuple[str, str]] = field(default_factory=list)

    def command(self, *arguments: str | Path) -> list[str]:
        return [_program("ip"), "netns", "exec", self.namespace, *map(str, arguments)]

    def run(self, *arguments: str | Path, timeout: float = 120.0) -> subprocess.CompletedProcess[str]:
        return subprocess.run(self.command(*arguments), capture_output=True, text=True, timeout=timeout)

    def cli(self, *arguments: str | Path, timeout: float = 120.0) -> subprocess.CompletedProcess[str]:
        """Run `fl-privacy` on this machine, to its end."""
        return cli(*arguments, timeout=timeout, machine=self.namespace)

    def serve(self, *arguments: str | Path) -> Command:
        """Start `fl-privacy` on this machine; the processes that it starts are forks. Ends at the latest with it."""
        return Command(*arguments, machine=self.namespace, whole=True)

    def python(self, code: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        return self.run(sys.executable, "-c", code, *arguments)

    def start(self, *arguments: str | Path, output: IO[bytes] | int = subprocess.DEVNULL) -> subprocess.Popen[bytes]:
        """Start a process in the background; it ends at the latest with the network."""
        return subprocess.Popen(
            self.command(*arguments), stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )

    def listening(self) -> list[str]:
        """Addresses that accept TCP connections, as host:port."""
        lines = self.run(_program("ss"), "-H", "-l", "-t", "-n").stdout.splitlines()
        return [line.split()[3] for line in lines]

    def close_to_the_outside(self) -> bool:
        """Add a firewall that lets in only replies; False if this machine has none."""
        if shutil.which("iptables", path=PATH) is None:
            return False
        rules = (
            ("-A", "INPUT", "-i", "lo", "-j", "ACCEPT"),
            ("-A", "INPUT", "-m", "conntrack", "--ctstate", "ESTABLISHED,RELATED", "-j", "ACCEPT"),
            ("-P", "INPUT", "DROP"),
        )
        return all(self.run(_program("iptables"), *rule).returncode == 0 for rule in rules)

    def cut(self) -> None:
        """Unplug its cables."""
        self._set("down")

    def plug_in(self) -> None:
        self._set("up")

    def _set(self, state: str) -> None:
        for bridge, wire in self.wires:
            _ip("-n", bridge, "link", "set", wire, state)

    @property
    def pids(self) -> list[int]:
        return [int(pid) for pid in _ip("netns", "pids", self.namespace).split()]


@dataclass
class Network:
    """Bridges in their own namespaces, and the hosts on them."""

    prefix: str
    hosts: dict[str, Host] = field(default_factory=dict)
    bridges: dict[str, str] = field(default_factory=dict)
    _made: list[str] = field(default_factory=list)

    def host(self, name: str, **addresses: str) -> Host:
        """A machine with one network card per bridge; peers know it by its first address."""
        made = Host(name, self._namespace(name), next(iter(addresses.values())))
        for number, (bridge, address) in enumerate(addresses.items()):
            switch, wire, card = self._bridge(bridge), f"w{len(self._made)}-{number}", f"eth{number}"
            _ip("-n", switch, "link", "add", wire, "type", "veth", "peer", "name", card, "netns", made.namespace)
            _ip("-n", switch, "link", "set", wire, "master", "bridge", "up")
            _ip("-n", made.namespace, "addr", "add", f"{address}/24", "dev", card)
            _ip("-n", made.namespace, "link", "set", card, "up")
            made.wires.append((switch, wire))
        self.hosts[name] = made
        return made

    def names(self, host: Host, known: dict[str, str]) -> None:
        """Write the host's /etc/hosts; there is no other name service."""
        folder = ETC / host.namespace
        folder.mkdir(parents=True, exist_ok=True)
        lines = {"localhost": "127.0.0.1", **known}
        (folder / "hosts").write_text("".join(f"{address} {name}\n" for name, address in lines.items()))
        (folder / "resolv.conf").write_text("")

    def _bridge(self, name: str) -> str:
        if name not in self.bridges:
            self.bridges[name] = self._namespace(f"net-{name}")
            _ip("-n", self.bridges[name], "link", "add", "bridge", "type", "bridge")
            _ip("-n", self.bridges[name], "link", "set", "bridge", "up")
        return self.bridges[name]

    def _namespace(self, name: str) -> str:
        namespace = f"{self.prefix}-{name}"
        _ip("netns", "add", namespace)
        self._made.append(namespace)
        _ip("-n", namespace, "link", "set", "lo", "up")
        return namespace

    def remove(self) -> None:
        """End the processes on its hosts, and remove the hosts."""
        for host in self.hosts.values():
            _end(host)
        for namespace in reversed(self._made):
            _delete(namespace)


def _end(host: Host) -> None:
    """End all processes of a host: SIGTERM, then SIGKILL."""
    until = time.monotonic() + GRACE
    asked: set[int] = set()
    while pids := host.pids:
        late = time.monotonic() > until
        for pid in pids:
            if late or pid not in asked:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL if late else signal.SIGTERM)
                asked.add(pid)
        if time.monotonic() > until + GRACE:
            return
        time.sleep(0.1)


def _delete(namespace: str) -> None:
    with suppress(OSError):
        _ip("netns", "del", namespace)
    shutil.rmtree(ETC / namespace, ignore_errors=True)


def _remove_old() -> None:
    """Remove the namespaces of test runs that were killed."""
    for line in _ip("netns", "list").splitlines():
        owner = line.split("-")[0].removeprefix(PREFIX)
        if line.startswith(PREFIX) and owner.isdecimal() and not Path("/proc", owner).exists():
            name = line.split()[0]
            _end(Host(name, name, ""))
            _delete(name)


@contextmanager
def network() -> Iterator[Network]:
    """A network that is always removed afterwards; skips the test where none can be created."""
    if os.geteuid() != 0:
        pytest.skip("network namespaces: only root can create them")
    for name in ("ip", "ss"):
        _program(name)
    try:
        _remove_old()
        probe = Network(f"{PREFIX}{os.getpid()}")
        probe.host("probe", probe="10.77.255.1")
        works = probe.hosts["probe"].run("true").returncode == 0
        probe.remove()
    except OSError as error:
        pytest.skip(f"network namespaces: {error}")
    if not works:
        pytest.skip("network namespaces: `ip netns exec` is not allowed here")
    made = Network(f"{PREFIX}{os.getpid()}")
    try:
        yield made
    finally:
        made.remove()
        with suppress(OSError):
            ETC.rmdir()


def connects(host: Host, address: str, port: int) -> bool:
    """Whether a TCP connection can be made from a host."""
    code = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 2)"
    return host.python(code, address, str(port)).returncode == 0


def quiet(command: Sequence[str], **options: Any) -> None:
    """Run a system command that must succeed."""
    subprocess.run([_program(command[0]), *command[1:]], check=True, capture_output=True, **options)


def left(kit: Path) -> list[str]:
    """Processes that have a kit on their command line."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        line = " ".join(process.info["cmdline"] or ())
        if f"{kit}/" in f"{line}/" and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(line)
    return found
