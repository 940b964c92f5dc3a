"""A start kit: the folder with everything that one party of a federation needs on its machine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import AfterValidator, Field

from fl_privacy.config import NAME, Address, Federation, Model
from fl_privacy.deploy.parties import parties
from fl_privacy.deploy.place import Place
from fl_privacy.errors import ConfigError
from fl_privacy.files import is_locked
from fl_privacy.identity.keyring import Identity, Keyring
from fl_privacy.reading import DEVICE, DIGEST, PROXY, mapping, text_of, validated
from fl_privacy.roles import ROLES, RUN, Role

PAGE = "docs/deploying.md"
HEAD = """\
# This machine's part in federation {federation}. Paths are relative to this folder.
# Set what you need, then run `fl-privacy preflight .`, and `fl-privacy refresh .` if you use systemd or a container.
# Provisioning again keeps your settings.
"""
POLICY = "policy.yaml"
# Whoever makes kits cannot decide these: a kit.yaml that tries is refused.
NEVER_SHIPPED = {
    "policy": f"a site's policy is {POLICY} in its kit, or a link there; put it there and remove this line",
    "trial": "say `fl-privacy serve --trial` where one person runs all sites; remove this line",
}


def _known(role: str) -> str:
    if role not in ROLES:
        raise ValueError(f"unknown role; use one of {', '.join(ROLES)}")
    return role


class Kit(Model):
    """`kit.yaml`. Paths are relative to the kit's folder."""

    version: Literal[1] = 1
    federation: str = Field(pattern=NAME)
    digest: str = Field(pattern=DIGEST, description="digest of the federation that the kit was made for")
    role: Annotated[str, AfterValidator(_known)]
    name: str = Field(pattern=NAME)
    listen: Address | None = Field(None, description="where a listening role listens")
    hosts: tuple[str, ...] = Field((), description="names and addresses in its certificate")
    superlink: Address | None = Field(None, description="the gate of the SuperLink; for sites and the server")
    middleware: tuple[Address, ...] = Field((), description="the shuffler, or every aggregator in order")
    evaluator: Address | None = None
    metrics: Address | None = Field(None, description="where this role serves Prometheus metrics; none: nowhere")
    proxy: str | None = Field(
        None,
        pattern=PROXY,
        description="HTTP proxy for outgoing connections; without a password",
    )
    device: str | None = Field(None, pattern=DEVICE, description="a site's device")
    data: Path | None = Field(None, description="data folder of a site, of the server and of the evaluator")
    runs: Path = Field(Path("runs"), description="where the server keeps runs")


@dataclass(frozen=True)
class Folder:
    """A kit on disk, read and checked. In a `trial` one person runs all sites, which need no policy."""

    path: Path
    kit: Kit
    federation: Federation
    trial: bool = False

    @classmethod
    def open(cls, path: Path, device: str | None = None, trial: bool = False) -> Folder:
        """Read a kit; `device` overrides the kit's own."""
        path = path.resolve()
        kit = read_kit(path, device)
        federation = Federation.load(path / "federation.yaml")
        if (federation.name, federation.digest) != (kit.federation, kit.digest):
            raise ConfigError(
                f"kit {path}: is for another federation, or another version of it, than its federation.yaml "
                f"({federation.name!r}); use files from the same fl-privacy provision"
            )
        if ROLES[kit.role].has_node:
            federation.site(kit.name)
        return cls(path, kit, federation, trial)

    @property
    def role(self) -> Role:
        return ROLES[self.kit.role]

    @property
    def identity(self) -> Identity:
        return Identity(self.kit.federation, self.kit.role, self.kit.name)

    @property
    def keys(self) -> Keyring:
        return Keyring(self.path / "keys", self.state if self.role.has_node else None)

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
        """What only matters while the role runs: pids, health, sockets, the relay's certificate."""
        return self.path / "run"

    @property
    def served(self) -> bool:
        """Whether a process serves it now, whoever started it: the lock ends with the process."""
        return is_locked(self.run / "lock")

    def at(self, path: Path | None) -> Path | None:
        """A path of the kit, made absolute."""
        return None if path is None else self.path / path

    @property
    def idle(self) -> bool:
        """Whether the federation's route does not use this party."""
        return (self.kit.role, self.kit.name) not in parties(self.federation)

    @property
    def place(self) -> Place:
        """Where this party lives on its machine."""
        kit, records = self.kit, self.path / self.role.records / RUN
        return Place(
            role=self.role,
            name=kit.name,
            federation=self.own_federation,
            config=self.run / "federation.yaml",
            keys=self.keys,
            state=self.state,
            run=self.run,
            node=self.node_key.parent,
            gated=True,
            listen=kit.listen,
            superlink=kit.superlink,
            middleware=kit.middleware,
            evaluator=kit.evaluator,
            data=self.at(kit.data),
            records=records if self.federation.audit and self.role.records else None,
            secret=self.path / "secret",
            metrics=kit.metrics,
            events=self.logs / "events.jsonl",
            proxy=kit.proxy,
            trial=self.trial,
        )

    @property
    def policy(self) -> Path | None:
        """The site's own file, which provisioning never writes: no file that it does write names or replaces it.

        Only in a trial, where a site has none of its own, it is the one that the federation's config names.
        """
        own = self.path / POLICY
        if own.exists() or own.is_symlink():
            return own
        return self.federation.site(self.kit.name).policy if self.trial and self.role.has_node else None

    @property
    def own_federation(self) -> Federation:
        """The federation with this site's own device, data and policy in it; the digest is the same.

        Whoever writes the config does not choose what a site reads: outside a trial, a folder in it does not count.
        """
        kit, data = self.kit, self.at(self.kit.data)
        given: dict[str, Any] = {"policy": self.policy}
        given |= {"device": kit.device} if kit.device is not None else {}
        given |= {"data": data} if data is not None or not self.trial else {}
        sites = tuple(
            site.model_copy(update=given) if self.role.has_node and site.name == kit.name else site
            for site in self.federation.sites
        )
        return self.federation.model_copy(update={"sites": sites})


def read_kit(path: Path, device: str | None = None) -> Kit:
    file = path / "kit.yaml"
    if not file.is_file():
        raise ConfigError(f"kit {path}: has no kit.yaml; make one with fl-privacy provision")
    values = mapping(text_of(file, "kit"), str(file), PAGE)
    for key in NEVER_SHIPPED.keys() & values.keys():
        raise ConfigError(f"{file}: {key}: not decided by a kit; {NEVER_SHIPPED[key]}")
    return validated(Kit, {**values, "device": device} if device else values, str(file))


def write_kit(path: Path, kit: Kit) -> None:
    """Write kit.yaml as a template: what its owner decides comes first, and what is not set stands in a comment."""
    values = {"version": kit.version, **kit.model_dump(mode="json", exclude_defaults=True)}
    lines = [HEAD.format(federation=kit.federation)]
    for key, example, text in _owners(ROLES[kit.role]):
        lines += [f"# {text}", _line(key, values.pop(key)) if key in values else f"# {key}: {example}", ""]
    lines += ["# From fl-privacy provision; do not change it.", *(_line(*item) for item in values.items())]
    (path / "kit.yaml").write_text("\n".join(lines) + "\n")


def _owners(role: Role) -> Iterator[tuple[str, str, str]]:
    """What a kit's owner decides: key, example, and what it means."""
    if role.data:
        yield "data", "/path/to/data", "The folder with the data."
    if role.has_node:
        yield "device", "cuda:0", "Where to train: cpu (the default), cuda or cuda:N."
    if role.dials:
        yield "proxy", "http://proxy.example.org:3128", "An HTTP proxy for outgoing connections; without a password."
    if role.listens:
        yield "listen", "0.0.0.0:9093", "Where to listen: one address of this machine, or all."
    yield "metrics", "127.0.0.1:9464", "Where Prometheus metrics are served; null: nowhere."


def _line(key: str, value: Any) -> str:
    return yaml.safe_dump({key: value}, sort_keys=False, width=1000).rstrip()
