"""The roster: who is in a federation, with which key and for which organisation, signed by the authority.

Plain dataclasses, because gate and relay read it too and do without pydantic's memory.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec

from fl_privacy.errors import LaunchError, ProtocolError
from fl_privacy.files import replace
from fl_privacy.identity.signing import sign_text, verify_text
from fl_privacy.roles import ROLES

FILE = "roster.json"
MAX_MEMBERS = 12_000
MAX_BYTES = 4 * 2**20  # more than that many members take
_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
_KEY = re.compile(r"sha256:[0-9a-f]{64}")
_FIELDS = ("role", "name", "key", "organisation")


@dataclass(frozen=True, slots=True, order=True)
class Member:
    """One party: the fingerprint of its key, and the organisation that runs it (default: its name)."""

    role: str
    name: str
    key: str
    organisation: str = ""

    def __post_init__(self) -> None:
        if self.organisation == "":
            object.__setattr__(self, "organisation", self.name)
        if not all(isinstance(getattr(self, field), str) for field in _FIELDS) or self.role not in ROLES:
            raise ValueError(f"member: {str(self.role)[:80]!r} is not a role")
        for field, pattern in (("name", _NAME), ("key", _KEY), ("organisation", _NAME)):
            if not pattern.fullmatch(getattr(self, field)):
                raise ValueError(f"{field}: {getattr(self, field)[:80]!r} is not valid")

    @property
    def party(self) -> tuple[str, str]:
        return self.role, self.name


@dataclass(frozen=True)
class Roster:
    """Who is in the federation. The serial grows by one with every change."""

    federation: str
    serial: int
    members: tuple[Member, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.federation, str) or not _NAME.fullmatch(self.federation):
            raise ValueError(f"federation: {str(self.federation)[:80]!r} is not valid")
        if isinstance(self.serial, bool) or not isinstance(self.serial, int) or not 1 <= self.serial < 2**31:
            raise ValueError(f"serial: {str(self.serial)[:80]} is not valid")
        if len(self.members) > MAX_MEMBERS:
            raise ValueError(f"members: {len(self.members)}; at most {MAX_MEMBERS} are allowed")
        parties = [member.party for member in self.members]
        if parties != sorted(set(parties)) or len({member.key for member in self.members}) != len(parties):
            raise ValueError("members: not in order, or a party or a key is there twice")

    @classmethod
    def of(cls, federation: str, serial: int, members: Iterable[Member]) -> Roster:
        """A roster of members in any order."""
        return cls(federation, serial, tuple(sorted(members)))

    @cached_property
    def canonical(self) -> bytes:
        """What is signed and digested: the same bytes for the same roster."""
        members = [{field: getattr(member, field) for field in _FIELDS} for member in self.members]
        values = {"version": 1, "federation": self.federation, "serial": self.serial, "members": members}
        return json.dumps(values, sort_keys=True, separators=(",", ":")).encode()

    @cached_property
    def digest(self) -> str:
        return hashlib.sha256(self.canonical).hexdigest()

    @cached_property
    def _by_party(self) -> dict[tuple[str, str], Member]:
        return {member.party: member for member in self.members}

    @property
    def sites(self) -> tuple[Member, ...]:
        """The members that hold data."""
        return tuple(member for member in self.members if ROLES[member.role].has_node)

    def key_of(self, role: str, name: str) -> str | None:
        """The fingerprint of a party's key; None if it is not a member."""
        member = self._by_party.get((role, name))
        return None if member is None else member.key

    @cached_property
    def _organisations(self) -> dict[str, str]:
        return {member.name: member.organisation for member in self.sites}

    def organisation_of(self, site: str) -> str:
        """Who runs a site."""
        if site not in self._organisations:
            why = f"roster: site {site[:80]!r} is not in it (serial {self.serial}); install the newest roster.json"
            raise ProtocolError("FAILED_PRECONDITION", why)
        return self._organisations[site]

    def organisations(self, sites: Iterable[str]) -> int:
        """How many different organisations run these sites."""
        return len({self.organisation_of(site) for site in sites})


def sign(roster: Roster, key: ec.EllipticCurvePrivateKey) -> bytes:
    """The file `roster.json`."""
    values = json.loads(roster.canonical)
    lines = ",\n".join(json.dumps(member, sort_keys=True) for member in values.pop("members"))
    values["signature"] = sign_text(key, _payload(roster))
    return f'{json.dumps(values, sort_keys=True)[:-1]}, "members": [\n{lines}\n]}}\n'.encode()


def load(data: bytes, authority: x509.Certificate) -> Roster:
    """A roster that this authority signed; ValueError for anything else."""
    return _load(data, authority)


@lru_cache(maxsize=4)
def _load(data: bytes, authority: x509.Certificate) -> Roster:
    """Cached by content: on one machine many parties have the same roster."""
    values = _values(data)
    signature = values.pop("signature", None)
    roster = _roster(values)
    try:
        verify_text(authority.public_key(), signature if isinstance(signature, str) else "", _payload(roster))
    except InvalidSignature:
        raise ValueError("not signed by this authority") from None
    return roster


def parse(data: bytes) -> Roster:
    """A roster without a signature, from our own disk; ValueError for anything else."""
    return _roster(_values(data))


def install(file: Path, data: bytes, authority: x509.Certificate) -> Roster | None:
    """Install a roster; None if a newer one is in place, ValueError if this authority did not sign it."""
    roster = load(data, authority)
    try:
        old = load(file.read_bytes(), authority)
    except (OSError, ValueError):
        old = None
    if old is not None and old.federation == roster.federation:
        if old.serial > roster.serial:
            return None
        if old.serial == roster.serial and old.digest != roster.digest:
            why = f"differs from the one in {file}, which has the same serial {old.serial}"
            raise LaunchError(f"roster: {why}; ask the authority for its newest one")
    file.parent.mkdir(parents=True, exist_ok=True)
    replace(file, data, unique=True)
    return roster


def _payload(roster: Roster) -> bytes:
    return b"fl-privacy roster\n" + roster.canonical


def _values(data: bytes) -> dict[str, Any]:
    if len(data) > MAX_BYTES:
        raise ValueError(f"larger than {MAX_BYTES} bytes")
    try:
        values = json.loads(data)
    except (ValueError, RecursionError):
        raise ValueError("not JSON") from None
    if not isinstance(values, dict):
        raise ValueError("not a roster")
    return values


def _roster(values: dict[str, Any]) -> Roster:
    if set(values) != {"version", "federation", "serial", "members"} or values["version"] != 1:
        raise ValueError("not a roster of version 1")
    listed = values["members"]
    if not isinstance(listed, list) or not all(isinstance(m, dict) and set(m) == set(_FIELDS) for m in listed):
        raise ValueError("members: not a list of role, name, key and organisation")
    return Roster(values["federation"], values["serial"], tuple(Member(**member) for member in listed))
