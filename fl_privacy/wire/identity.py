"""Who a peer is, by its certificate, and the credentials of one's own."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from fl_privacy.errors import LaunchError, ProtocolError

SCHEME = "fl-privacy"
ROLES = ("server", "site", "shuffler", "aggregator", "evaluator", "superlink")
_URI = re.compile(rf"{SCHEME}://([a-z0-9-]+)/([a-z]+)/([a-z0-9-]+)")


@dataclass(frozen=True)
class Identity:
    """Federation, role and name, as the URI in a certificate's subject alternative names."""

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
            raise ProtocolError("UNAUTHENTICATED", f"certificate: {uri!r} is no identity of a federation")
        return cls(found[1], found[2], found[3])


def peer(context: Any, federation: str, *roles: str) -> Identity:
    """The caller's identity, if it belongs to this federation and has one of these roles."""
    uris = context.auth_context().get("peer_uri", [])
    if len(uris) != 1:
        raise ProtocolError("UNAUTHENTICATED", "certificate: names no identity; use one made by fl-privacy")
    identity = Identity.parse(uris[0].decode("utf-8", "replace"))
    if identity.federation != federation:
        raise ProtocolError("PERMISSION_DENIED", f"certificate: of federation {identity.federation!r}")
    if identity.role not in roles:
        raise ProtocolError("PERMISSION_DENIED", f"{identity.role}: may not call this; it is for {' and '.join(roles)}")
    return identity


@dataclass(frozen=True)
class Keyring:
    """A party's folder of PEM files: its key, its certificate, and the authority's certificate."""

    folder: Path

    @property
    def key_file(self) -> Path:
        return self.folder / "key.pem"

    @property
    def certificate_file(self) -> Path:
        return self.folder / "cert.pem"

    @property
    def authority_file(self) -> Path:
        return self.folder / "ca.pem"

    def read(self) -> tuple[bytes, bytes, bytes]:
        """(key, certificate, authority)."""
        try:
            return self.key_file.read_bytes(), self.certificate_file.read_bytes(), self.authority_file.read_bytes()
        except OSError as error:
            raise LaunchError(f"certificates: {error.filename}: {error.strerror}; check --keys") from None

    def server_credentials(self) -> grpc.ServerCredentials:
        """Mutual TLS: a caller without a certificate of our authority does not get past the handshake."""
        key, certificate, authority = self.read()
        return grpc.ssl_server_credentials([(key, certificate)], authority, require_client_auth=True)

    def channel_credentials(self) -> grpc.ChannelCredentials:
        key, certificate, authority = self.read()
        return grpc.ssl_channel_credentials(authority, key, certificate)
