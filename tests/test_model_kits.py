"""Models and start kits: a site exports what it received; the initial model lies where the federation starts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import kits
from fl_privacy import vector
from fl_privacy.config import Federation
from fl_privacy.deploy.kits.kit import Folder
from fl_privacy.deploy.kits.provision import provision
from fl_privacy.deploy.kits.train import train
from fl_privacy.errors import ConfigError, FederationError
from fl_privacy.export.card import facts
from fl_privacy.export.source import locate
from fl_privacy.export.write import module, write
from fl_privacy.identity.pki import Authority
from fl_privacy.models import keep
from fl_privacy.models.initial import initial
from fl_privacy.tasks import accepted
from fl_privacy.tasks.workload import layout_of, model_of

SHARDS = {
    "route": {"kind": "shards", "aggregators": 2, "n_min": 2},
    "hosts": {"superlink": "a:1", "aggregators": ["b:1", "c:1"], "evaluator": "d:1"},
}
RESIDENTS = {
    "route": {"kind": "shards", "aggregators": 2, "n_min": 2, "placement": "sites"},
    "hosts": {"superlink": "a:1", "mailbox": "b:1"},
    "evaluate": "sites",
}


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority.open(tmp_path_factory.mktemp("pki"))


def random_model(federation: Federation, seed: int) -> vector.Vector:
    return np.random.default_rng(seed).normal(size=layout_of(federation).size).astype(np.float32)


def test_a_site_exports_the_models_that_it_received(tmp_path: Path) -> None:
    federation = kits.federation()
    provision(federation, tmp_path)
    state, layout = tmp_path / "site-0" / "state" / "models", layout_of(federation)
    for run, rounds in (("old", (5, 5)), ("new", (9, 7))):
        for which, round in zip(("last", "best"), rounds, strict=True):
            keep(state, run, which, round, random_model(federation, round), layout, {"loss": 1 / round})
    found = locate(tmp_path / "site-0")
    assert (found.name, found.round, found.rounds, found.site) == ("new", 9, 9, "site-0")
    np.testing.assert_array_equal(vector.flatten(module(found))[0], random_model(federation, 9))
    assert locate(tmp_path / "site-0", "best").round == locate(tmp_path / "site-0", "7").round == 7
    assert locate(tmp_path / "site-0", run="old").round == 5
    card = facts(found)
    assert (card["run_digest"], card["attacks"], card["spent"]) == (None, None, [])
    assert card["metrics"] == {"loss": 0.111}
    for round, run, said in (("8", None, "there: last is round 9, best is round 7"), ("last", "gone", "old")):
        with pytest.raises(FederationError, match=said):
            locate(tmp_path / "site-0", round, run)


CODE = """
from pathlib import Path
import torch
from fl_privacy import Task

Path({mark!r}).touch()

class Own(Task):
    def model(self):
        return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
"""


def test_the_code_of_a_task_is_not_run_before_it_is_accepted(tmp_path: Path) -> None:
    """A run or a kit may come from anywhere. Weights need no code; what does need it says so."""
    mark = tmp_path / "ran"
    (tmp_path / "own.py").write_text(CODE.format(mark=str(mark)))
    values = {**kits.federation().model_dump(mode="json"), "task": {"code": "own.py"}}
    federation = Federation.of(values, folder=tmp_path)
    provision(federation, tmp_path / "kits")
    layout = vector.Layout.from_json([["0.weight", [4, 3]], ["0.bias", [4]], ["1.weight", [4]], ["1.bias", [4]]])
    entries = (*layout.entries, vector.Entry("1.running_mean", (4,)), vector.Entry("1.running_var", (4,)))
    entries += (vector.Entry("2.weight", (2, 4)), vector.Entry("2.bias", (2,)))
    layout, state = vector.Layout(entries), tmp_path / "kits" / "site-0" / "state"
    keep(state / "models", "run", "last", 3, np.ones(layout.size, np.float32), layout)
    found = locate(tmp_path / "kits" / "site-0")
    write(found, tmp_path / "weights.pt")
    assert set(torch.load(tmp_path / "weights.pt", weights_only=True)) == {entry.name for entry in layout.entries}
    with pytest.raises(ConfigError, match=r"no site here accepted own\.py"):
        write(found, tmp_path / "model.onnx", (3,))
    assert not mark.exists()
    assert facts(found)["task_digest"] == federation.task.sha256
    assert facts(found)["task"].keys() == {"code", "name", "options", "train", "records", "sha256"}
    accepted.accept(federation, state)
    write(found, tmp_path / "whole.pt")
    assert mark.exists()
    model_of(federation).load_state_dict(torch.load(tmp_path / "whole.pt", weights_only=True))
    with pytest.raises(FederationError, match="add --shape"):
        write(found, tmp_path / "model.onnx")
    write(found, tmp_path / "model.onnx", (3,))


def test_kits_without_a_model_say_so(tmp_path: Path) -> None:
    provision(kits.federation(), tmp_path)
    for kit, said in (("shuffler", "a shuffler keeps no model"), ("site-1", "any run yet"), ("server", "any run yet")):
        with pytest.raises(FederationError, match=said):
            locate(tmp_path / kit)
    with pytest.raises(FederationError, match="leave --run out"):
        locate(tmp_path / "nowhere", run="x")


@pytest.mark.parametrize(
    ("changes", "starters"),
    [({}, ["server"]), (SHARDS, ["evaluator"]), (RESIDENTS, ["server", "site-0", "site-1", "site-2"])],
)
def test_the_initial_model_is_in_the_kit_of_every_party_that_starts_from_it(
    tmp_path: Path, changes: dict[str, object], starters: list[str]
) -> None:
    plain = kits.federation(**changes)
    torch.save(model_of(plain).state_dict(), tmp_path / "first.pt")
    provision(plain.starting_from(tmp_path / "first.pt"), tmp_path / "kits")
    (tmp_path / "first.pt").unlink()
    assert sorted(path.parent.name for path in (tmp_path / "kits").glob("*/init.pt")) == starters
    found = [Folder.open(kit).federation for kit in (tmp_path / "kits").iterdir()]
    assert len({one.digest for one in found}) == 1
    assert found[0].digest != plain.digest
    for starter in starters:
        initial(Folder.open(tmp_path / "kits" / starter).own_federation)


def test_a_run_of_kits_starts_only_from_the_file_that_all_agreed_on(tmp_path: Path, authority: Authority) -> None:
    plain = kits.federation()
    for name in ("first.pt", "other.pt"):
        torch.save({k: torch.randn_like(v) for k, v in model_of(plain).state_dict().items()}, tmp_path / name)
    provision(plain, tmp_path / "plain", authority, sign=True)
    provision(plain.starting_from(tmp_path / "first.pt"), tmp_path / "kits", authority, sign=True)
    provision(kits.federation(**SHARDS).starting_from(tmp_path / "first.pt"), tmp_path / "cut", authority, sign=True)
    for folder, said in (
        ("plain", r"add init: other\.pt to its config"),
        ("kits", "but the federation agreed on"),
        ("cut", "the evaluator starts this federation"),
    ):
        with pytest.raises(ConfigError, match=said):
            train(Folder.open(tmp_path / folder / "server"), init=tmp_path / "other.pt")
        assert not (tmp_path / folder / "server" / "runs").exists()
    (tmp_path / "kits" / "server" / "init.pt").unlink()
    with pytest.raises(ConfigError, match="cannot be read"):
        train(Folder.open(tmp_path / "kits" / "server"))


def test_a_model_of_another_layout_is_refused_by_provision(tmp_path: Path) -> None:
    torch.save({"fc1.weight": torch.zeros(2)}, tmp_path / "first.pt")
    with pytest.raises(ConfigError, match=r"fc1\.weight is \(2,\), not \(64, 64\)"):
        provision(kits.federation().starting_from(tmp_path / "first.pt"), tmp_path / "kits")
    assert not (tmp_path / "kits").exists()
