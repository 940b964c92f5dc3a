"""Connect to our federation's gate with our certificate, directly or through an HTTP proxy."""

from __future__ import annotations

import asyncio
import errno
import re
import socket
import ssl
from dataclasses import dataclass
from urllib.parse import urlsplit

from fl_privacy.addresses import show
from fl_privacy.errors import FederationError, LaunchError
from fl_privacy.gate.listener import CHUNK, Stream, close, keep_alive
from fl_privacy.identity import tls
from fl_privacy.identity.keyring import Identity, Keyring
from fl_privacy.identity.watched import Watched
from fl_privacy.roles import ROLES

CONNECT = 10.0
PROXY_BYTES = 8 * 1024
_STATUS = re.compile(rb"HTTP/1\.[01] ([0-9]{3})(?: [^\r\n]*)?")


class Unreachable(Exception):
    """Why the gate cannot be reached; `cause` is one of a few words."""

    def __init__(self, cause: str, reason: str) -> None:
        super().__init__(reason)
        self.cause = cause


def proxy_address(url: str) -> tuple[str, int]:
    """Host and port of `http://host:port`."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise LaunchError("proxy: not a URL; use http://host:port") from None
    if parts.username is not None or parts.password is not None:
        raise LaunchError("proxy: a user or password does not belong on a command line; use http://host:port")
    if parts.scheme != "http" or not parts.hostname or port is None or parts.path not in ("", "/") or parts.query:
        raise LaunchError(f"proxy {url!r}: must be http://host:port")
    return parts.hostname, port


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
            certificate = tls.peer_certificate(stream[1])
            peer = Identity.of(certificate)
            self.keys.refuse_revoked(certificate)
        except (FederationError, ValueError) as error:
            await close(stream[1])
            raise Unreachable("their_certificate", str(error)) from None
        if peer.federation != self.own.federation or not ROLES[peer.role].has_gate:
            await close(stream[1])
            raise Unreachable("their_certificate", f"{peer.uri} answered, not the superlink of {self.own.federation!r}")
        return stream

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


def connect_request(target: str) -> bytes:
    return f"CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n\r\n".encode()


def answered(answer: bytes) -> bool:
    """Whether a proxy's answer is complete."""
    if len(answer) > PROXY_BYTES:
        raise Unreachable("proxy", "the proxy's answer to CONNECT is not HTTP")
    return b"\r\n\r\n" in answer


def check_answer(answer: bytes, target: str) -> None:
    """Raise unless the proxy made the connection."""
    head, _, rest = answer.partition(b"\r\n\r\n")
    status = _STATUS.fullmatch(head.split(b"\r\n")[0])
    if status and not status[1].startswith(b"2"):
        raise Unreachable("proxy", f"the proxy answered {status[1].decode()} to CONNECT {target}; ask its operator")
    if not status or rest:
        raise Unreachable("proxy", "the proxy's answer to CONNECT is not HTTP")
