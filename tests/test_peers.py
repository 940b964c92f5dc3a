"""Routes without a server: their exchanges as mathematics, what they demand, and runs of them in simulation."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from numpy.typing import NDArray

import attacks
import fl_privacy
from commands import cli
from fl_privacy.config import Federation
from fl_privacy.deploy.engines.engine import up
from fl_privacy.deploy.engines.follow import Result
from fl_privacy.errors import ConfigError, FederationError, TranscriptError
from fl_privacy.identity.pki import load_key
from fl_privacy.peers import ako, graph, quantised, shatter
from fl_privacy.peers.exchange import pieces
from fl_privacy.round.checkpoints import Checkpoints
from fl_privacy.routes.peers import PEER
from fl_privacy.theory import distribution_time
from fl_privacy.transcript import ViewWriter, heads, open_run
from fl_privacy.transcript.events import Row
from fl_privacy.transcript.signing import load_anchors
from helpers import Keys

Matrix = NDArray[np.float32]
ULP = float(np.finfo(np.float32).eps)


def drawn(seed: int, *shape: int) -> Matrix:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


# Graphs


@given(nodes=st.integers(2, 30), degree=st.integers(1, 29), seed=st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_graphs_are_regular_and_symmetric_without_loops(nodes: int, degree: int, seed: int) -> None:
    if graph.impossible(nodes, degree):
        with pytest.raises(FederationError, match="degree: "):
            graph.regular(nodes, degree, (seed,))
        return
    found = graph.regular(nodes, degree, (seed,))
    assert found == graph.regular(nodes, degree, (seed,))
    for node, neighbours in enumerate(found):
        assert len(set(neighbours)) == len(neighbours) == degree
        assert node not in neighbours
        assert all(node in found[other] for other in neighbours)


# Shatter


@given(sites=st.integers(2, 6), chunks=st.integers(1, 4), seed=st.integers(0, 2**32))
@settings(max_examples=40, deadline=None)
def test_shatter_in_a_complete_graph_gives_every_site_the_mean(sites: int, chunks: int, seed: int) -> None:
    trained, overlay = drawn(seed, sites, 37), graph.regular(sites * chunks, sites * chunks - 1, (seed,))
    found = shatter.exchange(trained, pieces(37, chunks, seed), overlay)
    mean = trained.astype(np.float64).mean(axis=0)
    np.testing.assert_allclose(found.models, np.tile(mean, (sites, 1)), rtol=ULP, atol=ULP * np.abs(trained).max())


def test_a_site_of_shatter_averages_what_came_and_sends_one_chunk_per_virtual_node() -> None:
    trained, chunks, overlay = drawn(1, 5, 40), pieces(40, 4, 1), graph.regular(20, 3, (1,))
    found = shatter.exchange(trained, chunks, overlay)
    for message in found.messages:
        assert message.where is not None
        assert message.sender != message.recipient
        assert any(np.array_equal(message.where, chunk) for chunk in chunks)
        np.testing.assert_array_equal(message.values, trained[message.sender, message.where])
    for site in range(5):
        total, times = trained[site].astype(np.float64), np.ones(40)
        for virtual in range(20):
            for neighbour in overlay[virtual]:
                if neighbour // 4 == site:
                    where = chunks[virtual % 4]
                    total[where] += trained[virtual // 4, where]
                    times[where] += 1
        np.testing.assert_allclose(found.models[site], total / times, rtol=ULP)


# Ako


def test_ako_with_one_partition_is_federated_averaging() -> None:
    model, updates = drawn(2, 50), drawn(3, 6, 50)
    found = ako.exchange(np.tile(model, (6, 1)), updates, pieces(50, 1, 0), 1, {})
    expected = model + updates.astype(np.float64).mean(axis=0)
    np.testing.assert_allclose(found.models, np.tile(expected, (6, 1)), rtol=2 * ULP, atol=ULP)
    assert found.kept == {}


@given(sites=st.integers(2, 6), partitions=st.integers(1, 7), rounds=st.integers(1, 9), seed=st.integers(0, 2**32))
@settings(max_examples=40, deadline=None)
def test_ako_delivers_every_update_to_every_site_exactly_once(
    sites: int, partitions: int, rounds: int, seed: int
) -> None:
    d, start = 23, drawn(seed, 23)
    models, cut, sent, kept = np.tile(start, (sites, 1)), pieces(d, partitions, seed), np.zeros(d), {}
    for round in range(1, rounds + partitions):  # nothing is trained in the last ones
        updates = drawn(seed + round, sites, d) if round <= rounds else np.zeros((sites, d), np.float32)
        found = ako.exchange(models, updates, cut, round, kept)
        models, kept, sent = found.models, dict(found.kept), sent + updates.astype(np.float64).mean(axis=0)
        assert all(message.values.size == len(message.where) for message in found.messages)  # type: ignore[arg-type]
        assert len(found.messages) == sites * (sites - 1)
    # Every round rounds a model to float32 once, and a message of values below 6 partitions once.
    bound = (rounds + partitions) * ULP * (np.abs(start) + 6 * rounds + 6 * partitions)
    assert (np.abs(models - (start + sent)) <= bound).all()


# Q-DPSGD-1


def test_quantised_models_are_unbiased_on_a_grid_and_off_by_less_than_one_level() -> None:
    model, tensors, levels, draws = drawn(4, 60), [slice(0, 20), slice(20, 60)], 31, 400
    sent = np.stack(
        [quantised.quantised(model, tensors, levels, bytes([n % 256, n // 256] * 16)) for n in range(draws)]
    )
    steps = np.concatenate([np.full(len(model[t]), np.abs(model[t]).max() / levels) for t in tensors])
    grid = sent / steps
    np.testing.assert_allclose(grid, np.round(grid), atol=1e-4)
    assert (np.abs(sent - model) < steps * (1 + 1e-4)).all()
    # An entry is one of two neighbours on the grid: its variance is at most step^2 / 4. Six deviations of the mean.
    assert (np.abs(sent.mean(axis=0) - model) <= 6 * steps / 2 / np.sqrt(draws)).all()
    np.testing.assert_array_equal(quantised.quantised(np.zeros(60, np.float32), tensors, levels, bytes(32)), 0)


def test_gossip_keeps_the_mean_and_leads_to_consensus() -> None:
    models = drawn(5, 8, 30)
    mean, spread = models.astype(np.float64).mean(axis=0), np.ptp(models, axis=0).max()
    neighbours = graph.regular(8, 4, (5,), connected=True)
    for _ in range(30):
        found = quantised.exchange(models, list(models), neighbours, mixing=1.0)
        models = found.models
        np.testing.assert_allclose(models.astype(np.float64).mean(axis=0), mean, atol=40 * ULP * spread)
    assert np.ptp(models, axis=0).max() < 1e-2 * spread
    assert len(found.messages) == 8 * 4


# Configs


ROUTES = {
    "shatter": "{kind: shatter, chunks: 4, degree: 3}",
    "ako": "{kind: ako, partitions: 3}",
    "q-dpsgd-1": "{kind: q-dpsgd-1}",
}
BASE = """
name: peers
seed: 3
rounds: 4
audit: true
reproducible: true
canaries: {}
task: {train: {epochs: 2, lr: 0.1}}
"""


def text(kind: str, **changes: Any) -> str:
    private = kind == "q-dpsgd-1"
    sites = "sites: {count: 6, epsilon: 8}\nprivatise: {kind: dpsgd}\n" if private else "sites: 6\n"
    extra = "".join(f"{name}: {value}\n" for name, value in changes.items())
    return BASE + sites + ("" if "route" in changes else f"route: {ROUTES[kind]}\n") + extra


@pytest.mark.parametrize("kind", ROUTES)
def test_a_config_reads_back_and_lists_the_views_of_its_sites(kind: str) -> None:
    federation = Federation.parse(text(kind))
    assert Federation.parse(federation.to_yaml()).digest == federation.digest
    assert federation.route.observers(federation) == [f"peer-site-{i}" for i in range(6)]


@pytest.mark.parametrize(
    ("kind", "changes", "problem"),
    [
        ("ako", {"cohort": 4}, "cohort: on route ako, all 6 sites take part in every round"),
        ("ako", {"quorum": 5}, "cohort: on route ako, all 6 sites take part"),
        ("ako", {"combine": "{kind: median}"}, r"combine\.kind: on route ako sites combine themselves"),
        ("ako", {"hosts": "{superlink: 'a:1'}"}, "hosts: route ako runs on the simulation engine only"),
        ("ako", {"evaluate": "sites"}, r"evaluate\.by: route\.kind 'ako' carries no counts"),
        ("ako", {"compress": "{kind: dsc}"}, "dsc"),
        ("ako", {"route": "{kind: ako, partitions: 0}"}, r"route\.partitions"),
        ("shatter", {"route": "{kind: shatter, chunks: 2, degree: 12}"}, r"route\.degree: 12 is not from 1 to 11"),
        ("q-dpsgd-1", {"route": "{kind: q-dpsgd-1, degree: 6}"}, r"route\.degree: 6 is not from 1 to 5"),
        ("q-dpsgd-1", {"compress": "{kind: qsgd}"}, r"compress\.kind: qsgd with route q-dpsgd-1"),
        ("ako", {"route": "{kind: q-dpsgd-1}"}, r"route\.kind: q-dpsgd-1 exchanges noisy models"),
    ],
)
def test_what_a_route_without_a_server_cannot_do_is_refused(kind: str, changes: dict[str, str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        Federation.parse(text(kind, **changes))


def test_an_odd_graph_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"route\.degree: 3 times 5 nodes is odd"):
        Federation.parse("sites: 5\nroute: {kind: shatter, chunks: 1, degree: 3}")


@pytest.mark.parametrize("kind", ROUTES)
def test_they_run_in_simulation_only(kind: str, tmp_path: Path) -> None:
    config = tmp_path / "peers.yaml"
    config.write_text(text(kind))
    refused = f"error: route.kind: {kind} exists in simulation only; use --engine simulation, not "
    for words in (["up"], ["up", "--engine", "local"], ["up", "--engine", "compose"]):
        done = cli(*words, config, "--runs-dir", tmp_path / "runs")
        assert (done.returncode, done.stderr.strip()) == (2, refused + words[-1].replace("up", "local"))
    with pytest.raises(ConfigError, match="exists in simulation only"):
        fl_privacy.up(config, runs_dir=tmp_path / "runs")
    done = cli("provision", config, "--sign", "--compose", "--out", tmp_path / "kits")
    assert (done.returncode, done.stderr.strip()) == (2, refused + "kits")
    assert not (tmp_path / "runs").exists()


def test_a_worker_of_a_deployment_refuses_them(tmp_path: Path) -> None:
    config = tmp_path / "peers.yaml"
    config.write_text(text("ako"))
    command = [sys.executable, "-m", "client_app.worker", "--config", config, "--site", "site-0"]
    done = subprocess.run([*command, "--keys", tmp_path, "--socket", tmp_path / "s"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "ako exists in simulation only" in done.stderr


@pytest.mark.parametrize(
    ("kind", "setting", "sent"),
    [
        ("shatter", {"degree": 3}, lambda d: 3 * 4 * d),
        ("ako", {"partitions": 3}, lambda d: 5 * 4 * -(-d // 3)),
        ("q-dpsgd-1", {"degree": 2, "ratio": 6 / 32}, lambda d: -(-6 * 2 * d // 8)),
    ],
)
def test_plan_gives_what_a_site_sends_and_the_time_of_the_papers_formula(
    kind: str, setting: dict[str, Any], sent: Any, tmp_path: Path
) -> None:
    config = tmp_path / "peers.yaml"
    config.write_text(text(kind))
    found = json.loads(cli("plan", config, "--json").stdout)
    (site,) = found["per_round"]
    assert (site["party"], site["bytes_in"], site["bytes_out"]) == ("site", *[sent(found["parameters"])] * 2)
    published = distribution_time(kind, 4 * found["parameters"], 6, 20e6, **setting)
    assert found["distribution_time"]["published"] == pytest.approx(published)
    assert "by the formula in ERIS's tables" in cli("plan", config).stdout


# Transcripts


@pytest.mark.parametrize("role", ["site", "shuffler", "server"])
def test_only_the_server_records_what_a_simulated_site_received(role: str, tmp_path: Path) -> None:
    keys = Keys(tmp_path, "peers").of(role, role)
    view = ViewWriter(tmp_path / "view", "peer-x", "run", load_key(keys.key_file), keys.certificate_file.read_bytes())
    expected = heads.Expected(load_anchors(keys.authority_file.read_bytes()))
    head = json.loads(view.signed_head)
    if role == "server":
        assert heads.place(heads.check(head, expected, "head"), head, "head") == "views/peer-x"
    else:
        with pytest.raises(TranscriptError, match=f"view of peer-x, signed by {role}"):
            heads.check(head, expected, "head")


# Runs


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Result]:
    """The run of a route, made once."""
    return cache(lambda kind: up(Federation.parse(text(kind)), "simulation", tmp_path_factory.mktemp("runs")))


@pytest.mark.e2e
@pytest.mark.parametrize("kind", ROUTES)
def test_a_run_learns_and_records_what_every_site_received(kind: str, ran: Callable[[str], Result]) -> None:
    result = ran(kind)
    assert result.status == "completed", result.reason
    assert result.accuracy is not None
    assert result.accuracy > {"shatter": 0.85, "ako": 0.85, "q-dpsgd-1": 0.6}[kind]  # chance is 0.1
    assert cli("transcript", "verify", result.path).returncode == 0
    opened = open_run(result.path)
    assert opened.observers == [*(f"{PEER}site-{i}" for i in range(6)), "server"]
    assert opened.view("server").round(1).arrays == {}
    saved = Checkpoints(Path(result.path) / "checkpoints").load(4)
    assert {name for name in saved if name.startswith(PEER)} == {f"{PEER}site-{i}" for i in range(6)}
    view = opened.view(f"{PEER}site-0")
    arrays, rows = view.round(4).arrays, [e for e in view.events(4) if isinstance(e, Row)]
    assert len(arrays["values"]) == arrays["sizes"].sum()
    assert ("where" in arrays) == (kind != "q-dpsgd-1")
    assert [event.row for event in rows] == ([] if kind == "shatter" else list(range(len(arrays["sizes"]))))
    assert "site-0" not in {event.name for event in rows}


@pytest.mark.e2e
@pytest.mark.parametrize("kind", ROUTES)
def test_a_site_can_be_asked_which_records_others_trained_on(kind: str, ran: Callable[[str], Result]) -> None:
    path = Path(ran(kind).path)
    found = attacks.replay(path, ["membership"], seeds=1, observers=[f"{PEER}site-0"])["membership"]["measures"]
    if kind == "q-dpsgd-1":
        assert found["epsilon"]["value"] <= found["epsilon_ledger"]["value"]
    else:
        assert found["likelihood_auc"]["value"] > found["likelihood_auc"]["chance"] + 0.03
    with pytest.raises(FederationError, match="cannot use the view of peer-site-0"):
        attacks.replay(path, ["privacy-inference"], observers=[f"{PEER}site-0"])


@pytest.mark.e2e
def test_a_resumed_run_of_ako_ends_with_the_same_models(ran: Callable[[str], Result], tmp_path: Path) -> None:
    """It is the one that keeps more than models."""
    part = up(Federation.parse(text("ako").replace("rounds: 4", "rounds: 2")), "simulation", tmp_path)
    resumed = up(Federation.parse(text("ako")), "simulation", tmp_path, resume=part.path)
    saved = [Checkpoints(Path(one.path) / "checkpoints").load(4) for one in (ran("ako"), resumed)]
    assert saved[0].keys() == saved[1].keys()
    assert "kept.recent" in saved[0]
    for name, array in saved[0].items():
        np.testing.assert_array_equal(array, saved[1][name])
