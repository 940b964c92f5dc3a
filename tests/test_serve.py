"""What `serve` and `train` refuse to start with, in one line each; and that a kit owner's settings are kept."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from commands import cli
from fl_privacy.deploy.kits.kit import read_kit
from fl_privacy.deploy.kits.provision import provision
from fl_privacy.files import write_secret
from fl_privacy.identity.pki import Authority
from kits import change, federation


@pytest.fixture
def kits(tmp_path: Path) -> Path:
    provision(federation(), tmp_path / "kits", Authority.open(tmp_path / "ca"), sign=True)
    return tmp_path / "kits"


def refused(command: str, kit: Path) -> str:
    done = cli(command, kit)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert not (kit / "run" / "healthy").exists()
    return str(done.stderr)


@pytest.mark.parametrize(("command", "name"), [("serve", "shuffler"), ("serve", "site-0"), ("train", "server")])
def test_nothing_starts_with_keys_of_another_kit(kits: Path, command: str, name: str) -> None:
    keys, kit = kits / name / "keys", kits / name
    (keys / "key.pem").rename(keys / "kept")
    write_secret(keys / "key.pem", b"garbage")
    assert "key.pem: not a private key in PEM; restore it" in refused(command, kit)
    shutil.copy(kits / "site-1" / "keys" / "key.pem", keys)
    assert "do not belong together; install the signed file again" in refused(command, kit)
    shutil.copy(kits / "site-1" / "keys" / "cert.pem", keys)
    assert "its certificate belongs to fl-privacy://kits/site/site-1; install the one" in refused(command, kit)
    (keys / "cert.pem").unlink()
    assert f"has no certificate; run fl-privacy pki request {kit}" in refused(command, kit)


def test_training_without_the_secret_names_the_missing_secret(kits: Path) -> None:
    (kits / "server" / "secret").unlink()
    assert "secret is missing; copy it from the superlink's kit" in refused("train", kits / "server")


def test_a_changed_interface_is_kept_while_the_port_is_the_same(kits: Path) -> None:
    change(kits / "shuffler", listen="127.0.0.1:9")
    provision(federation(), kits)
    assert read_kit(kits / "shuffler").listen == "127.0.0.1:9"
    provision(federation(port=10), kits)
    assert read_kit(kits / "shuffler").listen == "0.0.0.0:10"
