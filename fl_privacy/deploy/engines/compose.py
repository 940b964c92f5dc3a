"""Federations in containers: what docker-compose.yml's services are called, and a compose file for any federation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fl_privacy.config import Federation, Hosts, ShardsRoute
from fl_privacy.deploy.kits.kit import Role, parties
from fl_privacy.errors import ConfigError

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
NETWORKS = {"site": ["sites"], "server": ["core"], "evaluator": ["core"]}
BOTH = ["sites", "core"]
INIT = (
    "rm -f /done/done && exec fl-privacy provision /federation.yaml --compose --sign "
    "--out /kits --pki /pki --runs /runs --data /data"
)


def document(federation: Federation, config: Path, image: str, run: str, data: Path | None = None) -> dict[str, Any]:
    """The compose file of a federation: the services of docker-compose.yml, as many as the federation has."""
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
        + [f"{volume}:/kits/{name}" for name, volume in kits.items()],
    }
    volumes: dict[str, None] = dict.fromkeys(["pki", "done", "runs", *kits.values()])
    networks = {name: {"internal": True} for name in BOTH}
    return {"services": services, "networks": networks, "volumes": volumes}


def located(federation: Federation) -> Federation:
    """The federation with the sites' own paths made absolute: containers see them at the same place."""
    sites = []
    for site in federation.sites:
        paths = {"data": site.data, "policy": site.policy}
        sites.append(site.model_copy(update={key: path.resolve() for key, path in paths.items() if path}))
    return federation.model_copy(update={"sites": tuple(sites)})


def _service(federation: Federation, role: Role, name: str, image: str, run: str, data: list[str]) -> dict[str, Any]:
    kit, done = f"kit-{name}:/kit", "done:/done:ro"
    made: dict[str, Any] = {**COMMON, "image": image, "networks": NETWORKS.get(role, BOTH)}
    needs: dict[str, Any] = {"init": {"condition": "service_completed_successfully"}}
    if role in ("site", "server"):
        listening = [other for kind, other in parties(federation) if kind not in ("site", "server")]
        needs |= {
            other: {"condition": "service_healthy"} for other in listening if role == "server" or other != "evaluator"
        }
    made["depends_on"] = needs
    if role == "server":
        made |= {"restart": "no", "volumes": [kit, "done:/done", "runs:/runs", *data]}
        return made | {"command": ["train", "/kit", "--done", "/done/done", "--run", run]}
    made |= {"command": ["serve", "/kit", "--until", "/done/done"], "volumes": [kit, done]}
    if role in ("site", "evaluator"):
        made["volumes"] += data
    if role == "site":
        site = federation.site(name)
        made["volumes"] += [f"{path}:{path}:ro" for path in (site.data, site.policy) if path]
        reserve(made, site.device)
    return made


def reserve(service: dict[str, Any], device: str) -> None:
    """Give a site's container the one GPU of its device; inside the container that is the first."""
    if device != "cpu":
        service["command"] += ["--device", "cuda"]
        chosen = {"driver": "nvidia", "device_ids": [device.partition(":")[2] or "0"], "capabilities": ["gpu"]}
        service["deploy"] = {"resources": {"reservations": {"devices": [chosen]}}}


def addressed(federation: Federation) -> Federation:
    """The federation with its roles at the names of their services."""
    count = federation.route.aggregators if isinstance(federation.route, ShardsRoute) else 0
    hosts = Hosts(
        superlink=f"superlink:{GATE}",
        shuffler=f"shuffler:{MIDDLEWARE}",
        aggregators=tuple(f"aggregator-{k}:{MIDDLEWARE}" for k in range(count)),
        evaluator=f"evaluator:{MIDDLEWARE}",
    )
    return federation.model_copy(update={"hosts": hosts})


def mounted(federation: Federation, kits: Path) -> list[tuple[Role, str]]:
    """Every role that has a volume under `kits`; those that the route has no use for will stand by."""
    there = sorted(path.name for path in kits.iterdir() if path.is_dir()) if kits.is_dir() else []
    wanted = parties(federation)
    spare = [(role, name) for name in there if (role := _spare(name)) and (role, name) not in wanted]
    if sorted(name for _, name in wanted + spare) != there:
        raise ConfigError(
            f"sites: this compose file is for {', '.join(there) or 'nobody'}, and the federation has "
            f"{', '.join(name for _, name in wanted)}; use fl-privacy up CONFIG --engine compose, which fits any"
        )
    return wanted + spare


def _spare(name: str) -> Role | None:
    """The middleware role that a service of this name has."""
    for role in ("shuffler", "aggregator", "evaluator"):
        if name == role or (role == "aggregator" and name.startswith("aggregator-")):
            return role
    return None
