"""Who takes part in a federation, and where each of them is dialled."""

from __future__ import annotations

from fl_privacy.config import Address, Federation
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


def index(name: str) -> int:
    """Which of a numbered role's parties this is."""
    return int(name.rpartition("-")[2])


def serving(federation: Federation, *services: str) -> list[tuple[str, str]]:
    """The parties that others dial for one of these services: superlink, middleware, evaluator."""
    return [party for party in parties(federation) if ROLES[party[0]].serves in services]


def starter(federation: Federation) -> tuple[str, str]:
    """The party that gives the federation its initial model: the evaluator where there is one, or the server."""
    return next(iter(serving(federation, "evaluator")), ("server", "server"))


def starters(federation: Federation) -> list[tuple[str, str]]:
    """The parties that read the initial model: the one that starts, and where sites aggregate all that hold shards."""
    sites = [("site", name) for name in federation.site_names] if federation.route.needs_all_sites else []
    return [starter(federation), *sites]


def called(federation: Federation, role: Role, name: str, *services: str) -> list[tuple[str, str]]:
    """Those that give one of these services to a party; a site calls only the middleware that it submits to."""
    found = [party for party in serving(federation, *services) if ROLES[party[0]].serves in role.dials]
    if not role.has_node:
        return found
    others = set(federation.route.middleware()) - set(federation.route.submits_to(federation, name))
    return [party for party in found if party[1] not in others]


def dialled(federation: Federation, role: Role, name: str, service: str) -> tuple[Address, ...]:
    """Where a party finds those that give a service; nowhere if it does not dial them."""
    if federation.hosts is None:
        return ()
    found = [federation.hosts.of(*party) for party in called(federation, role, name, service)]
    return tuple(address for address in found if address is not None)
