"""The federation's certificate authority: one persistent root that signs every party's identity."""

from __future__ import annotations

import datetime as dt
import ipaddress
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fl_privacy.errors import LaunchError
from fl_privacy.wire.identity import Identity, Keyring

ROOT_DAYS = 3650
LEAF_DAYS = 90
_SKEW = dt.timedelta(minutes=5)


def write_secret(path: Path, data: bytes) -> None:
    """Write a file that only its owner can read, never for a moment otherwise."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(handle, "wb") as file:
        os.fchmod(handle, 0o600)
        file.write(data)


def pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def load_key(path: Path) -> ec.EllipticCurvePrivateKey:
    key = serialization.load_pem_private_key(path.read_bytes(), None)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise LaunchError(f"key {path}: not an elliptic-curve key; make a new one")
    return key


@dataclass(frozen=True)
class Authority:
    """The root key and certificate, in a folder of the federation's operator."""

    folder: Path
    key: ec.EllipticCurvePrivateKey
    certificate: x509.Certificate

    @classmethod
    def open(cls, folder: Path) -> Authority:
        """The authority in `folder`, made on first use and the same ever after."""
        key_file, certificate_file = folder / "ca.key", folder / "ca.pem"
        if not key_file.exists():
            key = ec.generate_private_key(ec.SECP256R1())
            name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "fl-privacy authority")])
            certificate = (
                _builder(name, name, key.public_key(), ROOT_DAYS)
                .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
                .add_extension(_usage(certificates=True), critical=True)
                .sign(key, hashes.SHA256())
            )
            write_secret(key_file, pem(key))
            certificate_file.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        try:
            return cls(folder, load_key(key_file), x509.load_pem_x509_certificate(certificate_file.read_bytes()))
        except (OSError, ValueError) as error:
            raise LaunchError(
                f"authority {folder}: {error}; restore it, or remove the folder to make a new one"
            ) from None

    @property
    def pem(self) -> bytes:
        return self.certificate.public_bytes(serialization.Encoding.PEM)

    def issue(self, identity: Identity, folder: Path, hosts: Sequence[str] = ()) -> Keyring:
        """A fresh key and certificate for a party, in its own folder; `hosts` are what it will be dialled by."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, identity.name)])
        names: list[x509.GeneralName] = [x509.UniformResourceIdentifier(identity.uri)]
        names += [_host(host) for host in hosts]
        # A process that both serves and dials needs both usages.
        usages = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
        certificate = (
            _builder(subject, self.certificate.subject, key.public_key(), LEAF_DAYS)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(usages, critical=False)
            .add_extension(_usage(certificates=False), critical=True)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key()), critical=False)
            .sign(self.key, hashes.SHA256())
        )
        keys = Keyring(folder)
        write_secret(keys.key_file, pem(key))
        keys.certificate_file.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        keys.authority_file.write_bytes(self.pem)
        return keys


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    now = dt.datetime.now(dt.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _SKEW)
        .not_valid_after(now + dt.timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _usage(certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not certificates,
        key_cert_sign=certificates,
        crl_sign=certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
