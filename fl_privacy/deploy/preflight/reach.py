"""Whether a peer can be reached and accepts our certificate, within two seconds."""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable

from cryptography import x509

from fl_privacy.deploy.preflight.finding import Check
from fl_privacy.dialling import Unreachable, Way, left
from fl_privacy.errors import ProtocolError
from fl_privacy.identity.keyring import Identity, Keyring, holder
from fl_privacy.wire.peer import check

WAIT = 2.0
NO_PASSWORD = ""  # otherwise OpenSSL prompts for the password of an encrypted key
HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00"


def peer(address: str, keys: Keyring, whom: Identity | None = None, proxy: str | None = None) -> Check:
    """Whether the gRPC server there and we accept each other's certificates."""
    return dialogue(Way(address, proxy), keys, HTTP2, "h2", whom)[0]


def answers(way: Way) -> Check:
    """Whether something listens there, for a party that has no certificate yet."""
    try:
        way.open(time.monotonic() + WAIT).close()
    except (OSError, Unreachable) as error:
        return _unreachable(way, error)
    return Check("peer", True, f"{way.address}: reachable; our certificate is checked once there is one")


def dialogue(
    way: Way, keys: Keyring, greeting: bytes, protocol: str, whom: Identity | None = None
) -> tuple[Check, bytes]:
    """A real handshake, and the start of the answer: gRPC only reports UNAVAILABLE, TLS reports why."""
    address = way.address
    try:
        context = ssl.create_default_context(cafile=str(keys.authority_file))
        context.load_cert_chain(keys.certificate_file, keys.key_file, NO_PASSWORD)
    except (OSError, ValueError):
        return answers(way), b""  # problems with our own files are reported by another check
    try:
        answer = greet(way, greeting, protocol, context, lambda shown: _admit(shown, keys, whom))
    except ProtocolError as error:
        fix = "correct the address, or install the newest roster.json and revoked.pem of the authority on both sides"
        return Check("peer", False, f"{address}: we refused its {error}", fix), b""
    except ssl.SSLCertVerificationError as error:
        fix = "check that both sides have the same ca.pem, and the host name and dates of its certificate"
        return Check("peer", False, f"{address}: we refused its certificate: {error.verify_message}", fix), b""
    except (ssl.SSLError, ConnectionResetError, BrokenPipeError) as error:
        # We accepted its certificate. Many servers close the connection without saying why they refuse ours.
        why = getattr(error, "reason", None) or "it closed the connection after the handshake (revoked? expired?)"
        fix = "get a new certificate from the federation's authority"
        return Check("peer", False, f"{address}: refused our certificate: {why}", fix), b""
    except (OSError, ValueError, Unreachable) as error:
        return _unreachable(way, error), b""
    by = f" through the proxy {way.proxy}" if way.proxy else ""
    return Check("peer", True, f"{address}: mutual TLS works{by}"), answer


def _unreachable(way: Way, error: Exception) -> Check:
    if isinstance(error, Unreachable):
        return Check("peer", False, f"{way.address}: {error}", "correct `proxy` in kit.yaml, or ask its operator")
    return Check("peer", False, f"{way.address}: {error}", "start it, or correct host, port or firewall")


def _admit(certificate: x509.Certificate, keys: Keyring, whom: Identity | None) -> None:
    """Raise unless this party may answer there. If we have no roster, which another check reports, anyone may."""
    try:
        keys.roster()
    except ProtocolError:
        return
    check(certificate, keys, holder(certificate)[0] if whom is None else whom)


def greet(
    way: Way,
    greeting: bytes,
    protocol: str,
    context: ssl.SSLContext,
    admit: Callable[[x509.Certificate], None] = lambda shown: None,
) -> bytes:
    """Send a greeting over mutual TLS: in TLS 1.3 the peer checks our certificate after our side of the handshake."""
    until = time.monotonic() + WAIT
    context.set_alpn_protocols([protocol])
    with way.open(until) as plain, context.wrap_socket(plain, server_hostname=way.host) as secure:
        admit(x509.load_der_x509_certificate(secure.getpeercert(binary_form=True) or b""))
        secure.settimeout(left(until))
        secure.sendall(greeting)
        answer = secure.recv(4096)
        if not answer:
            raise ConnectionResetError
        return answer
