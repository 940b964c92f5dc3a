"""What comes after the first certificate: the next one, for whom and which hosts; and news of revocations."""

from __future__ import annotations

import datetime as dt
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import yaml
from cryptography import x509
from cryptography.hazmat.primitives import serialization

from enrolling import SITE, certificate, contents
from fl_privacy.config import Federation
from fl_privacy.launch import pki
from fl_privacy.launch.kit import Folder
from fl_privacy.launch.pki import Authority, load_key, write_public
from fl_privacy.launch.provision import provision
from fl_privacy.wire.identity import Identity, Keyring, belong_together


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority.create(tmp_path / "authority", "test")


def federation(**changes: Any) -> Federation:
    values = {
        "name": "test",
        "sites": 3,
        "quorum": 2,
        "route": {"kind": "shuffler", "n_min": 2},
        "hosts": {"superlink": "one.test:9092", "shuffler": "mix.test:9093"},
    }
    return Federation.model_validate({**values, **changes})


def age(authority: Authority, kit: Path, days_left: int) -> None:
    """As if its certificate, of 90 days, were given out that long ago."""
    folder = Folder.open(kit)
    key = load_key(folder.keys.key_file).public_key()
    with mock.patch.object(pki, "_SKEW", dt.timedelta(days=90 - days_left)):
        made = authority.certify(folder.identity, key, folder.kit.hosts, days_left)
    write_public(folder.keys.certificate_file, made.public_bytes(serialization.Encoding.PEM))


def change_hosts(kit: Path, *hosts: str) -> None:
    path = kit / "kit.yaml"
    path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), "hosts": list(hosts)}))


@pytest.mark.parametrize(("days_left", "anew"), [(-10, True), (29, True), (31, False)])
def test_provisioning_again_renews_what_ends_soon_and_keeps_all_else(
    authority: Authority, tmp_path: Path, days_left: int, anew: bool
) -> None:
    """A federation in containers is provisioned at every start: it outlives its certificates with keys and budgets."""
    kits = provision(federation(), tmp_path / "kits", authority, sign=True)
    (tmp_path / "kits" / "site-0" / "state" / "ledger.jsonl").write_text("spent\n")
    for kit in kits:
        age(authority, kit, days_left)
    before = contents(tmp_path / "kits")
    provision(federation(), tmp_path / "kits", authority, sign=True)
    after = contents(tmp_path / "kits")
    changed = {name for name in after if after[name] != before.get(name)}
    assert changed == ({f"{kit.name}/keys/cert.pem" for kit in kits} if anew else set())
    for kit in kits:
        folder = Folder.open(kit)
        assert belong_together(*folder.keys.read())
        assert Identity.of(certificate(kit)) == folder.identity
        assert certificate(kit).not_valid_after_utc > dt.datetime.now(dt.UTC) + dt.timedelta(days=30)


def test_provisioning_for_other_hosts_certifies_them(authority: Authority, tmp_path: Path) -> None:
    provision(federation(), tmp_path / "kits", authority, sign=True)
    before = {kit.name: certificate(kit) for kit in (tmp_path / "kits").iterdir()}
    moved = federation(hosts={"superlink": "one.test:9092", "shuffler": "moved.test:9093"})
    kits = provision(moved, tmp_path / "kits", authority, sign=True)
    assert [kit.name for kit in kits if certificate(kit) != before[kit.name]] == ["shuffler"]
    made = certificate(tmp_path / "kits" / "shuffler").extensions.get_extension_for_class(x509.SubjectAlternativeName)
    assert made.value.get_values_for_type(x509.DNSName) == ["moved.test"]


@pytest.mark.parametrize("wrong", ["foreign", "another party", "another key", "garbage", "no key"])
def test_provisioning_replaces_what_is_no_certificate_of_this_party(
    authority: Authority, tmp_path: Path, wrong: str
) -> None:
    provision(federation(), tmp_path / "kits", authority, sign=True)
    keys = Folder.open(tmp_path / "kits" / "site-0").keys
    if wrong == "foreign":
        Authority.create(tmp_path / "foreign").issue(SITE, keys.folder)
        keys.authority_file.write_bytes(authority.pem)
    elif wrong == "another party":
        authority.issue(Identity("test", "site", "site-1"), keys.folder)
    elif wrong == "another key":
        other = authority.issue(SITE, tmp_path / "other")
        keys.key_file.write_bytes(other.key_file.read_bytes())
    elif wrong == "garbage":
        keys.certificate_file.write_bytes(b"\xff")
    else:
        keys.key_file.unlink()
    provision(federation(), tmp_path / "kits", authority, sign=True)
    assert belong_together(*keys.read())
    assert Identity.of(certificate(tmp_path / "kits" / "site-0")) == SITE


def test_provisioning_tells_the_kits_of_revocations_and_lets_no_revoked_site_back_in(
    authority: Authority, tmp_path: Path
) -> None:
    kits = provision(federation(), tmp_path / "kits", authority, sign=True)
    assert not any((kit / "keys" / "revoked.pem").exists() for kit in kits)
    site, nodes = tmp_path / "kits" / "site-0", tmp_path / "kits" / "superlink" / "nodes"
    age(authority, site, days_left=5)
    authority.revoke(SITE.uri)
    (nodes / "site-0.pub").unlink()
    old = certificate(site)
    provision(federation(), tmp_path / "kits", authority, sign=True)
    assert all(Keyring(kit / "keys").revoked() == authority.revoked() != frozenset() for kit in kits)
    assert certificate(site) == old
    assert sorted(path.name for path in nodes.iterdir()) == ["site-1.pub", "site-2.pub"]
    [fresh] = provision(federation(), tmp_path / "new", authority, roles=[("shuffler", "shuffler")])
    assert Keyring(fresh / "keys").revoked() == authority.revoked()


def test_newer_revocations_in_a_kit_stay(authority: Authority, tmp_path: Path) -> None:
    """The authority's folder was restored from a backup."""
    provision(federation(), tmp_path / "kits", authority, sign=True)
    shuffler = Folder.open(tmp_path / "kits" / "shuffler")
    authority.revoke(SITE.uri)
    old = authority.revoked_file.read_bytes()
    authority.revoke("fl-privacy://test/site/site-1")
    provision(federation(), tmp_path / "kits", authority)
    assert len(shuffler.keys.revoked()) == 2
    authority.revoked_file.write_bytes(old)
    provision(federation(), tmp_path / "kits", authority)
    assert len(shuffler.keys.revoked()) == 2
