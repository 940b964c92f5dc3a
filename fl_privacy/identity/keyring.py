"""A peer's identity in its certificate, and a party's own key files."""

from __future__ import annotations

import datetime as dt
import re
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from fl_privacy.errors import LaunchError, ProtocolError
from fl_privacy.files import Stamp, check_private, stamp
from fl_privacy.identity import accepted
from fl_privacy.identity.roster import FILE, MAX_BYTES, Roster, load
from fl_privacy.identity.signing import fingerprint
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
        return _parsed(context.auth_context()["x509_pem_cert"][0])
    except (KeyError, IndexError, ValueError):
        raise ProtocolError("UNAUTHENTICATED", "certificate: missing or unreadable") from None


@lru_cache(maxsize=1024)
def _parsed(pem: bytes) -> x509.Certificate:
    """Every call brings the certificate of its connection; it is parsed once."""
    return x509.load_pem_x509_certificate(pem)


@lru_cache(maxsize=1024)
def holder(certificate: x509.Certificate) -> tuple[Identity, str]:
    """Whose certificate it is, and the fingerprint of the key in it."""
    key = certificate.public_key()
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise ProtocolError("UNAUTHENTICATED", "certificate: has no elliptic-curve key; use one made by fl-privacy")
    return Identity.of(certificate), fingerprint(key)


@dataclass(frozen=True)
class Keyring:
    """A party's folder of files: its key and certificate, and the authority's certificate, revocations and roster."""

    folder: Path
    state: Path | None = None  # a site's own folder: a roster counts only once it is accepted there
    _revoked: dict[Stamp, frozenset[int]] = field(default_factory=dict, init=False, compare=False, repr=False)
    _rosters: dict[Stamp, Roster] = field(default_factory=dict, init=False, compare=False, repr=False)

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

    @property
    def roster_file(self) -> Path:
        return self.folder / FILE

    def read(self) -> tuple[bytes, bytes, bytes]:
        """(key, certificate, authority). A key that others could read is refused."""
        check_private(self.key_file)
        try:
            return self.key_file.read_bytes(), self.certificate_file.read_bytes(), self.authority_file.read_bytes()
        except OSError as error:
            raise LaunchError(f"certificates: {error.filename}: {error.strerror}; check --keys") from None

    def admit(self, certificate: x509.Certificate) -> Identity:
        """Whose certificate it is. Raise unless it is valid today, and its key is the one in the roster."""
        self.refuse_revoked(certificate)
        return self.refuse_unlisted(certificate)

    def refuse_unlisted(self, certificate: x509.Certificate) -> Identity:
        """Whose certificate it is. Raise unless its key is the one that the roster has for this party."""
        identity, key = holder(certificate)
        listed = self.roster()
        wanted = listed.key_of(identity.role, identity.name) if listed.federation == identity.federation else None
        if key != wanted:
            why = "is not in the roster" if wanted is None else "has another key than the roster's"
            fix = "install the authority's newest roster.json"
            raise ProtocolError(DENIED, f"certificate of {identity.uri}: {why} (serial {listed.serial}); {fix}")
        return identity

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

    def roster(self) -> Roster:
        """Who is in the federation; read again only if a file changed. Without a roster, everybody is refused."""
        files = (self.roster_file, self.authority_file)
        now = stamp(files if self.state is None else (*files, accepted.file_of(self.state)))
        found = self._rosters.get(now)
        if found is None:
            found = self._read_roster()
            self._rosters.clear()
            self._rosters[now] = found
        return found

    def _read_roster(self) -> Roster:
        where, again = f"roster {self.roster_file}", "install the authority's roster.json with `fl-privacy pki install`"
        try:
            with self.roster_file.open("rb") as file:
                data = file.read(MAX_BYTES + 1)
            found = load(data, x509.load_pem_x509_certificate(self.authority_file.read_bytes()))
        except FileNotFoundError as error:
            raise ProtocolError(DENIED, f"roster: {error.filename} is missing; {again}") from None
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or error
            raise ProtocolError(DENIED, f"{where}: cannot be verified ({why}); {again}") from None
        if self.state is not None and not accepted.is_accepted(found, self.state):
            fix = "look at it and accept it with `fl-privacy site accept KIT`"
            raise ProtocolError(DENIED, f"{where}: serial {found.serial} is not accepted at this site; {fix}")
        return found


def accepted_roster(keys: Keyring, state: Path | None) -> Roster:
    """The roster that a site obeys: signed by its authority and accepted by its operator."""
    if state is None:
        raise LaunchError("state: missing, so no roster is accepted; start the worker with --state")
    return Keyring(keys.folder, state).roster()


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
