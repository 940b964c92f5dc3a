"""Certificates: identities, files and their permissions, and who is trusted."""

from __future__ import annotations

import datetime as dt
import os
import stat
from pathlib import Path

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.x509.oid import ExtendedKeyUsageOID
from cryptography.x509.verification import PolicyBuilder, Store, VerificationError
from hypothesis import given, strategies as st

from fl_privacy.errors import LaunchError, ProtocolError
from fl_privacy.files import write_secret
from fl_privacy.identity.keyring import Identity, Keyring, peer
from fl_privacy.identity.pki import LEAF_DAYS, Authority, load_key
from fl_privacy.roles import ROLES
from fl_privacy.wire import rpc
from helpers import HOSTS, Keys, refused

NAMES = st.from_regex(r"[a-z0-9][a-z0-9-]{0,30}", fullmatch=True)
SITE = Identity("test", "site", "site-0")


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    return Keys(tmp_path_factory.mktemp("pki"))


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def certificate(ring: Keyring) -> x509.Certificate:
    return x509.load_pem_x509_certificate(ring.certificate_file.read_bytes())


def verify(ring: Keyring, authority: Authority) -> None:
    """Verify a client as a TLS server would."""
    verifier = PolicyBuilder().store(Store([authority.certificate])).build_client_verifier()
    verifier.verify(certificate(ring), [])


class Caller:
    def __init__(self, *uris: bytes) -> None:
        self._uris = list(uris)

    def auth_context(self) -> dict[str, list[bytes]]:
        return {"peer_uri": self._uris} if self._uris else {}


def test_secrets_are_readable_only_by_their_owner_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        ring = Authority.open(tmp_path / "ca").issue(SITE, tmp_path / "site")
    finally:
        os.umask(before)
    assert mode(tmp_path / "ca" / "ca.key") == mode(ring.key_file) == 0o600


def test_a_secret_is_never_readable_even_if_the_old_file_was(tmp_path: Path) -> None:
    path = tmp_path / "key.pem"
    path.write_bytes(b"a longer text than the secret")
    path.chmod(0o666)
    write_secret(path, b"secret")
    assert path.read_bytes() == b"secret"
    assert mode(path) == 0o600


def test_only_a_party_s_key_is_private(keys: Keys) -> None:
    ring = keys.of("site", "site-0")
    public = ring.certificate_file.read_bytes() + ring.authority_file.read_bytes()
    assert b"PRIVATE" not in public
    key = load_key(ring.key_file)
    assert certificate(ring).public_key() == key.public_key()


@given(NAMES, st.sampled_from(sorted(ROLES)), NAMES)
def test_an_identity_is_its_uri(federation: str, role: str, name: str) -> None:
    identity = Identity(federation, role, name)
    assert Identity.parse(identity.uri) == identity


@given(st.sampled_from([SITE.uri, "", "fl-privacy://"]), st.text(max_size=40))
def test_whatever_parses_is_exactly_an_identity(start: str, more: str) -> None:
    """A newline, a query or a second path after a good name must not pass for that name."""
    try:
        found = Identity.parse(start + more)
    except ProtocolError:
        return
    assert found.uri == start + more


@pytest.mark.parametrize(
    "uri",
    [
        "fl-privacy://test/site/a\n",
        "fl-privacy://test/site/a/b",
        "fl-privacy://test/site/",
        "fl-privacy://test/site/A",
        "fl-privacy://test/root/a",
        "fl-privacy://test//a",
        "http://test/site/a",
        "fl-privacy://test/site/a?b",
        "fl-privacy://test/site/a\x00",
        "",
    ],
)
def test_an_almost_right_uri_is_not_an_identity(uri: str) -> None:
    with refused("UNAUTHENTICATED"):
        Identity.parse(uri)


def test_a_peer_is_trusted_only_for_its_federation_and_role() -> None:
    uri = SITE.uri.encode()
    assert peer(Caller(uri), "test", "server", "site") == SITE
    with refused("PERMISSION_DENIED"):
        peer(Caller(uri), "another", "site")
    with refused("PERMISSION_DENIED"):
        peer(Caller(uri), "test", "server")
    for caller in (Caller(), Caller(uri, uri), Caller(b"\xff\xfe")):
        with refused("UNAUTHENTICATED"):
            peer(caller, "test", "site")


def test_a_certificate_states_identity_hosts_and_validity(keys: Keys) -> None:
    made = certificate(keys.of("aggregator", "aggregator-0"))
    names = made.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.UniformResourceIdentifier) == ["fl-privacy://test/aggregator/aggregator-0"]
    assert [str(ip) for ip in names.get_values_for_type(x509.IPAddress)] == [HOSTS[0]]
    assert names.get_values_for_type(x509.DNSName) == [HOSTS[1]]
    usages = set(made.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value)
    assert usages == {ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH}
    assert not made.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert not made.extensions.get_extension_for_class(x509.KeyUsage).value.key_cert_sign
    now = dt.datetime.now(dt.UTC)
    assert made.not_valid_before_utc < now
    assert now + dt.timedelta(days=LEAF_DAYS - 1) < made.not_valid_after_utc < now + dt.timedelta(days=LEAF_DAYS + 1)


def test_a_party_cannot_sign_for_another(keys: Keys, tmp_path: Path) -> None:
    """Certificates issued by a leaf that acts as an authority are not trusted."""
    site = keys.of("site", "site-0")
    rogue = Authority(tmp_path, certificate(site), load_key(site.key_file))
    forged = rogue.issue(Identity("test", "server", "server"), tmp_path / "forged")
    with pytest.raises(VerificationError):
        verify(forged, keys.authority)


def test_the_authority_accepts_only_its_own_certificates(keys: Keys, tmp_path: Path) -> None:
    verify(keys.of("site", "site-0"), keys.authority)
    with pytest.raises(VerificationError):
        verify(Keys(tmp_path).of("site", "site-0"), keys.authority)
    with pytest.raises(VerificationError):
        verify(keys.expired("site", "site-0"), keys.authority)


def test_an_authority_is_created_once(tmp_path: Path) -> None:
    first, again = Authority.open(tmp_path), Authority.open(tmp_path)
    assert first.certificate == again.certificate
    assert first.key.public_key() == again.key.public_key()
    basics = first.certificate.extensions.get_extension_for_class(x509.BasicConstraints).value
    assert (basics.ca, basics.path_length) == (True, 0)
    old = first.issue(SITE, tmp_path / "site")
    again.issue(Identity("test", "site", "site-1"), tmp_path / "joined")
    verify(old, again)


def test_a_reissued_certificate_has_a_new_key(tmp_path: Path) -> None:
    authority = Authority.open(tmp_path / "ca")
    one, two = (load_key(authority.issue(SITE, tmp_path / name).key_file) for name in ("one", "two"))
    assert one.public_key() != two.public_key()


@pytest.mark.parametrize("broken", ["ca.key", "ca.pem"])
def test_a_broken_authority_is_named_with_the_fix(tmp_path: Path, broken: str) -> None:
    Authority.open(tmp_path)
    (tmp_path / broken).write_bytes(b"not PEM")
    with pytest.raises(LaunchError, match=r"authority .*restore it"):
        Authority.open(tmp_path)


def test_an_encrypted_or_mismatched_authority_is_refused(tmp_path: Path) -> None:
    one, other = Authority.create(tmp_path / "one"), Authority.create(tmp_path / "other")
    (one.folder / "ca.key").write_bytes((other.folder / "ca.key").read_bytes())
    with pytest.raises(LaunchError, match=r"ca\.key does not belong to ca\.pem; restore"):
        Authority.load(one.folder)
    how = serialization.BestAvailableEncryption(b"word")
    encrypted = one.key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, how)
    (one.folder / "ca.key").write_bytes(encrypted)
    with pytest.raises(LaunchError, match=r"authority .*ca\.key: is encrypted.*restore it"):
        Authority.load(one.folder)


@pytest.mark.parametrize("name", ["Foo Bar", "-a", "a_b", "a\n", "a" * 64, "../a"])
def test_an_authority_for_an_invalid_federation_name_is_not_created(tmp_path: Path, name: str) -> None:
    with pytest.raises(LaunchError, match=r"federation: .*use at most 63 lower-case letters"):
        Authority.create(tmp_path / "ca", name)
    assert not (tmp_path / "ca").exists()
    assert Authority.create(tmp_path / "ca", "cardio-2").federation == "cardio-2"


def test_a_key_of_another_kind_is_refused(tmp_path: Path) -> None:
    from cryptography.hazmat.primitives.asymmetric import ed25519

    key = ed25519.Ed25519PrivateKey.generate()
    encoded = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    write_secret(tmp_path / "key.pem", encoded)
    with pytest.raises(LaunchError, match="not an elliptic-curve key"):
        load_key(tmp_path / "key.pem")


def test_a_missing_file_is_named(keys: Keys, tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"key\.pem"):
        rpc.server_credentials(Keyring(tmp_path))
    assert isinstance(rpc.server_credentials(keys.of("site", "site-0")), grpc.ServerCredentials)
