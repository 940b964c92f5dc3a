"""Whether a peer can be reached and accepts our certificate, within two seconds."""

from __future__ import annotations

import socket
import ssl
import time
from dataclasses import dataclass

from fl_privacy.addresses import host_of, parse
from fl_privacy.deploy.preflight.finding import Check
from fl_privacy.errors import FederationError
from fl_privacy.gate import dial
from fl_privacy.identity.keyring import Keyring

WAIT = 2.0
NO_PASSWORD = ""  # otherwise OpenSSL prompts for the password of an encrypted key
HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00"


@dataclass(frozen=True)
class Way:
    """How to connect to an address: directly or through an HTTP proxy."""

    address: str
    proxy: str | None = None

    @property
    def host(self) -> str:
        return host_of(self.address)

    def open(self, until: float) -> socket.socket:
        """Connect before `until`."""
        try:
            where = dial.proxy_address(self.proxy) if self.proxy else parse(self.address)
            sock = socket.create_connection(where, _left(until))
        except (OSError, FederationError) as error:
            if self.proxy:
                why = getattr(error, "strerror", None) or error
                raise dial.Unreachable("proxy", f"the proxy {self.proxy}: {why}") from None
            raise
        try:
            if self.proxy:
                self._tunnel(sock, until)
            sock.settimeout(_left(until))
        except BaseException:
            sock.close()
            raise
        return sock

    def _tunnel(self, sock: socket.socket, until: float) -> None:
        answer = b""
        sock.sendall(dial.connect_request(self.address))
        while not dial.answered(answer):
            sock.settimeout(_left(until))
            if not (data := sock.recv(dial.PROXY_BYTES)):
                break
            answer += data
        dial.check_answer(answer, self.address)


def _left(until: float) -> float:
    """Seconds left, never zero."""
    return max(0.01, until - time.monotonic())


def peer(address: str, keys: Keyring, proxy: str | None = None) -> Check:
    """Whether the gRPC server there and we accept each other's certificates."""
    return dialogue(Way(address, proxy), keys, HTTP2, "h2")[0]


def answers(way: Way) -> Check:
    """Whether something listens there, for a party that has no certificate yet."""
    try:
        way.open(time.monotonic() + WAIT).close()
    except (OSError, dial.Unreachable) as error:
        return _unreachable(way, error)
    return Check("peer", True, f"{way.address}: reachable; our certificate is checked once there is one")


def dialogue(way: Way, keys: Keyring, greeting: bytes, protocol: str) -> tuple[Check, bytes]:
    """A real handshake, and the start of the answer: gRPC only reports UNAVAILABLE, TLS reports why."""
    address = way.address
    try:
        context = ssl.create_default_context(cafile=str(keys.authority_file))
        context.load_cert_chain(keys.certificate_file, keys.key_file, NO_PASSWORD)
    except (OSError, ValueError):
        return answers(way), b""  # problems with our own files are reported by another check
    try:
        answer = greet(way, greeting, protocol, context)
    except ssl.SSLCertVerificationError as error:
        fix = "check that both sides have the same ca.pem, and the host name and dates of its certificate"
        return Check("peer", False, f"{address}: we refused its certificate: {error.verify_message}", fix), b""
    except (ssl.SSLError, ConnectionResetError, BrokenPipeError) as error:
        # We accepted its certificate. Many servers close the connection without saying why they refuse ours.
        why = getattr(error, "reason", None) or "it closed the connection after the handshake (revoked? expired?)"
        fix = "get a new certificate from the federation's authority"
        return Check("peer", False, f"{address}: refused our certificate: {why}", fix), b""
    except (OSError, ValueError, dial.Unreachable) as error:
        return _unreachable(way, error), b""
    by = f" through the proxy {way.proxy}" if way.proxy else ""
    return Check("peer", True, f"{address}: mutual TLS works{by}"), answer


def _unreachable(way: Way, error: Exception) -> Check:
    if isinstance(error, dial.Unreachable):
        return Check("peer", False, f"{way.address}: {error}", "correct `proxy` in kit.yaml, or ask its operator")
    return Check("peer", False, f"{way.address}: {error}", "start it, or correct host, port or firewall")


def greet(way: Way, greeting: bytes, protocol: str, context: ssl.SSLContext) -> bytes:
    """Send a greeting over mutual TLS: in TLS 1.3 the peer checks our certificate after our side of the handshake."""
    until = time.monotonic() + WAIT
    context.set_alpn_protocols([protocol])
    with way.open(until) as plain, context.wrap_socket(plain, server_hostname=way.host) as secure:
        secure.settimeout(_left(until))
        secure.sendall(greeting)
        answer = secure.recv(4096)
        if not answer:
            raise ConnectionResetError
        return answer
