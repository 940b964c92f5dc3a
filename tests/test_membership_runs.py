"""Membership inference on real runs: it finds members in unprotected ones, and never more than the ledger allows."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import attacks
from attacks.common.fetched import Models
from attacks.common.knowledge import knowledge_of
from attacks.common.truth import Truth
from attacks.membership.attack import ATTACK
from attacks.membership.run import Findings
from commands import cli, json_of
from fl_privacy.config import Federation
from fl_privacy.config.policy import open_ledger
from fl_privacy.deploy.engines.engine import up
from fl_privacy.transcript import open_run

SITES, AGGREGATORS, ROUNDS = 24, 4, 3
CONFIG = f"""
name: membership
seed: 5
sites: {{count: {SITES}}}
rounds: {ROUNDS}
audit: true
canaries: {{}}
task: {{train: {{epochs: 5, batch_size: 16, lr: 0.1}}}}
"""
SHARDS = f"route: {{kind: shards, aggregators: {AGGREGATORS}}}\n"
EVERY = [f"aggregator-{k}" for k in range(AGGREGATORS)]

pytestmark = pytest.mark.e2e


def ran(folder: Path, text: str) -> Path:
    result = up(Federation.parse(text), "simulation", folder)
    assert result.status == "completed", result.reason
    return Path(result.path)


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ran(tmp_path_factory.mktemp("shards"), CONFIG + SHARDS)


@pytest.fixture(scope="module")
def private(tmp_path_factory: pytest.TempPathFactory) -> Path:
    text = CONFIG.replace("count:", "epsilon_total: 2, count:") + "route: {kind: server}\nprivatise: {kind: dpsgd}\n"
    return ran(tmp_path_factory.mktemp("private"), text)


def measured(run: Path, *observers: str) -> dict[str, dict[str, float]]:
    return attacks.replay(run, ["membership"], seeds=1, observers=observers)["membership"]["measures"]


def findings(run: Path, *observers: str) -> Findings:
    opened = open_run(run)
    federation = Federation.model_validate(opened.manifest["config"])
    knowledge = knowledge_of(federation, None, ATTACK.needs, models=Models(opened))
    return ATTACK.run({name: opened.view(name) for name in observers}, knowledge, 0)


def test_one_aggregator_of_an_unprotected_run_beats_chance_and_refutes_every_small_epsilon(sharded: Path) -> None:
    alone = measured(sharded, EVERY[0])
    for name in ("cosine", "likelihood"):
        assert alone[f"{name}_accuracy_max_p"]["value"] < 0.01
        assert alone[f"{name}_accuracy_max"]["value"] > alone[f"{name}_accuracy_max"]["chance"] > 0.5
        assert alone[f"{name}_auc"]["value"] > 0.6 > alone[f"{name}_auc"]["chance"]
    assert alone["likelihood_tpr_at_1"]["value"] > 2 * alone["likelihood_tpr_at_1"]["chance"]
    assert alone["epsilon"]["value"] > 0.2
    assert alone["epsilon"]["chance"] < 0.01
    assert "epsilon_ledger" not in alone  # nothing was promised
    assert {"loss_zeros_auc", "cosine_zeros_auc"} <= alone.keys()  # the handicapped attacker


def test_colluders_do_better_by_loss_and_the_global_models_alone_give_little_away(sharded: Path) -> None:
    alone, together, models = (measured(sharded, *who) for who in ((EVERY[0],), EVERY, ("evaluator",)))
    assert together["loss_auc"]["value"] > alone["loss_auc"]["value"]
    assert not [name for name in together if "zeros" in name]  # nothing is unseen
    assert together["epsilon"]["value"] > models["epsilon"]["value"]
    assert models["likelihood_auc"]["value"] < alone["likelihood_auc"]["value"]


def test_the_command_prints_the_scores_and_draws_the_operating_curves(sharded: Path) -> None:
    pair = ",".join(EVERY[:2])
    printed = cli("attack", sharded, "membership", "--observer", pair, "--seeds", "1", "--json")
    found: dict[str, Any] = json_of(printed)["attacks"]["membership"]
    assert found["observers"] == EVERY[:2]
    (picture,) = found["pictures"]
    assert (sharded / picture).read_bytes().startswith(b"\x89PNG")
    assert set(found["curves"]["likelihood_accuracy"]) == {str(round + 1) for round in range(ROUNDS)}
    assert f"likelihood_accuracy/site-{SITES - 1}" in found["curves"]
    assert any("add-or-remove" in note for note in found["notes"])
    for measure in found["measures"].values():
        assert np.isfinite([measure["value"], measure["chance"]]).all()


def test_the_attack_itself_needs_no_truth(sharded: Path, tmp_path: Path) -> None:
    without = tmp_path / "run"
    shutil.copytree(sharded, without, ignore=shutil.ignore_patterns("truth"))
    found, bare = findings(sharded, EVERY[1]), findings(without, EVERY[1])
    assert np.array_equal(found.overall["likelihood"], bare.overall["likelihood"])


def test_a_private_run_gives_away_less_than_its_ledger_charged(private: Path) -> None:
    """The bound fails with probability 0.1 % if the guarantee holds; a broken mechanism would exceed it."""
    found = measured(private, "server")
    assert found["epsilon"]["value"] < found["epsilon_ledger"]["value"] <= 2
    federation, truth = Federation.parse(CONFIG), Truth(open_run(private))
    for site in ("site-0", f"site-{SITES - 1}"):
        ledger = open_ledger(truth.federation, site, private.parent / "sites" / federation.name / site)
        assert truth.spent(site) == pytest.approx(ledger.spent())


def test_the_mean_of_a_mixture_is_all_that_a_shuffled_server_has(tmp_path: Path) -> None:
    """The shuffler sees whose update is whose. What the server gets says less, and the same however it is mixed."""
    text = CONFIG.replace(f"rounds: {ROUNDS}", "rounds: 1") + "route: {kind: shuffler, level: parameter, n_min: 4}\n"
    run = ran(tmp_path, text)
    shuffler, server = (measured(run, name) for name in ("shuffler", "server"))
    assert shuffler["likelihood_auc"]["value"] > server["likelihood_auc"]["value"] + 0.05
    assert shuffler["epsilon"]["value"] > 0.1
    assert {"loss_auc", "cosine_auc", "likelihood_auc", "epsilon"} <= server.keys()


def test_the_server_of_the_baseline_finds_members(tmp_path: Path) -> None:
    run = ran(tmp_path, CONFIG.replace(f"rounds: {ROUNDS}", "rounds: 2") + "route: {kind: server}\n")
    found = measured(run, "server")
    for name in ("loss", "cosine", "likelihood"):
        assert found[f"{name}_accuracy_max_p"]["value"] < 0.01
        assert found[f"{name}_accuracy"]["value"] > 0.57 > found[f"{name}_accuracy"]["chance"]
    assert found["epsilon"]["value"] > 0.2
