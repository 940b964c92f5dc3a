"""A peer's identity in its certificate, and a party's own key files."""

from __future__ import annotations

import datetime as dt
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from fl_privacy.errors import LaunchError, ProtocolError
from fl_privacy.files import Stamp, stamp
from fl_privacy.identity.watched import Watched
from fl_privacy.roles import ROLES

SCHEME, DENIED = "fl-privacy", "PERMISSION_DENIED"
_URI = re.compile(rf"{SCHEME}://([a-z0-9-]+)/([a-z]+)/([a-z0-9-]+)")


@dataclass(frozen=True)
class Identity:
    """Federation, role and name: the URI in a certificate's subject alternative names."""

    federation: str
    role: str
    name: str

    @property
    def uri(self) -> str:
        return f"{SCHEME}://{self.federation}/{self.role}/{self.name}"

    @classmethod
    def parse(cls, uri: str) -> Identity:
        found = _URI.fullmatch(uri)
        if not found or found[2] not in ROLES:
            raise ProtocolError("UNAUTHENTICATED", f"certificate: {uri!r} is not the identity of a party")
        return cls(found[1], found[2], found[3])

    @classmethod
    def of(cls, certificate: x509.Certificate) -> Identity:
        """The one identity that a certificate names."""
        try:
            names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
            uris = names.get_values_for_type(x509.UniformResourceIdentifier)
        except (ValueError, x509.ExtensionNotFound, x509.DuplicateExtension, x509.UnsupportedGeneralNameType):
            uris = []
        if len(uris) != 1:
            raise ProtocolError("UNAUTHENTICATED", "certificate: has no identity; use one made by fl-privacy")
        return cls.parse(uris[0])


def peer(context: Any, federation: str, *roles: str) -> Identity:
    """The caller's identity, which must belong to this federation and have one of these roles."""
    uris = context.auth_context().get("peer_uri", [])
    if len(uris) != 1:
        raise ProtocolError("UNAUTHENTICATED", "certificate: has no identity; use one made by fl-privacy")
    identity = Identity.parse(uris[0].decode("utf-8", "replace"))
    if identity.federation != federation:
        raise ProtocolError(DENIED, f"certificate: belongs to federation {identity.federation!r}")
    if identity.role not in roles:
        raise ProtocolError(DENIED, f"{identity.role}: may not call this; only {' and '.join(roles)} may")
    return identity


def certificate_of(context: Any) -> x509.Certificate:
    """The certificate of the caller's connection."""
    try:
        return x509.load_pem_x509_certificate(context.auth_context()["x509_pem_cert"][0])
    except (KeyError, IndexError, ValueError):
        raise ProtocolError("UNAUTHENTICATED", "certificate: missing or unreadable") from None


@dataclass(frozen=True)
class Keyring:
    """A party's folder of PEM files: its key, its certificate, the authority's certificate and its revocations."""

    folder: Path
    _revoked: dict[Stamp, frozenset[int]] = field(default_factory=dict, init=False, compare=False, repr=False)

    @property
    def key_file(self) -> Path:
        return self.folder / "key.pem"

    @property
    def certificate_file(self) -> Path:
        return self.folder / "cert.pem"

    @property
    def authority_file(self) -> Path:
        return self.folder / "ca.pem"

    @property
    def revoked_file(self) -> Path:
        return self.folder / "revoked.pem"

    def read(self) -> tuple[bytes, bytes, bytes]:
        """(key, certificate, authority)."""
        try:
            return self.key_file.read_bytes(), self.certificate_file.read_bytes(), self.authority_file.read_bytes()
        except OSError as error:
            raise LaunchError(f"certificates: {error.filename}: {error.strerror}; check --keys") from None

    def refuse_revoked(self, certificate: x509.Certificate) -> None:
        """Raise if the authority revoked it, or if it expired since the handshake.

        If there are revocations that cannot be verified, everybody is refused.
        """
        if dt.datetime.now(dt.UTC) > certificate.not_valid_after_utc:
            raise ProtocolError(DENIED, f"certificate of {Identity.of(certificate).uri}: expired; renew it")
        if certificate.serial_number in self.revoked():
            raise ProtocolError(DENIED, f"certificate of {Identity.of(certificate).uri}: revoked")

    def revoked(self) -> frozenset[int]:
        """The serial numbers that the authority revoked; read again only if a file changed."""
        try:
            self.revoked_file.lstat()
        except FileNotFoundError:
            return frozenset()
        except OSError:
            pass  # it exists but is not readable: refused below
        try:
            now = stamp((self.revoked_file, self.authority_file))
            found = self._revoked.get(now)
            if found is None:
                authority = x509.load_pem_x509_certificate(self.authority_file.read_bytes())
                found = frozenset(entry.serial_number for entry in load_crl(self.revoked_file.read_bytes(), authority))
                self._revoked.clear()
                self._revoked[now] = found
            return found
        except (OSError, ValueError):
            why = "revocations: cannot be verified, so everybody is refused; install revoked.pem again"
            raise ProtocolError(DENIED, why) from None


def load_crl(data: bytes, authority: x509.Certificate) -> x509.CertificateRevocationList:
    """Revocations signed by this authority; ValueError if it did not sign them."""
    try:
        found = x509.load_pem_x509_crl(data)
        good = found.issuer == authority.subject and found.is_signature_valid(authority.public_key())  # type: ignore[arg-type]
    except (TypeError, UnsupportedAlgorithm) as error:
        raise ValueError(str(error)) from None
    if not good:
        raise ValueError("not signed by this authority")
    return found


class Renewing(Watched[tuple[bytes, bytes, bytes]]):
    """A keyring's files as last read. Changed files come into force when all of them belong together."""

    def __init__(self, keys: Keyring) -> None:
        def whole() -> tuple[bytes, bytes, bytes]:
            found = keys.read()
            if not belong_together(*found):
                raise ValueError("they do not belong together")
            return found

        super().__init__((keys.key_file, keys.certificate_file, keys.authority_file), keys.read, whole)

    @property
    def contents(self) -> tuple[bytes, bytes, bytes]:
        return self.made


def belong_together(key: bytes, certificate: bytes, authority: bytes) -> bool:
    """Whether this authority issued the certificate for this key."""
    try:
        made = x509.load_pem_x509_certificate(certificate)
        made.verify_directly_issued_by(x509.load_pem_x509_certificate(authority))
        return load_pem_private_key(key, None).public_key() == made.public_key()
    except (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm):
        return False
