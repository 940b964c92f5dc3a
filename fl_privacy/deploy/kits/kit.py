"""A start kit: the folder with all that one role of a federation needs on its machine."""

from __future__ import annotations

import fcntl
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import yaml
from pydantic import Field

from fl_privacy.config import NAME, Address, Federation, Model, ServerRoute, ShardsRoute, ShufflerRoute
from fl_privacy.errors import ConfigError
from fl_privacy.identity.keyring import Identity, Keyring
from fl_privacy.reading import mapping, text_of, validated

PAGE = "docs/deploying.md"
Role = Literal["superlink", "server", "shuffler", "aggregator", "evaluator", "site"]


class Kit(Model):
    """`kit.yaml`. Paths are relative to the kit's folder."""

    version: Literal[1] = 1
    federation: str = Field(pattern=NAME)
    digest: str = Field(pattern=r"^[0-9a-f]{64}$", description="of the federation that the kit was made for")
    role: Role
    name: str = Field(pattern=NAME)
    listen: Address | None = Field(None, description="where a listening role listens")
    hosts: tuple[str, ...] = Field((), description="names and addresses that its certificate is for")
    superlink: Address | None = Field(None, description="the gate of the SuperLink; for sites and the server")
    middleware: tuple[Address, ...] = Field((), description="the shuffler, or every aggregator in order")
    evaluator: Address | None = None
    metrics: Address | None = Field(None, description="where Prometheus finds this role's metrics; none: nowhere")
    proxy: str | None = Field(
        None, pattern=r"^http://[A-Za-z0-9.-]+:[0-9]{1,5}$", description="HTTP proxy on the way out; without a password"
    )
    device: str | None = Field(None, pattern=r"^(cpu|cuda(:\d{1,2})?)$", description="a site's device")
    data: Path | None = Field(None, description="data folder of a site, of the server and of the evaluator")
    policy: Path | None = Field(None, description="a site's own policy")
    runs: Path = Field(Path("runs"), description="where the server keeps runs")


@dataclass(frozen=True)
class Folder:
    """A kit on disk, read and found to be whole."""

    path: Path
    kit: Kit
    federation: Federation

    @classmethod
    def open(cls, path: Path, device: str | None = None) -> Folder:
        """Read it; `device` goes before the kit's own."""
        path = path.resolve()
        kit = read_kit(path, device)
        federation = Federation.load(path / "federation.yaml")
        if (federation.name, federation.digest) != (kit.federation, kit.digest):
            raise ConfigError(
                f"kit {path}: is for another federation, or another version of it, than its federation.yaml "
                f"({federation.name!r}); take both from the same fl-privacy provision"
            )
        if kit.role == "site":
            federation.site(kit.name)
        return cls(path, kit, federation)

    @property
    def identity(self) -> Identity:
        return Identity(self.kit.federation, self.kit.role, self.kit.name)

    @property
    def keys(self) -> Keyring:
        return Keyring(self.path / "keys")

    @property
    def node_key(self) -> Path:
        """The SuperNode's own key, in the only folder of the kit that shipped code can read."""
        return self.path / "node" / "node.key"

    @property
    def state(self) -> Path:
        return self.path / "state"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def run(self) -> Path:
        """What is only true while the role runs: pids, health, sockets, the relay's certificate."""
        return self.path / "run"

    @property
    def served(self) -> bool:
        """Whether a process serves it now, whoever started it: the lock goes with the process, however it ends."""
        try:
            with (self.run / "lock").open() as lock:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def at(self, path: Path | None) -> Path | None:
        """A path of the kit, made absolute."""
        return None if path is None else self.path / path

    @property
    def index(self) -> int:
        """Which aggregator this is."""
        return int(self.kit.name.rpartition("-")[2])

    @property
    def idle(self) -> bool:
        """Whether the federation's route has no use for this role."""
        route = self.federation.route
        users = {"shuffler": ShufflerRoute, "aggregator": ShardsRoute, "evaluator": ShardsRoute}
        if self.kit.role not in users:
            return False
        return not isinstance(route, users[self.kit.role]) or (
            self.kit.role == "aggregator" and isinstance(route, ShardsRoute) and self.index >= route.aggregators
        )

    @property
    def own_federation(self) -> Federation:
        """The federation with this site's own device, data and policy in it; the digest is the same."""
        kit = self.kit
        own = {"device": kit.device, "data": self.at(kit.data), "policy": self.at(kit.policy)}
        given = {key: value for key, value in own.items() if value is not None}
        sites = tuple(
            site.model_copy(update=given) if kit.role == "site" and site.name == kit.name else site
            for site in self.federation.sites
        )
        return self.federation.model_copy(update={"sites": sites})


def parties(federation: Federation) -> list[tuple[Role, str]]:
    """Every role and name that a federation's route takes, sites last."""
    found: list[tuple[Role, str]] = [("superlink", "superlink"), ("server", "server")]
    if isinstance(federation.route, ShufflerRoute):
        found.append(("shuffler", "shuffler"))
    if isinstance(federation.route, ShardsRoute):
        found += [("aggregator", f"aggregator-{k}") for k in range(federation.route.aggregators)]
        found.append(("evaluator", "evaluator"))
    return found + [("site", name) for name in federation.site_names]


def observers(federation: Federation) -> dict[str, str]:
    """Whose views a run will have, and where in its folder."""
    names = ["server"]
    if federation.audit:
        names += [name for role, name in parties(federation) if role in ("shuffler", "aggregator", "evaluator")]
    return {name: f"views/{name}" for name in names}


def middleware_of(federation: Federation) -> tuple[Address, ...]:
    """Where the sites and the server find the middleware."""
    hosts = federation.hosts
    if hosts is None or isinstance(federation.route, ServerRoute):
        return ()
    if isinstance(federation.route, ShufflerRoute):
        assert hosts.shuffler is not None
        return (hosts.shuffler,)
    return hosts.aggregators


def read_kit(path: Path, device: str | None = None) -> Kit:
    file = path / "kit.yaml"
    if not file.is_file():
        raise ConfigError(f"kit {path}: has no kit.yaml; make one with fl-privacy provision")
    values = mapping(text_of(file, "kit"), str(file), PAGE)
    return validated(Kit, {**values, "device": device} if device else values, str(file))


def write_kit(path: Path, kit: Kit) -> None:
    values = kit.model_dump(mode="json", exclude_defaults=True)
    (path / "kit.yaml").write_text(yaml.safe_dump({"version": kit.version, **values}, sort_keys=False))
