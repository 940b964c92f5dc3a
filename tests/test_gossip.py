"""Route gossip: models travel along the edges of the topology and nowhere else, and every site's view says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from fl_privacy.config import Federation
from fl_privacy.deploy.engines.engine import up
from fl_privacy.errors import ConfigError
from fl_privacy.routes.base import check_engine
from fl_privacy.routes.peers import PEER, Moment
from fl_privacy.theory import cost
from fl_privacy.transcript import open_run, verify
from fl_privacy.transcript.events import Row
from fl_privacy.vector import Entry, Layout

Matrix = NDArray[np.float32]
ULP = float(np.finfo(np.float32).eps)
GRAPHS = ("ring", "line", "star", "erdos-renyi", "barabasi-albert")
CONFIG = Path(__file__).parent.parent / "configs" / "gossip.yaml"


def federation(kind: str, sites: int = 12, more: str = "", route: str = "{kind: gossip}") -> Federation:
    return Federation.parse(f"sites: {sites}\nseed: 3\ntopology: {{kind: {kind}}}\nroute: {route}\n{more}")


def averaged(made: Federation, models: Matrix) -> Any:
    """One exchange; rows are the sites by name, as the network has them."""
    layout, names = Layout((Entry("w", (models.shape[1],)),)), sorted(made.site_names)
    at = Moment(made, layout, None, names, models, np.zeros_like(models), {})  # type: ignore[arg-type]
    return made.route.exchange(at)  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", GRAPHS)
def test_gossip_keeps_the_mean_and_sends_along_the_edges_only(kind: str) -> None:
    made = federation(kind)
    assert made.topology is not None
    graph, names = made.topology.graph(made), sorted(made.site_names)
    models = np.random.default_rng(5).normal(size=(12, 30)).astype(np.float32)
    mean, spread = models.astype(np.float64).mean(axis=0), float(np.ptp(models, axis=0).max())
    found = averaged(made, models)
    edges = {(made.site_names[a], made.site_names[b]) for a, b in graph.edges}
    assert {(names[m.sender], names[m.recipient]) for m in found.messages} == edges | {(b, a) for a, b in edges}
    for message in found.messages:
        np.testing.assert_array_equal(message.values, models[message.sender])
    for _ in range(400):
        np.testing.assert_allclose(found.models.astype(np.float64).mean(axis=0), mean, atol=400 * ULP * spread)
        found = averaged(made, found.models)
    assert np.ptp(found.models, axis=0).max() < 1e-2 * spread


def test_a_site_moves_by_metropolis_s_weights() -> None:
    """In a line of three sites, the middle one has two neighbours, and all weights are a third."""
    models = np.array([[0.0], [3.0], [9.0]], np.float32)
    assert averaged(federation("line", 3), models).models[:, 0].tolist() == [1.0, 4.0, 7.0]
    half = federation("line", 3, route="{kind: gossip, mixing: 0.5}")
    assert averaged(half, models).models[:, 0].tolist() == [0.5, 3.5, 8.0]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "topology: route gossip sends along its edges, and there is none"),
        ("topology: {kind: hierarchical}", r"topology\.kind: hierarchical has region-0"),
        ("topology: {kind: star, hub: server}", r"topology\.kind: star has server"),
        ("topology: {kind: erdos-renyi, p: 0}", r"topology\.p: 0\.0 is not a probability"),
        ("topology: {kind: ring}\ncohort: 4", "cohort: on route gossip, all 6 sites take part"),
        ("topology: {kind: ring}\nhosts: {superlink: 'a:1'}", "hosts: route gossip runs on the simulation engine only"),
        ("topology: {kind: ring}\ncombine: {kind: median}", r"combine\.kind: on route gossip sites combine themselves"),
    ],
)
def test_what_gossip_cannot_do_is_refused(text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        Federation.parse(f"sites: 6\nroute: {{kind: gossip}}\n{text}")


def test_gossip_exists_in_simulation_only() -> None:
    with pytest.raises(ConfigError, match="gossip exists in simulation only"):
        check_engine(federation("ring").route, "local")


def test_what_sites_send_is_counted_by_degree() -> None:
    made = federation("star", 5)
    costs = {one.party: (one.count, one.bytes_in, one.bytes_out) for one in made.route.cost(made, 100)}
    assert costs == {"site of degree 1": (4, 400, 400), "site of degree 4": (1, 1600, 1600)}
    assert cost.times(made.route.cost(made, 100), 1600.0).total > 0


@pytest.mark.e2e
@pytest.mark.timeout(600)
def test_a_run_records_what_every_site_received_of_its_neighbours(tmp_path: Path) -> None:
    made = Federation.parse(CONFIG.read_text().replace("rounds: 10", "rounds: 4"))
    result = up(made, "simulation", tmp_path)
    assert result.status == "completed", result.reason
    assert result.accuracy is not None
    assert result.accuracy > 0.5  # chance is 0.1
    assert verify(Path(result.path), (tmp_path / "pki" / "ca.pem").read_bytes()).ok
    run, around = open_run(result.path), made.route.neighbours(made)  # type: ignore[attr-defined]
    assert run.observers == sorted([*(PEER + name for name in made.site_names), "server"])
    assert run.view("server").round(1).arrays == {}
    own = {name: run.view(PEER + name) for name in made.site_names}
    for name, view in own.items():
        for round in (1, 4):
            arrays, rows = view.round(round).arrays, [e.name for e in view.events(round) if isinstance(e, Row)]
            assert rows == around[name]
            assert arrays["values"].size == arrays["model"].size * len(rows)
    trained = {}  # what a site sent is the same at all of its neighbours
    for name, view in own.items():
        values = np.asarray(view.round(2).arrays["values"]).reshape(len(around[name]), -1)
        for sender, row in zip(around[name], values, strict=True):
            assert np.array_equal(trained.setdefault(sender, row), row)
    for name in made.site_names:  # and these lead to the model that it starts the next round from
        degree = {site: len(found) for site, found in around.items()}
        weights = {other: 1 / (1 + max(degree[name], degree[other])) for other in around[name]}
        expected = trained[name] + sum(w * (trained[o] - trained[name].astype(np.float64)) for o, w in weights.items())
        np.testing.assert_allclose(own[name].round(3).arrays["model"], expected, rtol=1e-6, atol=1e-7)
