"""Federations in containers: what docker-compose.yml's services are called, and a compose file for any federation."""

from __future__ import annotations

from pathlib import Path

from fl_privacy.config import Federation, Hosts, ShardsRoute
from fl_privacy.errors import ConfigError
from fl_privacy.launch.kit import Role, parties

GATE, MIDDLEWARE = 9092, 9093


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
