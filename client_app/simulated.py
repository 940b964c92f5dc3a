"""A site inside a simulation's process: the worker's own function, called directly."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

from flwr.app import Context

from fl_privacy.config import Federation
from fl_privacy.errors import FederationError
from fl_privacy.identity.keyring import Keyring
from fl_privacy.ops.log import Log
from fl_privacy.round.together import Together
from fl_privacy.tasks.workload import Workload

from . import worker
from .site import Site
from .tickets import ABSTAIN

Reply = tuple[dict[str, Any], bytes | memoryview | bytearray]


def answer(context: Context, ticket: dict[str, Any], payload: bytes | memoryview) -> Reply:
    """Answer a ticket as the site of this partition."""
    home, partition = str(context.run_config["home"]), int(context.node_config["partition-id"])
    try:
        site = _site(home, partition)
    except FederationError as error:
        _log(home, f"partition-{partition}")("error", reason=str(error))
        return {"status": ABSTAIN}, b""
    return worker.answer(site, ticket, bytearray(payload))


@lru_cache(maxsize=1)
def workload(home: str) -> Workload:
    """The task that all sites of a process share."""
    facts = _facts(home)
    return Workload(Federation.load(facts["config"]), facts["data_dir"] and Path(facts["data_dir"])).loaded()


@lru_cache(maxsize=1)
def _facts(home: str) -> Any:
    return json.loads((Path(home) / "simulation.json").read_text())


@lru_cache(maxsize=1024)
def _site(home: str, partition: int) -> Site:
    facts, work = _facts(home), workload(home)
    name = work.federation.site_names[partition]
    state = Path(facts["sites"]) / name
    keys, log = Keyring(Path(home) / "sites" / name, state), _log(home, name)
    folders = (None, Path(facts["run_dir"]) / "truth" / name, state)  # data, truth, state
    secrets = _together(home, name) if work.federation.agrees else None
    return Site(work.federation, name, keys, facts["middleware"], *folders, workload=work, log=log, secrets=secrets)


def _together(home: str, name: str) -> Together:
    """The simulated sites' agreement, of which one process plays all parts."""
    facts, names = _facts(home), workload(home).federation.site_names

    def state(site: str) -> Path:
        return Path(facts["sites"]) / site

    keys = {site: Keyring(Path(home) / "sites" / site, state(site)) for site in names}
    return Together(name, keys, state, Path(home) / "agreement.lock", _log(home, name))


def _log(home: str, name: str) -> Log:
    return Log(name, Path(_facts(home)["run_dir"]) / "logs" / "sites.log")
