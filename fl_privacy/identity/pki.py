"""The federation's certificate authority: one persistent root that issues and revokes certificates."""

from __future__ import annotations

import datetime as dt
import ipaddress
import json
import re
import time
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fl_privacy.errors import LaunchError, ProtocolError
from fl_privacy.files import check_private, locked, replace, write_public, write_secret
from fl_privacy.identity.anchor import CERTIFICATE, Anchor, broken, read_certificate
from fl_privacy.identity.keyring import Identity, Keyring, load_crl
from fl_privacy.identity.roster import Member, Roster, sign
from fl_privacy.identity.signing import fingerprint

ROOT_DAYS = 3650
LEAF_DAYS = 90
_SKEW = dt.timedelta(minutes=5)


def pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def load_key(path: Path) -> ec.EllipticCurvePrivateKey:
    try:
        return _key_in(path)
    except ValueError as error:
        raise LaunchError(f"key {path}: {error}; restore it, or remove it to make a new one") from None


def _key_in(path: Path) -> ec.EllipticCurvePrivateKey:
    """ValueError for anything but one of our keys. Roles start unattended, so a key must have no password."""
    check_private(path)
    try:
        key = serialization.load_pem_private_key(path.read_bytes(), None)
    except TypeError:
        raise ValueError("is encrypted, but must have no password") from None
    except (ValueError, UnsupportedAlgorithm):
        raise ValueError("not a private key in PEM") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ValueError("not an elliptic-curve key")
    return key


def load_certificate(path: Path) -> x509.Certificate:
    try:
        return read_certificate(path)
    except ValueError as error:
        raise LaunchError(f"certificate {path}: {error}; restore it, or remove it and make a new request") from None


@dataclass(frozen=True)
class Record:
    """One certificate that the authority issued: identity, key and dates."""

    identity: str
    serial: str
    since: str
    until: str
    key: str
    hosts: tuple[str, ...] = ()
    issued: int = 0  # nanoseconds since 1970: a certificate's own dates are whole seconds

    @property
    def number(self) -> int:
        return int(self.serial, 16)

    @property
    def expired(self) -> bool:
        return dt.datetime.fromisoformat(self.until) < dt.datetime.now(dt.UTC)


@dataclass(frozen=True)
class Authority(Anchor):
    """The root key and certificate, in a folder of the federation's operator."""

    key: ec.EllipticCurvePrivateKey

    @classmethod
    def create(cls, folder: Path, federation: str = "") -> Authority:
        """Make a new authority; with `federation` it signs only for that one."""
        from fl_privacy.reading import NAME, PATTERNS  # takes 14 MB, which gate and relay need not spend

        if federation and not re.fullmatch(NAME, federation):
            raise LaunchError(f"federation: {federation!r} is not a valid name; {PATTERNS[NAME]}")
        key_file, certificate_file = folder / "ca.key", folder / CERTIFICATE
        if key_file.exists() or certificate_file.exists():
            raise LaunchError(f"authority {folder}: already exists; choose another folder to make a new one")
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "fl-privacy authority")])
        certificate = (
            builder(name, name, key.public_key(), ROOT_DAYS)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(certificates=True), critical=True)
            .sign(key, hashes.SHA256())
        )
        write_secret(key_file, pem(key))
        if federation:
            write_public(folder / "federation", federation.encode())
        write_public(certificate_file, certificate.public_bytes(serialization.Encoding.PEM))
        return cls(folder, certificate, key)

    @classmethod
    def load(cls, folder: Path) -> Authority:
        """Read the authority in `folder`."""
        key_file, certificate_file = folder / "ca.key", folder / CERTIFICATE
        if not key_file.exists() and not certificate_file.exists():
            raise LaunchError(f"authority {folder}: does not exist; make it with `fl-privacy pki init {folder}`")
        try:
            key = _key_in(key_file)
        except (OSError, ValueError) as error:
            raise broken(key_file, error) from None
        try:
            certificate = read_certificate(certificate_file)
        except (OSError, ValueError) as error:
            raise broken(certificate_file, error) from None
        if certificate.public_key() != key.public_key():
            raise LaunchError(f"authority {folder}: ca.key does not belong to ca.pem; restore both from one backup")
        return cls(folder, certificate, key)

    @classmethod
    def open(cls, folder: Path) -> Authority:
        """The authority in `folder`, made on first use."""
        there = (folder / "ca.key").exists() or (folder / CERTIFICATE).exists()
        return cls.load(folder) if there else cls.create(folder)

    @property
    def federation(self) -> str:
        """The only federation that it signs for; empty: any."""
        file = self.folder / "federation"
        return file.read_text(errors="replace").strip() if file.exists() else ""

    def locked(self) -> AbstractContextManager[None]:
        """One command at a time changes the authority's records."""
        return locked(self.folder)

    def issue(self, identity: Identity, folder: Path, hosts: Sequence[str] = (), days: int | None = None) -> Keyring:
        """Make a new key and certificate for a party in its own folder; `hosts` are its names and addresses."""
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = self.certify(identity, key.public_key(), hosts, days)
        keys = Keyring(folder)
        write_secret(keys.key_file, pem(key))
        write_public(keys.certificate_file, certificate.public_bytes(serialization.Encoding.PEM))
        write_public(keys.authority_file, self.pem)
        return keys

    def keep(self, identity: Identity, folder: Path, hosts: Sequence[str] = ()) -> None:
        """Make a party's certificate if there is none, and renew it in its last third or if identity or hosts changed.

        The key stays, because signatures made with it must still verify. A revoked party gets no new certificate.
        """
        keys = Keyring(folder)
        if self.has_revoked(keys):
            return
        try:
            made, key = read_certificate(keys.certificate_file), _key_in(keys.key_file)
            whole = made.public_key() == key.public_key()
        except (FileNotFoundError, ValueError):
            whole = False
        if not whole:
            self.issue(identity, folder, hosts)
        elif not self._fits(made, identity, hosts):
            fresh = self.certify(identity, key.public_key(), hosts)
            write_public(keys.authority_file, self.pem)
            write_public(keys.certificate_file, fresh.public_bytes(serialization.Encoding.PEM))

    def _fits(self, made: x509.Certificate, identity: Identity, hosts: Sequence[str]) -> bool:
        """Whether a certificate is ours, for this party and these hosts, with a third of its lifetime left."""
        start, end = made.not_valid_before_utc, made.not_valid_after_utc
        try:
            made.verify_directly_issued_by(self.certificate)
            names = made.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
            same = Identity.of(made) == identity and set(names) == set(alternative_names(identity, hosts))
        except (ValueError, TypeError, InvalidSignature, ProtocolError, x509.ExtensionNotFound):
            return False
        return same and dt.datetime.now(dt.UTC) < end - (end - start) / 3

    def certify(
        self, identity: Identity, key: ec.EllipticCurvePublicKey, hosts: Sequence[str] = (), days: int | None = None
    ) -> x509.Certificate:
        """Certify a party's own key; the certificate is recorded before it is handed out."""
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, identity.name)])
        # A process that both serves and dials needs both usages.
        usages = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
        certificate = (
            builder(subject, self.certificate.subject, key, LEAF_DAYS if days is None else days)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(alternative_names(identity, hosts), critical=False)
            .add_extension(usages, critical=False)
            .add_extension(_usage(certificates=False), critical=True)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key()), critical=False)
            .sign(self.key, hashes.SHA256())
        )
        record = Record(
            identity.uri,
            f"{certificate.serial_number:x}",
            certificate.not_valid_before_utc.isoformat(),
            certificate.not_valid_after_utc.isoformat(),
            fingerprint(key),
            tuple(hosts),
            time.time_ns(),
        )
        write_public(self.folder / "issued" / f"{record.serial}.json", json.dumps(asdict(record)).encode())
        return certificate

    def records(self) -> list[Record]:
        """Everything that was ever signed, by identity and date."""
        found = []
        for file in (self.folder / "issued").glob("*.json"):
            try:
                values = json.loads(file.read_bytes())
                found.append(Record(**{**values, "hosts": tuple(values["hosts"])}))
            except (ValueError, TypeError, KeyError) as error:
                raise LaunchError(f"authority record {file}: {error}; restore it from a backup") from None
        return sorted(found, key=lambda record: (record.identity, record.since, record.issued))

    def enlist(self, federation: str, members: Iterable[Member], file: Path | None = None) -> Roster:
        """Sign the roster of these members, in `file` or the authority's folder; a change adds one to its serial."""
        file = file or self.roster_file(federation)
        old = self.roster(federation, file)
        made = Roster.of(federation, 1 if old is None else old.serial + 1, members)
        if old is not None and old.members == made.members:
            return old
        file.parent.mkdir(parents=True, exist_ok=True)
        replace(file, sign(made, self.key))
        return made

    def revoke(self, identity: str) -> list[Record]:
        """Revoke every certificate of an identity, including expired ones: their keys must not be used again."""
        with self.locked():
            before, crl = self.revoked(), self.crl()
            new = [record for record in self.records() if record.identity == identity and record.number not in before]
            if new or crl is None:
                write_public(self.revoked_file, self._sign_crl(crl, new).public_bytes(serialization.Encoding.PEM))
            return new

    def _sign_crl(
        self, last: x509.CertificateRevocationList | None, new: Sequence[Record]
    ) -> x509.CertificateRevocationList:
        # No date for the next list: this one holds until it is replaced or the authority expires.
        now = dt.datetime.now(dt.UTC)
        builder = (
            x509.CertificateRevocationListBuilder()
            .issuer_name(self.certificate.subject)
            .last_update(now - _SKEW)
            .next_update(self.certificate.not_valid_after_utc)
            .add_extension(x509.CRLNumber(0 if last is None else crl_number(last) + 1), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key()), critical=False)
        )
        for entry in last or ():
            builder = builder.add_revoked_certificate(entry)
        for record in new:
            entry = x509.RevokedCertificateBuilder().serial_number(record.number).revocation_date(now).build()
            builder = builder.add_revoked_certificate(entry)
        return builder.sign(self.key, hashes.SHA256())


def install_crl(file: Path, data: bytes, authority: x509.Certificate) -> x509.CertificateRevocationList | None:
    """Install revocations; None if newer ones are in place, ValueError if this authority did not sign them."""
    crl = load_crl(data, authority)
    try:
        newest = crl_number(load_crl(file.read_bytes(), authority))
    except (OSError, ValueError):
        newest = -1
    if crl_number(crl) < newest:
        return None
    write_public(file, data)
    return crl


def crl_number(crl: x509.CertificateRevocationList) -> int:
    """The list's serial number; -1 if it has none."""
    try:
        return crl.extensions.get_extension_for_class(x509.CRLNumber).value.crl_number
    except x509.ExtensionNotFound:
        return -1


def alternative_names(identity: Identity, hosts: Sequence[str]) -> x509.SubjectAlternativeName:
    """A party's identity and hosts as they appear in its certificate and its request."""
    return x509.SubjectAlternativeName([x509.UniformResourceIdentifier(identity.uri), *map(_host, hosts)])


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: int, since: dt.timedelta | None = None
) -> x509.CertificateBuilder:
    """A certificate for so many days from now, and from `since` ago."""
    now = dt.datetime.now(dt.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - (_SKEW if since is None else since))
        .not_valid_after(now + dt.timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _usage(certificates: bool) -> x509.KeyUsage:
    never = ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement")
    return x509.KeyUsage(
        digital_signature=not certificates,
        key_cert_sign=certificates,
        crl_sign=certificates,
        **dict.fromkeys((*never, "encipher_only", "decipher_only"), False),
    )
