"""A site as in Flower's example of secure aggregation: each of a round's four messages loads torch."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context
from flwr.client import Client, NumPyClient
from flwr.client.mod import secaggplus_mod
from flwr.clientapp import ClientApp

from fl_privacy.config import Federation
from fl_privacy.tasks.train import fit
from fl_privacy.tasks.workload import Workload, training_seed


class Training(NumPyClient):
    """Trains when it is asked for its masked update; Flower's mod answers the other messages."""

    def __init__(self, context: Context) -> None:
        self._config, self._place = context.run_config, int(context.node_config["partition-id"])

    def fit(self, parameters: list[Any], config: dict[str, Any]) -> tuple[list[Any], int, dict[str, Any]]:
        federation = Federation.parse(str(self._config["federation"]))
        site, round = federation.sites[self._place], int(config["round"])
        if site.name in json.loads(str(self._config["stops"])).get(str(round), []):
            self._stop(site.name)
        work = Workload(federation)
        data = work.site_data(site.name)
        names = work.model.state_dict()
        work.model.load_state_dict({name: torch.tensor(one) for name, one in zip(names, parameters, strict=True)})
        fit(work.model, data, work.recipe, training_seed(federation.seed, site.name, round), site.device)
        return [one.numpy() for one in work.model.state_dict().values()], len(data), {}

    def _stop(self, name: str) -> None:
        """Tell the benchmark, which freezes all of this site's processes, and never answer."""
        Path(str(self._config["timings"])).with_name(f"stopping-{name}").touch()
        while True:
            time.sleep(1)


def client(context: Context) -> Client:
    return Training(context).to_client()


app = ClientApp(client_fn=client, mods=[secaggplus_mod])
