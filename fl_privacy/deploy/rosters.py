"""Rosters: made of the certificates on this machine or of the authority's records, handed on, and installed."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cryptography import x509

from fl_privacy.config import Federation
from fl_privacy.deploy.parties import parties
from fl_privacy.errors import LaunchError
from fl_privacy.files import write_public
from fl_privacy.identity import roster
from fl_privacy.identity.accepted import changes
from fl_privacy.identity.keyring import Identity, Keyring
from fl_privacy.identity.pki import Authority, load_certificate
from fl_privacy.identity.roster import Member, Roster
from fl_privacy.identity.signing import fingerprint
from fl_privacy.roles import ROLES


def here(federation: Federation, authority: Authority, keys: Callable[[str, str], Keyring]) -> list[Member]:
    """Of the parties whose keys are on this machine, except revoked ones."""
    own = {party: keys(*party) for party in parties(federation)}
    certificates = {p: load_certificate(k.certificate_file) for p, k in own.items() if not authority.has_revoked(k)}
    return _members(federation, {party: fingerprint(made.public_key()) for party, made in certificates.items()})


def recorded(federation: Federation, authority: Authority) -> list[Member]:
    """Of the parties that the authority certified: the key of the newest certificate that is not revoked."""
    revoked = authority.revoked()
    newest = {record.identity: record.key for record in authority.records() if record.number not in revoked}
    named = {party: Identity(federation.name, *party).uri for party in parties(federation)}
    return _members(federation, {party: newest[uri] for party, uri in named.items() if uri in newest})


def _members(federation: Federation, keys: dict[tuple[str, str], str]) -> list[Member]:
    run_by = {site.name: site.organisation or site.name for site in federation.sites}
    return [
        Member(role, name, key, run_by[name] if ROLES[role].has_node else name) for (role, name), key in keys.items()
    ]


def share(file: Path, folder: Path) -> None:
    """Put a roster into a party's folder; thousands of parties on one machine share one file."""
    target = Keyring(folder).roster_file
    target.unlink(missing_ok=True)
    try:
        os.link(file, target)
    except OSError:
        shutil.copyfile(file, target)


def enlist(federation: Federation, authority: Authority) -> Roster:
    """The next roster of a federation, from the records of the authority, which the caller has locked."""
    if authority.federation not in ("", federation.name):
        raise LaunchError(f"config: of federation {federation.name!r}; this authority is for {authority.federation!r}")
    return authority.enlist(federation.name, recorded(federation, authority))


def make(federation: Federation, authority: Authority, out: Path | None = None) -> dict[str, Any]:
    """The authority's next roster of a federation: what it changes, and who has no certificate yet."""
    with authority.locked():
        old, new = authority.roster(federation.name), enlist(federation, authority)
    missing = [" ".join(party) for party in parties(federation) if new.key_of(*party) is None]
    facts = {"federation": new.federation, "serial": new.serial, "digest": new.digest, "members": len(new.members)}
    file = authority.roster_file(new.federation)
    if out is not None:
        copy = out / roster.FILE if out.is_dir() else out
        write_public(copy, file.read_bytes())
        file = copy
    return {**facts, "changes": [*changes(old, new)], "missing": missing, "file": str(file)}


def is_one(data: bytes) -> bool:
    """Whether a file claims to be a roster; nothing in it is trusted yet."""
    try:
        values = json.loads(data)
    except (ValueError, RecursionError):
        return False
    return isinstance(values, dict) and "members" in values


def check(data: bytes, authority: x509.Certificate, federation: str) -> Roster:
    """A roster that this authority signed for this federation; ValueError for anything else."""
    found = roster.load(data, authority)
    if found.federation != federation:
        raise ValueError(f"it is of federation {found.federation!r}")
    return found


def install(keys: Keyring, federation: str, file: Path, data: bytes) -> dict[str, Any]:
    """Install the file that the authority sent; a site's operator has to accept it then."""
    if not keys.authority_file.exists():
        raise LaunchError(f"roster {file}: this kit has no authority yet; install its own signed file first")
    authority = load_certificate(keys.authority_file)
    try:
        found = check(data, authority, federation)
        newest = roster.install(keys.roster_file, data, authority)
    except ValueError as error:
        why = f"not as the authority in {keys.authority_file} signed it for {federation!r} ({error})"
        raise LaunchError(f"roster {file}: {why}; ask for it again") from None
    if newest is None:
        raise LaunchError(f"roster {file}: older than the one in place; use the authority's newest one")
    return {"installed": "roster", "serial": found.serial, "digest": found.digest, "file": str(keys.roster_file)}
