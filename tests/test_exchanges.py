"""What a route declares as its exchanges is what its server end does in a round, and what its cost counts."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chains import chain
from fl_privacy.config import Federation
from fl_privacy.routes.base import tickets
from fl_privacy.wire import client, rpc
from serving import Noted
from sites import PARAMETERS

ROUTES = (
    "route: {kind: shuffler, n_min: 3}",
    "route: {kind: shards, aggregators: 2, n_min: 3}",
    "route: {kind: hierarchical, regions: 1, n_min: 3}",
    "route: {kind: mixes, mixes: 2, trust: semi-honest, n_min: 3}\nencode: {kind: rns, r: 4}",
    "route: {kind: mixes, mixes: 2, trust: malicious, n_min: 3}\nencode: {kind: rns, r: 4}",
)


def federation(route: str) -> Federation:
    return Federation.parse(f"name: test\nsites: 3\nrounds: 4\ndeadline: 20\nevaluate: server\n{route}\n")


@pytest.mark.parametrize("route", ROUTES, ids=["shuffler", "shards", "hierarchical", "semi-honest", "malicious"])
def test_the_server_makes_the_calls_that_its_route_declares(
    route: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, calls, plain = federation(route), list[list[str]](), rpc.middleware

    def noted(channel: Any) -> Any:
        calls.append([])
        return Noted(plain(channel), calls[-1])

    evaluators = [party for party in made.route.parties() if party[0] == "evaluator"]
    with chain(tmp_path, made) as one:
        for party in evaluators:
            shards = made.route.parts(made, PARAMETERS).split(np.zeros(PARAMETERS, np.float32))
            for aggregator, shard in zip(one.mixes, shards, strict=True):
                client.seed(aggregator.party(*party).stub, "run", 0, shard, 30.0)
        with monkeypatch.context() as patched:
            patched.setattr(rpc, "middleware", noted)
            one.connect_server()
        one.play()
        assert not one.errors
    for found in calls:
        assert tuple(name for name, _ in groupby(found)) == made.route.exchanges  # it calls again to wait longer
    others = len(evaluators) + tickets(made) * len(made.sites)
    assert made.route.cost(made, PARAMETERS)[0].messages == pytest.approx(sum(map(len, calls)) + others)
