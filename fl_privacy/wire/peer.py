"""Who answers at an address. gRPC only asks for a certificate of our authority for the host name, which others have.

So a party is asked for its certificate first, and gRPC then trusts that one certificate and no other.
"""

from __future__ import annotations

import ssl
import time

from cryptography import x509

from fl_privacy.addresses import host_of
from fl_privacy.dialling import Unreachable, Way, usual_proxy
from fl_privacy.errors import LaunchError, ProtocolError
from fl_privacy.identity import tls
from fl_privacy.identity.keyring import DENIED, Identity, Keyring, holder
from fl_privacy.identity.watched import Watched

UNAVAILABLE = "UNAVAILABLE"


def check(certificate: x509.Certificate, keys: Keyring, whom: Identity) -> None:
    """Raise unless the certificate is valid today and of this party, with its key in the roster."""
    found, _ = holder(certificate)
    if found != whom:
        raise ProtocolError(DENIED, f"certificate of {found.uri}: another party than {whom.uri}, which was dialled")
    keys.admit(certificate)


class Peer:
    """The party that we dial at an address."""

    def __init__(self, address: str, keys: Keyring, whom: Identity) -> None:
        self._address, self._keys, self._whom = address, keys, whom
        self._contexts = Watched(tls.files(keys), self._context)

    def _context(self) -> ssl.SSLContext:
        certificate, key, authority = tls.files(self._keys)
        context = tls.client_context(authority, certificate, key)
        context.set_alpn_protocols(["h2"])
        return context

    def still(self, certificate: x509.Certificate) -> bool:
        """Whether we would still trust a certificate that we trusted before."""
        try:
            check(certificate, self._keys, self._whom)
        except ProtocolError:
            return False
        return True

    def certificate(self, seconds: float) -> x509.Certificate:
        """Connect and check who answers; a ProtocolError says why not."""
        try:
            found = self._shown(time.monotonic() + seconds)
        except ssl.SSLCertVerificationError as error:
            raise self._failed(f"we refused its certificate: {error.verify_message}") from None
        except (OSError, ValueError, Unreachable, LaunchError) as error:
            raise self._failed(str(getattr(error, "strerror", None) or error)) from None
        check(found, self._keys, self._whom)
        return found

    def _shown(self, until: float) -> x509.Certificate:
        way = Way(self._address, usual_proxy(host_of(self._address)))
        with way.open(until) as plain, self._contexts.get().wrap_socket(plain, server_hostname=way.host) as secure:
            return x509.load_der_x509_certificate(secure.getpeercert(binary_form=True) or b"")

    def _failed(self, why: str) -> ProtocolError:
        fix = "see its log, or run fl-privacy preflight"
        return ProtocolError(UNAVAILABLE, f"peer: {self._whom.name} at {self._address}: {why}; {fix}")
