"""The processes of a party and their commands, in the order in which they start: the same from a kit and an engine."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from fl_privacy.addresses import free_port, port_of
from fl_privacy.config import Address
from fl_privacy.config.policy import requires_confinement
from fl_privacy.deploy import confine, environment, flower
from fl_privacy.deploy.confine import user
from fl_privacy.deploy.confine.landlock import Allowed
from fl_privacy.deploy.parties import index
from fl_privacy.deploy.place import Place
from fl_privacy.errors import ConfigError
from fl_privacy.identity.tls import LocalKeys

LOOPBACK = "127.0.0.1"
START = 120.0  # seconds for a process to come up
LISTEN = "--listen"


@dataclass(frozen=True)
class Process:
    """One process; it is up once it has logged `listening`, where it does, or listens at `port`."""

    name: str
    command: list[str]
    env: Mapping[str, str] = field(default_factory=dict)
    announces: bool = False
    port: Address | None = None
    confined: bool = False  # it runs code that comes with a run
    detaches: bool = False  # it starts processes outside its own group

    def listening_at(self, address: Address) -> Process:
        """The same at the port that it picked when it was first started."""
        command = list(self.command)
        if LISTEN in command:
            command[command.index(LISTEN) + 1] = address
        return replace(self, command=command)


@dataclass(frozen=True)
class Ports:
    """Loopback ports of the processes that talk to each other on one machine, which several parties may share."""

    superlink: int
    relay: int
    node: int

    @classmethod
    def free(cls) -> Ports:
        return cls(free_port(), free_port(), free_port())


def processes(place: Place, ports: Ports) -> Iterator[Process]:
    """What a party runs."""
    return _FLOWER[place.role.flower](place, ports)


def variables(place: Place, process: Process) -> dict[str, str]:
    """What a process gets in its environment: the proxy on the way out, and nothing that diverts calls on loopback.

    Confined processes call loopback only.
    """
    if process.confined:
        return dict(process.env)
    env = flower.direct()
    if place.proxy:
        env |= {"https_proxy": place.proxy, "HTTPS_PROXY": place.proxy}
    return {**env, **process.env}


def _own(place: Place, ports: Ports) -> Iterator[Process]:
    """A role that runs one module of ours."""
    yield Process(place.name, _module(place), announces=True)


def _superlink(place: Place, ports: Ports) -> Iterator[Process]:
    """Flower's SuperLink on loopback, behind the gate: its control API has no authentication of its own."""
    address, home = f"{LOOPBACK}:{ports.superlink}", {"FLWR_HOME": str(place.state / "flwr")}
    if not place.gated:
        command = flower.superlink(address, place.keys, place.database)
        yield Process("superlink", command, home, port=address, detaches=True)
        return
    assert place.secret is not None
    local = LocalKeys.open(place.state, "superlink")
    command = flower.superlink_behind_gate(address, local, place.database, place.secret)
    yield Process("superlink", command, home, port=address)
    gate = flower.gate(_listen(place), address, local, place.keys, place.federation.name)
    yield Process("gate", [*gate, *_operations(place)], announces=True)


def _server(place: Place, ports: Ports) -> Iterator[Process]:
    """A SuperExec runs the ServerApp, which reads the server's plan; without a gate the SuperLink runs it."""
    if place.gated:
        assert place.secret is not None
        yield _relay(place, ports)
        command = flower.superexec(f"{LOOPBACK}:{ports.relay}", place.run / "relay.pem", place.secret)
        yield Process("superexec", command, {"FLWR_HOME": str(place.state / "flwr")})


def _site(place: Place, ports: Ports) -> Iterator[Process]:
    """The worker holds all that is the site's own; the SuperNode, which runs shipped code, sees only its own folder."""
    node, run = place.node.absolute(), place.run.absolute()
    run.mkdir(parents=True, exist_ok=True, mode=0o700)
    user.share(run, user.of(node))  # before the worker makes its socket there
    yield Process("worker", _module(place), announces=True)
    superlink, authority = place.superlink, node / "ca.pem"
    if place.gated:
        yield _relay(place, ports)
        superlink, authority = f"{LOOPBACK}:{ports.relay}", run / "relay.pem"
    assert superlink is not None
    own = (node / "flwr", node / "tmp")
    for folder in own:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    # The ClientApp calls its SuperNode, and the SuperNode the SuperLink.
    ways = Allowed((authority,), own, sockets=(run,), bind=(ports.node,), connect=(ports.node, port_of(superlink)))
    command = flower.supernode(superlink, authority, node / place.node_key.name, ports.node, run / place.socket.name)
    wrapped = confine.wrapped(command, node, ways, requires_confinement(place.federation, place.name))
    address = f"{LOOPBACK}:{ports.node}"
    yield Process("supernode", wrapped, environment.confined(node), port=address, confined=True)


_FLOWER: dict[str, Callable[[Place, Ports], Iterator[Process]]] = {
    "": _own,
    "superlink": _superlink,
    "superexec": _server,
    "supernode": _site,
}


def _relay(place: Place, ports: Ports) -> Process:
    if place.superlink is None:
        raise ConfigError(f"{place.name}: superlink is missing; add the host:port of the SuperLink's gate to kit.yaml")
    listen = f"{LOOPBACK}:{ports.relay}"
    node = user.of(place.node.absolute()) if place.role.has_node else None
    command = flower.relay(place.superlink, place.keys, place.run, listen, place.proxy or "", node)
    return Process("relay", command, announces=True)


def _listen(place: Place) -> str:
    if place.listen is None:
        raise ConfigError(f"{place.name}: listen is missing; add the host:port where it listens to kit.yaml")
    return place.listen


_OPTIONS: dict[str, Callable[[Place], list[str]]] = {
    "listen": lambda place: [LISTEN, _listen(place)],
    "index": lambda place: ["--index", str(index(place.name))],
    "state": lambda place: ["--state", str(place.state)],
    "site": lambda place: ["--site", place.name],
    "socket": lambda place: ["--socket", str(place.socket)],
    "middleware": lambda place: ["--middleware", *place.middleware],
    "data": lambda place: ["--data-dir", str(place.data)] if place.data else [],
    "view": lambda place: ["--view", str(place.records)] if place.records else [],
    "trial": lambda place: ["--trial"] if place.trial else [],
    "truth": lambda place: ["--truth", str(place.records)] if place.records else [],
}


def _module(place: Place) -> list[str]:
    """The command of a role's own module."""
    command = [sys.executable, "-m", place.role.module, "--config", str(place.config), "--keys", str(place.keys.folder)]
    options = [word for name in place.role.options for word in _OPTIONS[name](place)]
    return [*command, *options, *_operations(place)]


def _operations(place: Place) -> list[str]:
    """Where a process tells its operator what it does."""
    metrics = ["--metrics", place.metrics] if place.metrics else []
    return [*metrics, "--events", str(place.events)] if place.events else metrics
