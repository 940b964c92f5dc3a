"""Connect to our federation's gate with our certificate, directly or through an HTTP proxy."""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
from dataclasses import dataclass

from cryptography import x509

from fl_privacy.addresses import show
from fl_privacy.dialling import PROXY_BYTES, Unreachable, answered, check_answer, connect_request
from fl_privacy.errors import FederationError, ProtocolError
from fl_privacy.gate.listener import CHUNK, Stream, close, keep_alive
from fl_privacy.identity import tls
from fl_privacy.identity.keyring import DENIED, Identity, Keyring
from fl_privacy.identity.watched import Watched
from fl_privacy.roles import ROLES

CONNECT = 10.0


@dataclass(frozen=True)
class Gateway:
    """Where the gate is, and how to reach it."""

    target: tuple[str, int]
    keys: Keyring
    proxy: tuple[str, int] | None
    own: Identity
    contexts: Watched[ssl.SSLContext]

    @classmethod
    def of(cls, target: tuple[str, int], keys: Keyring, proxy: tuple[str, int] | None = None) -> Gateway:
        certificate, key, authority = tls.files(keys)
        contexts = Watched(tls.files(keys), lambda: tls.client_context(authority, certificate, key))
        return cls(target, keys, proxy, tls.own_identity(keys), contexts)

    async def dial(self) -> Stream:
        """A connection to a gate whose identity was checked; whether it accepts us shows in its first answer."""
        sock = await _connect(*(self.proxy or self.target), "proxy" if self.proxy else "superlink")
        try:
            if self.proxy:
                await _tunnel(sock, show(*self.target))
            stream = await self._handshake(sock)
        except BaseException:
            sock.close()
            raise
        try:
            self._check(tls.peer_certificate(stream[1]))
        except (FederationError, ValueError) as error:
            await close(stream[1])
            raise Unreachable("their_certificate", str(error)) from None
        return stream

    def _check(self, certificate: x509.Certificate) -> None:
        """Raise unless it is the superlink's, valid today, and of the key in the roster."""
        found, own = Identity.of(certificate), self.own.federation
        if found.federation != own or not ROLES[found.role].has_gate:
            raise ProtocolError(DENIED, f"{found.uri} answered, not the superlink of {own!r}")
        self.keys.admit(certificate)

    async def _handshake(self, sock: socket.socket) -> Stream:
        try:
            return await asyncio.open_connection(
                sock=sock,
                ssl=self.contexts.get(),
                server_hostname=self.target[0],
                limit=CHUNK,
                ssl_handshake_timeout=tls.HANDSHAKE,
                ssl_shutdown_timeout=tls.GOODBYE,
            )
        except OSError as error:
            raise explain(error) from None


def explain(error: OSError) -> Unreachable:
    """The reason why a connection or its handshake failed."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return Unreachable("their_certificate", f"the superlink's certificate: {error.verify_message}")
    if isinstance(error, ssl.SSLError):
        reason = (error.reason or str(error)).lower().replace("_", " ")
        if "alert" in reason:
            return Unreachable("our_certificate", f"the superlink refused our certificate: {reason}; renew it")
        return Unreachable("tls", f"TLS with the superlink failed: {reason}")
    if isinstance(error, TimeoutError) or error.errno == errno.ETIMEDOUT:
        return Unreachable("timed_out", "timed out")
    if isinstance(error, ConnectionAbortedError) and "handshake" in str(error):
        return Unreachable("timed_out", "the TLS handshake timed out")
    return Unreachable("closed", f"the superlink closed the connection: {error.strerror or error}")


async def _connect(host: str, port: int, what: str) -> socket.socket:
    loop = asyncio.get_running_loop()
    where = f"{what} {show(host, port)}"
    try:
        async with asyncio.timeout(CONNECT):
            found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        text = "timed out" if isinstance(error, TimeoutError) else getattr(error, "strerror", None) or error
        raise Unreachable("name", f"{where}: name not found ({text}); check the address and DNS") from None
    last = Unreachable("name", f"{where}: has no address")
    for family, kind, protocol, _, place in found:
        sock = socket.socket(family, kind, protocol)
        try:
            sock.setblocking(False)
            async with asyncio.timeout(CONNECT):
                await loop.sock_connect(sock, place)
            keep_alive(sock)
            return sock
        except TimeoutError:
            last = Unreachable("timed_out", f"{where}: timed out; is a firewall in between?")
        except ConnectionRefusedError:
            last = Unreachable("refused", f"{where}: refused; nothing listens there")
        except OSError as error:
            last = Unreachable("network", f"{where}: {error.strerror or error}")
        except BaseException:
            sock.close()
            raise
        sock.close()
    raise last


async def _tunnel(sock: socket.socket, target: str) -> None:
    """Ask a proxy for a connection; after its answer, nothing may arrive before we send."""
    loop = asyncio.get_running_loop()
    answer = b""
    try:
        async with asyncio.timeout(CONNECT):
            await loop.sock_sendall(sock, connect_request(target))
            while not answered(answer):
                data = await loop.sock_recv(sock, PROXY_BYTES)
                if not data:
                    raise Unreachable("proxy", "the proxy's answer to CONNECT is not HTTP")
                answer += data
    except TimeoutError:
        raise Unreachable("proxy", "the proxy did not answer CONNECT in time") from None
    except OSError as error:
        raise Unreachable("proxy", f"the proxy closed the connection: {error.strerror or error}") from None
    check_answer(answer, target)
