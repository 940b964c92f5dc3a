"""For tests of start kits: a federation with addresses, kits edited as their owner would, preflight's findings."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from commands import Command
from fl_privacy.config import Federation
from fl_privacy.deploy.kits.kit import Folder
from fl_privacy.deploy.kits.provision import Choices, provision
from fl_privacy.deploy.preflight import of_kit
from fl_privacy.identity.pki import Authority

HERE = "127.0.0.1"
POLICY = "epsilon_per_round: 9\nepsilon: 99\ntasks: [digits, mnist]\nallow_plain: true\n"


def federation(sites: int = 3, port: int = 9, **changes: Any) -> Federation:
    values = {
        "name": "kits",
        "sites": sites,
        "quorum": 2,
        "route": {"kind": "shuffler", "n_min": 2},
        "hosts": {"superlink": f"{HERE}:{port}", "shuffler": f"{HERE}:{port}"},
    }
    return Federation.model_validate({**values, **changes})


def signed_site(folder: Path, authority: Authority) -> Path:
    """A valid kit of a site, with its policy; only its peers are not running."""
    provision(federation(), folder / "kits", authority, sign=True, choices=Choices(metrics=None))
    (folder / "kits" / "site-0" / "policy.yaml").write_text(POLICY)
    return folder / "kits" / "site-0"


def write(folder: Path, made: Federation) -> Path:
    path = folder / "federation.yaml"
    path.write_text(made.to_yaml())
    return path


def change(kit: Path, **values: Any) -> None:
    """Edit kit.yaml as its owner would."""
    path = kit / "kit.yaml"
    path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), **values}))


def failures(kit: Path, reach: bool = False) -> dict[str, str]:
    """The failed checks and their details; each has a fix."""
    found = [check for check in of_kit.run(Folder.open(kit), reach) if not check.ok]
    assert all(check.fix for check in found)
    return {check.name: check.detail for check in found}


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@contextmanager
def serving(kit: Path, whole: bool = False) -> Iterator[None]:
    """Serve a kit as where one person runs all sites: they need no policy. `whole`: its processes are forks."""
    if whole:
        forked = Command("serve", kit, "--trial", whole=True)
        try:
            yield
        finally:
            forked.signal(signal.SIGTERM)
            forked.end(60)
        return
    program = Path(sys.executable).with_name("fl-privacy")
    with (kit / "logs" / "serve.out").open("wb") as output:
        process = subprocess.Popen([program, "serve", kit, "--trial"], stdout=output, stderr=output)
    try:
        yield
    finally:
        process.terminate()
        process.wait(60)
