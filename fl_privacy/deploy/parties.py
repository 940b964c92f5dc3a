"""Who takes part in a federation, and where each of them is dialled."""

from __future__ import annotations

from fl_privacy.config import Address, Federation, Hosts
from fl_privacy.roles import ROLES, Role


def parties(federation: Federation) -> list[tuple[str, str]]:
    """Role and name of every party that the federation's route needs, sites last."""
    sites = [("site", name) for name in federation.site_names]
    return [("superlink", "superlink"), ("server", "server"), *federation.route.parties(), *sites]


def observers(federation: Federation) -> dict[str, str]:
    """Whose views a run will have, and where in its folder: the server's always, the others' under `audit: true`."""
    found = [(ROLES[role], name) for role, name in parties(federation)]
    seen = [name for role, name in found if role.records == "views" and (role.starts_runs or federation.audit)]
    return {name: f"views/{name}" for name in seen}


def address_of(hosts: Hosts, role: str, name: str) -> Address | None:
    """Where a party is dialled; None for one that `hosts` does not name."""
    if not ROLES[role].numbered:
        return getattr(hosts, role, None)
    many = getattr(hosts, f"{role}s", ())
    return many[number] if (number := index(name)) < len(many) else None


def index(name: str) -> int:
    """Which of a numbered role's parties this is."""
    return int(name.rpartition("-")[2])


def dialled(federation: Federation, role: Role, serving: str) -> tuple[Address, ...]:
    """Where a party of this role finds those that serve as `serving`; none if it does not dial them."""
    if federation.hosts is None or serving not in role.dials:
        return ()
    served = [party for party in parties(federation) if ROLES[party[0]].serves == serving]
    return tuple(where for party in served if (where := address_of(federation.hosts, *party)) is not None)
