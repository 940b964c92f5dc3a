"""The public half of an authority: its certificate and what it has revoked. Its key is not needed to trust it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import serialization

from fl_privacy.errors import LaunchError
from fl_privacy.identity.keyring import Keyring, load_crl
from fl_privacy.identity.roster import Roster, load

CERTIFICATE = "ca.pem"


def read_certificate(path: Path) -> x509.Certificate:
    """ValueError for anything but a certificate."""
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except ValueError:
        raise ValueError("not a certificate in PEM") from None


def broken(file: Path, error: OSError | ValueError) -> LaunchError:
    why = getattr(error, "strerror", None) or error
    return LaunchError(f"authority {file}: {why}; restore it from a backup, or work where the authority is kept")


@dataclass(frozen=True)
class Anchor:
    """An authority as every party knows it."""

    folder: Path
    certificate: x509.Certificate

    @classmethod
    def read(cls, path: Path) -> Anchor:
        """From an authority's folder, of which ca.pem is enough, or from that file."""
        file = path if path.is_file() else path / CERTIFICATE
        if not file.exists():
            raise LaunchError(f"authority {path}: does not exist; make it with `fl-privacy pki init {path}`")
        try:
            return cls(file.parent, read_certificate(file))
        except (OSError, ValueError) as error:
            raise broken(file, error) from None

    @property
    def pem(self) -> bytes:
        return self.certificate.public_bytes(serialization.Encoding.PEM)

    @property
    def revoked_file(self) -> Path:
        return self.folder / "revoked.pem"

    def crl(self) -> x509.CertificateRevocationList | None:
        """The newest revocation list; None if nothing was ever revoked."""
        if not self.revoked_file.exists():
            return None
        try:
            return load_crl(self.revoked_file.read_bytes(), self.certificate)
        except ValueError as error:
            raise LaunchError(f"authority {self.revoked_file}: {error}; restore it from a backup") from None

    def revoked(self) -> frozenset[int]:
        """Serial numbers of the revoked certificates."""
        crl = self.crl()
        return frozenset() if crl is None else frozenset(entry.serial_number for entry in crl)

    def revocations(self) -> bytes | None:
        """The newest revocation list as PEM; None if nothing was ever revoked."""
        crl = self.crl()
        return None if crl is None else crl.public_bytes(serialization.Encoding.PEM)

    def roster_file(self, federation: str) -> Path:
        return self.folder / "rosters" / f"{federation}.json"

    def roster(self, federation: str, file: Path | None = None) -> Roster | None:
        """The newest roster of a federation; None if there is none yet."""
        file = file or self.roster_file(federation)
        try:
            found = load(file.read_bytes(), self.certificate)
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise LaunchError(f"roster {file}: {error}; restore it from a backup") from None
        if found.federation != federation:
            raise LaunchError(f"roster {file}: of federation {found.federation!r}; restore it from a backup")
        return found

    def has_revoked(self, keys: Keyring) -> bool:
        """Whether the certificate in that folder was revoked; False if there is none."""
        try:
            return read_certificate(keys.certificate_file).serial_number in self.revoked()
        except (FileNotFoundError, ValueError):
            return False
