"""Under `audit: true`, parties that outlive a run record every run separately."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from commands import cli, json_of
from fl_privacy.addresses import free_port
from fl_privacy.config import Federation
from fl_privacy.deploy.kits.kit import Folder
from fl_privacy.deploy.kits.provision import Choices, provision
from fl_privacy.deploy.parties import observers
from fl_privacy.identity.pki import Authority
from fl_privacy.roles import ROLES
from fl_privacy.transcript import open_run, verify
from fl_privacy.transcript.read import View
from helpers import Keys, collect, deploy, eventually, open_round, round_header, submit
from kits import HERE, serving

UP = 180.0


def test_a_shuffler_records_each_run_in_its_own_view(tmp_path: Path) -> None:
    made = Federation.model_validate({"name": "test", "sites": 3, "audit": True})
    views = tmp_path / "views" / "{run}"
    shuffler = deploy(tmp_path, Keys(tmp_path / "keys"), made, "shuffler", options=("--view", str(views)))
    try:
        for run, value in (("first", 1.0), ("second", 2.0)):
            opened = open_round(shuffler.server, round_header(run, 1, 4))
            for number in range(3):
                submit(shuffler.site(number), opened, np.full(4, value + number, np.float32))
            collect(shuffler.server, opened)
    finally:
        shuffler.stop()
    assert sorted(path.name for path in views.parent.iterdir()) == ["first", "second"]
    for run, value in (("first", 1.0), ("second", 2.0)):
        seen = View(views.parent / run).round(1).arrays["updates"]
        np.testing.assert_array_equal(np.sort(seen[:, 0]), value + np.arange(3))


def audited(port: Iterator[int]) -> Federation:
    at = {"superlink": f"{HERE}:{next(port)}", "evaluator": f"{HERE}:{next(port)}"}
    values: dict[str, Any] = {
        "name": "kits",
        "sites": 2,
        "rounds": 1,
        "audit": True,
        "task": {"train": {"epochs": 1}},
        "route": {"kind": "shards", "aggregators": 2, "n_min": 2},
        "hosts": {**at, "aggregators": [f"{HERE}:{next(port)}" for _ in range(2)]},
    }
    return Federation.model_validate(values)


def collected(run: Path, kits: Path) -> None:
    """As docs/deploying.md says: each party's record goes to its place in the run's folder."""
    for kit in kits.iterdir():
        role = ROLES[Folder.open(kit).kit.role]
        if role.records and not role.starts_runs:
            shutil.copytree(kit / role.records / run.name, run / role.records / kit.name)


@pytest.mark.e2e
@pytest.mark.timeout(900)
def test_kits_run_twice_and_both_runs_verify_with_all_views_and_truth(tmp_path: Path) -> None:
    made, authority, kits = audited(iter(free_port, None)), Authority.open(tmp_path / "ca"), tmp_path / "kits"
    provision(made, kits, authority, sign=True, choices=Choices(metrics=None))
    up = sorted(kit for kit in kits.iterdir() if kit.name != "server")
    with ExitStack() as all_up:
        for kit in up:
            all_up.enter_context(serving(kit, whole=True))
        for kit in up:
            eventually((kit / "run" / "healthy").exists, UP)
        done = [cli("train", kits / "server", "--json", timeout=UP, whole=True) for _ in range(2)]
    for one in done:
        assert one.returncode == 0, one.stderr
        run = Path(json_of(one)["path"])
        collected(run, kits)
        report = verify(run, authority.pem)  # the parties reported their heads, and the server pinned them
        assert report.ok, report.problems
        opened = open_run(run)
        assert set(opened.observers) == set(observers(made)) == {"server", "aggregator-0", "aggregator-1", "evaluator"}
        assert all(opened.view(name).rounds[-1] == 1 for name in opened.observers)
        assert opened.sites == ["site-0", "site-1"]
        assert all(opened.truth(name).rounds == [1] for name in opened.sites)
