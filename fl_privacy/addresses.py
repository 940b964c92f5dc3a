"""Addresses as host:port: the one parser and the one way of writing them."""

from __future__ import annotations

import ipaddress
import socket

from fl_privacy.errors import LaunchError

LOOPBACK = "127.0.0.1"


def parse(text: str) -> tuple[str, int]:
    """`HOST:PORT`, or `[HOST]:PORT` for IPv6."""
    host, colon, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    host = host[1:-1] if bracketed else host
    if not colon or not host or not port.isascii() or not port.isdecimal() or int(port) > 65535:
        raise LaunchError(f"address {text!r}: must be HOST:PORT")
    if (":" in host) != bracketed or not host.isprintable() or " " in host:
        raise LaunchError(f"address {text!r}: must be HOST:PORT, IPv6 in brackets")
    return host, int(port)


def show(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def host_of(address: str) -> str:
    return parse(address)[0]


def port_of(address: str) -> int:
    return parse(address)[1]


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def free_port() -> int:
    """A port of the loopback interface that nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])
