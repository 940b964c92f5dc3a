"""Any process may be killed at any moment of a round: the run completes by itself with the unbroken run's model.

`make test` kills each process once; `make test-faults` kills each at every phase that it has, and its results are the
table in docs/recovery.md.
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from commands import cli, json_of
from fault_matrix import FAULTS, ONCE, WHERE, Fault, arm
from fl_privacy.addresses import free_port
from fl_privacy.config import Federation, Hosts
from fl_privacy.deploy import ledgers
from fl_privacy.deploy.engines.engine import up
from fl_privacy.deploy.kits.kit import Folder
from fl_privacy.deploy.kits.provision import Choices, provision
from fl_privacy.identity.pki import Authority
from fl_privacy.roles import ROLES
from fl_privacy.round.journal import FILE, OPENED, RELEASED
from fl_privacy.transcript import verify
from helpers import eventually
from kits import HERE, serving

ROOT = Path(__file__).parent.parent
SPACE = 3  # rounds per fault
PER_RUN = 3
UP = 240.0
CONFIG = """
name: recovery
seed: 7
reproducible: true
deadline: 120
attempts: 5
sites: {{count: {sites}, epsilon: 4}}
rounds: {rounds}
privatise: {{kind: ldp}}
task: {{partition: {{kind: dirichlet, alpha: 0.5}}, train: {{epochs: 1}}}}
"""
SHARDS = "route: {kind: shards, aggregators: 2, n_min: 2}\ncompress: {kind: dsc, p: 0.3}\n"
RESIDENTS = SHARDS.replace("n_min", "placement: sites, n_min") + "evaluate: {by: sites, alone: false}\n"
MIXES = "route: {kind: mixes, mixes: 3, trust: malicious, n_min: 2}\nencode: {kind: rns}\n"
REGIONS = "route: {kind: hierarchical, regions: [3, 2], n_min: 2}\n"
ADDED = {"shards": SHARDS, "residents": RESIDENTS, "mixes": MIXES, "regions": REGIONS}
SITES = {"regions": 5}

pytestmark = pytest.mark.e2e


def final(run: Path, accuracy: Any, loss: Any) -> dict[str, np.ndarray]:
    """The last checkpoint: the model, or with shards nothing, and then the metrics stand for it."""
    saved = load_file(sorted((run / "checkpoints").glob("*.safetensors"))[-1])
    return {**saved, "scores": np.array([accuracy, loss], np.float64)}


@cache
def unbroken(config: str) -> dict[str, np.ndarray]:
    with tempfile.TemporaryDirectory() as folder:
        result = up(Federation.parse(config), "simulation", Path(folder))
        return final(Path(result.path), result.accuracy, result.loss)


@dataclass
class Run:
    """How a run ended, where it left its records, and where its middleware and its sites keep theirs."""

    status: str
    reason: str
    path: Path
    final: dict[str, np.ndarray]
    charges: list[int]
    journals: list[Path]
    authority: bytes

    @property
    def releases(self) -> Counter[tuple[str, int, bool]]:
        """How many attempts at each round every middleware released."""
        found: Counter[tuple[str, int, bool]] = Counter()
        for journal in self.journals:
            lines = [json.loads(line) for line in journal.read_bytes().splitlines()]
            rounds = {line["attempt"]: (line["round"], line["farewell"]) for line in lines if line["kind"] == OPENED}
            found.update((str(journal), *rounds[line["attempt"]]) for line in lines if line["kind"] == RELEASED)
        return found


def locally(federation: Federation, folder: Path) -> Run:
    result = up(federation, "local", folder)
    charges = [int(ledger["charges"]) for ledger in result.ledgers]
    journals = list((folder / ".state" / result.run / "private").glob(f"*/state/{FILE}"))
    path, authority = Path(result.path), (folder / "pki" / "ca.pem").read_bytes()
    last = final(path, result.accuracy, result.loss)
    return Run(result.status, result.reason, path, last, charges, journals, authority)


def hosts(federation: Federation) -> dict[str, Any]:
    """An address for every party that listens."""
    found: dict[str, Any] = {"superlink": f"{HERE}:{free_port()}"}
    for role, _ in federation.route.parties():
        at, key = f"{HERE}:{free_port()}", Hosts.listing(role)
        found |= {key: [*found.get(key, []), at]} if ROLES[role].numbered else {key: at}
    return found


def in_kits(federation: Federation, folder: Path) -> Run:
    made = Federation.model_validate({**federation.model_dump(exclude_defaults=True), "hosts": hosts(federation)})
    authority = Authority.open(folder.parent / "ca")
    provision(made, folder, authority, sign=True, choices=Choices(metrics=None))
    up_first = sorted(kit for kit in folder.iterdir() if kit.name != "server")
    with ExitStack() as all_up:
        for kit in up_first:
            all_up.enter_context(serving(kit))
        for kit in up_first:
            eventually((kit / "run" / "healthy").exists, UP)
        done = cli("train", folder / "server", "--json", timeout=900)
    assert done.returncode in (0, 1), done.stderr
    told = json_of(done)
    sites = [Folder.open(folder / name) for name in made.site_names]
    reports = [ledgers.report(site.federation, site.kit.name, site.state) for site in sites]
    charges = [int(report["charges"]) for report in reports if report]
    last = final(Path(told["path"]), told["accuracy"], told["loss"])
    journals = [folder / name / "state" / FILE for name in made.route.middleware()]
    return Run(told["status"], told["reason"], Path(told["path"]), last, charges, journals, authority.pem)


def broken(faults: Sequence[Fault], where: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """Break a run, and check it; returns how many charges beyond one per round the site has that paid most."""
    rounds = SPACE * (len(faults) + 1)
    config = CONFIG.format(rounds=rounds, sites=SITES.get(where, 3)) + ADDED.get(where.removeprefix("kits of "), "")
    federation, expected = Federation.parse(config), unbroken(config)
    kits = where.startswith("kits")
    done = arm(faults, folder, monkeypatch, kits)
    run = (in_kits if kits else locally)(federation, folder / "runs")
    happened = [faults[int(file.stem)].phase for file in sorted(done.glob("*.done"))]
    assert (run.status, happened) == ("completed", [fault.phase for fault in faults]), run.reason
    assert run.final.keys() == expected.keys()
    assert all(np.array_equal(array, expected[name]) for name, array in run.final.items())
    assert set(run.releases.values()) == {1}
    assert {round for _, round, _ in run.releases} >= set(range(1, rounds + 1))
    assert min(run.charges) >= rounds
    assert max(run.charges) <= rounds + len(faults)
    assert verify(run.path, run.authority).ok
    return max(run.charges) - rounds


@pytest.mark.parametrize("where", ONCE)
@pytest.mark.timeout(900)
def test_a_run_completes_although_each_of_its_processes_is_killed_once(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken(ONCE[where], where, tmp_path, monkeypatch)


def parts() -> Iterator[tuple[str, int, int]]:
    """A process that exits five times within a minute fails a local run: its faults are spread over several runs.

    Rounds do not wait for a site's SuperNode or ClientApp: a second fault would find neither before the run is over.
    """
    for process, faults in FAULTS.items():
        most = 1 if faults[0].victim.lstrip("^").startswith("supernode") else PER_RUN
        for first in range(0, len(faults), most):
            yield process, first, min(first + most, len(faults))


@pytest.mark.faults
@pytest.mark.parametrize(("process", "first", "end"), list(parts()))
@pytest.mark.timeout(1800)
def test_a_run_completes_although_a_process_is_killed_at_every_phase(
    process: str, first: int, end: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where, faults = WHERE[process], FAULTS[process][first:end]
    extra = broken(faults, where, tmp_path, monkeypatch)
    row = {"process": process, "first": first, "where": where, "phases": [f.phase for f in faults], "extra": extra}
    (ROOT / "build").mkdir(exist_ok=True)
    with (ROOT / "build" / "faults.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")


def test_the_table_in_the_docs_has_every_process_and_phase() -> None:
    lines = (ROOT / "docs" / "recovery.md").read_text().splitlines()
    for process, faults in FAULTS.items():
        assert any(line.startswith(f"| {process} | {', '.join(f.phase for f in faults)} |") for line in lines), process
