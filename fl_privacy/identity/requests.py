"""The two files that a party and its authority exchange, and the checks before they are trusted."""

from __future__ import annotations

import ipaddress
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from fl_privacy.errors import LaunchError, ProtocolError
from fl_privacy.identity.keyring import Identity
from fl_privacy.identity.pki import alternative_names
from fl_privacy.identity.roster import MAX_BYTES as MAX_ROSTER
from fl_privacy.identity.signing import fingerprint, verify_text
from fl_privacy.reading import validated
from fl_privacy.roles import ROLES

MAX_FILE = 64 * 1024
MAX_CRL = 16 * 2**20
MAX_SIGNED = 2 * (MAX_CRL + MAX_ROSTER)
MAX_HOSTS = 16
_CURVES = ("secp256r1", "secp384r1")
_DNS = re.compile(
    r"(?=.{1,253}$)[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?(\.[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?)*", re.I | re.A
)
_BAD_EXTENSION = (x509.DuplicateExtension, x509.ExtensionNotFound, x509.UnsupportedGeneralNameType)
BROKEN = (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm, x509.InvalidVersion, *_BAD_EXTENSION)

Pem = Annotated[str, StringConstraints(max_length=8192)]
Crl = Annotated[str, StringConstraints(max_length=MAX_CRL)]
Listed = Annotated[str, StringConstraints(max_length=MAX_ROSTER)]
Signature = Annotated[str, StringConstraints(max_length=256)]
Name = Annotated[str, StringConstraints(max_length=256)]
M = TypeVar("M", bound=BaseModel)


class Renewal(BaseModel):
    """Proof that the requester also holds the key of its current certificate."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    certificate: Pem
    signature: Signature


class Request(BaseModel):
    """What a party sends to the authority; `signature` covers all of it, by the key to be certified."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    version: Literal[1] = 1
    identity: Name
    hosts: Annotated[tuple[Name, ...], Field(max_length=MAX_HOSTS)] = ()
    csr: Pem
    node: Pem | None = None
    signature: Signature = ""
    renewal: Renewal | None = None

    @property
    def payload(self) -> bytes:
        return b"fl-privacy request\n" + _canonical(self, {"signature", "renewal"})


class Signed(BaseModel):
    """What the authority sends back; its `signature` covers all of it. Nothing in it is secret."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    version: Literal[1] = 1
    identity: Name
    certificate: Pem
    ca: Pem
    node: Pem | None = None
    revoked: Crl | None = None
    roster: Listed | None = None
    signature: Signature = ""

    @property
    def payload(self) -> bytes:
        """Without `revoked` or `roster` if there is none: older files were signed without them."""
        absent = {name for name in ("revoked", "roster") if getattr(self, name) is None}
        return b"fl-privacy signed\n" + _canonical(self, {"signature", *absent})


@dataclass(frozen=True)
class CheckedRequest:
    """A request that is consistent in itself: its signature, identity, hosts and node key were checked."""

    source: Path
    request: Request
    identity: Identity
    key: ec.EllipticCurvePublicKey
    node: ec.EllipticCurvePublicKey | None

    def describe(self) -> dict[str, Any]:
        described = {"identity": self.identity.uri, "hosts": list(self.request.hosts), "key": fingerprint(self.key)}
        return described if self.node is None else {**described, "node": fingerprint(self.node)}


def check(made: Request, source: Path) -> CheckedRequest:
    """Check a request in itself: well-formed, signed by the key to be certified, and no more in it than it says."""
    where = f"request {source}"
    identity = identity_of(made.identity, where)
    hosts = hosts_of(identity, made.hosts, where)
    try:
        csr = x509.load_pem_x509_csr(made.csr.encode())
        key = csr.public_key()
        wanted = alternative_names(identity, hosts)
        good = csr.is_signature_valid and [e.value for e in csr.extensions] == [wanted]
        if not good or not isinstance(key, ec.EllipticCurvePublicKey) or key.curve.name not in _CURVES:
            raise ValueError
        verify_text(key, made.signature, made.payload)
        node = None if made.node is None else serialization.load_pem_public_key(made.node.encode())
    except BROKEN:
        raise LaunchError(
            f"{where}: its signing request is broken, or not for {identity.uri} and its hosts; "
            "make it again with `fl-privacy pki request`"
        ) from None
    if ROLES[identity.role].has_node != (node is not None):
        raise LaunchError(f"{where}: a site, and only a site, sends a node key; make the request again")
    if node is not None and not (isinstance(node, ec.EllipticCurvePublicKey) and node.curve.name == "secp384r1"):
        raise LaunchError(f"{where}: its node key is not P-384; make the request again")
    return CheckedRequest(source, made, identity, key, node)


def identity_of(uri: str, where: str) -> Identity:
    try:
        identity = Identity.parse(uri)
    except ProtocolError:
        raise LaunchError(f"{where}: {uri[:80]!r} is not an identity; roles are {', '.join(ROLES)}") from None
    if max(len(identity.name), len(identity.federation)) > 63:
        raise LaunchError(f"{where}: a name has at most 63 characters")
    return identity


def hosts_of(identity: Identity, hosts: Sequence[object], where: str) -> tuple[str, ...]:
    """Check names and addresses; a party that does not listen has none."""
    if hosts and not ROLES[identity.role].listens:
        raise LaunchError(f"{where}: a {identity.role} accepts no connections; remove its hosts")
    if len(hosts) > MAX_HOSTS:
        raise LaunchError(f"{where}: {len(hosts)} hosts; use at most {MAX_HOSTS}")
    for host in hosts:
        if not isinstance(host, str) or not (_DNS.fullmatch(host) or _is_address(host)):
            raise LaunchError(f"{where}: host {str(host)[:80]!r} is not a name or address")
    return tuple(str(host) for host in hosts)


def _is_address(host: str) -> bool:
    try:
        # An address with a zone is valid on one machine only and cannot be in a certificate.
        return "%" not in host and bool(ipaddress.ip_address(host))
    except ValueError:
        return False


def _canonical(model: BaseModel, without: set[str]) -> bytes:
    return json.dumps(model.model_dump(mode="json", exclude=without), sort_keys=True).encode()


def read(model: type[M], path: Path, what: str, limit: int = MAX_FILE) -> M:
    data = bounded(path, limit, what)
    try:
        values = json.loads(data)
    except (ValueError, RecursionError):
        raise LaunchError(f"{what} {path}: not JSON; ask for it again") from None
    if not isinstance(values, dict):
        raise LaunchError(f"{what} {path}: not a {what}; ask for it again")
    return validated(model, values, f"{what} {path}")


def bounded(path: Path, limit: int, what: str) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(limit + 1)
    except OSError as error:
        raise LaunchError(f"{what} {path}: cannot be read ({error.strerror})") from None
    if len(data) > limit:
        raise LaunchError(f"{what} {path}: larger than {limit} bytes; this is the wrong file")
    return data
