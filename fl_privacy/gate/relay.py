"""`python -m fl_privacy.gate.relay`: lets Flower's programs, which have no client certificates, reach the gate.

They connect to the relay on loopback; it connects to the gate with the party's certificate and copies bytes both ways.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import sys
import time
from contextlib import suppress
from pathlib import Path

from fl_privacy.addresses import parse, show
from fl_privacy.dialling import Unreachable, proxy_address
from fl_privacy.errors import LaunchError
from fl_privacy.gate.dial import Gateway, explain
from fl_privacy.gate.listener import CHUNK, Arguments, Stream, accept_tls, close, listen, run, serve
from fl_privacy.identity import tls
from fl_privacy.identity.keyring import Keyring
from fl_privacy.ops.log import Log

LOOPBACK = ("127.0.0.1", "localhost")
CONNECTIONS = 128
AT_ONCE = 10.0  # a gate that closes a connection this soon refuses us; later, the connection was merely idle
SOCKETS = Path("/proc/net/tcp")


class Relay:
    """Accepts connections from this user's programs and opens one connection to the gate for each."""

    def __init__(self, gateway: Gateway, local: tls.LocalKeys, log: Log, node: int | None = None) -> None:
        """`node` is the number of the SuperNode's own user, where it has one."""
        self._gateway, self._log, self._node = gateway, log, node
        self._server = tls.server_context(local.certificate, local.key)
        self._open = 0
        self._state = ""

    async def handle(self, sock: socket.socket, _: str) -> None:
        """Serve one accepted connection until it ends."""
        if self._open >= CONNECTIONS or not ours(sock, self._node):
            sock.close()
            return
        self._open += 1
        try:
            await self._join(sock)
        finally:
            self._open -= 1

    async def _join(self, sock: socket.socket) -> None:
        # First this handshake, then the gate: Flower gives up for good if a handshake fails.
        try:
            inside = await accept_tls(sock, self._server)
        except OSError:
            return
        try:
            outside = await self._gateway.dial()
            try:
                await self._pass_on(inside, outside)
            finally:
                await close(outside[1])
        except Unreachable as error:
            self._saw(error.cause, str(error))
        finally:
            await close(inside[1])

    async def _pass_on(self, inside: Stream, outside: Stream) -> None:
        """Copy both ways until either side ends."""
        asked = asyncio.Event()
        up = asyncio.create_task(_copy(inside[0], outside[1], asked))
        down = asyncio.create_task(self._answers(outside[0], inside[1], asked))
        try:
            await asyncio.wait((up, down), return_when=asyncio.FIRST_COMPLETED)
            if not inside[0].at_eof():
                # The gate accepts no more; its last bytes say why.
                await asyncio.wait((down,), timeout=tls.GOODBYE)
            if down.done():
                down.result()
        finally:
            up.cancel()
            down.cancel()
            await asyncio.gather(up, down, return_exceptions=True)

    async def _answers(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, asked: asyncio.Event) -> None:
        answered, began = False, time.monotonic()
        while True:
            try:
                data = await reader.read(CHUNK)
            except OSError as error:
                raise explain(error) from None
            if not data and not answered and (asked.is_set() or time.monotonic() - began < AT_ONCE):
                raise Unreachable("closed", "the superlink closed the connection without an answer; its log says why")
            if not data or not await _write(writer, data):
                return
            answered = True
            self._saw("connected")

    def _saw(self, state: str, reason: str = "") -> None:
        """Log once when the gate becomes reachable, or unreachable and why."""
        if state != self._state:
            self._state = state
            target = show(*self._gateway.target)
            if reason:
                self._log("unreachable", target=target, cause=state, reason=reason)
            else:
                self._log("connected", target=target)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, begun: asyncio.Event) -> None:
    """Copy until either end closes."""
    with suppress(OSError):
        while data := await reader.read(CHUNK):
            begun.set()
            if not await _write(writer, data):
                return


async def _write(writer: asyncio.StreamWriter, data: bytes) -> bool:
    try:
        writer.write(data)
        await writer.drain()
    except OSError:
        return False
    return True


def ours(sock: socket.socket, node: int | None = None) -> bool:
    """Whether this user, root or the SuperNode's own user is at the other end of a loopback connection.

    True where the system cannot tell.
    """
    if sock.family != socket.AF_INET or not SOCKETS.exists():
        return True
    try:
        here, there = (_hex(*end) for end in (sock.getsockname(), sock.getpeername()))
    except OSError:
        return False
    for line in SOCKETS.read_text().splitlines()[1:]:
        fields = line.split()
        if fields[1] == there and fields[2] == here:
            return int(fields[7]) in (os.geteuid(), 0, node)
    return False


def _hex(host: str, port: int) -> str:
    """An address in the kernel's notation."""
    return f"{struct.unpack('=I', socket.inet_aton(host))[0]:08X}:{port:04X}"


async def main(log: Log) -> None:
    parser = Arguments(prog="fl_privacy.gate.relay", description="From this machine's loopback to the gate")
    parser.add_argument("--listen", default="127.0.0.1:0", help="loopback HOST:PORT; port 0 picks a free port")
    parser.add_argument("--target", required=True, help="HOST:PORT of the gate")
    parser.add_argument("--keys", type=Path, required=True, help="folder with key.pem, cert.pem and ca.pem")
    parser.add_argument("--certificates", type=Path, required=True, help="folder for relay.pem, which callers trust")
    parser.add_argument("--user", type=int, help="number of the SuperNode's own user, who may connect too")
    parser.add_argument("--proxy", help="http://host:port of a proxy that allows CONNECT")
    options = parser.parse_args()
    host, port = parse(options.listen)
    if host not in LOOPBACK:
        raise LaunchError(f"listen {options.listen}: a relay listens on loopback only; use 127.0.0.1:{port}")
    proxy = proxy_address(options.proxy) if options.proxy else None
    gateway = Gateway.of(parse(options.target), Keyring(options.keys), proxy)
    relay = Relay(gateway, tls.LocalKeys.open(options.certificates, "relay"), log, options.user)
    await serve(listen(host, port), relay.handle, log)


if __name__ == "__main__":
    sys.exit(run("relay", main))
