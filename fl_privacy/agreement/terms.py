"""Who agrees on what: the sites of one accepted roster, in one run and round, with their keys and quorums."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from fl_privacy.crypto import sealing
from fl_privacy.errors import FederationError, ProtocolError
from fl_privacy.identity.roster import Roster
from fl_privacy.identity.signing import fingerprint

FEWEST = 4  # 3 f + 1 sites bear f faulty ones
MARK = 32  # bytes of a fingerprint
MOST = 100  # a proof of a new view holds a quorum of certificates, each with a quorum of signatures


def public(key: ec.EllipticCurvePrivateKey) -> bytes:
    """A site's public key as the terms hold it."""
    return key.public_key().public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)


@lru_cache(maxsize=1024)
def loaded(key: bytes) -> ec.EllipticCurvePublicKey:
    """A public key from its DER form."""
    try:
        found = serialization.load_der_public_key(key)
    except (ValueError, UnsupportedAlgorithm):
        found = None
    if not isinstance(found, ec.EllipticCurvePublicKey):
        raise FederationError("agreement: not an elliptic-curve key; use the key of the site's certificate")
    return found


def _mark(key: bytes) -> bytes:
    """The fingerprint of a key, as the roster lists it."""
    return bytes.fromhex(fingerprint(loaded(key)).partition(":")[2])


@lru_cache(maxsize=16_384)
def holds(key: bytes, signature: bytes, payload: bytes) -> bool:
    """Whether this key signed this. Cached: the same statement comes again in certificates and retransmissions."""
    try:
        sealing.verify(loaded(key), signature, payload)
    except ProtocolError:
        return False
    return True


@dataclass(frozen=True)
class Terms:
    """One agreement. `roster` is the digest of the roster that the sites accepted; `keys` are those it lists.

    A roster lists fingerprints. Of a site that has not shown its key yet, `keys` has the 32 bytes of the fingerprint;
    `learn` adds the key. Until then nothing that this site is said to have signed is accepted.
    """

    run: str
    round: int
    roster: str
    keys: tuple[tuple[str, bytes], ...]

    def __post_init__(self) -> None:
        sites = [site for site, _ in self.keys]
        if not 0 < len(self.run) <= 128 or not 0 <= self.round <= 2**31 or len(self.roster) != 64:
            raise FederationError("agreement: run, round or roster digest is out of range; take them from the ticket")
        if len(sites) < FEWEST:
            why = f"agreement: {len(sites)} sites cannot bear one faulty site; at least {FEWEST} are needed"
            raise FederationError(why)
        if len(sites) > MOST:
            raise FederationError(f"agreement: {len(sites)} sites; at most {MOST} are supported")
        if sites != sorted(set(sites)) or len(set(self._marks.values())) != len(sites):
            raise FederationError("agreement: sites are not in order, or a site or a key is there twice")

    @classmethod
    def of(cls, roster: Roster, run: str, round: int, keys: Mapping[str, bytes]) -> Terms:
        """The terms of the sites of a roster, each with the key of the fingerprint that the roster lists."""
        listed = {member.name: member.key for member in roster.sites}
        if set(keys) != set(listed):
            missing = ", ".join(sorted(set(keys) ^ set(listed)))
            raise FederationError(f"agreement: the keys are not those of the roster's sites ({missing[:200]})")
        for site, key in keys.items():
            if fingerprint(loaded(key)) != listed[site]:
                why = f"agreement: site {site!r} has another key than the roster's; install the newest roster.json"
                raise FederationError(why)
        return cls(run, round, roster.digest, tuple(sorted(keys.items())))

    @classmethod
    def of_roster(cls, roster: Roster, run: str, round: int) -> Terms:
        """The terms of all sites of a roster, whose keys are still to be learned."""
        marks = ((member.name, bytes.fromhex(member.key.partition(":")[2])) for member in roster.sites)
        return cls(run, round, roster.digest, tuple(sorted(marks)))

    def learn(self, site: str, key: bytes) -> bool:
        """Take a site's key, whoever shows it; False for one that is not of the fingerprint that the roster lists."""
        try:
            good = site in self._marks and _mark(key) == self._marks[site]
        except FederationError:
            return False
        if good:
            self.key_of[site] = key
        return good

    @cached_property
    def _marks(self) -> Mapping[str, bytes]:
        """The fingerprint of every site's key."""
        return {site: key if len(key) == MARK else _mark(key) for site, key in self.keys}

    @cached_property
    def sites(self) -> tuple[str, ...]:
        return tuple(site for site, _ in self.keys)

    @cached_property
    def key_of(self) -> dict[str, bytes]:
        """The keys that are known; `learn` adds to them."""
        return {site: key for site, key in self.keys if len(key) != MARK}

    @property
    def faults(self) -> int:
        """f: how many sites may be faulty without harm, the largest with 3 f < n."""
        return (len(self.keys) - 1) // 3

    @property
    def quorum(self) -> int:
        """So many that any two quorums share a correct site: the fewest above (n + f) / 2, so 2 f + 1 of 3 f + 1."""
        return (len(self.keys) + self.faults) // 2 + 1

    def head(self, height: int, view: int) -> str:
        """Who proposes: PBFT's primary."""
        return self.sites[(height - 1 + view) % len(self.sites)]

    @cached_property
    def scope(self) -> bytes:
        """What every signature is bound to. The sites and keys are those of the roster, and are bound all the same."""
        keys = b"".join(sealing.fields(site, mark) for site, mark in self._marks.items())
        return hashlib.sha256(sealing.fields(self.run, str(self.round), self.roster, keys)).digest()
