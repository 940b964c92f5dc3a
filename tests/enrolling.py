"""For tests: kits of single parties, and how they get a certificate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cryptography import x509

from fl_privacy.config import Federation
from fl_privacy.deploy.kits import enrol
from fl_privacy.deploy.kits.kit import Kit, write_kit
from fl_privacy.identity.keyring import Identity
from fl_privacy.identity.pki import Authority

SITE = Identity("test", "site", "site-0")
SHUFFLER = Identity("test", "shuffler", "shuffler")


def make_kit(folder: Path, role: str, name: str, federation: str = "test", hosts: tuple[str, ...] = ()) -> Path:
    kit = folder / name
    kit.mkdir(parents=True)
    whole = Federation.parse(f"name: {federation}\nsites: 3")
    (kit / "federation.yaml").write_text(whole.to_yaml())
    values = {"federation": federation, "digest": whole.digest, "role": role, "name": name, "hosts": hosts}
    write_kit(kit, Kit.model_validate(values))
    return kit


def join(authority: Authority, kit: Path, **options: Any) -> Path:
    """Request, sign and install a certificate; returns the signed file."""
    [made] = enrol.sign(authority, [enrol.request(kit)[0]], **options)
    enrol.install(kit, Path(made["file"]))
    return Path(made["file"])


def certificate(kit: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate((kit / "keys" / "cert.pem").read_bytes())


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
