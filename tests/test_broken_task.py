"""A task that is broken: every command that would start it says where, in one line, and starts nothing."""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import yaml

from commands import cli
from fl_privacy.config import Federation
from fl_privacy.config.policy import template
from fl_privacy.deploy.kits.kit import Folder
from fl_privacy.deploy.kits.provision import Choices, provision
from fl_privacy.identity.pki import Authority
from fl_privacy.tasks import accepted
from kits import change
from test_own_data import BROKEN, DATA, GOOD, HEAD, MODEL, RUNS

NAN = "    def model(self):\n        m = nn.Linear(2, 2)\n        m.bias.data.fill_(np.nan)\n        return m\n"
BY_KIND = {
    "syntax": BROKEN["syntax"],
    "raises at one site": (
        HEAD + MODEL + DATA.format(f"({GOOD})[1 // (site != 'site-0') - 1 :]"),
        r"task\.py:9: data of site 'site-0': ZeroDivisionError",
    ),
    "empty": (HEAD + RUNS["empty"][0], r"task\.py:8: .*no training"),
    "not finite": (HEAD + NAN + DATA.format(GOOD), r"task\.py:6: bias of the new model is not finite"),
    "wrong width": (HEAD + RUNS["wrong width"][0], RUNS["wrong width"][1]),
}
CONFIG = "name: broken\nsites: 3\nrounds: 1\ntask: {code: task.py}\nroute: {kind: shuffler, n_min: 2}\n"
HOSTS = "hosts: {superlink: 127.0.0.1:9, shuffler: 127.0.0.1:9}\n"


@dataclass
class Broken:
    """A federation whose task is broken, as a config and as a kit of a site that accepted it."""

    config: Path
    kit: Path
    said: str

    def refused(self, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        """The command ends with an error that the user can fix, and says where, in one line."""
        done = cli(*arguments, whole=True)
        named = [line for line in (done.stdout + done.stderr).splitlines() if re.search(self.said, line)]
        assert (done.returncode, len(named)) == (2, 1), done.stdout + done.stderr
        assert "Traceback" not in done.stdout + done.stderr
        return done

    def check_idle(self) -> None:
        """No process has the kit or the config in its command."""
        own = str(self.config.parent)
        left = [found.info for found in psutil.process_iter(["pid", "cmdline"])]
        assert not [one for one in left if any(own in word for word in one["cmdline"] or ())]


@pytest.fixture(scope="module")
def authority() -> Iterator[Authority]:
    with tempfile.TemporaryDirectory() as folder:
        yield Authority.open(Path(folder))


@pytest.fixture(params=BY_KIND)
def broken(request: pytest.FixtureRequest, authority: Authority) -> Iterator[Broken]:
    with tempfile.TemporaryDirectory(prefix="b") as name:  # a socket's path is short
        folder, (code, said) = Path(name), BY_KIND[request.param]
        (folder / "task.py").write_text(code)
        (folder / "federation.yaml").write_text(CONFIG)
        federation = Federation.parse(CONFIG + HOSTS, folder=folder)
        provision(federation, folder / "kits", authority, sign=True, choices=Choices(metrics=None, data=folder))
        kit = folder / "kits" / "site-0"
        own = yaml.safe_load(template(federation, "site-0")) | {"allow_plain": True}
        (kit / "policy.yaml").write_text(yaml.safe_dump(own))
        accepted.accept(federation, Folder.open(kit).state)
        change(kit, data=str(folder))
        yield Broken(folder / "federation.yaml", kit, said)


@pytest.mark.e2e
def test_every_command_names_the_line_and_leaves_nothing_behind(broken: Broken) -> None:
    """In a kit, the relay and the SuperNode start once the worker has read task and data."""
    runs = broken.config.parent / "runs"
    where = ("--data-dir", broken.config.parent, "--runs-dir", runs)
    broken.refused("preflight", broken.config, *where)
    assert broken.refused("up", broken.config, *where).stderr.count("\n") == 1
    assert not runs.exists()
    broken.refused("preflight", broken.kit)
    broken.refused("site", "start", broken.kit)
    *events, error = broken.refused("serve", broken.kit).stderr.splitlines()
    assert error.startswith("error: ")
    assert all(json.loads(line)["event"] in ("starting", "stopped") for line in events)
    started = {log.stem for log in (broken.kit / "logs").glob("*.log")} - {"serve"}
    assert started == {"worker"}
    assert not (broken.kit / "run" / "healthy").exists()
    broken.check_idle()
