"""How to reach an address: directly, or through an HTTP proxy that allows CONNECT."""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from fl_privacy.addresses import host_of, parse
from fl_privacy.errors import FederationError, LaunchError

PROXY_BYTES = 8 * 1024
PROXIES, DIRECT = ("grpc_proxy", "https_proxy", "http_proxy"), ("no_grpc_proxy", "no_proxy")
_STATUS = re.compile(rb"HTTP/1\.[01] ([0-9]{3})(?: [^\r\n]*)?")


class Unreachable(Exception):
    """Why a party cannot be reached; `cause` is one of a few words."""

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


def usual_proxy(host: str, environ: Mapping[str, str] = os.environ) -> str | None:
    """The proxy that gRPC would use for a host, from the same variables."""
    direct = next((environ[name] for name in DIRECT if environ.get(name)), "")
    if any(host.endswith(end) for entry in direct.split(",") if (end := entry.strip())):
        return None
    return next((environ[name] for name in PROXIES if environ.get(name)), None)


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
            where = proxy_address(self.proxy) if self.proxy else parse(self.address)
            sock = socket.create_connection(where, left(until))
        except (OSError, FederationError) as error:
            if self.proxy:
                why = getattr(error, "strerror", None) or error
                raise Unreachable("proxy", f"the proxy {self.proxy}: {why}") from None
            raise
        try:
            if self.proxy:
                self._tunnel(sock, until)
            sock.settimeout(left(until))
        except BaseException:
            sock.close()
            raise
        return sock

    def _tunnel(self, sock: socket.socket, until: float) -> None:
        answer = b""
        sock.sendall(connect_request(self.address))
        while not answered(answer):
            sock.settimeout(left(until))
            if not (data := sock.recv(PROXY_BYTES)):
                break
            answer += data
        check_answer(answer, self.address)


def left(until: float) -> float:
    """Seconds left, never zero."""
    return max(0.01, until - time.monotonic())


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
