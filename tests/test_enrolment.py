"""A party requests its certificate, the authority signs it, the party installs it; and what is refused on the way."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from commands import cli
from enrolling import SHUFFLER, SITE, certificate, contents, join, make_kit
from fl_privacy.cli import app
from fl_privacy.config import Federation
from fl_privacy.deploy.kits import enrol
from fl_privacy.deploy.preflight import checks
from fl_privacy.errors import FederationError, LaunchError
from fl_privacy.identity import requests
from fl_privacy.identity.keyring import Identity, Keyring, belong_together
from fl_privacy.identity.pki import Authority, alternative_names, load_key
from fl_privacy.identity.signing import sign_text
from helpers import HOSTS, Keys


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority.create(tmp_path / "authority", "test")


@pytest.fixture
def site(tmp_path: Path) -> Path:
    return make_kit(tmp_path / "kits", "site", "site-0")


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_party_gets_a_certificate_for_a_key_that_never_leaves_it(authority: Authority, site: Path) -> None:
    before = os.umask(0)
    try:
        signed = join(authority, site)
    finally:
        os.umask(before)
    assert mode(site / "keys" / "key.pem") == mode(site / "node" / "node.key") == 0o600
    assert belong_together(*Keyring(site / "keys").read())
    assert Identity.of(certificate(site)) == Identity("test", "site", "site-0")
    sent = (site / "site-0.request.json").read_bytes() + signed.read_bytes()
    assert b"PRIVATE" not in sent
    assert all(b"PRIVATE" not in data for name, data in contents(authority.folder).items() if name != "ca.key")
    federation = Federation.parse("name: test\nsites: 3")
    assert all(found.ok for found in checks.certificates(federation, Keyring(site / "keys")))


def test_joins_are_additive(authority: Authority, tmp_path: Path) -> None:
    """Two sites at once, one later, and a superlink that admits the late one; a join changes nobody else's files."""
    kits = [make_kit(tmp_path / "kits", "site", f"site-{k}") for k in range(3)]
    superlink = make_kit(tmp_path / "kits", "superlink", "superlink", hosts=HOSTS)
    join(authority, superlink)
    made = enrol.sign(authority, [enrol.request(kit)[0] for kit in kits[:2]], days=7, out=tmp_path / "post")
    for kit, one in zip(kits, made, strict=False):
        enrol.install(kit, Path(one["file"]))
        enrol.install(superlink, Path(one["file"]))
    before = [contents(kit) for kit in kits[:2]]
    records = authority.records()
    late = join(authority, kits[2])
    enrol.install(superlink, late)
    assert [contents(kit) for kit in kits[:2]] == before
    assert [r for r in authority.records() if r in records] == records
    assert sorted(p.name for p in (superlink / "nodes").iterdir()) == ["site-0.pub", "site-1.pub", "site-2.pub"]
    private = serialization.load_ssh_private_key((kits[2] / "node" / "node.key").read_bytes(), None)
    public = serialization.load_pem_public_key((superlink / "nodes" / "site-2.pub").read_bytes())
    assert private.public_key() == public
    validity = certificate(kits[0]).not_valid_after_utc - certificate(kits[0]).not_valid_before_utc
    assert validity.days == 7


def test_a_lost_request_is_recreated_with_the_same_keys(authority: Authority, site: Path) -> None:
    first, again = enrol.request(site)[1], enrol.request(site)[1]
    assert first.describe() == again.describe()
    join(authority, site)
    with pytest.raises(LaunchError, match="pki renew"):
        enrol.request(site)


def test_a_taken_name_needs_the_old_key_or_a_decision(authority: Authority, site: Path, tmp_path: Path) -> None:
    join(authority, site)
    thief = make_kit(tmp_path / "thief", "site", "site-0")
    asked = enrol.request(thief)[0]
    with pytest.raises(LaunchError, match="--replace"):
        enrol.sign(authority, [asked])
    enrol.sign(authority, [asked], replace=True)


@pytest.mark.parametrize("new_key", [False, True])
def test_a_renewal_needs_no_decision(authority: Authority, site: Path, new_key: bool) -> None:
    join(authority, site)
    old, key = certificate(site), (site / "keys" / "key.pem").read_bytes()
    asked = enrol.renew(site, new_key)[0]
    assert (site / "keys" / "key.pem").read_bytes() == key
    [made] = enrol.sign(authority, [asked])
    enrol.install(site, Path(made["file"]))
    assert certificate(site).serial_number != old.serial_number
    assert ((site / "keys" / "key.pem").read_bytes() != key) is new_key
    assert belong_together(*Keyring(site / "keys").read())
    assert mode(site / "keys" / "key.pem") == 0o600


def test_a_renewal_proved_by_the_wrong_key_is_refused(authority: Authority, site: Path, tmp_path: Path) -> None:
    """Another site's proof, a proof for another request, a revoked proof."""
    join(authority, site)
    other = make_kit(tmp_path / "kits", "site", "site-1")
    join(authority, other)
    foreign = json.loads(enrol.renew(other)[0].read_text())["renewal"]
    thief = make_kit(tmp_path / "thief", "site", "site-0")
    asked = enrol.request(thief)[0]
    own = json.loads(enrol.renew(site)[0].read_text())["renewal"]
    for renewal in (foreign, own):
        asked.write_text(json.dumps({**json.loads(asked.read_text()), "renewal": renewal}))
        with pytest.raises(LaunchError, match="another key"):
            enrol.sign(authority, [asked])
    authority.revoke("fl-privacy://test/site/site-0")
    with pytest.raises(LaunchError, match="was revoked"):
        enrol.sign(authority, [enrol.renew(site, new_key=True)[0]])
    with pytest.raises(LaunchError, match="key was revoked"):
        enrol.sign(authority, [enrol.renew(site)[0]], replace=True)
    enrol.sign(authority, [enrol.renew(site, new_key=True)[0]], replace=True)


def _csr(kit: Path, identity: Identity, *hosts: str, key: ec.EllipticCurvePrivateKey | None = None) -> str:
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, identity.name)])
    builder = x509.CertificateSigningRequestBuilder().subject_name(subject)
    builder = builder.add_extension(alternative_names(identity, hosts), critical=False)
    made = builder.sign(key or load_key(kit / "keys" / "key.pem"), hashes.SHA256())
    return made.public_bytes(serialization.Encoding.PEM).decode()


# What is changed in a good request of site-0; with True, its holder signs it again.
TAMPERED: dict[str, tuple[Callable[[Path, dict[str, Any]], dict[str, Any]], bool]] = {
    "csr for another name": (lambda kit, r: {"csr": _csr(kit, Identity("test", "site", "site-1"))}, True),
    "csr for another role": (lambda kit, r: {"csr": _csr(kit, Identity("test", "server", "site-0"))}, True),
    "csr with a host more": (lambda kit, r: {"csr": _csr(kit, SITE, "shuffler.example")}, True),
    "csr with a host of a site": (
        lambda kit, r: {"csr": _csr(kit, SITE, "shuffler.example"), "hosts": ["shuffler.example"]},
        True,
    ),
    "csr of another key": (lambda kit, r: {"csr": _csr(kit, SITE, key=ec.generate_private_key(ec.SECP256R1()))}, True),
    "csr on a weak curve": (lambda kit, r: {"csr": _csr(kit, SITE, key=ec.generate_private_key(ec.SECP256K1()))}, True),
    "csr of garbage": (lambda kit, r: {"csr": "-----BEGIN CERTIFICATE REQUEST-----\n????"}, True),
    "another role": (lambda kit, r: {"identity": "fl-privacy://test/server/site-0"}, True),
    "another federation": (
        lambda kit, r: {"identity": "fl-privacy://there/site/site-0", "csr": _csr(kit, Identity("there", *_TAIL))},
        True,
    ),
    "no identity": (lambda kit, r: {"identity": "../../etc/passwd"}, True),
    "a long name": (lambda kit, r: {"identity": f"fl-privacy://test/site/{'a' * 100}"}, True),
    "another node": (lambda kit, r: {"node": _public(ec.SECP384R1())}, False),
    "a node of another curve": (lambda kit, r: {"node": _public(ec.SECP256R1())}, True),
    "no node": (lambda kit, r: {"node": None}, True),
    "a wildcard": (lambda kit, r: {"identity": SHUFFLER.uri, "node": None, "hosts": ["*.example"]}, True),
    "no signature": (lambda kit, r: {"signature": ""}, False),
    "not base64": (lambda kit, r: {"signature": "ö?"}, False),
    "another version": (lambda kit, r: {"version": 2}, False),
    "an unknown field": (lambda kit, r: {"ca": "yes"}, False),
    "a number": (lambda kit, r: {"csr": 1}, False),
    "many hosts": (lambda kit, r: {"hosts": ["a"] * 1000}, False),
    "a large field": (lambda kit, r: {"csr": "a" * 20_000}, False),
}
_TAIL = ("site", "site-0")


def _public(curve: ec.EllipticCurve) -> str:
    key = ec.generate_private_key(curve).public_key()
    encoded = key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    return encoded.decode()


@pytest.mark.parametrize("name", TAMPERED)
def test_a_tampered_request_is_not_signed(authority: Authority, site: Path, name: str) -> None:
    change, signs = TAMPERED[name]
    asked = enrol.request(site)[0]
    values = json.loads(asked.read_text())
    values.update(change(site, values))
    if signs:
        payload = requests.Request.model_validate(values).payload
        values["signature"] = sign_text(load_key(site / "keys" / "key.pem"), payload)
    asked.write_text(json.dumps(values))
    with pytest.raises(FederationError, match="request") as caught:
        enrol.sign(authority, [asked], replace=True)
    assert "\n" not in str(caught.value)
    assert authority.records() == []
    assert not list(site.glob("*.signed.json"))


@pytest.mark.parametrize("data", [b"", b"\xff\xfe", b"[" * 60_000, b"[]", b"{}", b"null", b" " * 100_000])
def test_garbage_is_neither_signed_nor_installed(authority: Authority, site: Path, data: bytes) -> None:
    file = site / "some.json"
    file.write_bytes(data)
    with pytest.raises(FederationError):
        enrol.sign(authority, [file])
    with pytest.raises(FederationError):
        enrol.install(site, file)


def test_one_bad_request_stops_the_whole_batch(authority: Authority, site: Path, tmp_path: Path) -> None:
    good = enrol.request(site)[0]
    other = make_kit(tmp_path / "other", "site", "site-1", federation="there")
    with pytest.raises(LaunchError, match="'there'"):
        enrol.sign(authority, [good, enrol.request(other)[0]])
    with pytest.raises(LaunchError, match="second request"):
        enrol.sign(authority, [good, good])
    with pytest.raises(LaunchError, match="days"):
        enrol.sign(authority, [good], days=10_000)
    assert authority.records() == []


def test_only_what_fits_the_kit_is_installed(authority: Authority, site: Path, tmp_path: Path) -> None:
    join(authority, site)
    before = contents(site / "keys")
    other = make_kit(tmp_path / "kits", "site", "site-1")
    [made] = enrol.sign(authority, [enrol.request(other)[0]])
    with pytest.raises(LaunchError, match="site-1"):
        enrol.install(site, Path(made["file"]))
    foreign = Authority.create(tmp_path / "foreign")
    [made] = enrol.sign(foreign, [enrol.renew(site)[0]])
    with pytest.raises(LaunchError, match="another authority"):
        enrol.install(site, Path(made["file"]))
    twin = make_kit(tmp_path / "twin", "site", "site-0")
    [made] = enrol.sign(authority, [enrol.request(twin)[0]], replace=True)
    with pytest.raises(LaunchError, match="does not have"):
        enrol.install(site, Path(made["file"]))
    assert contents(site / "keys") == before


def test_a_signed_file_is_accepted_only_as_a_whole(authority: Authority, site: Path, tmp_path: Path) -> None:
    superlink = make_kit(tmp_path / "kits", "superlink", "superlink", hosts=HOSTS)
    signed = join(authority, site)
    with pytest.raises(LaunchError, match="has no authority"):
        enrol.install(superlink, signed)
    join(authority, superlink)
    signed.write_text(json.dumps({**json.loads(signed.read_text()), "node": _public(ec.SECP384R1())}))
    with pytest.raises(LaunchError, match="not as its authority signed it"):
        enrol.install(superlink, signed)
    assert not (superlink / "nodes").exists()


def test_an_expired_certificate_is_not_installed(tmp_path: Path) -> None:
    keys = Keys(tmp_path)
    ring = keys.expired("site", "site-0")
    made = requests.Signed(
        identity=SITE.uri, certificate=ring.certificate_file.read_text(), ca=keys.authority.pem.decode()
    )
    made = made.model_copy(update={"signature": sign_text(keys.authority.key, made.payload)})
    kit = make_kit(tmp_path / "kits", "site", "site-0")
    (kit / "signed.json").write_text(made.model_dump_json())
    with pytest.raises(FederationError, match="expired"):
        enrol.install(kit, kit / "signed.json")


def test_revocations_are_accepted_only_from_their_authority_and_never_roll_back(
    authority: Authority, site: Path, tmp_path: Path
) -> None:
    shuffler = make_kit(tmp_path / "kits", "shuffler", "shuffler", hosts=HOSTS)
    join(authority, shuffler)
    join(authority, site)
    assert len(authority.revoke(SITE.uri)) == 1
    first = authority.revoked_file.read_bytes()
    assert authority.revoke(SITE.uri) == []
    assert authority.revoked_file.read_bytes() == first
    join(authority, make_kit(tmp_path / "kits", "site", "site-1"))
    authority.revoke("fl-privacy://test/site/site-1")
    assert len(authority.revoked()) == 2
    assert enrol.install(shuffler, authority.revoked_file)["count"] == 2
    (tmp_path / "old.pem").write_bytes(first)
    with pytest.raises(LaunchError, match="older"):
        enrol.install(shuffler, tmp_path / "old.pem")
    foreign = Authority.create(tmp_path / "foreign")
    foreign.revoke("nobody")
    with pytest.raises(LaunchError, match="not signed by the authority"):
        enrol.install(shuffler, foreign.revoked_file)
    assert Keyring(shuffler / "keys").revoked() == authority.revoked()


def test_an_authority_is_not_created_twice_or_by_mistake(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="pki init"):
        Authority.load(tmp_path / "a")
    made = Authority.create(tmp_path / "a")
    with pytest.raises(LaunchError, match="already exists"):
        Authority.create(tmp_path / "a")
    (tmp_path / "a" / "ca.key").unlink()
    with pytest.raises(LaunchError, match="restore it"):
        Authority.open(tmp_path / "a")
    assert (tmp_path / "a" / "ca.pem").read_bytes() == made.pem


def test_the_commands_cover_the_whole_life_cycle_and_print_no_secrets(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home, site = tmp_path / "authority", make_kit(tmp_path / "kits", "site", "site-0")
    shuffler = make_kit(tmp_path / "kits", "shuffler", "shuffler", hosts=HOSTS)
    printed = []

    def run(*words: str | Path) -> Any:
        app(["pki", *map(str, words), "--json"], standalone_mode=False)
        printed.append("".join(capsys.readouterr()))
        return json.loads(printed[-1])

    run("init", home, "--federation", "test")
    asked = [run("request", kit) for kit in (site, shuffler)]
    made = run("sign", home, *(one["file"] for one in asked), "--days", "2", "--out", tmp_path / "post")
    assert [one["key"] for one in made] == [one["key"] for one in asked]
    for kit, one in zip((site, shuffler), made, strict=True):
        assert run("install", kit, one["file"])["identity"] == one["identity"]
    revoked = run("revoke", home, "site-0")
    assert revoked["install_at"] == [SHUFFLER.uri]
    assert run("install", shuffler, revoked["file"])["count"] == 1
    assert {row["identity"]: row["state"] for row in run("list", home)} == {SITE.uri: "revoked", SHUFFLER.uri: "valid"}
    again = cli("pki", "init", home)
    assert again.returncode == 2
    assert again.stderr.startswith("error: ")
    secrets = [site / "keys" / "key.pem", site / "node" / "node.key", shuffler / "keys" / "key.pem", home / "ca.key"]
    renewal = ("renew", site, "--new-key", "--out", tmp_path / "again.json")
    for words in (renewal, ("list", home), ("revoke", home, "site-0"), ("install", shuffler, revoked["file"])):
        app(["pki", *map(str, words)], standalone_mode=False)
        printed.append("".join(capsys.readouterr()))
    secrets.append(site / "keys" / "key.next.pem")
    for secret in secrets:
        for line in secret.read_text().splitlines():
            assert all(line not in text for text in printed)
