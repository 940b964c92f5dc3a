"""The examples of Tazza: they learn, a killed site comes back, poison stays out, and the server has no secret."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from attacks.common.replay import replay
from attacks.common.truth import Truth
from fl_privacy import models
from fl_privacy.agreement.saved import restore
from fl_privacy.agreement.secret import Agreed
from fl_privacy.config import Federation
from fl_privacy.deploy.engines.engine import up
from fl_privacy.export.source import locate
from fl_privacy.identity.keyring import Keyring
from fl_privacy.identity.pki import load_key
from fl_privacy.round.agreeing import FOLDER, disk_key, place_of, terms_of
from fl_privacy.steps.permute.shuffled import example_rules
from fl_privacy.transcript import open_run, verify
from fl_privacy.vector import Layout

CONFIGS = Path(__file__).parent.parent / "configs"
CONFIG, POISONED = CONFIGS / "tazza.yaml", CONFIGS / "tazza-poisoned.yaml"
SITE = "site-1"

pytestmark = pytest.mark.e2e


def test_clusters_keep_label_flippers_out_although_the_server_cannot_read_the_models(tmp_path: Path) -> None:
    """The server combines closed models; scoring opens them."""
    result = up(Federation.load(POISONED), "simulation", tmp_path)
    assert result.accuracy is not None
    assert result.accuracy > 0.9
    run, last = open_run(result.path), Federation.load(POISONED).rounds
    measures = replay(Path(result.path), ["poisoning"], seeds=1)["poisoning"]["measures"]
    assert measures["kept_out"]["value"] > 0.9
    assert measures["kept_out"]["chance"] < 0.2  # of honest updates
    assert measures["benign_accuracy"]["value"] > 0.9
    model = run.view("server").round(last).arrays["model"]
    truth = Truth(run)
    assert not np.array_equal(truth.opened(model, ["site-0"]), model)


def worker_of(folder: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            line = process.cmdline()
        except psutil.Error:
            continue
        if "client_app.worker" in line and SITE in line and any(str(folder) in word for word in line):
            found.append(process)
    return found


@pytest.mark.timeout(900)
def test_the_example_learns_though_a_site_is_killed_and_the_server_has_no_byte_of_a_secret(tmp_path: Path) -> None:
    federation, killed = Federation.load(CONFIG).model_copy(update={"rounds": 3}), list[int]()

    def watch(run: Path) -> None:
        if not killed and (run / "checkpoints").is_dir() and any((run / "checkpoints").glob("*1*")):
            for process in worker_of(tmp_path):
                process.kill()
                killed.append(process.pid)

    result = up(federation, "local", tmp_path, watch=watch)
    assert result.status == "completed", result.reason
    assert killed
    assert result.accuracy is not None
    assert result.accuracy > 0.8
    assert verify(Path(result.path), (tmp_path / "pki" / "ca.pem").read_bytes()).ok
    _check_secrets(tmp_path, Path(result.path), federation)


def _check_secrets(folder: Path, run: Path, federation: Federation) -> None:
    private, secrets = folder / ".state" / run.name / "private", set[bytes]()
    for name in federation.site_names:
        state = folder / "sites" / federation.name / name
        keys = Keyring(private / "sites" / name)
        roster = keys.roster()
        sealed = place_of(state, roster.digest)
        assert sealed.parent.name == FOLDER
        part = restore(
            sealed.read_bytes(), disk_key(keys, roster.digest, name), terms_of(roster), load_key(keys.key_file)
        )
        assert part.outcome is not None
        secrets.add(part.outcome.secret)
    (secret,) = secrets
    manifest: dict[str, Any] = open_run(run).manifest
    nonce = bytes.fromhex(manifest["nonce"])
    own = Agreed(secret, terms_of(roster)).of_run(run.name, nonce)
    rules, hidden = example_rules(federation), [secret, own, secret.hex().encode(), own.hex().encode()]
    for round in range(1, federation.rounds + 1):
        rule = rules.draw(own, federation.name, round)
        axes = [axis for tensor in rule.tensors.values() for axis in tensor if axis is not None]
        hidden += [axis.astype(kind).tobytes()[:48] for axis in axes for kind in (np.int64, np.int32)]
    held = [run, private / "server", private / "mailbox", folder / ".state" / run.name]
    files = {path for place in held for path in place.rglob("*") if path.is_file()}
    assert len(files) > 20
    for path in files:
        data = path.read_bytes()
        assert not any(part in data for part in hidden), path
    _check_models(folder, run, federation, own)


def _check_models(folder: Path, run: Path, federation: Federation, own: bytes) -> None:
    """The server's last model is the sites', closed; and `export` finds the sites' one."""
    layout = Layout.from_json(open_run(run).manifest["layout"])
    found = locate(run).model
    kept = models.kept.received(folder / "sites" / federation.name / "site-0" / "models", run.name, "last").model
    assert np.array_equal(found, kept)
    last = federation.rounds
    closed = open_run(run).view("server").round(last).arrays
    assert not np.array_equal(closed["model"], found)
    rule = example_rules(federation).draw(own, federation.name, last)
    rows = next(array for name, array in closed.items() if array.ndim == 2 and array.dtype == np.float32)
    opened = rule.inverse.apply((closed["model"] + rows.mean(axis=0)).astype(np.float32), layout)
    assert np.abs(opened - found).max() < 1e-5 * np.abs(found).max()
