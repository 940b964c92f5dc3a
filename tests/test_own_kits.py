"""Your own data and model on real machines: each has its own file and nothing of the others'."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import hearts
from commands import cli
from fl_privacy.deploy.kits.kit import read_kit, write_kit
from fl_privacy.models import kept
from helpers import eventually
from netns import Network, network
from test_own_data import CLINICS, FILES, PAGE, folder  # noqa: F401 (a fixture)

NAMES = {"fl.example.org": "10.77.0.2", "mix.example.org": "10.77.0.3"}
HOSTS = {"superlink": "fl.example.org:9443", "shuffler": "mix.example.org:9444"}
MACHINES = PAGE.partition("## On the clinics' own machines")[2]
UP = 240.0
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def net() -> Iterator[Network]:
    with network() as made:
        for number, name in enumerate(("superlink", "shuffler", "server", "site-a", "site-b", "site-c", "site-d"), 2):
            made.names(made.host(name, wide=f"10.77.0.{number}"), NAMES)
        yield made


class Consortium:
    """A federation of kits: every party on a machine of its own."""

    def __init__(
        self, net: Network, base: Path, config: Path, data: dict[str, Path], sign: bool = True, **changes: Any
    ) -> None:
        self.base, self.kits, self.net = base, base / "kits", net
        values = yaml.safe_load(config.read_text()) | {"hosts": HOSTS} | changes
        values["sites"] = [{k: v for k, v in site.items() if k != "data"} for site in values["sites"]]
        self.config = config.with_name(f"kits-{config.name}")
        self.config.write_text(yaml.safe_dump(values))
        if not sign:
            self.follow("pki init ca --federation private-clinics")
        done = cli("provision", self.config, "--out", self.kits, "--pki", base / "ca", *["--sign"] * sign)
        assert done.returncode == 0, done.stderr
        self.machines = {"superlink": "superlink", "shuffler": "shuffler", "server": "server"}
        self.machines |= dict(zip(data, ("site-a", "site-b", "site-c", "site-d"), strict=False))
        for name in data if sign else ():
            (self.kits / name / "policy.yaml").write_text(cli("site", "policy", self.kits / name).stdout)
        for name, own in data.items():
            shutil.copytree(own, self.kits / name / "data")
            write_kit(self.kits / name, read_kit(self.kits / name).model_copy(update={"data": Path("data")}))

    def follow(self, line: str, name: str = "", *more: str | Path) -> str:
        """Run a command of the page, as the party of that name; what it printed."""
        assert f"    fl-privacy {line}\n" in MACHINES
        places = {"KIT": self.kits / name, "NAME.signed.json": self.kits / name / f"{name}.signed.json"}
        places |= {"ca": self.base / "ca", "private.yaml": self.config}
        command = line.partition(" > ")[0].split()
        asked = sorted(self.kits.glob("*/*.request.json")) if "*.request.json" in command else []
        done = cli(*(places.get(word, word) for word in command if word != "*.request.json"), *asked, *more)
        assert done.returncode == 0, f"{line}: {done.stderr}"
        return done.stdout

    def enrol(self) -> None:
        """Keys are made where they are used; only requests and answers travel."""
        for name in self.machines:
            self.follow("pki request KIT", name)
        self.follow("pki sign ca *.request.json --config private.yaml")
        for name in self.machines:
            self.follow("pki install KIT NAME.signed.json", name)
        for name in CLINICS:
            answer = self.kits / name / f"{name}.signed.json"
            assert cli("pki", "install", self.kits / "superlink", answer).returncode == 0

    def run(self, name: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        whole = arguments[0] == "train"
        host = self.net.hosts[self.machines[name]]
        return host.serve(*arguments).end(400) if whole else host.cli(*arguments, timeout=400)

    @contextmanager
    def serving(self, name: str) -> Iterator[None]:
        process = self.net.hosts[self.machines[name]].serve("serve", self.kits / name)
        try:
            yield
        finally:
            process.signal(signal.SIGTERM)
            process.end(60)

    @contextmanager
    def up(self, *names: str) -> Iterator[None]:
        with ExitStack() as stack:
            for name in names:
                stack.enter_context(self.serving(name))
            for name in names:
                eventually(lambda name=name: (self.kits / name / "run" / "healthy").exists(), UP)  # type: ignore[misc]
            yield

    def train(self) -> dict[str, Any]:
        with self.up(*(name for name in self.machines if name != "server" and not self.is_up(name))):
            done = self.run("server", "train", self.kits / "server", "--json")
            assert done.returncode == 0, done.stderr
            return dict(json.loads(done.stdout.strip().splitlines()[-1]))

    def is_up(self, name: str) -> bool:
        return (self.kits / name / "run" / "healthy").exists()


def test_a_table_without_python(net: Network, folder: Path, tmp_path: Path) -> None:  # noqa: F811
    made = Consortium(net, tmp_path, folder / "clinics.yaml", {name: folder / name for name in CLINICS}, rounds=4)
    (made.kits / "clinic-b" / "data" / "patients.csv").rename(made.kits / "clinic-b" / "data" / "away")
    done = made.run("clinic-b", "preflight", made.kits / "clinic-b")
    assert done.returncode == 2
    assert re.search(r"FAIL data .*clinic-b/data", done.stdout)
    (made.kits / "clinic-b" / "data" / "away").rename(made.kits / "clinic-b" / "data" / "patients.csv")
    result = made.train()
    assert result["accuracy"] > 0.88
    models = [kept.received(made.kits / name / "state" / "models", result["run"], "last") for name in CLINICS]
    assert len({one.model.tobytes() for one in models}) == 1
    lines = (made.kits / "clinic-a" / "state" / "metrics" / f"{result['run']}.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["model"] == "alone"


def test_a_task_of_one_s_own_runs_only_where_it_was_accepted(net: Network, folder: Path, tmp_path: Path) -> None:  # noqa: F811
    """The page's commands, each on the machine of its party."""
    data = {name: folder / name for name in CLINICS}
    made = Consortium(net, tmp_path, folder / "private.yaml", data, sign=False, rounds=4)
    made.enrol()
    kit = made.kits / "clinic-c"
    done = cli("preflight", kit)
    assert done.returncode == 2
    for fix in (f"site accept {kit}", f"site accept-task {kit}", f"site policy {kit} > {kit}/policy.yaml"):
        assert f"fix: fl-privacy {fix}" in done.stdout
    done = cli("serve", kit)
    assert done.returncode == 2
    assert "is not accepted at this site" in done.stderr
    for name in CLINICS:
        made.follow("site accept KIT", name, "--yes")
        assert FILES["task.py"].splitlines()[0] in made.follow("site accept-task KIT", name, "--yes")
        (made.kits / name / "policy.yaml").write_text(made.follow("site policy KIT > KIT/policy.yaml", name))
    with made.up("superlink", "shuffler"):
        done = made.run("clinic-c", "preflight", kit)
        assert done.returncode == 0, done.stdout
        result = made.train()
    assert result["status"] == "completed"
    assert result["accuracy"] > 0.85


def test_heart_disease_with_one_file_per_machine_gives_the_model_of_the_pooled_folder(
    net: Network, tmp_path: Path
) -> None:
    apart = hearts.spread(tmp_path)
    config, pooled = tmp_path / "apart.yaml", tmp_path / "pooled.yaml"
    config.write_text(yaml.safe_dump(hearts.federation("hearts", apart)))
    pooled.write_text(yaml.safe_dump(hearts.federation("hearts")))
    runs = ("--runs-dir", tmp_path / "runs", "--json")
    one = cli("up", pooled, "--engine", "simulation", "--data-dir", hearts.data_folder(), *runs, whole=True)
    two = cli("up", config, *runs, whole=True)
    assert (one.returncode, two.returncode) == (0, 0), one.stderr + two.stderr
    found = [Path(json.loads(done.stdout)["path"]) for done in (one, two)]
    found.append(Path(Consortium(net, tmp_path, config, apart).train()["path"]))
    models = [hearts.model_of(path) for path in found]
    assert all(np.array_equal(models[0], model) for model in models)
