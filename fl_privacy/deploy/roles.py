"""The processes of each role of a kit: their commands, in the order in which they start."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from fl_privacy.config import Address
from fl_privacy.deploy import confine, flower
from fl_privacy.deploy.engines.ground import free_port
from fl_privacy.deploy.kits.kit import Folder
from fl_privacy.errors import ConfigError
from fl_privacy.identity.tls import LocalKeys

LOOPBACK = "127.0.0.1"
START = 120.0  # seconds for a process to come up


@dataclass(frozen=True)
class Process:
    """One process; it is up once it has logged `listening`, where it does, or listens at `port`."""

    name: str
    command: list[str]
    env: Mapping[str, str] = field(default_factory=dict)
    announces: bool = False
    port: Address | None = None
    confined: bool = False


@dataclass(frozen=True)
class Ports:
    """Loopback ports of the processes that talk to each other on one machine; several kits may share a machine."""

    superlink: int
    relay: int
    node: int

    @classmethod
    def free(cls) -> Ports:
        return cls(free_port(), free_port(), free_port())


def processes(folder: Folder, ports: Ports) -> Iterator[Process]:
    """What a kit's role runs."""
    return {
        "superlink": _superlink,
        "server": _server,
        "shuffler": _shuffler,
        "aggregator": _aggregator,
        "evaluator": _evaluator,
        "site": _site,
    }[folder.kit.role](folder, ports)


def _superlink(folder: Folder, ports: Ports) -> Iterator[Process]:
    """Flower's SuperLink on loopback, and the gate before it: its control API has no authentication of its own."""
    local = LocalKeys.open(folder.state, "superlink")
    address, home = f"{LOOPBACK}:{ports.superlink}", {"FLWR_HOME": str(folder.state / "flwr")}
    command = flower.superlink_behind_gate(address, local, folder.state / "flower.db", folder.path / "secret")
    yield Process("superlink", command, home, port=address)
    gate = flower.gate(_listen(folder), address, local, folder.keys, folder.kit.federation)
    yield Process("gate", [*gate, *_observed(folder)], announces=True)


def _server(folder: Folder, ports: Ports) -> Iterator[Process]:
    """SuperExec runs the ServerApp; what it needs is in the plan that `train` writes."""
    yield _relay(folder, ports)
    command = flower.superexec(f"{LOOPBACK}:{ports.relay}", folder.run / "relay.pem", folder.path / "secret")
    yield Process("superexec", command, {"FLWR_HOME": str(folder.state / "flwr")})


def _site(folder: Folder, ports: Ports) -> Iterator[Process]:
    """The worker holds all that is the site's own; the SuperNode, which runs shipped code, sees only its own folder."""
    kit, socket, node = folder.kit, folder.run / "worker", folder.node_key.parent
    config = folder.run / "federation.yaml"
    config.write_text(folder.own_federation.to_yaml())
    worker = ["-m", "client_app.worker", "--config", str(config), "--site", kit.name, "--socket", str(socket)]
    worker += ["--keys", str(folder.keys.folder), "--state", str(folder.state), "--middleware", *kit.middleware]
    if folder.federation.audit:
        worker += ["--truth", str(folder.path / "truth")]
    yield Process("worker", [sys.executable, *worker, *_data(folder), *_observed(folder)], announces=True)
    yield _relay(folder, ports)
    relay, authority = f"{LOOPBACK}:{ports.relay}", folder.run / "relay.pem"
    command = flower.supernode(relay, authority, folder.node_key, ports.node, socket)
    home = {"FLWR_HOME": str(node / "flwr"), "TMPDIR": str(node / "tmp")}
    (node / "tmp").mkdir(parents=True, exist_ok=True)
    own = f"{LOOPBACK}:{ports.node}"
    yield Process("supernode", confine.wrapped(command, [authority], [node]), home, port=own, confined=True)


def _shuffler(folder: Folder, ports: Ports) -> Iterator[Process]:
    yield _middleware(folder, ["-m", "shuffler_app"])


def _aggregator(folder: Folder, ports: Ports) -> Iterator[Process]:
    yield _middleware(folder, ["-m", "aggregator_app", "--index", str(folder.index), "--state", str(folder.state)])


def _evaluator(folder: Folder, ports: Ports) -> Iterator[Process]:
    command = ["-m", "aggregator_app.evaluator", "--aggregators", *folder.kit.middleware, *_data(folder)]
    yield _middleware(folder, command)


def _middleware(folder: Folder, command: list[str]) -> Process:
    common = ["--config", str(folder.path / "federation.yaml"), "--keys", str(folder.keys.folder)]
    common += ["--listen", _listen(folder), *_observed(folder)]
    if folder.federation.audit:
        common += ["--view", str(folder.path / "view")]
    return Process(folder.kit.name, [sys.executable, *command, *common], announces=True)


def _relay(folder: Folder, ports: Ports) -> Process:
    kit = folder.kit
    if kit.superlink is None:
        raise ConfigError(f"kit {folder.path}: superlink is missing; add the host:port of the SuperLink's gate")
    listen = f"{LOOPBACK}:{ports.relay}"
    command = flower.relay(kit.superlink, folder.keys, folder.run, listen, kit.proxy or "")
    return Process("relay", command, announces=True)


def _listen(folder: Folder) -> str:
    if folder.kit.listen is None:
        raise ConfigError(f"kit {folder.path}: listen is missing; add the host:port where this role listens")
    return folder.kit.listen


def _data(folder: Folder) -> list[str]:
    data = folder.at(folder.kit.data)
    return ["--data-dir", str(data)] if data else []


def _observed(folder: Folder) -> list[str]:
    """Where this role tells what it does."""
    metrics = ["--metrics", folder.kit.metrics] if folder.kit.metrics else []
    return [*metrics, "--events", str(folder.logs / "events.jsonl")]


def environment(folder: Folder) -> dict[str, str]:
    """What every process of a kit gets: the way out, and nothing that would divert calls on loopback."""
    env = flower.direct()
    if folder.kit.proxy:
        env |= {"https_proxy": folder.kit.proxy, "HTTPS_PROXY": folder.kit.proxy}
    return env
