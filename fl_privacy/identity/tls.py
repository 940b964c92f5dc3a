"""TLS of the gate and the relay: contexts, the peer's certificate, and certificates for loopback."""

from __future__ import annotations

import asyncio
import datetime as dt
import ipaddress
import ssl
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from fl_privacy.errors import LaunchError
from fl_privacy.files import check_private, write_public, write_secret
from fl_privacy.identity import pki
from fl_privacy.identity.keyring import Identity, Keyring

LOCAL_DAYS = 3650
HANDSHAKE = 10.0
GOODBYE = 2.0


def server_context(certificate: Path, key: Path, authority: Path | None = None) -> ssl.SSLContext:
    """For a server; with `authority`, clients must have a certificate issued by it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # A resumed session would skip the certificate check.
    context.num_tickets = 0
    check_private(key)
    context.load_cert_chain(certificate, key, password="")
    if authority is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(authority)
    return context


def client_context(authority: Path, certificate: Path | None = None, key: Path | None = None) -> ssl.SSLContext:
    """For a client: the server's certificate must be issued by `authority` for the host name."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_verify_locations(authority)
    if certificate is not None and key is not None:
        check_private(key)
        context.load_cert_chain(certificate, key, password="")
    return context


def files(keys: Keyring) -> tuple[Path, Path, Path]:
    return keys.certificate_file, keys.key_file, keys.authority_file


def own_identity(keys: Keyring) -> Identity:
    try:
        return Identity.of(x509.load_pem_x509_certificate(keys.certificate_file.read_bytes()))
    except (OSError, ValueError) as error:
        raise LaunchError(f"certificates: {keys.certificate_file}: {error}; check --keys") from None


def peer_certificate(writer: asyncio.StreamWriter) -> x509.Certificate:
    return x509.load_der_x509_certificate(writer.get_extra_info("ssl_object").getpeercert(binary_form=True))


@dataclass(frozen=True)
class LocalKeys:
    """A self-signed certificate for this machine's loopback and its key, in a folder."""

    certificate: Path
    key: Path

    @classmethod
    def open(cls, folder: Path, name: str) -> LocalKeys:
        """The keys in `folder`, made on first use: clients that trusted them before a restart still do."""
        keys = cls(folder / f"{name}.pem", folder / f"{name}.key")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if not keys._usable():
                keys._make()
        except OSError as error:
            raise LaunchError(f"{folder}: {error.strerror or error}; choose a writable folder") from None
        return keys

    def _usable(self) -> bool:
        try:
            server_context(self.certificate, self.key)
            ends = x509.load_pem_x509_certificate(self.certificate.read_bytes()).not_valid_after_utc
        except (OSError, ValueError):
            return False
        return ends > dt.datetime.now(dt.UTC) + dt.timedelta(days=LOCAL_DAYS // 2)

    def _make(self) -> None:
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
        hosts = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
        certificate = (
            # Correcting the clock after the start must not make it invalid.
            pki.builder(name, name, key.public_key(), LOCAL_DAYS, dt.timedelta(days=LOCAL_DAYS))
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName(hosts), critical=False)
            .sign(key, hashes.SHA256())
        )
        write_secret(self.key, pki.pem(key))
        write_public(self.certificate, certificate.public_bytes(serialization.Encoding.PEM))
        self.certificate.chmod(0o644)  # a SuperNode with a user of its own reads it too
