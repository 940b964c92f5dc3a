"""Federations in containers: the service names of docker-compose.yml, and a compose file for any federation."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from fl_privacy.config import Federation, Hosts
from fl_privacy.config.policy import shared_ledger
from fl_privacy.deploy.parties import called, parties
from fl_privacy.errors import ConfigError
from fl_privacy.roles import CORE, ROLES, SITES

GATE, MIDDLEWARE = 9092, 9093
COMMON: dict[str, Any] = {
    "init": True,
    "read_only": True,
    "tmpfs": ["/tmp"],
    "cap_drop": ["ALL"],
    "security_opt": ["no-new-privileges:true"],
    "restart": "on-failure:5",
    "stop_grace_period": "30s",
    "logging": {"driver": "local", "options": {"max-size": "10m", "max-file": "5"}},
    "pull_policy": "never",
}
INIT = (
    "rm -f /done/done && exec fl-privacy provision /federation.yaml --compose --sign "
    "--out /kits --pki /pki --runs /runs --data /data"
)


def document(federation: Federation, config: Path, image: str, run: str, data: Path | None = None) -> dict[str, Any]:
    """The compose file of a federation: the services of docker-compose.yml, one per party."""
    roles = parties(federation)
    shared = [f"{data}:/data:ro"] if data else []
    services = {name: _service(federation, role, name, image, run, shared) for role, name in roles}
    kits = {name: f"kit-{name}" for _, name in roles}
    services["init"] = {
        **COMMON,
        "image": image,
        "entrypoint": ["sh", "-c"],
        "command": [INIT],
        "restart": "no",
        "network_mode": "none",
        "healthcheck": {"disable": True},
        "volumes": [f"{config}:/federation.yaml:ro", "pki:/pki", "done:/done"]
        + [f"{pinned.file}:{pinned.file}:ro" for pinned in [federation.init] if pinned]
        + [f"{volume}:/kits/{name}" for name, volume in kits.items()],
    }
    volumes: dict[str, None] = dict.fromkeys(["pki", "done", "runs", *kits.values()])
    networks = {name: {"internal": True} for name in (SITES, CORE)}
    return {"services": services, "networks": networks, "volumes": volumes}


def located(federation: Federation) -> Federation:
    """The federation with absolute paths, which containers mount at the same place."""
    sites = []
    for site in federation.sites:
        paths = {"data": site.data, "policy": site.policy}
        sites.append(site.model_copy(update={key: path.resolve() for key, path in paths.items() if path}))
    init = federation.init and federation.init.model_copy(update={"file": federation.init.file.resolve()})
    return federation.model_copy(update={"sites": tuple(sites), "init": init})


def _service(federation: Federation, role: str, name: str, image: str, run: str, data: list[str]) -> dict[str, Any]:
    known, kit, shared = ROLES[role], f"kit-{name}:/kit", data if ROLES[role].data else []
    made: dict[str, Any] = {**COMMON, "image": image, "networks": list(known.networks)}
    needs: dict[str, Any] = {"init": {"condition": "service_completed_successfully"}}
    if known.awaits:
        found = called(federation, known, name, *known.dials)
        needs |= {other: {"condition": "service_healthy"} for _, other in found}
    made["depends_on"] = needs
    if known.starts_runs:
        made |= {"restart": "no", "volumes": [kit, "done:/done", "runs:/runs", *shared]}
        return made | {"command": ["train", "/kit", "--done", "/done/done", "--run", run]}
    made |= {"command": ["serve", "/kit", "--until", "/done/done"], "volumes": [kit, "done:/done:ro", *shared]}
    if known.has_node:
        made["command"] += ["--trial"]
        site = federation.site(name)
        made["volumes"] += [f"{path}:{path}:ro" for path in (site.data, site.policy) if path]
        made["volumes"] += [f"{path}:{path}" for path in [shared_ledger(site.policy)] if path]
        reserve(made, site.device)
    return made


def reserve(service: dict[str, Any], device: str) -> None:
    """Give a site's container the GPU of its device; inside the container it is the first one."""
    if device != "cpu":
        service["command"] += ["--device", "cuda"]
        chosen = {"driver": "nvidia", "device_ids": [device.partition(":")[2] or "0"], "capabilities": ["gpu"]}
        service["deploy"] = {"resources": {"reservations": {"devices": [chosen]}}}


def addressed(federation: Federation) -> Federation:
    """The federation with its roles addressed by the names of their services."""
    hosts: dict[str, Any] = {}
    for known, name in ((ROLES[role], name) for role, name in parties(federation)):
        address = f"{name}:{GATE if known.has_gate else MIDDLEWARE}"
        if known.listens and known.numbered:
            hosts.setdefault(Hosts.listing(known.name), []).append(address)
        elif known.listens:
            hosts[known.name] = address
    return federation.model_copy(update={"hosts": Hosts.model_validate(hosts)})


def mounted(federation: Federation, kits: Path) -> list[tuple[str, str]]:
    """Every party that has a volume under `kits`; those that the route does not use will stand by."""
    there = sorted(path.name for path in kits.iterdir() if path.is_dir()) if kits.is_dir() else []
    wanted = parties(federation)
    spare = [(role, name) for name in there if (role := _spare(name)) and (role, name) not in wanted]
    if sorted(name for _, name in wanted + spare) != there:
        raise ConfigError(
            f"sites: this compose file is for {', '.join(there) or 'nobody'}, and the federation has "
            f"{', '.join(name for _, name in wanted)}; use fl-privacy up CONFIG --engine compose, which fits any"
        )
    return wanted + spare


def _spare(name: str) -> str | None:
    """The role of a route that a service of this name has."""
    for role in ROLES.values():
        if not role.flower and re.fullmatch(f"{role.name}-[0-9]+" if role.numbered else role.name, name):
            return role.name
    return None
