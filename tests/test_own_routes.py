"""A task of one's own, with everything that it may bring, on every kind of route, with every kind of noise."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import fl_privacy
from fl_privacy.config import Federation
from fl_privacy.deploy.engines.engine import up
from fl_privacy.round.checkpoints import Checkpoints
from fl_privacy.tasks.measures import latest

TASK = """
import numpy as np
import torch
from torch import nn

from fl_privacy import Task, held_out


class Own(Task):
    preprocessing = "public"

    def model(self):
        return nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 2))

    def data(self, site, folder):
        table = np.loadtxt(folder / "own.csv", delimiter=",")
        test = held_out(table, ratio=0.3)
        x, y = table[:, :3], table[:, 3].astype(int)
        return (x[~test], y[~test]), (x[test], y[test])

    def loss(self, outputs, targets):
        return nn.functional.cross_entropy(outputs, targets, weight=torch.tensor([1.0, 2.0]), reduction="none")

    def augment(self, records):
        return records.add_(0.01 * torch.randn_like(records))

    def metrics(self, outputs, targets):
        return {"recall": float((outputs.argmax(1)[targets == 1] == 1).float().mean())}
"""
ROUTES = {
    "server, records": "route: {kind: server}\nprivatise: {kind: dpsgd}\n",
    "shuffler, sites": "route: {kind: shuffler}\nprivatise: {kind: ldp}\n",
    "shards, records": "route: {kind: shards, aggregators: 2}\nprivatise: {kind: dpsgd}\n",
    "mixes": "route: {kind: mixes, mixes: 2, trust: semi-honest}\nencode: {kind: rns}\n",
}


def federation(folder: Path, route: str) -> Federation:
    """Three sites of different sizes, each with a folder of its own."""
    (folder / "own.py").write_text(TASK)
    draw, sites = np.random.default_rng(0), []
    for number, size in enumerate((40, 90, 200)):
        site = folder / f"site-{number}"
        site.mkdir(exist_ok=True)
        x = draw.normal(size=(size, 3))
        np.savetxt(site / "own.csv", np.c_[x, x[:, 0] > 0], delimiter=",")
        sites.append(f"{{name: site-{number}, data: site-{number}{', epsilon: 8' if 'privatise' in route else ''}}}")
    return Federation.parse(
        f"name: own\nsites: [{', '.join(sites)}]\nrounds: 2\nreproducible: true\n{route}"
        "task: {code: own.py, train: {epochs: 2, batch_size: 16, lr: 0.1}}\n",
        folder=folder,
    )


@pytest.mark.e2e
@pytest.mark.timeout(900)
@pytest.mark.parametrize("route", ROUTES)
def test_a_task_of_one_s_own_runs_on_every_kind_of_route(route: str, tmp_path: Path) -> None:
    result = up(federation(tmp_path, ROUTES[route]), "simulation", tmp_path / "runs")
    assert result.status == "completed", result.reason
    run = fl_privacy.Run(result.path)
    assert [line["round"] for line in run.metrics] == [0, 1, 2]
    assert run.metrics[-1]["records"] > 60
    for name in ("site-0", "site-1", "site-2"):
        own = latest(tmp_path / "runs" / "sites" / "own" / name / "metrics")
        assert own is not None
        assert own["global"]["model"] == 2
        assert 0 <= own["global"]["recall"] <= 1


@pytest.mark.e2e
@pytest.mark.timeout(900)
def test_what_a_task_draws_is_the_same_on_every_engine(tmp_path: Path) -> None:
    made = federation(tmp_path, "route: {kind: shuffler}\nprivatise: {kind: dpsgd}\n")
    digests = []
    for engine in ("simulation", "local"):
        result = up(made, engine, tmp_path / engine)
        assert result.status == "completed", result.reason
        digests.append(Checkpoints(Path(result.path) / "checkpoints").load(2)["model"].tobytes())
    assert digests[0] == digests[1]
