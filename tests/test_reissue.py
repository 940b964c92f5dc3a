"""After the first certificate: renewals, who gets them and for which hosts, and updates of revocations."""

from __future__ import annotations

import base64
import datetime as dt
import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import yaml
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from enrolling import SHUFFLER, SITE, certificate, contents, join, make_kit
from fl_privacy.cli import app
from fl_privacy.config import Federation
from fl_privacy.deploy.kits import enrol
from fl_privacy.deploy.kits.kit import Folder
from fl_privacy.deploy.kits.provision import provision
from fl_privacy.errors import FederationError, LaunchError
from fl_privacy.files import write_public
from fl_privacy.identity import pki, requests
from fl_privacy.identity.keyring import Identity, Keyring, belong_together
from fl_privacy.identity.pki import Authority, load_key
from fl_privacy.identity.signing import sign_text, verify_text
from helpers import HOSTS

SUPERLINK = Identity("test", "superlink", "superlink")


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
    """As if its certificate of 90 days had been issued this many days ago."""
    folder = Folder.open(kit)
    key = load_key(folder.keys.key_file).public_key()
    with mock.patch.object(pki, "_SKEW", dt.timedelta(days=90 - days_left)):
        made = authority.certify(folder.identity, key, folder.kit.hosts, days_left)
    write_public(folder.keys.certificate_file, made.public_bytes(serialization.Encoding.PEM))


def change_hosts(kit: Path, *hosts: str) -> None:
    path = kit / "kit.yaml"
    path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), "hosts": list(hosts)}))


@pytest.mark.parametrize(("days_left", "renewed"), [(-10, True), (29, True), (31, False)])
def test_provisioning_again_renews_what_expires_soon_and_keeps_everything_else(
    authority: Authority, tmp_path: Path, days_left: int, renewed: bool
) -> None:
    """A federation in containers is provisioned at every start: keys and budgets outlast its certificates."""
    kits = provision(federation(), tmp_path / "kits", authority, sign=True)
    (tmp_path / "kits" / "site-0" / "state" / "ledger.jsonl").write_text("spent\n")
    for kit in kits:
        age(authority, kit, days_left)
    before = contents(tmp_path / "kits")
    provision(federation(), tmp_path / "kits", authority, sign=True)
    after = contents(tmp_path / "kits")
    changed = {name for name in after if after[name] != before.get(name)}
    assert changed == ({f"{kit.name}/keys/cert.pem" for kit in kits} if renewed else set())
    for kit in kits:
        folder = Folder.open(kit)
        assert belong_together(*folder.keys.read())
        assert Identity.of(certificate(kit)) == folder.identity
        assert certificate(kit).not_valid_after_utc > dt.datetime.now(dt.UTC) + dt.timedelta(days=30)


def test_provisioning_for_other_hosts_issues_certificates_for_them(authority: Authority, tmp_path: Path) -> None:
    provision(federation(), tmp_path / "kits", authority, sign=True)
    before = {kit.name: certificate(kit) for kit in (tmp_path / "kits").iterdir()}
    moved = federation(hosts={"superlink": "one.test:9092", "shuffler": "moved.test:9093"})
    kits = provision(moved, tmp_path / "kits", authority, sign=True)
    assert [kit.name for kit in kits if certificate(kit) != before[kit.name]] == ["shuffler"]
    made = certificate(tmp_path / "kits" / "shuffler").extensions.get_extension_for_class(x509.SubjectAlternativeName)
    assert made.value.get_values_for_type(x509.DNSName) == ["moved.test"]


def test_provisioning_registers_the_node_key_that_a_site_created(authority: Authority, tmp_path: Path) -> None:
    provision(federation(), tmp_path / "kits", authority, sign=True)
    site, known = tmp_path / "kits" / "site-0", tmp_path / "kits" / "superlink" / "nodes" / "site-0.pub"
    before = known.read_bytes()
    (site / "node" / "node.key").unlink()
    [made] = enrol.sign(authority, [enrol.renew(site)[0]])
    enrol.install(tmp_path / "kits" / "superlink", Path(made["file"]))
    installed = known.read_bytes()
    provision(federation(), tmp_path / "kits", authority, sign=True)
    assert known.read_bytes() == installed != before


@pytest.mark.parametrize("wrong", ["foreign", "another party", "another key", "garbage", "no key"])
def test_provisioning_replaces_what_is_not_a_certificate_of_this_party(
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


def test_provisioning_updates_revocations_in_the_kits_and_readmits_no_revoked_site(
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


def test_newer_revocations_in_a_kit_are_kept(authority: Authority, tmp_path: Path) -> None:
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


def test_a_signed_file_installs_its_revocations_but_never_older_ones(authority: Authority, tmp_path: Path) -> None:
    for name in ("site-0", "site-1"):
        join(authority, make_kit(tmp_path / "kits", "site", name))
    shuffler = make_kit(tmp_path / "kits", "shuffler", "shuffler", hosts=HOSTS)
    authority.revoke(SITE.uri)
    signed = join(authority, shuffler)
    keys = Keyring(shuffler / "keys")
    assert len(keys.revoked()) == 1
    authority.revoke("fl-privacy://test/site/site-1")
    enrol.install(shuffler, authority.revoked_file)
    enrol.install(shuffler, signed)
    assert len(keys.revoked()) == 2
    superlink = make_kit(tmp_path / "kits", "superlink", "superlink", hosts=HOSTS)
    join(authority, superlink)
    (superlink / "keys" / "revoked.pem").unlink()
    site = make_kit(tmp_path / "kits", "site", "site-2")
    enrol.install(superlink, join(authority, site))
    assert Keyring(superlink / "keys").revoked() == authority.revoked()


def test_many_revocations_fit_into_a_signed_file(authority: Authority, tmp_path: Path) -> None:
    records = [pki.Record(SITE.uri, f"{n:x}", "", "", "") for n in range(2**80, 2**80 + 2000)]
    crl = authority._sign_crl(None, records).public_bytes(serialization.Encoding.PEM)
    authority.revoked_file.write_bytes(crl)
    assert len(crl) > requests.MAX_FILE
    shuffler = make_kit(tmp_path / "kits", "shuffler", "shuffler", hosts=HOSTS)
    join(authority, shuffler)
    assert len(Keyring(shuffler / "keys").revoked()) == 2000


def test_revocations_in_a_signed_file_must_be_the_authority_s(authority: Authority, tmp_path: Path) -> None:
    """Removed, exchanged, or from a foreign authority although ours signed the file."""
    shuffler = make_kit(tmp_path / "kits", "shuffler", "shuffler", hosts=HOSTS)
    authority.revoke("nobody")
    [made] = enrol.sign(authority, [enrol.request(shuffler)[0]])
    good = json.loads(Path(made["file"]).read_text())
    foreign = Authority.create(tmp_path / "foreign")
    foreign.revoke("nobody")
    other = foreign.revoked_file.read_text()
    signed = requests.Signed.model_validate({**good, "revoked": other})
    signature = sign_text(authority.key, signed.payload)
    without = {name: value for name, value in good.items() if name != "revoked"}
    for wrong in (without, {**good, "revoked": other}, {**good, "revoked": other, "signature": signature}):
        Path(made["file"]).write_text(json.dumps(wrong))
        with pytest.raises(LaunchError, match="not as its authority signed it"):
            enrol.install(shuffler, Path(made["file"]))
    assert not (shuffler / "keys" / "revoked.pem").exists()
    assert not (shuffler / "keys" / "cert.pem").exists()


def test_a_signed_file_without_revocations_has_the_old_format(authority: Authority, tmp_path: Path) -> None:
    signed = json.loads(join(authority, make_kit(tmp_path / "kits", "site", "site-0")).read_text())
    assert set(signed) == {"version", "identity", "certificate", "ca", "node", "signature"}
    payload = json.dumps({k: v for k, v in signed.items() if k != "signature"}, sort_keys=True).encode()
    verify_text(authority.certificate.public_key(), signed["signature"], b"fl-privacy signed\n" + payload)


@pytest.mark.parametrize("new_key", [False, True])
def test_a_renewal_gains_no_host(authority: Authority, tmp_path: Path, new_key: bool) -> None:
    """Sites check the host name they dial: with another party's host name a superlink could pose as the shuffler."""
    shuffler = make_kit(tmp_path / "kits", "shuffler", "shuffler", hosts=("mix.test",))
    superlink = make_kit(tmp_path / "kits", "superlink", "superlink", hosts=("one.test", "fd00::1"))
    join(authority, shuffler)
    join(authority, superlink)
    records = authority.records()
    for asked, said in (("mix.test", SHUFFLER.uri), ("other.test", "--replace")):
        change_hosts(superlink, "one.test", asked)
        request = enrol.renew(superlink, new_key)[0]
        with pytest.raises(LaunchError, match=f"{SUPERLINK.uri} asks for host {asked}.*--replace") as caught:
            enrol.sign(authority, [request])
        assert said in str(caught.value)
        assert "\n" not in str(caught.value)
    assert authority.records() == records
    change_hosts(superlink, "ONE.test", "fd00:0::1")
    enrol.sign(authority, [enrol.renew(superlink, new_key)[0]])
    with mock.patch.object(pki, "_SKEW", dt.timedelta()):
        change_hosts(superlink, "moved.test")
        request = enrol.renew(superlink, new_key)[0]
        enrol.sign(authority, [request], replace=True)
    enrol.sign(authority, [request])
    change_hosts(superlink, "one.test")
    with pytest.raises(LaunchError, match="--replace"):
        enrol.sign(authority, [enrol.renew(superlink, new_key)[0]])


def test_roles_on_one_machine_share_its_name_and_the_operator_sees_it(
    authority: Authority, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kits = [make_kit(tmp_path / "kits", role, role, hosts=("one.test",)) for role in ("superlink", "shuffler")]
    asked = [str(enrol.request(kit)[0]) for kit in kits]
    app(["pki", "sign", str(authority.folder), *asked], standalone_mode=False)
    shown = " ".join(capsys.readouterr().out.split())
    assert shown.count("hosts one.test") == 2
    assert f"shares a host name with {SHUFFLER.uri}" in shown
    assert f"shares a host name with {SUPERLINK.uri}" in shown
    for kit in kits:
        enrol.install(kit, kit / f"{kit.name}.signed.json")
        [made] = enrol.sign(authority, [enrol.renew(kit)[0]])
        assert len(made["shared"]) == 1
    authority.revoke(SHUFFLER.uri)
    [made] = enrol.sign(authority, [enrol.renew(kits[0])[0]])
    assert made["shared"] == []


def _encrypted() -> bytes:
    key, how = ec.generate_private_key(ec.SECP256R1()), serialization.BestAvailableEncryption(b"word")
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, how)


def _encrypted_node() -> bytes:
    """Like a key that ssh-keygen writes with a password, but without the secret itself."""
    key = ec.generate_private_key(ec.SECP384R1()).public_key()
    line = key.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)

    def text(data: bytes) -> bytes:
        return len(data).to_bytes(4, "big") + data

    parts = b"openssh-key-v1\0" + text(b"aes256-ctr") + text(b"bcrypt") + text(text(bytes(16)) + bytes([0, 0, 0, 16]))
    parts += bytes([0, 0, 0, 1]) + text(base64.b64decode(line.split()[1])) + text(bytes(160))
    kind = b"OPENSSH PRIVATE KEY-----\n"
    return b"-----BEGIN " + kind + base64.encodebytes(parts) + b"-----END " + kind


@pytest.mark.parametrize(
    ("file", "data"),
    [
        ("keys/key.pem", b"garbage"),
        ("keys/key.pem", _encrypted()),
        ("keys/cert.pem", b"\xff\xfe"),
        ("keys/cert.pem", b"a" * 10_000),
        ("node/node.key", b"garbage"),
        ("node/node.key", _encrypted_node()),
    ],
)
def test_a_broken_file_of_a_kit_is_named(authority: Authority, tmp_path: Path, file: str, data: bytes) -> None:
    site = make_kit(tmp_path / "kits", "site", "site-0")
    signed = join(authority, site)
    (site / file).write_bytes(data)
    steps = [lambda: enrol.renew(site)]
    if file == "keys/key.pem":
        steps.append(lambda: enrol.install(site, signed))
    for step in steps:
        with pytest.raises(FederationError, match=rf"{file}: .*remove it") as caught:
            step()
        assert "\n" not in str(caught.value)
    if file == "keys/key.pem":
        (site / "keys" / "cert.pem").unlink()
        with pytest.raises(LaunchError, match=r"key\.pem: .*remove it"):
            enrol.request(site)


@pytest.mark.parametrize("hosts", [[f"h{n}.test" for n in range(17)], ["\u017fite.test"], ["fe80::1%eth0"]])
def test_invalid_hosts_are_refused_in_one_line(tmp_path: Path, hosts: list[str]) -> None:
    kit = make_kit(tmp_path / "kits", "shuffler", "shuffler", hosts=tuple(hosts))
    with pytest.raises(LaunchError, match=r"17 hosts; use at most 16|is not a name or address") as caught:
        enrol.request(kit)
    assert "\n" not in str(caught.value)
